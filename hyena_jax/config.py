"""What an experiment is: frozen dataclasses, and how one is loaded, compared and saved.

Nothing here imports JAX, so that `--help` is quick. A field marked RUNTIME may change when a run is
resumed; every other field of `model`, `data`, `optimizer` and `seed` is the experiment's identity.
"""

import dataclasses
import difflib
import importlib.util
import inspect
import json
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

if TYPE_CHECKING:
    import cattrs

T = TypeVar("T")


class UserError(ValueError):
    """The input is wrong. Commands print the message on one line and exit with code 2."""


def choose(what: str, name: str, allowed: Mapping[str, T]) -> T:
    """Returns `allowed[name]`; an unknown name is refused with the nearest valid one."""
    if name in allowed:
        return allowed[name]
    raise UserError(f"{what} {name!r} is unknown{_nearest(name, allowed)}; allowed: {', '.join(allowed)}")


def _nearest(name: str, allowed: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(allowed), n=1, cutoff=0.4)
    return f" (did you mean {near[0]!r}?)" if near else ""


def require(condition: bool, argument: str, value: object, allowed: str) -> None:
    """Raises the one form of error that a wrong value gets: the argument, its value, what is allowed."""
    if not condition:
        raise UserError(f"{argument} must be {allowed}, got {value!r}")


# Metadata of a field that may change between the runs of one experiment.
RUNTIME = {"runtime": True}


# Filters and mixers


@dataclass(frozen=True)
class ImplicitFilterConfig:
    """A long filter as a sine network of the time index under a decaying window (Hyena, section 3.3)."""

    emb_dim: int = 33
    """Width of the positional features, odd: time, and (emb_dim - 1) / 2 cosine and sine pairs."""
    width: int = 64
    """Hidden width of the sine network."""
    n_hidden: int = 2
    """Hidden layers after the first; 2 makes the paper's four dense layers."""
    sine_frequency: float = 14.0
    """Initial value w of the learnable frequencies in sin(w x)."""
    fast_decay: float = 0.3
    """Fastest channel: fraction of max_len at which its window has decayed to `decay_target`."""
    slow_decay: float = 1.5
    """Slowest channel: the same fraction."""
    decay_target: float = 0.01
    """Window value that defines the two fractions above."""
    window_shift: float = 0.0
    """Constant added to the window, so that it does not vanish."""
    train_decay: bool = False
    """Train the decay rates of the window."""
    norm_axis: Literal["none", "channels", "length"] = "none"
    """Divide the filter by its L1 norm over all filter channels at each lag, or over the lags."""

    def __post_init__(self) -> None:
        require(self.emb_dim >= 3 and self.emb_dim % 2 == 1, "emb_dim", self.emb_dim, "odd and at least 3")
        require(self.width >= 1, "width", self.width, "at least 1")
        require(self.n_hidden >= 0, "n_hidden", self.n_hidden, "at least 0")
        require(0 < self.fast_decay <= self.slow_decay, "fast_decay", self.fast_decay, "in (0, slow_decay]")
        require(0 < self.decay_target < 1, "decay_target", self.decay_target, "in (0, 1)")
        for name in ("sine_frequency", "window_shift", "slow_decay"):
            require(math.isfinite(getattr(self, name)), name, getattr(self, name), "finite")


@dataclass(frozen=True)
class HyenaConfig:
    """Gated long convolutions (Poli et al. 2023, arXiv 2302.10866)."""

    order: int = 2
    """Gating projections N. `conv_first` has N long filters, `gate_first` N - 1."""
    gating: Literal["conv_first", "gate_first"] = "gate_first"
    """The paper's equation 6, or the published PyTorch code (and its checkpoints)."""
    short_filter_len: int = 3
    """Taps of the depthwise causal FIR on the projections."""
    filter: ImplicitFilterConfig = ImplicitFilterConfig()

    def __post_init__(self) -> None:
        least = 2 if self.gating == "gate_first" else 1
        require(self.order >= least, "order", self.order, f"at least {least} with gating {self.gating!r}")
        require(self.short_filter_len >= 1, "short_filter_len", self.short_filter_len, "at least 1")


@dataclass(frozen=True)
class AttentionConfig:
    """Softmax multi-head attention, the baseline."""

    n_heads: int = 4
    """Heads; must divide d_model."""

    def __post_init__(self) -> None:
        require(self.n_heads >= 1, "n_heads", self.n_heads, "at least 1")


MixerConfig = HyenaConfig | AttentionConfig
MIXER_CONFIGS: dict[str, type] = {"hyena": HyenaConfig, "attention": AttentionConfig}


# Sections


