"""What commands print: plain text, and progress bars of work in one loop."""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

from hyena_jax.system.errors import as_printed

T = TypeVar("T")


class Output(Console):
    """A console for plain text, which raises BrokenPipeError where nobody reads it; rich's would exit."""

    def __init__(self, **options):
        super().__init__(highlight=False, markup=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Called by rich for all text, also that of a table's cells."""
        return super().render_str(as_printed(text), **options)

    def on_broken_pipe(self) -> None:
        """Called by rich while it handles the error."""
        raise sys.exception()


@contextmanager
def bar(what: str, total: int, console: Console | None = None) -> Iterator[Callable[..., None]]:
    """A progress bar with the time left, which disappears at the end; nothing without a terminal.

    Yields:
      advance(by=1), which moves the bar.

    Args:
      console: where lines are printed meanwhile; if it is not a terminal, the bar is on the standard error.
    """
    console = console if console is not None and console.is_terminal else Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    hidden = not console.is_terminal
    with RichProgress(
        *columns, console=console, transient=True, disable=hidden, redirect_stdout=False
    ) as live:
        task = live.add_task("", total=total)
        yield lambda by=1: live.advance(task, by)


def watched(what: str, items: Iterable[T], total: int) -> Iterator[T]:
    """The items, with a `bar` that advances by one for each."""
    with bar(what, total) as advance:
        for item in items:
            yield item
            advance()
