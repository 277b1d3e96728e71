"""The flags of `hyena-jax bench`. Imports nothing heavy."""

import importlib.util
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import ClassVar

from hyena_jax.config import MIXER_CONFIGS, Experiment, encode
from hyena_jax.config.flags import FLAT, PluginFlags, positional
from hyena_jax.system.errors import UserError, choose, is_unicode, require
from hyena_jax.system.files import require_own_folder

RESULTS, PLOT = "results.json", "plot.png"


@dataclass(frozen=True)
class Effort:
    """How long to measure each program."""

    seconds: float = 1.0
    """Seconds to measure each program at each size, after its warm-up."""
    least_runs: int = 5
    """Minimum timed runs per median."""
    max_seconds: float = 20.0
    """A run that takes longer is not repeated, and its method is not measured at greater lengths."""


@dataclass(frozen=True)
class Common(Effort):
    """The flags of every benchmark."""

    benchmark: ClassVar[str]
    """Its name: the command's second word, and its module in this folder."""

    output: Path | None = None
    """Folder for results.json and plot.png: new, empty, or an earlier benchmark's. Without it, no files."""
    json: bool = False
    """Print results.json instead of the table, once everything is measured."""
    profile: Path | None = None
    """Folder for a trace of one run of every program, to be opened with XProf or TensorBoard."""
    plugins: PluginFlags = field(default=PluginFlags(), metadata=FLAT)

    def check(self) -> None:
        """Raises UserError for values that no benchmark can run with."""
        require(0 < self.seconds <= 600, "seconds", self.seconds, "in (0, 600]")
        require(self.least_runs >= 1, "least_runs", self.least_runs, "at least 1")
        require(self.max_seconds > 0, "max_seconds", self.max_seconds, "above 0")
        for name, folder in (("output", self.output), ("profile", self.profile)):
            require(folder is None or is_unicode(folder), name, str(folder), "a path in UTF-8")
        if self.output is not None:
            require_own_folder("output", self.output, "benchmark", RESULTS)
        if self.profile is not None and self.profile.exists():
            require(self.profile.is_dir(), "profile", str(self.profile), "a folder")


@dataclass(frozen=True)
class OfMixers(Common):
    """The flags of the benchmarks of mixers."""

    mixers: tuple[str, ...] = ("hyena", "hawk", "attention")
    """Names of mixers; `all` means every mixer."""
    d_model: int = 256
    """Width D of the mixers."""
    dtype: str = "float32"
    """Dtype of the activations: float32 or bfloat16. Parameters, FFTs and recurrences stay in float32."""

    @property
    def chosen(self) -> tuple[str, ...]:
        """The mixers' names, each once."""
        return tuple(MIXER_CONFIGS) if "all" in self.mixers else tuple(dict.fromkeys(self.mixers))

    def check_mixers(self, argument: str, lengths: tuple[int, ...]) -> None:
        """Raises UserError unless every mixer can be built for `lengths`, which `argument` gave."""
        super().check()
        require(len(self.chosen) >= 1, "mixers", self.chosen, "at least one name")
        require(self.d_model >= 1, "d_model", self.d_model, "at least 1")
        for name in self.chosen:
            MIXER_CONFIGS.choose("mixer", name)().check(self.d_model, max([*lengths, 1]))
        choose("dtype", self.dtype, dict.fromkeys(("float32", "bfloat16")))
        _check_counts(argument, lengths)


@dataclass(frozen=True)
class Operators(OfMixers):
    """Time mixers, forward and with their gradients, over lengths."""

    benchmark = "operators"

    lengths: tuple[int, ...] = tuple(2**i for i in range(8, 18))
    """Sequence lengths to measure, in tokens."""
    batch_size: int = 1
    """Sequences per batch."""
    baseline: tuple[str, ...] = ()
    """Also time our plain versions of the same mixers: `torch`, `flax`, or both."""

    def check(self) -> None:
        """Raises UserError for values that cannot be run."""
        self.check_mixers("lengths", self.lengths)
        require(self.batch_size >= 1, "batch_size", self.batch_size, "at least 1")
        for name in self.baseline:
            choose("baseline", name, dict.fromkeys(("torch", "flax")))
        if "torch" in self.baseline and importlib.util.find_spec("torch") is None:
            raise UserError("baseline 'torch' needs PyTorch, which is not installed: pip install torch")


