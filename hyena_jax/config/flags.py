"""The flags of a command, derived from the fields of its dataclass; a wrong flag is refused in one line.

A field `d_model` of a config in the field `model` is set by `--model.d-model VALUE`. A boolean is set by
`--greedy` or `--no-greedy`. A tuple takes several values, and repeating its flag adds values; any other flag
is given once.

Parts are chosen by name: `--optimizer lion`, `--model.pattern hawk,hawk,hyena`. They decide which other flags
exist, so they are read first, the outer ones before the inner ones.
"""

import dataclasses
import difflib
import errno
import math
import os
import re
import reprlib
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

from hyena_jax.config.checks import field_types, type_in_words
from hyena_jax.config.registry import is_kind
from hyena_jax.system.errors import UserError, choose, is_unicode, require
from hyena_jax.system.storage.location import Location, is_url

T = TypeVar("T")

# Metadata of a field that holds a dataclass: names of the inner flags omit this field.
FLAT = {"flat": True}
# Metadata of a field that no flag sets; and of one that takes all flags that the command lacks, as they are.
HIDDEN = {"hidden": True}
OTHERS = {**HIDDEN, "others": True}

_NEGATIVE = "--no-"
NONE = ("None", "none")
"""How a flag that may be None is told so."""


def positional(metavar: str) -> dict[str, str]:
    """Metadata of a positional argument; `metavar` is its name in the help."""
    return {"positional": metavar}


@dataclasses.dataclass(frozen=True)
class PluginFlags:
    """Flags of the commands that use registered parts, read before their others."""

    plugin: tuple[str, ...] = ()
    """Python file, module or entry point (group hyena_jax.plugins) that registers your parts; may be
    repeated. The environment variable HYENA_JAX_PLUGINS names more, separated by colons."""


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
        return not self.name.startswith("--")

    @property
    def base(self) -> type | None:
        """The base class, such as `MixerConfig`, of the parts that the flag chooses by name; else None."""
        arguments = get_args(self.hint)
        kind = arguments[0] if arguments[1:] == (Ellipsis,) else self.hint
        return kind if is_kind(kind) else None


def flags_of(
    command: type, defaults: Mapping[str, Any] | None = None, arguments: Sequence[str] = ()
) -> list[Flag]:
    """All flags of a dataclass, in the order of its fields, with the flags of nested dataclasses last.

    `defaults` replace the fields' own; `arguments` may choose parts, whose flags then exist.
    """
    return _section(command, defaults, list(arguments)).flags()


def read_flags(
    command: type[T],
    called: str,
    arguments: Sequence[str],
    defaults: Mapping[str, Any] | None = None,
    program: str = "hyena-jax",
) -> T:
    """The dataclass that the arguments describe; for `defaults` see `flags_of`.

    An error names the flag, and the command as it is `called`, after `program`.
    """
    rest = list(arguments)
    section = _section(command, defaults, rest)
    flags = section.flags()
    values = _parse(command, flags, called, rest)
    for flag in flags:
        if flag.default is MISSING and flag.path not in values:
            raise UserError(f"must be given: see {program} {called} --help", flag.name)
    return section.build(values, {flag.path: flag.name for flag in flags if flag.base is None})


def take_flag(flag: str, arguments: list[str]) -> str | None:
    """Takes `--flag value` or `--flag=value` out of the arguments; returns the value, None if absent."""
    value, rest, waiting = None, [], False
    for argument in arguments:
        name, equals, attached = argument.partition("=")
        if waiting:
            value, waiting = argument, False
        elif argument.startswith("--") and name.replace("_", "-") == flag:
            if value is not None:
                raise UserError("is given twice", flag)
            value, waiting = attached if equals else None, not equals
        else:
            rest.append(argument)
    if waiting:
        raise UserError("must be followed by a name", flag)
    arguments[:] = rest
    return value


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


