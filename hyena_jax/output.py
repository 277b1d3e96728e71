"""What the commands print."""

import sys

from rich.console import Console


class Output(Console):
    """A console for plain text, which raises BrokenPipeError where nobody reads it; rich's would exit."""

    def __init__(self, **options):
        super().__init__(highlight=False, markup=False, **options)

    def on_broken_pipe(self) -> None:
        """Called by rich while it handles the error."""
        raise sys.exception()
