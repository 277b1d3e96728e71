"""The error of wrong input, and the two checks that everything uses: one form of message."""

import difflib
import re
import sysconfig
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

COPY = re.compile(r"(?<![^\s'\"])[^\s'\"]*/hyena_jax_copy_\w+/gs:/")
"""How the path of a local copy of a folder in a bucket begins: see `storage/location.py`."""


class UserError(ValueError):
    """The input is wrong. Commands print the error on one line and exit with code 2.

    Attributes:
      message: what is wrong, and what to do.
      argument: what the message is about, such as `d_model`: the error begins with it, and commands replace
        it by the name of its flag. None if the message is a whole sentence.
    """

    def __init__(self, message: str, argument: str | None = None):
        message = as_urls(message)
        super().__init__(message, argument)
        self.message, self.argument = message, argument

    def __str__(self) -> str:
        return self.message if self.argument is None else f"{self.argument} {self.message}"


def require(condition: bool, argument: str, value: object, allowed: str) -> None:
    """Raises UserError `{argument} must be {allowed}, got {value}` unless the condition holds."""
    if not condition:
        raise UserError(f"must be {allowed}, got {value!r}", argument)


def choose(what: str, name: str, allowed: Mapping[str, T], hint: str = "") -> T:
    """Returns `allowed[name]`; refuses an unknown name and suggests the nearest valid one.

    With `hint`, what else the name may be, only a very near one is suggested.
    """
    if name in allowed:
        return allowed[name]
    near = difflib.get_close_matches(str(name), list(allowed), n=1, cutoff=0.6 if hint else 0.4)
    notes = " ".join(filter(None, (f"did you mean {near[0]!r}?" if near else "", hint)))
    also = f" ({notes})" if notes else ""
    raise UserError(f"{name!r} is unknown{also}; allowed: {', '.join(allowed)}", what)


def as_urls(text: object) -> str:
    """The text with URLs in the place of paths in local copies, which the user never saw."""
    return COPY.sub("gs://", str(text))


def is_unicode(text: object) -> bool:
    """Whether the text can be written as UTF-8: arguments and names of files may hold other bytes."""
    return not any("\ud800" <= character <= "\udfff" for character in str(text))


def printable(text: object) -> str:
    """The text on one line, where control characters, which a terminal would obey, are escaped."""
    return "".join(
        one if one.isprintable() else " " if one.isspace() else ascii(one)[1:-1] for one in str(text)
    )


def as_printed(text: object) -> str:
    """The lines of a text as commands print them: it may name what a stranger named."""
    return "\n".join(map(printable, as_urls(text).split("\n")))


def describe_fault(error: BaseException) -> str:
    """One line for an error in the user's code: its type, its message, and where it was raised."""
    ours = str(Path(__file__).parents[1])
    installed = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((ours, *installed, "<"))
    ]
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    try:
        lines = str(error).strip().splitlines() or [""]
    except Exception:  # the error's class may also be the user's code
        lines = [""]
    return f"{type(error).__name__}: {lines[0]}{where}"