def _parse(
    command: type, flags: Sequence[Flag], called: str, arguments: Sequence[str]
) -> dict[tuple[str, ...], Any]:
    """The values of the given flags, by path."""
    by_name = {flag.name: flag for flag in flags if not flag.is_positional and flag.base is None}
    by_name |= {_NEGATIVE + flag.name[2:]: flag for flag in flags if flag.hint is bool}
    places = [flag for flag in flags if flag.is_positional]
    values: dict[tuple[str, ...], Any] = {}
    taking = ((field.name,) for field in dataclasses.fields(command) if field.metadata.get("others"))
    others, rest, before = next(taking, None), list(arguments), None

    def words(most: int) -> list[str]:
        """Takes at most this many arguments, up to the next flag."""
        count = next((i for i, word in enumerate(rest[:most]) if _is_flag(word)), len(rest[:most]))
        taken, rest[:count] = rest[:count], []
        return taken

    while rest:
        argument = rest.pop(0)
        name, equals, attached = argument.partition("=")
        name = name.replace("_", "-")
        if not _is_flag(argument):
            if not places:
                hint = f"; {before.name} takes {n_values(before.hint)}" if before else ""
                raise UserError(f"{_shown(argument)} is one argument too many for {called}{hint}")
            flag = places[0] if n_values(places[0].hint) is None else places.pop(0)
            value = _converted(flag, [argument])
        elif name not in by_name:
            if others is not None:
                more = [] if equals else words(len(rest))
                values[others] = (*values.get(others, ()), argument, *more)
                continue
            known = [*by_name, *(flag.name for flag in flags if flag.base is not None)]
            # What was probably meant: a flag of that name in a section, or else a similar spelling.
            inside = [flag for flag in known if flag.endswith(f".{name[2:]}")]
            near = next(iter(inside or difflib.get_close_matches(name, known, n=1)), "")
            raise UserError(f"{name} is not a flag of {called}" + (f"; did you mean {near}?" if near else ""))
        elif by_name[name].hint is bool:
            flag, follows = by_name[name], attached if equals else next(iter(rest), "")
            if equals or follows.lower() in ("true", "false"):
                both = f"{flag.name} or {_NEGATIVE}{flag.name[2:]}"
                raise UserError(f"takes no value, got {_shown(follows)}: write {both}", flag.name)
            value = name == flag.name
        else:
            flag = by_name[name]
            value = _converted(flag, [attached] if equals else words(n_values(flag.hint) or len(rest)))
        if flag.path in values:
            if n_values(flag.hint) is not None or None in (value, values[flag.path]):
                raise UserError("is given twice", flag.name)
            value = (*values[flag.path], *value)
        values[flag.path] = value
        before = None if flag.is_positional or flag.hint is bool else flag
    return values


def _is_flag(argument: str) -> bool:
    return argument.startswith("--") and argument[2:3].isalpha()


def _converted(flag: Flag, given: Sequence[str]) -> Any:
    elements = _elements(flag.hint)
    if not given:
        raise UserError("must be followed by a value", flag.name)
    if elements is None:
        return _convert(flag, flag.hint, given[0])
    if list(given) in [[text] for text in NONE] and type(None) in get_args(flag.hint):
        return None
    elements = elements[:1] * len(given) if elements[-1] is Ellipsis else elements
    if len(given) != len(elements):
        raise UserError(f"must be followed by {len(elements)} values, got {len(given)}", flag.name)
    return tuple(_convert(flag, hint, text) for hint, text in zip(elements, given, strict=True))


def _convert(flag: Flag, hint: Any, text: str) -> Any:
    if get_origin(hint) is Literal:
        return choose(flag.name, text, dict(zip(get_args(hint), get_args(hint), strict=True)))
    is_text, is_path = (kind in (hint, *get_args(hint)) for kind in (str, Path))
    require(not is_text or is_unicode(text), flag.name, text, "text in UTF-8")
    if Location in get_args(hint):
        if is_url(text):
            return Location.parse(text, flag.name)
        hint = Union[tuple(kind for kind in get_args(hint) if kind is not Location)]  # noqa: UP007
    must = "on this machine or a disk that it mounts; gs:// names runs and shards of data alone"
    require(not (is_path and re.match(r"[a-z][a-z0-9+.-]*://", text)), flag.name, text, must)
    try:
        return _value(hint, text)
    except (TypeError, ValueError):
        raise UserError(f"must be {type_in_words(hint)}, got {_shown(text)}", flag.name) from None


def _value(hint: Any, text: str) -> Any:
    """The text as a value of that type. Raises ValueError or TypeError if it is not one."""
    if get_origin(hint) in (Union, types.UnionType):
        # Any text is a str, and most are paths.
        for argument in sorted(get_args(hint), key=lambda argument: argument in (str, Path)):
            try:
                return _value(argument, text)
            except (TypeError, ValueError):
                continue
        raise ValueError
    if get_origin(hint) is Literal or hint is type(None):
        if text in get_args(hint):
            return text
        if hint is type(None) and text in NONE:
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


