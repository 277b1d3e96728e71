"""`hyena-jax task` as typed by a user."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hyena_jax import cli, config
from hyena_jax.config import TASK_CONFIGS
from hyena_jax.tasks.task import TASKS

EXTENSIONS = Path(__file__).parent / "extensions"
MQAR = """\
mqar, preset small, test row 0, seed 0

inputs   2 39 15 56 31 58 12 55  2  0 15  0 12  0  0  0 31  0  0  0  0  0  0  0  0  0  0  0  0  0  0  0
target   ·  ·  ·  ·  ·  ·  ·  · 39  · 56  · 55  ·  ·  · 58  ·  ·  ·  ·  ·  ·  ·  ·  ·  ·  ·  ·  ·  ·  ·

Multi-query associative recall (Arora et al. 2023, 2312.04927; HazyResearch/zoology, multiquery_ar.py).
"""


@pytest.fixture(autouse=True)
def _wide(monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")


def run(line):
    return cli.main(["task", *line.split()])


def test_an_example_stands_above_its_answers_and_the_layout_follows(capsys):
    assert run("mqar") == 0
    shown = capsys.readouterr().out
    assert shown.startswith(MQAR)
    for line in (
        "    inputs   3 10 5 7 5 0 0 0 0 0 0 0 0 0 3  0",
        "chance\n    0.03125\n",
        "metric\n    accuracy, sequence accuracy\n",
        "preset l64\n    batch_size 512, train_rows 100000, test_rows 3000, vocab_size 8192, seq_len 64\n",
        "    Arora et al. 2023, 2312.04927, figure 2;",
    ):
        assert line in shown
    assert max(map(len, shown.splitlines())) <= 110


@pytest.mark.parametrize("name", TASK_CONFIGS)
def test_every_task_is_drawn(name, capsys):
    for part in ("test", "train"):
        assert run(f"{name} --part {part} --index 3 --seed 5") == 0
        shown = capsys.readouterr().out.splitlines()
        assert shown[0] == f"{name}, preset small, {part} row 3, seed 5"
        assert all(
            len(a) == len(b) for a, b in zip(shown[2::3], shown[3::3], strict=False) if a[:6] == "inputs"
        )
        assert max(map(len, shown)) <= 110
    assert f"{TASKS[TASK_CONFIGS[name]].metric}".replace("_", " ") in "\n".join(shown)


NOTE = "learned positions stay with any --model.pattern: --no-model.learned-positions drops them"


@pytest.mark.parametrize(
    ("config_and_flags", "is_said"),
    [
        ("tasks:mqar --model.pattern hawk", True),
        ("tasks:mqar --model.pattern=hawk --no-model.learned-positions", False),
        ("tasks:mqar --model.pattern hawk --model.learned_positions", False),
        ("tasks:mqar --model.n-layers 1", False),
        ("tasks:parity --model.pattern hyena", False),
        ("images:hyena --model.pattern hawk", False),
    ],
)
def test_positions_that_stay_when_the_mixer_is_replaced_are_said(capsys, config_and_flags, is_said):
    """The command line ends in a folder that cannot be, so that nothing is trained."""
    assert cli.main(["train", *config_and_flags.split(), "--workdir", os.devnull]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [NOTE in line for line in lines] == ([True] if is_said else []) + [False]


SORTED = """\
sort_digits, preset small, test row 0, seed 0

inputs  5 8 9 5 3 8 2 9 ? ? ? ? ? ? ? ?
target  · · · · · · · · 2 3 5 5 8 8 9 9
"""


def test_a_task_of_ones_own_is_drawn_like_any_other(capsys, own_parts):
    plugin = f"--plugin {EXTENSIONS / 'sort_digits.py'}"
    assert run(f"sort_digits {plugin}") == 0
    shown = capsys.readouterr().out
    assert shown.startswith(SORTED)
    assert "preset small\n    the defaults\npreset long" in shown
    assert "preset long\n    seq_len 32\n    this file\n" in shown
    assert run(f"sort_digits --preset long {plugin}") == 0
    assert run(f"sort_digits --preset short {plugin}") == 2
    assert "'short' is unknown; allowed: small, long" in capsys.readouterr().err
    assert run(f"--help {plugin}") == 0
    assert "sort_digits" in capsys.readouterr().out
    experiment = config.load("tasks:sort_digits/long")
    assert (experiment.data.seq_len, experiment.model.max_len, experiment.data.batch_size) == (32, 64, 64)


def test_the_task_in_the_documentation_is_a_whole_one(capsys, own_parts, tmp_path):
    page = (Path(__file__).parents[1] / "configs" / "README.md").read_text()
    (tmp_path / "reverse.py").write_text(page.split("```python\n")[1].split("```")[0])
    assert run(f"reverse --plugin {tmp_path / 'reverse.py'}") == 0
    inputs, target = (line.split()[1:] for line in capsys.readouterr().out.splitlines()[2:4])
    assert inputs == [*target[:7:-1], *"00000000"]
    assert target[:8] == ["·"] * 8
    assert config.load("tasks:reverse").model.max_len == 16


TASK = """
import itertools
from dataclasses import dataclass
from hyena_jax.tasks.task import TaskConfig, register_task, row

CALLS = itertools.count()

@dataclass(frozen=True)
class WrongConfig(TaskConfig):
    vocab_size: int = 4
    seq_len: int = 6

