"""Whole runs: changed, stopped anywhere and compared."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import chex
import pytest

from hyena_jax import models
from hyena_jax.config import Experiment
from hyena_jax.training import run as training
from hyena_jax.training.checkpoint import best
from hyena_jax.training.evaluate import evaluate_run
from hyena_jax.training.folder import read_folder
from hyena_jax.training.initial import load_params
from hyena_jax.training.metrics import read_rows


def with_training(experiment: Experiment, **changes) -> Experiment:
    return dataclasses.replace(experiment, training=dataclasses.replace(experiment.training, **changes))


def contents(folder: Path) -> dict[Path, bytes]:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def rows(workdir) -> list[dict]:
    """Metrics without fields that depend on the clock."""
    timed = ("time", "_per_second", "data_wait")
    return [
        {
            name: value
            for name, value in row.items()
            if not name.endswith(timed) and not name.startswith("goodput/")
        }
        for row in read_rows(workdir / "metrics.jsonl")
    ]


def losses(workdir, part: str = "train") -> list[float]:
    return [row[f"{part}/loss"] for row in rows(workdir) if f"{part}/loss" in row]


def saved(workdir, step: str = "latest"):
    """The step, the model and its parameters."""
    run = read_folder(workdir)
    model = models.build(run.experiment.model)
    found, params = load_params(run, model, step, print)
    return found, model, params


def evaluated(workdir, path: str | None = None, batch_size: int = 8) -> dict[str, float]:
    _, model, params = saved(workdir)
    return evaluate_run(read_folder(workdir), model, params, path, batch_size)


def assert_same_run(a, b) -> None:
    assert rows(a) == rows(b)
    assert best(a / "checkpoints") == best(b / "checkpoints")
    (step_a, _, params_a), (step_b, _, params_b) = saved(a), saved(b)
    assert step_a == step_b
    chex.assert_trees_all_equal(params_a, params_b)


@contextmanager
def before_step(step: int, act: Callable[[], None]) -> Iterator[None]:
    """Trainings call `act` before they get the batch of that step."""
    usual = training.iterate

    def iterate(dataset, start, *readers):
        for t, batch in usual(dataset, start, *readers):
            if t == step - 1:
                act()
            yield t, batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training, "iterate", iterate)
        yield


@contextmanager
def fails_before(step: int, error: Exception) -> Iterator[None]:
    def fail():
        raise error

    with before_step(step, fail), pytest.raises(type(error), match=str(error)):
        yield