@dataclass(frozen=True)
class LanguageModelConfig:
    """Token embedding, `n_layers` pre-norm blocks of a mixer and an MLP, LayerNorm, tied head."""

    pattern: tuple[MixerConfig, ...] = (HyenaConfig(),)
    """Mixers of the first layers; repeated until there are n_layers."""
    n_layers: int = 4
    """Blocks."""
    d_model: int = 128
    """Width D of the residual stream."""
    d_ff: int = 512
    """Hidden width of the MLP."""
    max_len: int = 256
    """Lmax: longest sequence, and the constant that filters and positions are defined by."""
    vocab_size: int | None = None
    """Symbols; None takes the tokenizer's count."""
    learned_positions: bool = False
    """Add a learned position embedding (attention needs it; convolutions do not)."""
    dropout: float = 0.0
    """Rate after the embedding, and on the output of each mixer and MLP."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Activations; parameters, FFTs, norms and the loss stay in float32."""
    remat: bool = field(default=False, metadata=RUNTIME)
    """Recompute each block in the backward pass instead of storing its activations."""

    def __post_init__(self) -> None:
        require(len(self.pattern) >= 1, "pattern", self.pattern, "at least one mixer")
        for name in ("n_layers", "d_model", "d_ff", "max_len"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        require(self.vocab_size is None or self.vocab_size >= 2, "vocab_size", self.vocab_size, "at least 2")
        require(0 <= self.dropout < 1, "dropout", self.dropout, "in [0, 1)")
        for mixer in self.pattern:
            if isinstance(mixer, AttentionConfig):
                require(
                    self.d_model % mixer.n_heads == 0,
                    "n_heads",
                    mixer.n_heads,
                    f"a divisor of d_model={self.d_model}",
                )


@dataclass(frozen=True)
class DataConfig:
    """Which text, as which tokens, in which batches."""

    name: str = "python_stdlib"
    """`python_stdlib` (no download) or the name of a text data set of TensorFlow Datasets."""
    path: str | None = field(default=None, metadata=RUNTIME)
    """Text file or folder to use in place of `name`; the last 10% are held out."""
    validation_path: str | None = field(default=None, metadata=RUNTIME)
    """Text file or folder to hold out in place of the last 10% of `path`."""
    tfds_dir: str | None = field(default=None, metadata=RUNTIME)
    """Where TensorFlow Datasets keeps prepared data (its data_dir)."""
    manual_dir: str | None = field(default=None, metadata=RUNTIME)
    """Folder with an already downloaded source file (the data set's manual_dir)."""
    tokenizer: Literal["bytes", "characters", "graphemes", "bpe"] = "bytes"
    """Symbols: UTF-8 bytes, code points, grapheme clusters, or the pieces of `tokenizer_path`."""
    tokenizer_path: str | None = field(default=None, metadata=RUNTIME)
    """The `tokenizer.json` of a byte-pair tokenizer (tokenizer=bpe)."""
    seq_len: int = 256
    """Tokens L in a training sequence."""
    batch_size: int = 16
    """Sequences in a step, over all devices and all accumulated parts."""

    def __post_init__(self) -> None:
        require(self.seq_len >= 1, "seq_len", self.seq_len, "at least 1")
        require(self.batch_size >= 1, "batch_size", self.batch_size, "at least 1")
        require(
            (self.tokenizer == "bpe") == (self.tokenizer_path is not None),
            "tokenizer_path",
            self.tokenizer_path,
            "given exactly when tokenizer is 'bpe'",
        )
        require(
            self.validation_path is None or self.path is not None,
            "validation_path",
            self.validation_path,
            "given only together with path",
        )


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters whose path matches `pattern` get their own learning rate and decay."""

    pattern: str
    """Regular expression searched in a path such as `blocks_0/mixer/filter/dense_0/kernel`."""
    learning_rate: float | None = None
    """Peak learning rate, 0 for constants; None keeps the optimizer's."""
    weight_decay: float | None = None
    """Decoupled weight decay; None keeps the optimizer's."""

    def __post_init__(self) -> None:
        for name in ("learning_rate", "weight_decay"):
            value = getattr(self, name)
            require(
                value is None or 0 <= value < math.inf, f"{name} of a group", value, "at least 0, or None"
            )


# The groups of the published Hyena code: filters and positional features apart, no decay where it has no use.
NO_DECAY = ParameterGroup(r"/(bias|scale|skip|short_taps|short_bias)$", weight_decay=0.0)
HYENA_GROUPS = (
    ParameterGroup(r"filter/positions$", learning_rate=1e-5, weight_decay=0.0),
    ParameterGroup(r"/filter/", weight_decay=0.0),
    NO_DECAY,
)


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW with warm-up, cosine decay, clipping by global norm and parameter groups."""

    learning_rate: float = 2e-3
    """Peak learning rate."""
    final_learning_rate: float = 2e-4
    """Learning rate at the end of the cosine."""
    warmup_steps: int = 100
    """Steps of linear warm-up from 0."""
    decay_steps: int | None = None
    """Step at which the cosine ends; None is training.steps."""
    b1: float = 0.9
    """Adam's decay of the first moment."""
    b2: float = 0.99
    """Adam's decay of the second moment."""
    eps: float = 1e-8
    """Adam's epsilon."""
    weight_decay: float = 0.1
    """Decoupled weight decay of every parameter that no group names."""
    clip_norm: float | None = 1.0
    """Largest global gradient norm; None does not clip."""
    accumulation_steps: int = 1
    """Parts that a batch is cut into; gradients are averaged over them before the update."""
    groups: tuple[ParameterGroup, ...] = ()
    """The first group that matches wins; one that matches no parameter is an error."""

    def __post_init__(self) -> None:
        require(0 < self.learning_rate < math.inf, "learning_rate", self.learning_rate, "above 0 and finite")
        final, most = self.final_learning_rate, f"in 0..learning_rate={self.learning_rate}"
        require(0 <= final <= self.learning_rate, "final_learning_rate", final, most)
        for name in ("weight_decay", "warmup_steps"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "at least 0")
        for name in ("b1", "b2"):
            require(0 <= getattr(self, name) < 1, name, getattr(self, name), "in [0, 1)")
        require(self.eps > 0, "eps", self.eps, "above 0")
        require(self.clip_norm is None or self.clip_norm > 0, "clip_norm", self.clip_norm, "above 0")
        require(self.accumulation_steps >= 1, "accumulation_steps", self.accumulation_steps, "at least 1")
        require(
            self.decay_steps is None or self.decay_steps > self.warmup_steps,
            "decay_steps",
            self.decay_steps,
            f"above warmup_steps={self.warmup_steps}",
        )


@dataclass(frozen=True)
class TrainingConfig:
    """How long to train and how often to look; free to change on resume."""

    steps: int = 2000
    """Steps to train; may grow when a run is continued."""
    eval_every: int = 250
    """Steps between evaluations on the held-out text."""
    eval_batch_size: int = 64
    """Sequences evaluated at once; does not change the result."""
    eval_windows: int | None = None
    """Evaluate on this many evenly spaced windows of the held-out text; None takes all of it."""
    checkpoint_every: int = 500
    """Steps between checkpoints."""
    log_every: int = 10
    """Steps between rows of training metrics."""
    keep_checkpoints: int = 2
    """Latest checkpoints to keep; the best one is kept beside them."""

    def __post_init__(self) -> None:
        for name in (
            "steps",
            "eval_every",
            "eval_batch_size",
            "checkpoint_every",
            "log_every",
            "keep_checkpoints",
        ):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        require(
            self.eval_windows is None or self.eval_windows >= 1,
            "eval_windows",
            self.eval_windows,
            "at least 1",
        )


@dataclass(frozen=True)
class ParallelConfig:
    """How a step is spread over devices."""

    devices: int | None = None
    """Local devices that share a batch; None takes all."""

    def __post_init__(self) -> None:
        require(self.devices is None or self.devices >= 1, "devices", self.devices, "at least 1")


@dataclass(frozen=True)
class LoggingConfig:
    """What is written while training."""

    tensorboard: bool = True
    """Write TensorBoard event files."""
    sample_tokens: int = 256
    """Tokens of the sample that ends a run; 0 for none."""
    sample_prompt: str | None = None
    """Text that the sample continues; None takes the beginning of the held-out text."""

    def __post_init__(self) -> None:
        require(self.sample_tokens >= 0, "sample_tokens", self.sample_tokens, "at least 0")


@dataclass(frozen=True)
class Experiment:
    """Everything that decides what a run computes."""

    model: LanguageModelConfig = LanguageModelConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig = field(default=TrainingConfig(), metadata=RUNTIME)
    parallel: ParallelConfig = field(default=ParallelConfig(), metadata=RUNTIME)
    logging: LoggingConfig = field(default=LoggingConfig(), metadata=RUNTIME)
    seed: int = 0
    """Root of every random choice: initial parameters, order of the data, dropout."""

    def __post_init__(self) -> None:
        require(0 <= self.seed < 2**32, "seed", self.seed, "in [0, 2**32)")
        most = f"at most model.max_len={self.model.max_len}"
        require(self.data.seq_len <= self.model.max_len, "data.seq_len", self.data.seq_len, most)


# Loading, comparing and saving


def load(spec: str) -> Experiment:
    """The experiment of `CONFIG` or `CONFIG:VARIANT`; CONFIG is a name in `configs/` or a Python file."""
    name, _, variant = spec.partition(":")
    path = _find_config(name)
    module_spec = importlib.util.spec_from_file_location(f"hyena_jax_config_{path.stem}", path)
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_spec.name] = module  # where dataclasses in the file look their annotations up
    try:
        module_spec.loader.exec_module(module)
        if variant and not inspect.signature(module.get_config).parameters:
            raise UserError("it has no variants")
        experiment = module.get_config(variant) if variant else module.get_config()
    except UserError as error:
        raise UserError(f"config {spec}: {error}") from None
    except (Exception, SystemExit) as error:  # a config is the user's own program: its faults are input
        raise UserError(f"config {path} cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(experiment, Experiment):
        raise UserError(
            f"config {path}: get_config must return an Experiment, got {type(experiment).__name__}"
        )
    return experiment


def config_files() -> dict[str, Path]:
    """The shipped configs by name: inside the package when installed, beside it in a checkout."""
    package = Path(__file__).parent
    for folder in (package / "configs", package.parent / "configs"):
        if folder.is_dir():
            return {path.stem: path for path in sorted(folder.glob("*.py"))}
    return {}


def _find_config(name: str) -> Path:
    if name.endswith(".py"):
        if not Path(name).is_file():
            raise UserError(f"config {name!r} is not a file")
        return Path(name)
    return choose("config", name, config_files())


def _converter() -> "cattrs.Converter":
    import cattrs
    from cattrs.strategies import configure_tagged_union

    converter = cattrs.Converter(forbid_extra_keys=True)
    names = {config_class: name for name, config_class in MIXER_CONFIGS.items()}
    configure_tagged_union(MixerConfig, converter, tag_generator=names.__getitem__, tag_name="type")
    return converter


def encode(experiment: Experiment) -> dict[str, Any]:
    """The experiment as JSON values; mixers carry a `type` tag."""
    return _converter().unstructure(experiment, unstructure_as=Experiment)


def decode(values: Mapping[str, Any]) -> Experiment:
    """The inverse of `encode`. Unknown keys and wrong types raise UserError."""
    import cattrs

    require(isinstance(values, Mapping), "an experiment", values, "a JSON object")

    def describe(error: BaseException, expected: type | None) -> str:
        return str(error) if isinstance(error, UserError) else cattrs.v.format_exception(error, expected)

    try:
        return _converter().structure(values, Experiment)
    except cattrs.BaseValidationError as error:
        raise UserError("; ".join(cattrs.transform_error(error, format_exception=describe))) from error


def read(path: Path) -> Experiment:
    """The experiment saved at `path`."""
    try:
        return decode(json.loads(path.read_text()))
    except (json.JSONDecodeError, UnicodeDecodeError, UserError) as error:
        raise UserError(f"{path} is not an experiment's config: {error}") from error


def identity_differences(ours: Experiment, theirs: Experiment) -> list[str]:
    """Lines `field: theirs -> ours` for the identity fields that differ."""
    return _differences(_leaves(ours, "", runtime=False), _leaves(theirs, "", runtime=False))


def runtime_differences(ours: Experiment, theirs: Experiment) -> list[str]:
    """Lines `field: theirs -> ours` for the runtime fields that differ."""
    return _differences(_leaves(ours, "", runtime=True), _leaves(theirs, "", runtime=True))


def _differences(ours: Iterable[tuple[str, Any]], theirs: Iterable[tuple[str, Any]]) -> list[str]:
    a, b = dict(ours), dict(theirs)
    keys = [key for key in a | b if a.get(key) != b.get(key)]
    return [f"{key}: {b.get(key)!r} -> {a.get(key)!r}" for key in keys]


def _leaves(value: Any, path: str, runtime: bool, is_runtime: bool = False) -> Iterable[tuple[str, Any]]:
    """Pairs of path and value of all leaves that are runtime fields, or of all that are not."""
    children = ()
    if dataclasses.is_dataclass(value):
        if path and runtime == is_runtime:
            yield f"{path}.type", type(value).__name__
        children = [
            (f.name, getattr(value, f.name), "runtime" in f.metadata) for f in dataclasses.fields(value)
        ]
    elif isinstance(value, tuple):
        children = [(i, child, False) for i, child in enumerate(value)]
    elif runtime == is_runtime:
        yield path, value
    for name, child, marked in children:
        yield from _leaves(child, f"{path}.{name}" if path else name, runtime, is_runtime or marked)
