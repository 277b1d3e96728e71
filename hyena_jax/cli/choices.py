"""Parts chosen by name on the command line: `--optimizer lion`, `--model.pattern hawk,hawk,hyena`.

They decide which other flags exist, so these flags are read first.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, get_args

from hyena_jax.config.checks import field_types
from hyena_jax.config.registry import is_kind
from hyena_jax.errors import UserError, choose


class Choice(NamedTuple):
    """A field of an experiment that holds a registered part, or a list of parts."""

    path: tuple[str, ...]
    base: type
    """The base class of its kind, such as `MixerConfig`."""
    is_list: bool

    @property
    def flag(self) -> str:
        """The flag on the command line."""
        return "--" + ".".join(self.path).replace("_", "-")


def choices(value: Any, path: tuple[str, ...] = ()) -> Iterator[Choice]:
    """All fields in a config where a part can be chosen, from the outside in."""
    if not dataclasses.is_dataclass(value):
        return
    for name, hint in field_types(type(value)).items():
        here, child = (*path, name), getattr(value, name)
        if is_kind(hint):
            yield Choice(here, hint, False)
            yield from choices(child, here)
        elif get_args(hint)[1:] == (Ellipsis,) and is_kind(get_args(hint)[0]):
            yield Choice(here, get_args(hint)[0], True)
            for i, element in enumerate(child):
                yield Choice((*here, str(i)), get_args(hint)[0], False)
                yield from choices(element, (*here, str(i)))
        else:
            yield from choices(child, here)


def choose_kinds(experiment: Any, arguments: Sequence[str]) -> tuple[Any, list[str]]:
    """The experiment with the parts that flags name, and the arguments without these flags.

    A chosen part has its default options. Options that a base class of the old and the new part declares keep
    their values, unless the new part has another default. Outer flags act before inner ones, in any order.

    Raises:
      UserError: for an unknown name, with the nearest valid one.
    """
    rest, depth = list(arguments), 1
    while any(len(choice.path) >= depth for choice in choices(experiment)):
        named = {}
        for choice in choices(experiment):
            if len(choice.path) == depth:
                names, rest = take_flag(choice.flag, rest)
                named |= {} if names is None else {choice.path: (choice, names)}
        experiment = _with(experiment, named) if named else experiment
        depth += 1
    return experiment, rest


def take_flag(flag: str, arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """The last value of a flag, given as `--flag value` or `--flag=value`, and the other arguments."""
    value, rest, waiting = None, [], False
    for argument in arguments:
        normal = argument.partition("=")[0].replace("_", "-")
        if waiting:
            value, waiting = argument, False
        elif argument.startswith("--") and normal == flag:
            value = argument.partition("=")[2] if "=" in argument else None
            waiting = "=" not in argument
        else:
            rest.append(argument)
    if waiting:
        raise UserError(f"{flag} must be followed by a name")
    return value, rest


def _with(value: Any, named: dict[tuple[str, ...], tuple[Choice, str]]) -> Any:
    """The config with the parts named by path; all of one dataclass at once, since they must fit together."""
    if () in named:
        return _chosen(value, *named[()])
    inner: dict[str, dict] = {}
    for (name, *path), choice in named.items():
        inner.setdefault(name, {})[tuple(path)] = choice
    if isinstance(value, tuple):
        return tuple(
            _with(child, inner.get(str(i), {})) if str(i) in inner else child for i, child in enumerate(value)
        )
    return dataclasses.replace(
        value, **{name: _with(getattr(value, name), below) for name, below in inner.items()}
    )


def _chosen(now: Any, choice: Choice, names: str) -> Any:
    registry = choice.base.registry
    if choice.is_list:
        listed = [name.strip() for name in names.split(",")] if names.strip() else []
        return tuple(choose(choice.flag, name, registry)() for name in listed)
    config_class = choose(choice.flag, names, registry)
    if type(now) is config_class:
        return now
    defaults = {field.name: field.default for field in dataclasses.fields(config_class)}
    kept = {
        field.name: getattr(now, field.name)
        for base in config_class.__mro__
        if dataclasses.is_dataclass(base) and isinstance(now, base)
        for field in dataclasses.fields(base)
        if field.default == defaults[field.name]
    }
    return config_class(**kept)


def choice_flags(experiment: Any) -> list[str]:
    """The flags that choose parts."""
    return [choice.flag for choice in choices(experiment)]


def describe_choices(experiment: Any) -> str:
    """The flags that choose parts, with the names that each takes, for `--help`."""
    by_base: dict[type, list[str]] = {}
    for choice in choices(experiment):
        by_base.setdefault(choice.base, []).append(choice.flag + (" A,B,..." if choice.is_list else " NAME"))
    lines = [f"{', '.join(flags)}: {', '.join(base.registry)}" for base, flags in by_base.items()]
    return "\n".join(["Parts chosen by name; each has its own options:", *lines])
