"""The error of wrong input, and the two checks that everything uses: one form of message."""

import difflib
from collections.abc import Iterable, Mapping
from typing import TypeVar

T = TypeVar("T")


class UserError(ValueError):
    """The input is wrong. Commands print the error on one line and exit with code 2.

    Attributes:
      message: what is wrong, and what to do.
      argument: what the message is about, such as `d_model`: the error begins with it, and commands replace
        it by the name of its flag. None if the message is a whole sentence.
    """

    def __init__(self, message: str, argument: str | None = None):
        super().__init__(message, argument)
        self.message, self.argument = message, argument

    def __str__(self) -> str:
        return self.message if self.argument is None else f"{self.argument} {self.message}"


def require(condition: bool, argument: str, value: object, allowed: str) -> None:
    """Raises UserError `{argument} must be {allowed}, got {value}` unless the condition holds."""
    if not condition:
        raise UserError(f"must be {allowed}, got {value!r}", argument)


def choose(what: str, name: str, allowed: Mapping[str, T]) -> T:
    """Returns `allowed[name]`; refuses an unknown name and suggests the nearest valid one."""
    if name in allowed:
        return allowed[name]
    raise UserError(f"{name!r} is unknown{_nearest(name, allowed)}; allowed: {', '.join(allowed)}", what)


def _nearest(name: str, allowed: Iterable[str]) -> str:
    near = difflib.get_close_matches(str(name), list(allowed), n=1, cutoff=0.4)
    return f" (did you mean {near[0]!r}?)" if near else ""


def is_unicode(text: object) -> bool:
    """Whether the text can be written as UTF-8: arguments and names of files may hold other bytes."""
    return not any("\ud800" <= character <= "\udfff" for character in str(text))


def printable(text: object) -> str:
    """The text without control characters that a terminal would obey."""
    return "".join(character for character in str(text) if character.isprintable())
