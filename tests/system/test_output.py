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


@pytest.mark.grid
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["train", "tasks:majority", "--training.steps", "5000"], 3, "nobody reads the output any more"),
        (["sweep", "tasks:majority", "--grid", "seed=0", "--training.steps", "5000"], 3, "nobody reads"),
        (["bench", "operators", "--mixers", "fir", "--lengths", "64"], 0, ""),
    ],
)
def test_commands_end_by_their_own_exit_codes(tmp_path, arguments, code, message):
    workdir = [] if arguments[0] == "bench" else ["--workdir", str(tmp_path / "run")]
    command = [sys.executable, "-m", "hyena_jax", *arguments, *workdir]
    read, write = os.pipe()
    os.close(read)
    try:
        done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    finally:
        os.close(write)
    assert (done.returncode, message in done.stderr) == (code, True), done.stderr


@pytest.mark.grid
@pytest.mark.parametrize(
    ("shell", "code", "printed"),
    [
        ("{command} task parity > /dev/full", 3, "No space left on device"),
        ("{command} task parity | true; exit ${{PIPESTATUS[0]}}", 0, ""),
        ("{command} task parity >&-", 0, ""),
        ("{command} task nothing 2>&-", 2, ""),
    ],
)
def test_output_that_cannot_be_written(shell, code, printed):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    line = shell.format(command=f"{sys.executable} -m hyena_jax")
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=environment)
    assert done.returncode == code
    assert done.stdout == ""
    assert done.stderr.count("\n") == bool(printed)
    assert printed in done.stderr
