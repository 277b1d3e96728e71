"""Runs in one program are those alone; sweeps/test_sweep.py has them in a worker of their own."""

import dataclasses
import io

import pytest
from rich.console import Console
from whole_runs import losses, rows, with_training

from hyena_jax.data import dataset
from hyena_jax.training.hooks import standard_hooks
from hyena_jax.training.options import NO_OPTIONS
from hyena_jax.training.together import Job, train_together

pytestmark = pytest.mark.xdist_group("trained")


def test_a_run_beside_one_of_another_seed_is_that_alone(whole, experiment, tmp_path):
    def job(name, seed):
        run = with_training(dataclasses.replace(experiment, seed=seed), steps=6)
        console = Console(file=io.StringIO(), width=120)
        return Job(run, tmp_path / name, console, NO_OPTIONS, dataset.load, standard_hooks)

    ended = []
    jobs = {"other": job("other", 1), "same": job("same", 0)}
    train_together(jobs, lambda name, error: ended.append((name, error)))
    assert ended == [("other", None), ("same", None)]
    for i in range(3):  # of the steps 3, 4 and 6; whether a step is the last changes nothing before it
        assert rows(tmp_path / "same")[i] == pytest.approx(rows(whole)[i], rel=1e-4)
    assert losses(tmp_path / "other") != losses(tmp_path / "same")
