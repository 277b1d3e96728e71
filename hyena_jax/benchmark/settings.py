"""What to measure: the flags of `hyena-jax bench`, checked by hand so that what is wrong is one line."""

import importlib.util
from dataclasses import dataclass, field, fields
from pathlib import Path

from hyena_jax.config import MIXER_CONFIGS, PluginFlags, UserError, choose, require
from hyena_jax.config.flags import FLAT, positional

DTYPES = {"float32": 4, "bfloat16": 2}
BASELINES = {"torch": "plain PyTorch", "flax": "naive Flax"}
POWERS = tuple(2**i for i in range(8, 18))


@dataclass(frozen=True)
class Common:
    """What every benchmark takes."""

    seconds: float = 1.0
    """Measuring time of each program at each size, after its warm-up."""
    least_runs: int = 5
    """Runs that a median is of, at least."""
    max_seconds: float = 20.0
    """A run that takes longer is not repeated, and nothing longer is run of that method."""
    output: Path | None = None
    """Folder for results.json and plot.png; new, empty, or of an earlier benchmark. Without it, no files."""
    plugins: PluginFlags = field(default=PluginFlags(), metadata=FLAT)

    def check(self) -> None:
        """Raises UserError for what no benchmark can be run with."""
        require(0 < self.seconds <= 600, "seconds", self.seconds, "in (0, 600]")
        require(self.least_runs >= 1, "least_runs", self.least_runs, "at least 1")
        require(self.max_seconds > 0, "max_seconds", self.max_seconds, "above 0")
        check_output(self.output)


@dataclass(frozen=True)
class Operators(Common):
    """Time mixers, forward and with their derivative, over lengths."""

    mixers: tuple[str, ...] = ("hyena", "hawk", "attention")
    """Names of mixers; `all` is every one."""
    lengths: tuple[int, ...] = POWERS
    """Tokens of a sequence."""
    batch_size: int = 1
    """Sequences."""
    d_model: int = 256
    """Channels."""
    dtype: str = "float32"
    """Of the activations: float32 or bfloat16. Parameters, FFTs and recurrences stay in float32."""
    baseline: tuple[str, ...] = ()
    """Also time our plain versions of the same mixers: `torch`, `flax`, or both."""

    @property
    def chosen(self) -> tuple[str, ...]:
        """The mixers' names, each once."""
        return tuple(MIXER_CONFIGS) if "all" in self.mixers else tuple(dict.fromkeys(self.mixers))

    def check(self) -> None:
        """Raises UserError for what cannot be run."""
        super().check()
        _check_mixers(self.chosen, self.d_model, self.lengths)
        _check_counts("lengths", self.lengths)
        require(self.batch_size >= 1, "batch_size", self.batch_size, "at least 1")
        choose("dtype", self.dtype, DTYPES)
        for name in self.baseline:
            choose("baseline", name, BASELINES)
        if "torch" in self.baseline and importlib.util.find_spec("torch") is None:
            raise UserError("baseline 'torch' needs PyTorch, which is not installed: pip install torch")


@dataclass(frozen=True)
class Model(Common):
    """Time a config's model: forward, loss and gradient, and the whole step of training, on random data."""

    config: str = field(kw_only=True, metadata=positional("CONFIG[:VARIANT]"))
    """Name of a config, or a Python file with get_config()."""
    batch_size: int | None = None
    """Rows of a batch; the config's by default."""
    seq_len: tuple[int, ...] = ()
    """Tokens of a sequence, of models of text, one or several lengths; the config's by default."""
    vocab_size: int = 256
    """Symbols, where the config leaves them to its text."""

    def check(self) -> None:
        """Raises UserError for what cannot be run."""
        super().check()
        batch_size = self.batch_size
        require(batch_size is None or batch_size >= 1, "batch_size", batch_size, "at least 1")
        for length in self.seq_len:
            require(length >= 1, "seq_len", length, "at least 1")
        require(self.vocab_size >= 2, "vocab_size", self.vocab_size, "at least 2")


@dataclass(frozen=True)
class Decode(Common):
    """Time the prefill of a prompt, and then the decoding loop, of language models of one mixer each."""

    mixers: tuple[str, ...] = ("hyena", "hawk", "attention")
    """Names of mixers; `all` is every one."""
    contexts: tuple[int, ...] = (1024, 4096)
    """Tokens of the whole sequence, prompt and new ones."""
    batch: tuple[int, ...] = (1, 8)
    """Sequences at once."""
    n_new: int = 256
    """New tokens, after a prompt of the rest of the context."""
    d_model: int = 256
    """Channels."""
    n_layers: int = 2
    """Blocks."""
    dtype: str = "float32"
    """Of the activations: float32 or bfloat16."""

    @property
    def chosen(self) -> tuple[str, ...]:
        """The mixers' names, each once."""
        return tuple(MIXER_CONFIGS) if "all" in self.mixers else tuple(dict.fromkeys(self.mixers))

    def check(self) -> None:
        """Raises UserError for what cannot be run."""
        super().check()
        _check_mixers(self.chosen, self.d_model, self.contexts)
        _check_counts("contexts", self.contexts)
        _check_counts("batch", self.batch)
        require(self.n_layers >= 1, "n_layers", self.n_layers, "at least 1")
        most = min(self.contexts) - 1
        require(2 <= self.n_new <= most, "n_new", self.n_new, f"in 2..{most}, below every context")
        choose("dtype", self.dtype, DTYPES)


Settings = Operators | Model | Decode
RESULTS, PLOT = "results.json", "plot.png"


def check_output(folder: Path | None) -> None:
    """Raises UserError for a folder that holds anything but an earlier benchmark."""
    if folder is None or not folder.exists():
        return
    require(folder.is_dir(), "output", str(folder), "a folder")
    names = {path.name for path in folder.iterdir()}
    require(not names or RESULTS in names, "output", str(folder), "new, empty, or of an earlier benchmark")


def flags(settings: Settings) -> dict[str, object]:
    """The settings as JSON values."""
    values = {field.name: getattr(settings, field.name) for field in fields(settings)}
    values |= {"plugins": settings.plugins.plugin}
    return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


def _check_counts(name: str, values: tuple[int, ...]) -> None:
    require(len(values) >= 1, name, values, "at least one number")
    for value in values:
        require(value >= 1, name, value, "at least 1")


def _check_mixers(names: tuple[str, ...], d_model: int, lengths: tuple[int, ...]) -> None:
    require(len(names) >= 1, "mixers", names, "at least one name")
    require(d_model >= 1, "d_model", d_model, "at least 1")
    for name in names:
        choose("mixer", name, MIXER_CONFIGS)().check(d_model, max([*lengths, 1]))
