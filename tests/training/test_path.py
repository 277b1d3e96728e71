"""hyena_jax/README.md lists the functions that run once at a start, when traced, and at every step."""

import re
import sys
import threading
from pathlib import Path

import pytest

import hyena_jax
from hyena_jax.training.run import train

PACKAGE = Path(hyena_jax.__file__).parent
PAGE = (PACKAGE / "README.md").read_text(encoding="utf-8")


def functions_of(begin: str, end: str) -> list[list[str]]:
    """The names of functions in each row of the list between two texts of the page: from its last column."""
    text = PAGE.split(begin)[1].split(end)[0]
    rows = [line for line in text.splitlines() if line.startswith("| ")][1:]
    return [re.findall(r"`([\w.]+)`", row.rstrip(" |").rpartition("| ")[2]) for row in rows]


START = functions_of("**Once, at a start**", "**Once, when")
TRACED = functions_of("**Once, when the step is traced**", "**At every step**")
EVERY = functions_of("**At every step**", "From a file")


def called(experiment, workdir, console) -> dict[str, set[str]]:
    """The functions called in a run, by part: until the first batch, in the traced step, and after it."""
    found, part = {"start": set(), "traced": set(), "every": set()}, ["start"]

    def note(frame, event, _):
        code = frame.f_code
        if not code.co_filename.startswith(str(PACKAGE)):
            return
        if code.co_name == "train_step":
            part[0] = {"call": "traced", "return": "every"}[event]
        if event == "call":
            name = code.co_qualname.replace("<locals>.", "")
            found[part[0]] |= {name, name.rpartition(".")[2]}

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        train(experiment, workdir, console)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return found


@pytest.mark.grid
def test_the_page_lists_what_runs(experiment, tmp_path, console):
    found = called(experiment, tmp_path / "run", console)
    for part, rows in (("start", START), ("traced", TRACED), ("every", EVERY)):
        names = {name for row in rows for name in row}
        assert names - found[part] == set(), part


def test_the_page_counts_the_functions_from_a_file_to_the_loss():
    _, of_load, *_ = START
    count = len(of_load) - 1 + len(("Trainer.steps", "Dataset.train_batches")) + 3 + sum(map(len, TRACED))
    assert f"a batch of text passes {count} functions" in PAGE
