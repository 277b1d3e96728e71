"""What `convert` needs to know of published models: a model's config, and where each parameter is."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from hyena_jax.config import LanguageModelConfig
from hyena_jax.data.tokenizers import Tokenizer
from hyena_jax.interop.settings import Settings, read_settings
from hyena_jax.interop.tensors import Tensors
from hyena_jax.interop.transforms import Transform
from hyena_jax.system.errors import UserError, require


class Options(NamedTuple):
    """What the user says about the source, in addition to its files."""

    config: Path | None = None
    max_len: int | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    window_shift: float | None = None
    window_of: Literal["deepmind", "transformers"] | None = None


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
    """What the files do not say and was assumed, and how to say otherwise."""


def settings_of(source: Path, options: Options, names: tuple[str, ...] = ("config.json",)) -> Settings:
    """The settings in `--config`, or in the first of these files that is next to the weights."""
    if options.config is not None:
        return read_settings(options.config)
    folder = source if source.is_dir() else source.parent
    for name in names:
        if (folder / name).exists() or (folder / name).is_symlink():
            return read_settings(folder / name)
    raise UserError(f"must be given: there is no {' or '.join(names)} next to the weights", "config")


def max_len_of(options: Options, default: int) -> int:
    """The longest sequence of the model: `--max-len`, or the family's default."""
    return default if options.max_len is None else options.max_len


def refuse_max_len(options: Options, fixed: int) -> None:
    """Refuses another `--max-len` where filters are defined relative to it."""
    allowed = f"{fixed}, of which the filters are functions"
    require(options.max_len in (None, fixed), "max_len", options.max_len, allowed)


def refuse_windows(options: Options, but: str = "") -> None:
    """Refuses the options about a window that another family has; `but` is the family's own."""
    for name, family in (("window_shift", "hyenadna"), ("window_of", "recurrentgemma")):
        value = getattr(options, name)
        require(name == but or value is None, name, value, f"None: only {family} has such a window")


def without_prefix(tensors: Tensors, prefix: str) -> Tensors:
    """The tensors without a prefix that all their names have; unchanged if some lack it."""
    if not all(name.startswith(prefix) for name in tensors):
        return tensors
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
