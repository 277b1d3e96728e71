"""The flags of a command, derived from the fields of its dataclass; a wrong flag is refused in one line.

A field `d_model` of a config in the field `model` is set by `--model.d-model VALUE`. A boolean is set by
`--greedy` or `--no-greedy`. A tuple takes several values, and repeating its flag adds values; for any other
repeated flag the last value counts.
"""

import dataclasses
import difflib
import errno
import math
import os
import reprlib
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from hyena_jax.config.checks import describe, field_types
from hyena_jax.config.registry import is_kind
from hyena_jax.errors import UserError, choose

T = TypeVar("T")

# Metadata of a field that holds a dataclass: names of the inner flags omit this field.
FLAT = {"flat": True}
# Metadata of a field that no flag sets.
HIDDEN = {"hidden": True}
MISSING = dataclasses.MISSING

_NEGATIVE = "--no-"


def positional(metavar: str) -> dict[str, str]:
    """Metadata of a positional argument; `metavar` is its name in the help."""
    return {"positional": metavar}


class Flag(NamedTuple):
    """A field that can be set on the command line."""

    path: tuple[str, ...]
    """Field names from the command's dataclass down to this field; indices for elements of tuples."""
    name: str
    """`--model.d-model`, or the name of a positional argument in the help."""
    hint: Any
    """The annotated type."""
    default: Any
    """MISSING if the command line must set it."""
    owner: type
    """The dataclass that declares the field."""

    @property
    def is_positional(self) -> bool:
        """Whether it is a positional argument."""
        return not self.name.startswith("--")


def flags_of(command: type, defaults: Mapping[str, Any] | None = None) -> list[Flag]:
    """All flags of a dataclass, in the order of its fields, with the flags of nested dataclasses last.

    Args:
      defaults: values that replace the fields' own defaults.
    """
    return list(_flags(_Section(command, dict(defaults or {}), (), "--")))


def read(
    command: type[T],
    called: str,
    arguments: Sequence[str],
    defaults: Mapping[str, Any] | None = None,
    others: Sequence[str] = (),
) -> T:
    """The dataclass that the arguments describe.

    Args:
      called: the name of the command, for messages.
      defaults: see `flags_of`.
      others: flags that were read before, to suggest if an unknown flag resembles one.

    Raises:
      UserError: for an unknown or missing flag, or a wrong value; it names the flag.
    """
    flags = flags_of(command, defaults)
    names = {flag.path: flag.name for flag in flags}
    values = _parse(flags, called, arguments, others)
    for flag in flags:
        if flag.default is MISSING and flag.path not in values:
            raise UserError(f"{flag.name} must be given: see hyena-jax {called} --help")
    return _build(_Section(command, dict(defaults or {}), (), "--"), values, names)


