"""The output of a run on a terminal and in a file."""

import dataclasses
import io
import re

import numpy as np
import pytest
from rich.console import Console
from whole_runs import with_training

from hyena_jax.config import CosineConfig, SGDConfig, TopKAccuracyConfig
from hyena_jax.system import output
from hyena_jax.training.console import Progress, parameter_table
from hyena_jax.training.run import train

ROW = re.compile(r"step +(\d+)   loss \d\.\d{4}   [\d,]+ tokens/s   \d:\d\d:\d\d left")


@pytest.mark.xdist_group("trained")
def test_without_a_terminal_rows_say_loss_speed_and_time_left(trained):
    said = trained.with_suffix(".txt").read_text()
    lines = said.splitlines()
    rows = [ROW.fullmatch(line) for line in lines if " left" in line]
    assert [row[1] for row in rows] == ["3", "6", "9", "12"]
    assert [line.split()[1] for line in lines if "validation" in line] == ["4", "8", "12"]
    assert said.index("compiling the training step") < said.index(" left")
    assert "nan" not in said
    assert "embedding/embedding" in said


def test_without_a_terminal_the_last_step_has_its_row():
    console = Console(file=io.StringIO(), width=120)
    with Progress(console, 0, 3, "token") as shown:
        for step in (1, 2, 3):
            shown.training(step, 2.5, 1234.0)
    assert re.findall(r"step +(\d+)", console.file.getvalue())[-1] == "3"


def test_equal_parameters_of_all_blocks_share_a_row_and_count_each():
    block = {"kernel": np.zeros((3, 4))}
    table = parameter_table({"blocks_0": block, "blocks_1": block, "scale": np.zeros(2)}, SGDConfig())
    cells = [[*column.cells] for column in table.columns[:3]]
    assert cells == [
        ["blocks_*/kernel", "scale", "total"],
        ["2 of 3 x 4", "2", ""],
        ["24", "2", "26"],
    ]


def test_on_a_terminal_the_bar_says_compiling_before_the_first_step():
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with Progress(console, 0, 10, "token") as shown:
        shown._rich.refresh()
        before = console.file.getvalue()
        shown.advance(1)
        shown.training(1, 2.5, 1234.0)
        with shown.evaluating():
            shown._rich.refresh()
        shown.validation(1, 3.5, {})
    after = console.file.getvalue()[len(before) :]
    assert "compiling" in before
    assert "loss" not in before
    assert "nan" not in before + after
    for text in ("evaluating", "training", "loss 2.5000", "validation 3.5000", "1,234 tokens/s"):
        assert text in after


@pytest.mark.grid
def test_a_continued_run_lists_no_parameters_and_no_more_rows_than_a_person_reads(whole, experiment, console):
    train(with_training(experiment, steps=21), whole, console)
    printed = console.file.getvalue()
    assert "continuing after step 12" in printed
    assert "embedding/embedding" not in printed
    assert [line.split()[1] for line in printed.splitlines() if " left" in line] == ["15", "21"]


@pytest.mark.grid
def test_a_warm_up_as_long_as_the_run_is_said(experiment, tmp_path, console):
    optimizer = dataclasses.replace(experiment.optimizer, schedule=CosineConfig(warmup_steps=2))
    for steps in (2, 3):
        rising = with_training(dataclasses.replace(experiment, optimizer=optimizer), steps=steps)
        train(rising, tmp_path / "run", console)
    rises = "the learning rate only rises, in optimizer.schedule.warmup_steps=2 of training.steps=2\n"
    assert rises in console.file.getvalue()
    assert console.file.getvalue().count("only rises") == 1


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_watched_loop_has_a_bar_on_a_terminal_alone(is_terminal, capsys, monkeypatch):
    usual = Console
    monkeypatch.setattr(output, "Console", lambda stderr: usual(stderr=stderr, force_terminal=is_terminal))
    assert list(output.watched("evaluating", "abc", 3)) == ["a", "b", "c"]
    captured = capsys.readouterr()
    assert captured.out == ""
    assert ("evaluating" in captured.err) == is_terminal


@pytest.mark.grid
def test_the_metrics_of_an_experiment_are_in_the_rows(experiment, tmp_path, console):
    measured = dataclasses.replace(experiment, metrics=(TopKAccuracyConfig(3),))
    train(with_training(measured, steps=1), tmp_path / "run", console)
    row = r"step +1   validation loss [\d.]+.*   top 3 accuracy 0\.\d{4}\n"
    assert re.search(row, console.file.getvalue())