def draw(rng, config):
    ids = rng.integers(0, 4, config.seq_len)
    return row(ids, ids)

register_task("wrong", WrongConfig, draw, lambda config: 0.25)
"""
ROW, CHANCE = "row(ids, ids)", "lambda config: 0.25"


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        (ROW, "row(ids, ids[1:])", "what draw draws must be a row of as many targets as inputs"),
        (
            ROW,
            "(ids, ids)",
            "must be a row: return hyena_jax.tasks.task.row(...), got 'tuple'",
        ),
        (ROW, "row(ids, 1, [5])", "what draw draws must be a row of inputs [L] and targets [n]"),
        (ROW, "row(ids, [1], [6])", "positions of the task's rows must be in 0..5, got '0 to 6'"),
        (ROW, "row(ids + 1, ids)", "inputs of the task's rows must be in 0..3"),
        (ROW, "row(ids / 2, ids)", "inputs of a task's row must be integers"),
        (ROW, "row((ids + next(CALLS)) % 4, ids)", "take all random numbers from rng"),
        (CHANCE, "0.25", "chance of task 'wrong' must be a function, got 0.25"),
    ],
)
def test_wrong_rows_are_told_in_a_line(right, wrong, message, tmp_path, capsys, own_parts):
    (tmp_path / "wrong.py").write_text(TASK.replace(right, wrong))
    assert run(f"wrong --index 1 --plugin {tmp_path / 'wrong.py'}") == 2
    assert message in capsys.readouterr().err


def test_rows_differ_by_index_seed_part_and_preset(capsys):
    lines = ["mqar", "mqar --index 1", "mqar --seed 1", "mqar --part train", "mqar --preset l64"]
    shown = []
    for line in lines:
        assert run(line) == 0
        shown.append(capsys.readouterr().out.splitlines()[2])
    assert len({*shown}) == len(shown)


def test_settings_are_flags(capsys):
    assert run("mqar --data.seq-len 16 --data.n-pairs 2 --data.test-seed 3") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "mqar, preset small with other settings, test row 0, seed 3"
    assert len(lines[2].split()[1:]) == 16
    assert run("mqar --preset l64 --help") == 0
    assert "--data.seq-len INT" in capsys.readouterr().out


def test_the_middle_of_a_long_row_is_left_out(capsys):
    assert run("selective_copying --preset mamba") == 0
    shown = capsys.readouterr().out.splitlines()
    lines = [line for line in shown[: shown.index("chance")] if line.startswith(("inputs", "target"))]
    (left_out,) = [line for line in shown if "left out" in line]
    n_shown = sum(len(line.split()) - 1 for line in lines if line.startswith("inputs"))
    assert len(lines) == 24
    assert n_shown + int(left_out.split()[1].replace(",", "")) == 4096 + 16
    assert lines[-1].split()[1:].count("·") == len(lines[-1].split()) - 1 - 16


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("task mkar", "task 'mkar' is unknown (did you mean 'mqar'? a name of your own needs --plugin FILE;"),
        ("task mqar --preset l46", "--preset 'l46' is unknown (did you mean 'l64'?); allowed: small, l64, l"),
        ("task mqar --index -1", "--index must be at least 0, got -1"),
        ("task mqar --seed 4294967296", "--seed must be in [0, 2**32), got 4294967296"),
        ("task mqar --part both", "--part 'both' is unknown; allowed: test, train"),
        ("task text", "task 'text' is unknown"),
        ("task --index 1 mqar", "NAME must come first after task, got '--index'"),
        ("task mqar --data.n-pairs 9", "--data.n-pairs must be at most seq_len / 4 = 8 (or raise seq_len)"),
        ("task mqar --data.n-pair 3", "--data.n-pair is not a flag of task; did you mean --data.n-pairs?"),
        ("task", "NAME must be given: see hyena-jax task --help"),
        ("train tasks:mqa", "variant 'mqa' is unknown (did you mean 'mqar'?"),
        ("train tasks:mqar/l46", "preset 'l46' is unknown (did you mean 'l64'?); allowed: small, l64, l128"),
        ("train tasks:mqar --data.vocab-size 8", "--data.n-pairs must be at most the 3 keys of vocab_size=8"),
    ],
)
def test_what_is_wrong_is_one_line_and_writes_nothing(line, message, tmp_path, capsys):
    workdir = ["--workdir", str(tmp_path / "run")] if line.startswith("train") else []
    assert cli.main([*line.split(), *workdir]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_preset_is_trained_with_the_small_model():
    experiment = config.load("tasks:mqar/l64")
    assert (experiment.data.vocab_size, experiment.data.batch_size) == (8192, 512)
    assert (experiment.model.max_len, experiment.model.d_model) == (64, 64)


def test_it_names_every_task_and_imports_nothing_slow():
    code = (
        "import sys; from hyena_jax import cli; cli.main(['task', 'recall']); cli.main(['task', '--help']);"
        "slow = {'jax', 'grain', 'tensorflow', 'tensorflow_datasets', 'tokenizers', 'regex', 'sklearn'};"
        "print(slow & set(sys.modules))"
    )
    command, environment = [sys.executable, "-W", "error", "-c", code], {**os.environ, "COLUMNS": "110"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.endswith("\nset()\n")
    assert done.stderr == ""
    assert all(name in done.stdout for name in TASK_CONFIGS)
