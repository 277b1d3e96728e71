"""What the commands share: the flags that name a run, and lines for the user.

No module of a command imports JAX at module level, so that `--help` and wrong flags answer at once.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hyena_jax.cli.flags import FLAT, positional
from hyena_jax.config import PluginFlags

if TYPE_CHECKING:
    from hyena_jax.output import Output


@dataclass(frozen=True)
class RunSelection:
    """A run, and one of its checkpoints."""

    workdir: Path = field(metadata=positional("WORKDIR"))
    """Folder of a run."""
    step: str = "latest"
    """Checkpoint: `latest`, `best` (lowest validation loss), or the number of a saved step."""
    plugins: PluginFlags = field(default=PluginFlags(), metadata=FLAT)


def note(text: str) -> None:
    """Prints a line to the standard error."""
    print(f"hyena-jax: {text}", file=sys.stderr)


def fail(reason: object, code: int) -> int:
    """Prints an error on one line; returns the exit code."""
    note(f"error: {' '.join(str(reason).split())}")
    return code


def unread() -> int:
    """Says that nobody reads the standard output, as after `| head`; returns the exit code."""
    sys.stdout = None
    return fail("nobody reads the output any more; rerun the command to continue", 3)


def table_console() -> "Output":
    """A console for tables; in a file they are not folded to the width of some terminal."""
    from hyena_jax.output import Output

    return Output(width=None if sys.stdout.isatty() else 200)
