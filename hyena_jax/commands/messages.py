"""What commands print besides their results: notes and errors on the standard error, tables."""

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def note(text: str) -> None:
    """Prints a line to the standard error."""
    print(f"hyena-jax: {text}", file=sys.stderr)


def fail(reason: object, code: int) -> int:
    """Prints an error on one line; returns the exit code."""
    note(f"error: {' '.join(str(reason).split())}")
    return code


def table_console() -> "Console":
    """A console for tables; in a file they are not folded to the width of some terminal."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else 200
    return Console(highlight=False, markup=False, width=width)
