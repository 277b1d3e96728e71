"""How a wrong value is refused: one kind of error, one form of message."""

import difflib
from collections.abc import Iterable, Mapping
from typing import TypeVar

T = TypeVar("T")


class UserError(ValueError):
    """The input is wrong. Commands print the message on one line and exit with code 2."""


def choose(what: str, name: str, allowed: Mapping[str, T]) -> T:
    """Returns `allowed[name]`; an unknown name is refused with the nearest valid one."""
    if name in allowed:
        return allowed[name]
    raise UserError(f"{what} {name!r} is unknown{_nearest(name, allowed)}; allowed: {', '.join(allowed)}")


def _nearest(name: str, allowed: Iterable[str]) -> str:
    near = difflib.get_close_matches(str(name), list(allowed), n=1, cutoff=0.4)
    return f" (did you mean {near[0]!r}?)" if near else ""


def require(condition: bool, argument: str, value: object, allowed: str) -> None:
    """Raises the one form of error that a wrong value gets: the argument, its value, what is allowed."""
    if not condition:
        raise UserError(f"{argument} must be {allowed}, got {value!r}")


def require_at_least(least: float, config: object, *names: str) -> None:
    """`require` for fields of `config` that are numbers, or None where that is a value of theirs."""
    for name in names:
        value = getattr(config, name)
        require(value is None or value >= least, name, value, f"at least {least}")


def require_choice(config: object, **allowed: tuple[str, ...]) -> None:
    """`choose` for fields of `config` that name one of a few variants.

    The annotation says the same; only the command line and config.json check that by themselves.
    """
    for name, names in allowed.items():
        choose(name, getattr(config, name), dict.fromkeys(names))


def require_divisor(argument: str, value: int, of: str, number: int) -> None:
    """Refuses a `value` that does not divide `number`, which is known as `of`."""
    require(number % value == 0, argument, value, f"a divisor of {of}={number}")
