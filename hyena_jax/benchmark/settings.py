"""The flags of `hyena-jax bench`. Imports nothing heavy."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, ClassVar

from hyena_jax.config import MIXER_CONFIGS, Above, AtLeast, Experiment, encode
from hyena_jax.config.flags import FLAT, PluginFlags, positional
from hyena_jax.system.errors import choose, is_unicode, require
from hyena_jax.system.files import require_can_hold_files, require_own_folder

RESULTS, PLOT = "results.json", "plot.png"


@dataclass(frozen=True)
class Effort:
    """How long to measure each program."""

    seconds: float = 1.0
    """Seconds to measure each program at each size, after its warm-up."""
    least_runs: Annotated[int, AtLeast(1)] = 5
    """Minimum timed runs per median."""
    max_seconds: Annotated[float, Above(0)] = 20.0
    """A run that takes longer is not repeated, and its method is not measured at greater lengths."""


@dataclass(frozen=True)
class Common(Effort):
    """The flags of every benchmark."""

    benchmark: ClassVar[str]
    """Its name, the command's second word."""

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
        for name, folder in (("output", self.output), ("profile", self.profile)):
            require(folder is None or is_unicode(folder), name, str(folder), "a path in UTF-8")
        if self.output is not None:
            require_own_folder("output", self.output, "benchmark", RESULTS, "benchmark")
        if self.profile is not None:
            require_can_hold_files("profile", self.profile)


@dataclass(frozen=True)
class OfMixers(Common):
    """The flags of the benchmarks of mixers."""

    mixers: tuple[str, ...] = ("hyena", "hawk", "attention")
    """Names of mixers; `all` means every mixer."""
    d_model: Annotated[int, AtLeast(1)] = 256
    """Width D of the mixers."""
    dtype: str = "float32"
    """Dtype of the activations: float32 or bfloat16. Parameters, FFTs and recurrences stay in float32."""

    @property
    def chosen(self) -> tuple[str, ...]:
        return tuple(MIXER_CONFIGS) if "all" in self.mixers else tuple(dict.fromkeys(self.mixers))

    def check_mixers(self, argument: str, lengths: tuple[int, ...]) -> None:
        """Raises UserError unless every mixer can be built for `lengths`, which `argument` gave."""
        super().check()
        require(len(self.chosen) >= 1, "mixers", self.chosen, "at least one name")
        for name in self.chosen:
            MIXER_CONFIGS.choose("mixer", name)().check(self.d_model, max([*lengths, 1]))
        choose("dtype", self.dtype, dict.fromkeys(("float32", "bfloat16")))
        _check_counts(argument, lengths)


@dataclass(frozen=True)
class Operators(OfMixers):
    """The flags of `bench operators`."""

    benchmark = "operators"

    lengths: tuple[int, ...] = tuple(2**i for i in range(8, 18))
    """Sequence lengths to measure, in tokens."""
    batch_size: Annotated[int, AtLeast(1)] = 1
    """Sequences per batch."""

    def check(self) -> None:
        self.check_mixers("lengths", self.lengths)


@dataclass(frozen=True)
class Model(Common):
    """The flags of `bench model`."""

    benchmark = "model"

    config: str = field(kw_only=True, metadata=positional("CONFIG[:VARIANT]"))
    """Name of a config, or a Python file with get_config()."""
    batch_size: Annotated[int | None, AtLeast(1)] = None
    """Rows per batch; by default the config's."""
    seq_len: tuple[int, ...] = ()
    """One or several sequence lengths, for models of text; by default the config's."""
    vocab_size: Annotated[int, AtLeast(2)] = 256
    """Vocabulary size, if the config takes it from its text."""
    experiment: Experiment = field(default=Experiment(), metadata=FLAT)

    def check(self) -> None:
        super().check()
        for length in self.seq_len:
            require(length >= 1, "seq_len", length, "at least 1")


@dataclass(frozen=True)
class Decode(OfMixers):
    """The flags of `bench decode`."""

    benchmark = "decode"

    contexts: tuple[int, ...] = (1024, 4096)
    """Context lengths to measure, in tokens: the prompt and the new tokens."""
    batch: tuple[int, ...] = (1, 8)
    """Batch sizes to measure."""
    n_new: int = 256
    """New tokens; the prompt is the rest of the context."""
    n_layers: Annotated[int, AtLeast(1)] = 2
    """Number of blocks."""

    def check(self) -> None:
        self.check_mixers("contexts", self.contexts)
        _check_counts("batch", self.batch)
        most = min(self.contexts) - 1
        require(2 <= self.n_new <= most, "n_new", self.n_new, f"in 2..{most}, below every context")


@dataclass(frozen=True)
class Function(Common):
    """The flags of `bench function`."""

    benchmark = "function"

    target: str = field(kw_only=True, metadata=positional("FILE.py:NAME"))
    """A Python file, and the names of one or several functions in it, separated by commas."""
    sizes: tuple[int, ...] = (1024,)
    """The sizes with which `make_inputs` is called."""
    gradients: bool = True
    """Also time y with the gradients of all inputs in floating point."""

    def check(self) -> None:
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