def split(command: type, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The arguments of a command, with their values and all positional arguments, and all others."""
    own = {flag.name: n_values(flag.hint) for flag in flags_of(command) if not flag.is_positional}
    ours, others, here, room = [], [], None, 0
    for argument in arguments:
        if _is_flag(argument):
            name, equals, _ = argument.partition("=")
            here = ours if name.replace("_", "-") in own else others
            most = own.get(name.replace("_", "-"))
            room = 0 if equals else len(arguments) if most is None else most
            here.append(argument)
        elif here is not None and room > 0:
            room -= 1
            here.append(argument)
        else:
            ours.append(argument)
    return ours, others


def as_flag(error: UserError, names: Iterable[str]) -> UserError:
    """The error with a flag's name in place of its argument, if exactly one flag matches."""
    wanted = (error.argument or "").replace("_", "-")
    names = [name for name in names if name.startswith("--")]
    near = [name for name in names if name == f"--{wanted}"] or [
        name for name in names if name.endswith(f".{wanted}")
    ]
    return UserError(error.message, near[0]) if len(near) == 1 else error


def n_values(hint: Any) -> int | None:
    """Number of values that a flag of this type takes; None for one or more."""
    if hint is bool:
        return 0
    elements = _elements(hint)
    return 1 if elements is None else None if elements[-1] is Ellipsis else len(elements)


def _flags(section: "_Section") -> Iterator[Flag]:
    nested = []
    for field, hint, value in _fields(section):
        path = (*section.path, field.name)
        if field.metadata.get("hidden"):
            continue
        if inner := list(_inside(section, field, hint, value)):
            nested += inner
        elif not _holds_dataclasses(hint):
            name = field.metadata.get("positional", section.prefix + field.name.replace("_", "-"))
            yield Flag(path, name, hint, value, section.kind)
    for inner in nested:
        yield from _flags(inner)


def _parse(
    flags: Sequence[Flag], called: str, arguments: Sequence[str], others: Sequence[str]
) -> dict[tuple[str, ...], Any]:
    """The values of the given flags, by path."""
    by_name = {flag.name: flag for flag in flags if not flag.is_positional}
    by_name |= {_NEGATIVE + flag.name[2:]: flag for flag in flags if flag.hint is bool}
    places = [flag for flag in flags if flag.is_positional]
    values: dict[tuple[str, ...], Any] = {}
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not _is_flag(argument):
            if not places:
                raise UserError(f"{_shown(argument)} is one argument too many for {called}")
            is_last = n_values(places[0].hint) is None  # it takes all that follow
            flag = places[0] if is_last else places.pop(0)
            value = _converted(flag, [argument])
            values[flag.path] = (*values.get(flag.path, ()), *value) if is_last else value
            continue
        name, equals, attached = argument.partition("=")
        name = name.replace("_", "-")
        if name not in by_name:
            near = _nearest(name, [*by_name, *others])
            raise UserError(f"{name} is not a flag of {called}" + (f"; did you mean {near}?" if near else ""))
        flag = by_name[name]
        if flag.hint is bool:
            follows = attached if equals else next(iter(rest), "")
            if equals or follows.lower() in ("true", "false"):
                raise UserError(
                    f"{flag.name} takes no value, got {_shown(follows)}: write {flag.name}"
                    f" or {_NEGATIVE}{flag.name[2:]}"
                )
            values[flag.path] = name == flag.name
            continue
        given = [attached] if equals else []
        most = n_values(flag.hint) or len(rest)
        while not equals and rest and len(given) < most and not _is_flag(rest[0]):
            given.append(rest.pop(0))
        value = _converted(flag, given)
        adds = n_values(flag.hint) is None and flag.path in values
        values[flag.path] = (*values[flag.path], *value) if adds else value
    return values


def _is_flag(argument: str) -> bool:
    return argument.startswith("--") and argument[2:3].isalpha()


def _nearest(name: str, known: Sequence[str]) -> str:
    """The flag that was probably meant: first one of that name in a section, then a similar spelling."""
    inside = [flag for flag in known if flag.endswith(f".{name[2:]}")]
    return next(iter(inside or difflib.get_close_matches(name, known, n=1)), "")


def _converted(flag: Flag, given: Sequence[str]) -> Any:
    """The given words as the flag's value."""
    elements = _elements(flag.hint)
    if not given:
        raise UserError(f"{flag.name} must be followed by a value")
    if elements is None:
        return _convert(flag, flag.hint, given[0])
    if list(given) == ["None"] and type(None) in get_args(flag.hint):
        return None
    elements = elements[:1] * len(given) if elements[-1] is Ellipsis else elements
    if len(given) != len(elements):
        raise UserError(f"{flag.name} must be followed by {len(elements)} values, got {len(given)}")
    return tuple(_convert(flag, hint, text) for hint, text in zip(elements, given, strict=True))


def _convert(flag: Flag, hint: Any, text: str) -> Any:
    if get_origin(hint) is Literal:
        return choose(flag.name, text, dict(zip(get_args(hint), get_args(hint), strict=True)))
    try:
        return _value(hint, text)
    except (TypeError, ValueError):
        raise UserError(f"{flag.name} must be {describe(hint)}, got {_shown(text)}") from None


def _value(hint: Any, text: str) -> Any:
    """The text as a value of that type. Raises ValueError or TypeError if it is not one."""
    if get_origin(hint) in (Union, types.UnionType):
        for argument in sorted(get_args(hint), key=lambda argument: argument is str):  # any text is a str
            try:
                return _value(argument, text)
            except (TypeError, ValueError):
                continue
        raise ValueError
    if get_origin(hint) is Literal or hint is type(None):
        if text in get_args(hint):
            return text
        if hint is type(None) and text == "None":
            return None
        raise ValueError
    if hint is bool:  # in a union or a tuple; bool("false") is True
        if text not in ("true", "false"):
            raise ValueError
        return text == "true"
    if hint is Path and not _is_path(text):
        raise ValueError
    value = hint(text)
    if hint is float and not math.isfinite(value):
        raise ValueError
    return value


def _is_path(text: str) -> bool:
    """Whether the system allows a file of that name."""
    try:
        os.lstat(text)
    except OSError as error:
        return text != "" and error.errno != errno.ENAMETOOLONG
    return True


def _elements(hint: Any) -> tuple | None:
    """The element types of a tuple or an optional tuple; None for other types."""
    for kind in (hint, *get_args(hint)):
        if get_origin(kind) is tuple:
            return get_args(kind)
    return None


def _shown(text: str) -> str:
    shorten = reprlib.Repr()
    shorten.maxstring = 60
    return shorten.repr(text)


class _Section(NamedTuple):
    """A dataclass to build: the command's own, or one inside it."""

    kind: type
    values: dict[str, Any]
    """Values that replace the fields' own defaults."""
    path: tuple[str, ...]
    prefix: str
    """Prefix of its flags, such as `--model.`"""


def _fields(section: _Section) -> Iterator[tuple[dataclasses.Field, Any, Any]]:
    """Each field with its type, and its value or MISSING."""
    for field in dataclasses.fields(section.kind):
        own = field.default if field.default_factory is MISSING else field.default_factory()
        if field.init:
            yield field, field_types(section.kind)[field.name], section.values.get(field.name, own)


def _inside(section: _Section, field: dataclasses.Field, hint: Any, value: Any) -> Iterator[_Section]:
    """The dataclasses that a field holds."""
    path = (*section.path, field.name)
    prefix = section.prefix + ("" if field.metadata.get("flat") else field.name.replace("_", "-") + ".")
    if value is MISSING and dataclasses.is_dataclass(hint):
        yield _Section(hint, {}, path, prefix)
    elif dataclasses.is_dataclass(value):
        yield _Section(type(value), _values(value), path, prefix)
    elif isinstance(value, tuple):
        for i, element in enumerate(value):
            if dataclasses.is_dataclass(element):
                yield _Section(type(element), _values(element), (*path, str(i)), f"{prefix}{i}.")


def _holds_dataclasses(hint: Any) -> bool:
    return any(dataclasses.is_dataclass(kind) or is_kind(kind) for kind in (hint, *get_args(hint)))


def _values(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _build(
    section: _Section, values: Mapping[tuple[str, ...], Any], names: Mapping[tuple[str, ...], str]
) -> Any:
    """The dataclass with the given values, built from the inside out."""
    options = {}
    for field, hint, value in _fields(section):
        inner = [_build(part, values, names) for part in _inside(section, field, hint, value)]
        if inner:
            options[field.name] = tuple(inner) if isinstance(value, tuple) else inner[0]
        else:
            options[field.name] = values.get((*section.path, field.name), value)
    try:
        return section.kind(**options)
    except UserError as error:
        name = names.get((*section.path, *(error.argument or "").split(".")))
        if name is not None:
            raise UserError(error.message, name) from error
        within = section.prefix.removesuffix(".")
        if within == "--":
            raise
        raise UserError(f"{within}: {error}") from error
