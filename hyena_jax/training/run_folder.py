"""A run's folder: what makes it explain itself, and what keeps one experiment from overwriting another.

config.json          the experiment, with what the model takes from the data filled in
data.json            tokenizer and fingerprint of the text, or normalization and fingerprint of the images
metrics.jsonl, tensorboard/, learning_curves.png; sample.txt (text) or predictions.png (images)
checkpoints/         see `checkpoint.py`
"""

import fcntl
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import flax.linen as nn
import jax
import numpy as np
import optax

from hyena_jax import config
from hyena_jax.config import Experiment, UserError
from hyena_jax.data.dataset import Dataset, Encoding, encoding_from_json
from hyena_jax.training.checkpoint import best, restore_readonly, saved_steps
from hyena_jax.training.step import init_params

CHECKPOINTS = "checkpoints"
# What a kill while a run folder is made can leave behind; config.json comes last.
UNFINISHED = {"data.draft", "data.json", "config.draft"}


class Run(NamedTuple):
    """What a run folder says about itself."""

    experiment: Experiment
    encoding: Encoding
    fingerprint: str
    checkpoints: Path


def open_run(workdir: Path, experiment: Experiment, data: Dataset) -> list[str]:
    """Makes `workdir` the folder of this experiment, or checks that it is already.

    Returns:
      Runtime settings that differ from the last time, as readable lines.

    Raises:
      UserError: if workdir is no folder, holds other things, another experiment, or one whose data were
        others; nothing is changed then.
    """
    if workdir.exists() and not workdir.is_dir():
        raise UserError(f"workdir must be a folder, got the file {str(workdir)!r}")
    if not (workdir / "config.json").exists():
        if workdir.is_dir() and {path.name for path in workdir.iterdir()} - UNFINISHED:
            raise UserError(
                f"workdir must be empty or a run's folder, but {str(workdir)!r} holds other files"
            )
        try:
            workdir.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise UserError(f"workdir {str(workdir)!r} cannot be made a folder: {error.strerror}") from error
        _write_json(workdir / "data.json", data.to_json())
        _write_json(workdir / "config.json", config.encode(experiment))
        return []
    run = read_run(workdir)
    differences = config.identity_differences(experiment, run.experiment)
    if differences:
        raise UserError(f"workdir {str(workdir)!r} holds a different experiment: {'; '.join(differences)}")
    if run.fingerprint != data.fingerprint:
        raise UserError(
            f"the {data.kind} changed since workdir {str(workdir)!r} was started (its fingerprint differs)"
        )
    _write_json(workdir / "config.json", config.encode(experiment))
    return config.runtime_differences(experiment, run.experiment)


@contextmanager
def locked(workdir: Path) -> Iterator[None]:
    """Holds the run's folder for this process; the lock ends with the process, however that ends.

    Raises:
      UserError: if another process trains here.
    """
    with (workdir / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"workdir {str(workdir)!r} is in use: another process trains there") from error
        yield


def read_run(workdir: Path) -> Run:
    """Reads a run folder.

    Raises:
      UserError: if workdir holds no run, or its files are not what `open_run` writes.
    """
    if not (workdir / "config.json").is_file():
        raise UserError(f"workdir {str(workdir)!r} holds no run: there is no config.json")
    experiment = config.read(workdir / "config.json")
    try:
        data = json.loads((workdir / "data.json").read_text(encoding="utf-8"))
        return Run(experiment, encoding_from_json(data), data["fingerprint"], workdir / CHECKPOINTS)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{workdir / 'data.json'} cannot be read: {error}") from error


def load_params(
    run: Run, model: nn.Module, step: str, report: Callable[[str], None]
) -> tuple[int, optax.Params]:
    """The parameters of a saved step, as NumPy arrays, and its number.

    Args:
      step: `latest`, `best`, or a number.

    Raises:
      UserError: if `step` is none of these or not saved, or no checkpoint is usable.
    """
    folder = run.checkpoints
    if not saved_steps(folder):
        raise UserError(f"{folder} holds no checkpoint")
    if step not in ("latest", "best") and not step.isdecimal():
        raise UserError(
            f"step must be 'latest', 'best' or one of the saved {saved_steps(folder)}, got {step!r}"
        )
    number = {"latest": None, "best": best(folder).step}.get(step) if not step.isdecimal() else int(step)
    if step == "best" and number is None:
        raise UserError(
            f"step must be 'latest' or one of {saved_steps(folder)}: none was evaluated, got 'best'"
        )
    shapes = jax.eval_shape(lambda: init_params(model, 0))
    target = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), shapes)
    restored = restore_readonly(folder, {"params": target}, report, number)
    return restored.step, restored.items["params"]


def _write_json(path: Path, value: dict) -> None:
    """In one rename, so that a kill leaves the old file or the new one."""
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    draft.rename(path)
