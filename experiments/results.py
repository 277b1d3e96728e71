"""What experiments share: errors in a line, and the loop of those that are not studies.

That loop: measure, write results.json, draw from it.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hyena_jax.cli.base import fail, note
from hyena_jax.system.errors import UserError
from hyena_jax.system.files import write_text
from hyena_jax.system.signals import STOPPED_CODE, Interrupted


@contextmanager
def faults_in_a_line() -> Iterator[None]:
    """Ends the process at what a person can cause, with one line and the exit codes of `hyena-jax`."""
    try:
        yield
    except UserError as error:
        sys.exit(fail(error, 2))
    except subprocess.CalledProcessError as error:  # the command has said why
        sys.exit(error.returncode)
    except json.JSONDecodeError as error:
        sys.exit(fail(f"results.json is damaged: {error}", 2))
    except OSError as error:
        sys.exit(fail(error, 3))
    except Interrupted as error:
        note(str(error))
        sys.exit(STOPPED_CODE)
    except KeyboardInterrupt:
        note("interrupted")
        sys.exit(130)


def report(
    folder: Path,
    measure: Callable[[], Iterable[dict[str, Any]]],
    draw: Callable[[dict[str, Any]], None],
    plot_only: bool,
) -> None:
    """Writes `folder/results.json` whenever `measure` yields results, which grow; then draws the last.

    Faults end the process: see `faults_in_a_line`.

    Args:
      plot_only: draw what the file holds, and measure nothing.
    """
    path = folder / "results.json"
    with faults_in_a_line():
        if not plot_only:
            folder.mkdir(parents=True, exist_ok=True)  # before minutes of measuring
            for results in measure():
                write_text(path, json.dumps(results, indent=2) + "\n")
        draw(json.loads(path.read_text()))


def fill(page: Path, name: str, text: str) -> None:
    """Replaces what stands in a page between the marks `<!-- name -->` and `<!-- end -->`."""
    before, mark, rest = page.read_text(encoding="utf-8").partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition("<!-- end -->")
    if not (mark and end):
        raise UserError(f"{page} has no marks <!-- {name} --> and <!-- end -->")
    write_text(page, f"{before}{mark}{text.strip()}\n{end}{after}")


def measured_on(*packages: str) -> dict[str, Any]:
    """This machine, and the versions of JAX and of further packages."""
    from hyena_jax.system.machine import describe_machine, describe_versions  # starts JAX

    return {"hardware": describe_machine(), "versions": describe_versions(*packages)}


def hyena_jax(*arguments: str) -> None:
    """Runs a command line in its own process."""
    subprocess.run([sys.executable, "-m", "hyena_jax", *arguments], check=True)
