"""Checks of the values of configs, against the annotations of their fields."""

import dataclasses
import inspect
import math
import types
from functools import cache
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from hyena_jax.system.errors import UserError, choose, require

# Metadata of a field that may change between the runs of one experiment.
RUNTIME = {"runtime": True}

MAX_COUNT = 2**31 - 1
# The largest float32: a larger value would be infinite.
MAX_FLOAT = (2 - 2**-23) * 2.0**127


def require_sizes(d_model: int, max_len: int) -> None:
    """Refuses a width or a length below 1."""
    for name, size in (("d_model", d_model), ("max_len", max_len)):
        require(_is_a(size, int) and size >= 1, name, size, "an int, at least 1")


def require_divisor(argument: str, value: int, of: str, number: int) -> None:
    """Refuses a `value` that does not divide `number`, called `of` in the message."""
    require(number % value == 0, argument, value, f"a divisor of {of}={number}")


@dataclasses.dataclass(frozen=True)
class Between:
    """A range that the numbers of a field must be in: `n_layers: Annotated[int, Between(1, 64)] = 4`.

    It also holds for each number in a tuple, and a field keeps the ranges that its base classes give it. Ints
    in a range are counts and must fit into 32 bits.
    """

    least: float
    most: float
    ends: Literal["..", "[]", "[)", "(]", "()"] = ".."
    """As in mathematics, `(` and `)` exclude an end. Both belong to the range with `..`, usual for ints."""

    def __contains__(self, number: float) -> bool:
        is_above = number > self.least if self.ends[0] == "(" else number >= self.least
        return is_above and (number < self.most if self.ends[1] == ")" else number <= self.most)

    def __str__(self) -> str:
        if self.most == math.inf:
            return f"{'above' if self.ends[0] == '(' else 'at least'} {self.least}"
        if self.least == -math.inf:
            return f"{'below' if self.ends[1] == ')' else 'at most'} {self.most}"
        if self.ends == "..":
            return f"in {self.least}..{self.most}"
        return f"in {self.ends[0]}{self.least}, {self.most}{self.ends[1]}"


def AtLeast(least: float) -> Between:
    """A range with the least number alone: `steps: Annotated[int, AtLeast(1)] = 2000`."""
    return Between(least, math.inf)


def AtMost(most: float) -> Between:
    """A range with the largest number alone."""
    return Between(-math.inf, most)


def Above(least: float) -> Between:
    """A range of all numbers above `least`: `eps: Annotated[float, Above(0)] = 1e-8`."""
    return Between(least, math.inf, "()")


def Below(most: float) -> Between:
    """A range of all numbers below `most`."""
    return Between(-math.inf, most, "()")


class Checked:
    """Base of the configs: refuses values that do not fit the annotations of the fields, also from Python.

    A subclass with its own checks calls `super().__post_init__()` first.
    """

    def __post_init__(self) -> None:
        for name, hint in field_types(type(self)).items():
            value = getattr(self, name)
            if get_origin(hint) is Literal and isinstance(value, str):
                choose(name, value, dict.fromkeys(get_args(hint)))
            require(_is_a(value, hint), name, value, type_in_words(hint))
            ranges = field_ranges(type(self)).get(name, ())
            if ranges and float not in (hint, *get_args(hint)):
                ranges += (AtMost(MAX_COUNT),)
            for number in value if isinstance(value, tuple) else (value,):
                for allowed in ranges:
                    is_fine = not isinstance(number, int | float) or number in allowed
                    require(is_fine, name, value, str(allowed))


def check_annotations(config_class: type) -> None:
    """Refuses a field whose type `_is_a` and `type_in_words` do not know, or which is called `type`."""
    for name, hint in field_types(config_class).items():
        must = "another name: in config.json `type` is the name of the part"
        require(name != "type", f"{config_class.__name__}.type", name, must)
        if not _is_supported(hint):
            raise UserError(
                f"{config_class.__name__}.{name} must be annotated with a class such as int, float, bool, str"
                f" or Path, a Literal of texts, a tuple of such types, or a union of them, got {hint}"
            )


def _is_supported(hint: Any) -> bool:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return all(isinstance(argument, str) for argument in arguments)
    if origin is tuple:
        inner = arguments[:-1] if arguments[-1:] == (Ellipsis,) else arguments
        return len(inner) > 0 and all(map(_is_supported, inner))
    if origin in (Union, types.UnionType):
        return all(map(_is_supported, arguments))
    try:
        isinstance(None, hint)  # some classes too, such as Any, refuse this
    except TypeError:
        return False
    return inspect.isclass(hint) and hint.__hash__ is not None  # not a list: modules are hashed with it


@cache
def field_types(config_class: type) -> dict[str, Any]:
    """The annotated type of each field of a config class, by name."""
    try:
        hints = get_type_hints(config_class)
    except NameError as error:
        raise UserError(f"an annotation of {config_class.__name__} cannot be read: {error}") from error
    return {field.name: hints[field.name] for field in dataclasses.fields(config_class)}


@cache
def field_ranges(config_class: type) -> dict[str, tuple[Between, ...]]:
    """The ranges of the numbers in each field that has any, by name."""
    found: dict[str, tuple[Between, ...]] = {}
    for base in reversed(config_class.__mro__):
        for name, hint in get_type_hints(base, include_extras=True).items():
            if ranges := (*found.get(name, ()), *_ranges_in(hint)):
                found[name] = tuple(dict.fromkeys(ranges))
    return found


def summary(config_class: type) -> str:
    """The first line of its docstring; empty if it has only the signature that `dataclass` writes."""
    line = (inspect.getdoc(config_class) or "").partition("\n")[0]
    return "" if line.startswith(f"{config_class.__name__}(") else line


def _ranges_in(hint: Any) -> list[Between]:
    if isinstance(hint, Between):
        return [hint]
    return [allowed for inner in get_args(hint) for allowed in _ranges_in(inner)]


def _is_a(value: object, hint: Any) -> bool:
    """Whether a value is of an annotated type. Ints are floats, bools are not numbers, floats are finite."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_is_a(value, argument) for argument in arguments)
    if origin is Literal:
        return isinstance(value, str) and value in arguments
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if arguments[-1] is Ellipsis:
            arguments = arguments[:1] * len(value)
        return len(value) == len(arguments) and all(map(_is_a, value, arguments))
    if hint in (int, float) and isinstance(value, bool):
        return False
    if hint is float:
        return isinstance(value, int | float) and abs(value) <= MAX_FLOAT
    return isinstance(value, hint)


def type_in_words(hint: Any) -> str:
    """An annotated type in words, as in `must be ...`."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(map(type_in_words, arguments))
    if origin is Literal:
        return f"one of {', '.join(arguments)}" if len(arguments) > 1 else repr(arguments[0])
    if origin is tuple:
        inner = type_in_words(arguments[0])
        count = "any number" if arguments[-1] is Ellipsis else str(len(arguments))
        return f"a tuple of {count} of: {inner}"
    if hint is type(None):
        return "None"
    if hint is Path:
        return "a path that the system allows"
    return "a finite float32" if hint is float else f"{'an' if hint is int else 'a'} {hint.__name__}"