class _Section:
    """A dataclass to build: the command's own, or one inside it."""

    def __init__(
        self, kind: type, values: Mapping[str, Any], path: tuple[str, ...], prefix: str, arguments: list[str]
    ):
        """Takes the flags that choose parts out of the arguments.

        `path` leads from the command's dataclass down to this one, whose flags begin with `prefix`.
        """
        self.kind, self.path, self.prefix = kind, path, prefix
        self.own: list[Flag] = []
        self.values: dict[str, Any] = {}
        """The values of the fields, with sections in place of dataclasses."""

        def inside(flag: Flag, prefix: str) -> Any:
            value = flag.default
            if flag.base is not None:
                self.own.append(flag)
                value = _chosen(flag, arguments)
            if isinstance(value, tuple):
                parts = [
                    Flag((*flag.path, str(i)), f"{flag.name}.{i}", flag.base, part, kind)
                    for i, part in enumerate(value)
                ]
                return tuple(inside(part, f"{part.name}.") for part in parts)
            if dataclasses.is_dataclass(value):
                fields = {field.name: getattr(value, field.name) for field in _fields(value)}
                return _Section(type(value), fields, flag.path, prefix, arguments)
            return value

        for field in _fields(kind):
            hint, name = field_types(kind)[field.name], prefix + field.name.replace("_", "-")
            called = field.metadata.get("positional", name)
            flag = Flag((*path, field.name), called, hint, values[field.name], kind)
            self.values[field.name] = inside(flag, prefix if field.metadata.get("flat") else f"{name}.")
            may_hold = any(dataclasses.is_dataclass(one) or is_kind(one) for one in (hint, *get_args(hint)))
            if not may_hold and not field.metadata.get("hidden"):
                self.own.append(flag)

    def flags(self) -> list[Flag]:
        """Its own flags, then those of the dataclasses inside."""
        inner = [
            part
            for value in self.values.values()
            for part in (value if isinstance(value, tuple) else (value,))
            if isinstance(part, _Section)
        ]
        return [*self.own, *(flag for section in inner for flag in section.flags())]

    def build(self, given: Mapping[tuple[str, ...], Any], names: Mapping[tuple[str, ...], str]) -> Any:
        """The dataclass with the given values, from the inside out; errors have the `names` of flags."""

        def built(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(built, value))
            return value.build(given, names) if isinstance(value, _Section) else value

        options = {name: given.get((*self.path, name), built(value)) for name, value in self.values.items()}
        try:
            return self.kind(**options)
        except UserError as error:
            name = names.get((*self.path, *(error.argument or "").split(".")))
            if name is not None:
                raise UserError(error.message, name) from error
            if self.path == ():
                raise
            raise UserError(f"{self.prefix.removesuffix('.')}: {error}") from error


def _section(command: type, values: Mapping[str, Any] | None, arguments: list[str]) -> _Section:
    """The command's own dataclass, with these values in place of its defaults."""
    own = {
        field.name: field.default if field.default_factory is MISSING else field.default_factory()
        for field in _fields(command)
    }
    return _Section(command, {**own, **(values or {})}, (), "--", arguments)


def _fields(kind: Any) -> list[dataclasses.Field]:
    return [field for field in dataclasses.fields(kind) if field.init]


def _chosen(flag: Flag, arguments: list[str]) -> Any:
    """The part or parts that the arguments name, else the flag's default.

    A chosen part has its default options. Options that a base class of the old and the new part declares keep
    values other than the old part's defaults, unless the new part has another default than the base class.
    """
    names, now, registry = take_flag(flag.name, arguments), flag.default, flag.base.registry
    if names is None:
        return now
    if flag.hint is not flag.base:
        listed = [name.strip() for name in names.split(",")] if names.strip() else []
        return tuple(registry.choose(flag.name, name)() for name in listed)
    config_class = registry.choose(flag.name, names)
    if type(now) is config_class:
        return now
    old, new = (
        {field.name: field.default for field in dataclasses.fields(kind)} for kind in (now, config_class)
    )
    kept = {
        field.name: getattr(now, field.name)
        for base in config_class.__mro__
        if dataclasses.is_dataclass(base) and isinstance(now, base)
        for field in dataclasses.fields(base)
        if field.default == new[field.name] and getattr(now, field.name) != old[field.name]
    }
    chosen = config_class()
    for name, value in kept.items():  # checked with those of further flags, when the part is built
        object.__setattr__(chosen, name, value)
    return chosen
