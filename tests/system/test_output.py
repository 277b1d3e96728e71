"""What is printed where nobody reads it."""

import io
import os
import subprocess
import sys
from unittest.mock import Mock

import pytest
from rich.table import Table

from hyena_jax.cli.base import note, say
from hyena_jax.system import output
from hyena_jax.system.output import Bar, Output

HOSTILE = "a\x1b]0;x\x07\x9b2J\rb\udcff\u202e"
ESCAPED = "a\\x1b]0;x\\x07\\x9b2J b\\udcff\\u202e"


def test_control_characters_of_names_are_escaped(capsys):
    say(f"one\n{HOSTILE}")
    note(HOSTILE)
    assert capsys.readouterr() == (f"one\n{ESCAPED}\n", f"hyena-jax: {ESCAPED}\n")
    table, file = Table(HOSTILE, box=None), io.StringIO()
    table.add_row(HOSTILE)
    console = Output(file=file, width=80)
    console.print(HOSTILE)
    console.print(table)
    assert [line.strip() for line in file.getvalue().splitlines()] == [ESCAPED] * 3


def test_the_time_left_is_that_of_what_is_left_at_the_pace_so_far(monkeypatch):
    monkeypatch.setattr(output, "time", Mock(monotonic=Mock(side_effect=[100.0, 106.0])))
    shown = Bar(Output(file=io.StringIO()), "scoring", 10)
    shown.show(2)
    assert shown.left(2) == ""
    assert shown.left(4) == "0:00:18 left"


def test_a_closed_pipe_is_an_error_of_its_own():
    read, write = os.pipe()
    os.close(read)
    with pytest.raises(BrokenPipeError), open(write, "w", closefd=True) as file:
        Output(file=file).print("nobody reads this")


TRAIN = "tasks:majority --training.steps 5000 --workdir run"


@pytest.mark.grid
@pytest.mark.parametrize(
    ("arguments", "code", "printed"),
    [
        ("task parity > /dev/full", 3, "No space left on device"),
        ("task parity >&-", 0, ""),
        ("task nothing 2>&-", 2, ""),
        ("task parity | true", 0, ""),
        ("bench operators --mixers fir --lengths 64 | true", 0, ""),
        (f"train {TRAIN} | true", 3, "nobody reads the output any more"),
        (f"sweep {TRAIN} --grid seed=0 | true", 3, "nobody reads the output any more"),
    ],
)
def test_output_that_cannot_be_written(tmp_path, arguments, code, printed):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    line = f"{sys.executable} -m hyena_jax {arguments}; exit ${{PIPESTATUS[0]}}"
    command = ["bash", "-c", line]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == code
    assert done.stdout == ""
    assert done.stderr.count("\n") == bool(printed)
    assert printed in done.stderr
