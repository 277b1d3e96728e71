"""What `convert` needs to know of published models: their settings, our config, where each parameter is."""

import re
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from hyena_jax.config import LanguageModelConfig, MixerConfig
from hyena_jax.config.checks import MAX_COUNT
from hyena_jax.data.tokenizers import Tokenizer
from hyena_jax.interop.tensors import Tensors
from hyena_jax.interop.transforms import Transform
from hyena_jax.system.errors import UserError, printable, require
from hyena_jax.system.files import MAX_DEPTH, MAX_JSON, parse_json, read_bytes

MISSING = object()


class Settings:
    """Values by name, from a file; an error names the file and the setting."""

    def __init__(self, source: str, values: Any) -> None:
        if not isinstance(values, Mapping):
            raise UserError(f"must be an object with settings by name, got {_shown(values)}", source)
        self.source = source
        self.values = values

    def get(self, name: str, default: Any = MISSING) -> Any:
        """The value as it is; null counts as missing. UserError if it is missing without a default."""
        value = self.values.get(name)
        if value is None:
            if default is MISSING:
                raise UserError(f"{self.source}: {name} is missing")
            return default
        return value

    def size(self, name: str, default: Any = MISSING, most: int = MAX_COUNT) -> int:
        """An int from 1 to `most`."""
        value = self.get(name, default)
        self.expect(type(value) is int and value >= 1, name, value, "an int, at least 1")
        self.expect(value <= most, name, value, f"at most {most}")
        return value

    def number(self, name: str, default: Any = MISSING, or_zero: bool = False) -> float:
        """A number above 0, or 0 too."""
        value = self.get(name, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        fits = is_number and (0 < value < 1e30 or (or_zero and value == 0))
        self.expect(fits, name, value, "a number of at least 0" if or_zero else "a number above 0")
        return float(value)

    def flag(self, name: str, default: Any = MISSING) -> bool:
        value = self.get(name, default)
        self.expect(isinstance(value, bool), name, value, "true or false")
        return value

    def indices(self, name: str, most: int, default: Any = MISSING) -> list[int]:
        """A list of different layers below `most`."""
        value = self.get(name, default)
        is_list = isinstance(value, list) and all(type(i) is int and 0 <= i < most for i in value)
        self.expect(is_list and len({*value}) == len(value), name, value, f"a list of layers below {most}")
        return value

    def names(self, name: str, allowed: tuple[str, ...], default: Any = MISSING) -> list[str]:
        """A list of at least one of the allowed words."""
        value = self.get(name, default)
        is_list = isinstance(value, list | tuple) and len(value) > 0
        fits = is_list and all(isinstance(word, str) and word in allowed for word in value)
        self.expect(fits, name, value, f"a list of {', '.join(allowed)}")
        return list(value)

    def require(self, name: str, *allowed: Any) -> None:
        """Refuses a value other than the first, the default, and the others that are allowed."""
        value = self.get(name, allowed[0])
        # 1 is not True here, though they are equal.
        fits = any(type(value) is type(one) and value == one for one in allowed)
        self.expect(fits, name, value, " or ".join(map(repr, allowed)) + ": no other is supported")

    def inner(self, name: str) -> "Settings":
        """The settings in the object of this name; empty if there is none."""
        return Settings(f"{self.source}: {name}", self.get(name, {}))

    def rotary(self) -> "Settings":
        """The settings of rotary positions, which must not be scaled and be the same in all layers."""
        self.require("rope_scaling", None)
        rope = self.inner("rope_parameters")
        for name in ("rope_type", "type"):  # the latter is its older name
            rope.require(name, "default")
        for name in sorted(rope.values.keys() - {"rope_type", "type", "rope_theta", "partial_rotary_factor"}):
            rope.require(name, None)
        return rope

    def expect(self, condition: bool, name: str, value: Any, allowed: str) -> None:
        """Raises UserError `FILE: {name} must be {allowed}, got {value}` unless the condition holds."""
        if not condition:
            raise UserError(f"{self.source}: {name} must be {allowed}, got {_shown(value)}")


def read_settings(path: Path) -> Settings:
    """The settings in a JSON or, by its suffix, a YAML file."""
    require(not path.is_symlink(), "config", str(path), "a file, not a symbolic link")
    data = read_bytes("config", path, MAX_JSON)
    try:
        values = _parse_yaml(data) if path.suffix in (".yml", ".yaml") else parse_json(data)
    except UserError as error:
        raise UserError(f"{str(path)!r} cannot be read: {error}", "config") from error
    return Settings(path.name, values)


def _shown(value: Any) -> str:
    """At most 80 characters of a value, without writing all of it."""
    short = reprlib.Repr()
    short.maxstring = 80
    try:
        return printable(short.repr(value))[:80]
    except ValueError:  # Python writes no ints of more than 4300 digits
        return f"a long {type(value).__name__}"


def _parse_yaml(data: bytes) -> Any:
    try:
        import yaml
    except ImportError:
        raise UserError("YAML needs the package PyYAML: pip install 'hyena_jax[interop]'") from None
    depth = 0
    try:
        for event in yaml.parse(data, yaml.SafeLoader):
            # A few lines of aliases of aliases can stand for more than fits into memory.
            if isinstance(event, yaml.AliasEvent):
                raise UserError("YAML with aliases is not supported")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise UserError(f"YAML must be at most {MAX_DEPTH} lists and objects deep")
        return yaml.safe_load(data)
    except UserError:
        raise
    except Exception as error:  # tags such as !!bool raise many kinds
        raise UserError(f"not YAML: {type(error).__name__}: {printable(error)[:200]}") from error


class Options(NamedTuple):
    """What the user says about the source, in addition to its files."""

    config: Path | None = None
    max_len: int | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    window_shift: float | None = None
    window_of: Literal["deepmind", "transformers"] | None = None

    def applied(self, model: LanguageModelConfig, max_len: int) -> LanguageModelConfig:
        """The model with this dtype, and with this longest sequence; by default the family's `max_len`."""
        return replace(model, max_len=max_len if self.max_len is None else self.max_len, dtype=self.dtype)

    def refuse_windows(self, but: str = "") -> None:
        """Refuses what is said about a window that another family has; `but` is the family's own."""
        for name, family in (("window_shift", "hyenadna"), ("window_of", "recurrentgemma")):
            value = getattr(self, name)
            require(name == but or value is None, name, value, f"None: only {family} has such a window")


@dataclass(frozen=True)
class Table:
    """Where the parameters of a model come from, and which other tensors may be there."""

    transforms: Mapping[str, Transform]
    """By the path of the parameter."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Tensors that may be there, and the one that each must equal."""
    constants: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Tensors that may be there, and the values that they must have, to 1e-4 of the largest."""
    ignored: re.Pattern[str] | None = None
    """Names of other tensors that have no effect."""


@dataclass(frozen=True)
class Source:
    """A published model, as its files describe it."""

    model: LanguageModelConfig
    table: Table
    tensors: Tensors
    """By the names in the table."""
    tokenizer: Tokenizer | None = None
    """The tokenizer that the family always has; None where the folder brings one."""
    bos: int | None = None
    """The id that every text begins with."""
    note: str | None = None
    """What the files do not say and was assumed, and how to say otherwise; or tensors that are left out."""


def settings_of(source: Path, options: Options, names: tuple[str, ...] = ("config.json",)) -> Settings:
    """The settings in `--config`, or in the first of these files that is next to the weights."""
    if options.config is not None:
        return read_settings(options.config)
    folder = source if source.is_dir() else source.parent
    for name in names:
        if (folder / name).exists() or (folder / name).is_symlink():
            return read_settings(folder / name)
    raise UserError(f"must be given: there is no {' or '.join(names)} next to the weights", "config")


def blocks(model: LanguageModelConfig, prefix: str) -> Iterator[tuple[str, str, MixerConfig]]:
    """Our name, theirs and the mixer of each block."""
    for i in range(model.n_layers):
        yield f"blocks_{i}", f"{prefix}.{i}", model.pattern[i % len(model.pattern)]


def without_prefix(tensors: Tensors, prefix: str) -> Tensors:
    """The tensors without a prefix that all their names have; unchanged if some lack it."""
    if not all(name.startswith(prefix) for name in tensors):
        return tensors
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