@dataclass(frozen=True)
class Model(Common):
    """Time a config's model on random data: forward, loss and gradient, and the whole training step.

    The first two run on one device. The step runs with pmap on all, whatever the config's strategy is.
    """

    benchmark = "model"

    config: str = field(kw_only=True, metadata=positional("CONFIG[:VARIANT]"))
    """Name of a config, or a Python file with get_config()."""
    batch_size: int | None = None
    """Rows per batch; by default the config's."""
    seq_len: tuple[int, ...] = ()
    """One or several sequence lengths, for models of text; by default the config's."""
    vocab_size: int = 256
    """Vocabulary size, if the config takes it from its text."""
    experiment: Experiment = field(default=Experiment(), metadata=FLAT)

    def check(self) -> None:
        """Raises UserError for values that cannot be run."""
        super().check()
        batch_size = self.batch_size
        require(batch_size is None or batch_size >= 1, "batch_size", batch_size, "at least 1")
        for length in self.seq_len:
            require(length >= 1, "seq_len", length, "at least 1")
        require(self.vocab_size >= 2, "vocab_size", self.vocab_size, "at least 2")


@dataclass(frozen=True)
class Decode(OfMixers):
    """Time the prefill of a prompt and then the decoding loop, in language models of one mixer each."""

    benchmark = "decode"

    contexts: tuple[int, ...] = (1024, 4096)
    """Context lengths to measure, in tokens: the prompt and the new tokens."""
    batch: tuple[int, ...] = (1, 8)
    """Batch sizes to measure."""
    n_new: int = 256
    """New tokens; the prompt is the rest of the context."""
    n_layers: int = 2
    """Number of blocks."""

    def check(self) -> None:
        """Raises UserError for values that cannot be run."""
        self.check_mixers("contexts", self.contexts)
        _check_counts("batch", self.batch)
        require(self.n_layers >= 1, "n_layers", self.n_layers, "at least 1")
        most = min(self.contexts) - 1
        require(2 <= self.n_new <= most, "n_new", self.n_new, f"in 2..{most}, below every context")


@dataclass(frozen=True)
class Function(Common):
    """Time functions of your own file, forward and with the gradients of their inputs, over sizes.

    The file has `make_inputs(size)`, which returns the arguments as a tuple of arrays; and, if the values are
    to be checked first, `oracle(*arguments)`, which returns them as NumPy computes them in float64.
    """

    benchmark = "function"

    target: str = field(kw_only=True, metadata=positional("FILE.py:NAME"))
    """A Python file, and the names of one or several functions in it, separated by commas."""
    sizes: tuple[int, ...] = (1024,)
    """The sizes with which `make_inputs` is called."""
    gradients: bool = True
    """Also time y with the gradients of all inputs in floating point."""

    def check(self) -> None:
        """Raises UserError for values that cannot be run."""
        super().check()
        file, _, names = self.target.rpartition(":")
        is_named = file.endswith(".py") and all(name.isidentifier() for name in names.split(","))
        require(is_named, "target", self.target, "FILE.py:NAME, or FILE.py:NAME,NAME")
        _check_counts("sizes", self.sizes)


Settings = Operators | Model | Decode | Function


def flags(settings: Settings) -> dict[str, object]:
    """The settings as JSON values."""
    values = {field.name: getattr(settings, field.name) for field in fields(settings)}
    values |= {"plugins": settings.plugins.plugin}
    if isinstance(settings, Model):
        values["experiment"] = encode(settings.experiment)
    return {name: str(value) if isinstance(value, Path) else value for name, value in values.items()}


def _check_counts(argument: str, values: tuple[int, ...]) -> None:
    require(len(values) >= 1, argument, values, "at least one number")
    for value in values:
        require(value >= 1, argument, value, "at least 1")
