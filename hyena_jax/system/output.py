"""What commands print: plain text, and progress: bars, or rows of text without a terminal."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Self, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

from hyena_jax.system.errors import as_printed

T = TypeVar("T")

VALUES = "{task.fields[values]}"
"""A column with the `values` that `Bar.show` was given last."""


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


class Bar:
    """A progress bar, shown on a terminal while a `with` block runs; elsewhere nothing, or rows of text.

    `total` is None if unknown; `columns`, rich's or VALUES, are shown behind the bar, which starts at `done`;
    `options` are those of `rich.progress.Progress`.
    """

    def __init__(
        self,
        console: Console,
        what: str,
        total: float | None,
        *columns: ProgressColumn | str,
        done: float = 0,
        **options: Any,
    ):
        self._console, self._total = console, total
        self._first: tuple[float, float] | None = None  # what was done at first, and when
        self._printed: float | None = None
        columns = ("{task.description}", BarColumn(), *columns)
        self._rich = RichProgress(*columns, console=console, disable=not console.is_terminal, **options)
        self._task = self._rich.add_task(what, total=total, completed=done, values="")

    def __enter__(self) -> Self:
        self._rich.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._rich.stop()

    def show(self, done: float | None = None, what: str | None = None, **values: str) -> None:
        """Changes the bar, but for what is None; time counts from the first call with `done` on."""
        if done is not None and self._first is None:
            self._first = done, time.monotonic()
        self._rich.update(self._task, completed=done, description=what, **values)

    def add(self, by: float = 1) -> None:
        """Moves the bar onwards."""
        self._rich.advance(self._task, by)

    def left(self, done: float) -> str:
        """The time left at the pace so far; empty if it is unknown."""
        if self._first is None or self._total is None or done <= self._first[0]:
            return ""
        seconds = (time.monotonic() - self._first[1]) / (done - self._first[0]) * (self._total - done)
        return f"{timedelta(seconds=round(seconds))} left"

    def is_row_due(self, every: float, is_last: bool = False) -> bool:
        """Whether to print a row of text, in the place of a bar: one in so many seconds, and the last one."""
        now = time.monotonic()
        is_due = self._printed is None or now - self._printed >= every or is_last
        if self._console.is_terminal or not is_due:
            return False
        self._printed = now
        return True


@contextmanager
def bar(what: str, total: int, console: Console | None = None) -> Iterator[Callable[..., None]]:
    """A progress bar with the time left, which disappears at the end; nothing without a terminal.

    Yields `advance(by=1)`, which moves it. Lines are printed to `console` meanwhile; if that is not a
    terminal, the bar is on the standard error.
    """
    console = console if console is not None and console.is_terminal else Console(stderr=True)
    columns = (MofNCompleteColumn(), TimeRemainingColumn())
    with Bar(console, what, total, *columns, transient=True, redirect_stdout=False) as live:
        yield live.add


def watched(what: str, items: Iterable[T], total: int) -> Iterator[T]:
    """The items, with a `bar` that advances by one for each."""
    with bar(what, total) as advance:
        for item in items:
            yield item
            advance()
