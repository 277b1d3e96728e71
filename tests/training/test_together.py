"""Runs in one program are those alone; sweeps/test_sweep.py has them in a worker of their own."""

import dataclasses
import io

import pytest
from rich.console import Console
from whole_runs import losses, rows

from hyena_jax.data import dataset
from hyena_jax.training.hooks import standard_hooks
from hyena_jax.training.options import NO_OPTIONS
from hyena_jax.training.together import Job, train_together

pytestmark = pytest.mark.xdist_group("trained")


def test_a_run_beside_one_of_another_seed_is_that_alone(whole, experiment, tmp_path):
    def job(name, experiment):
        console = Console(file=io.StringIO(), width=120)
        return Job(
            experiment,
            tmp_path / name,
            console,
            NO_OPTIONS,
            load_data=dataset.load,
            make_hooks=standard_hooks,
        )

    ended = []
    jobs = {"other": job("other", dataclasses.replace(experiment, seed=1)), "same": job("same", experiment)}
    train_together(jobs, lambda name, error: ended.append((name, error)))
    assert ended == [("other", None), ("same", None)]
    for found, expected in zip(rows(tmp_path / "same"), rows(whole), strict=True):
        assert found == pytest.approx(expected, rel=1e-4)
    assert losses(tmp_path / "other") != losses(whole)
