"""A run's folder: what makes it explain itself, and what keeps one experiment from overwriting another.

config.json          the experiment, with what the model takes from the data filled in
data.json            tokenizer and fingerprint of the text, or normalization and fingerprint of the images
metrics.jsonl, tensorboard/, learning_curves.png; sample.txt (text) or predictions.png (images)
checkpoints/         see `checkpoint.py`
"""

import fcntl
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import numpy as np
import optax

from hyena_jax import config
from hyena_jax.config import Experiment, UserError
from hyena_jax.data.dataset import Dataset, Encoding, encoding_from_json
from hyena_jax.training import atomic
from hyena_jax.training.checkpoint import best, restore_readonly, saved_steps
from hyena_jax.training.step import init_params

CHECKPOINTS = "checkpoints"
MOST_DIGITS = 10
"""Of the number of a step."""
LOCK = ".lock"
# What a kill while a run folder is made can leave behind; config.json comes last.
UNFINISHED = {LOCK, "data.json.draft", "data.json", "config.json.draft"}


class Run(NamedTuple):
    """What a run folder says about itself."""

    experiment: Experiment
    encoding: Encoding
    fingerprint: str
    checkpoints: Path
    plugins: Mapping[str, Any]
    """What the plugins were whose parts it uses: see `config.plugins_in`."""


def check_run(
    workdir: Path, experiment: Experiment, data: Dataset, accept_changed_data: bool = False
) -> Run | None:
    """Whether `workdir` can be the folder of this experiment; changes nothing.

    Args:
      accept_changed_data: a run whose data were others may go on with these.

    Returns:
      The run that is there, or None where there is none yet.

    Raises:
      UserError: if workdir is no folder, holds other things, another experiment, or one whose data were
        others.
    """
    if workdir.exists() and not workdir.is_dir():
        raise UserError(f"workdir must be a folder, got the file {str(workdir)!r}")
    if not (workdir / "config.json").exists():
        if workdir.is_dir() and {path.name for path in workdir.iterdir()} - UNFINISHED:
            raise UserError(
                f"workdir must be empty or a run's folder, but {str(workdir)!r} holds other files"
            )
        return None
    run = read_run(workdir)
    differences, faults = config.identity_differences(experiment, run.experiment), []
    if differences:
        faults.append(f"workdir {str(workdir)!r} holds a different experiment: {'; '.join(differences)}")
    if run.fingerprint != data.fingerprint and not accept_changed_data:
        faults.append(
            f"the {data.kind} changed since workdir {str(workdir)!r} was started (its fingerprint differs;"
            f" --accept-changed-data True goes on with the {data.kind} of now)"
        )
    if faults:
        raise UserError("; ".join(faults))
    return run


def open_run(workdir: Path, run: Run | None, experiment: Experiment, data: Dataset) -> list[str]:
    """Makes `workdir`, which is locked, the folder of this experiment.

    Args:
      run: what `check_run` found.

    Returns:
      What differs from the last time, as readable lines.
    """
    changes = []
    if run is None or run.fingerprint != data.fingerprint:
        _write_json(workdir / "data.json", data.to_json())
        if run is not None:
            changes.append(f"{data.kind}: fingerprint {run.fingerprint[:12]} -> {data.fingerprint[:12]}")
    changed_code = [] if run is None else config.changed_plugins(experiment, run.plugins)
    if run is None or run.experiment != experiment or changed_code:
        _write_json(workdir / "config.json", config.encode(experiment))
        changes += config.runtime_differences(experiment, run.experiment) if run else []
    return changes + changed_code


def kept_encoding(workdir: Path, experiment: Experiment) -> Encoding | None:
    """What the run in `workdir` reads its data with; None if there is no run, or one on another kind."""
    if not (workdir / "config.json").exists():
        return None
    run = read_run(workdir)
    return run.encoding if type(run.experiment.data) is type(experiment.data) else None


def write_description(workdir: Path, experiment: Experiment, data: dict[str, Any]) -> None:
    """Makes an existing folder a run's, without checkpoint; `data` is what `Dataset.to_json` returned."""
    _write_json(workdir / "data.json", data)
    _write_json(workdir / "config.json", config.encode(experiment))


@contextmanager
def locked(workdir: Path) -> Iterator[None]:
    """Makes the folder if it is missing, and holds it; the lock ends with the process, however that ends.

    Raises:
      UserError: if another process trains here, or a file is in the way.
    """
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise UserError(f"workdir {str(workdir)!r} cannot be made a folder: {error.strerror}") from error
    with (workdir / LOCK).open("w") as file:
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
    data = config.read_json("workdir", workdir / "data.json")
    try:
        plugins = config.read_json("workdir", workdir / "config.json").get("plugins", {})
        encoding = encoding_from_json(data)
        config.require(isinstance(data["fingerprint"], str), "fingerprint", data["fingerprint"], "a text")
        return Run(experiment, encoding, data["fingerprint"], workdir / CHECKPOINTS, plugins)
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
    is_number = step.isascii() and step.isdecimal() and len(step) <= MOST_DIGITS
    if step not in ("latest", "best") and not is_number:
        raise UserError(
            f"step must be 'latest', 'best' or one of the saved {saved_steps(folder)}, got {step[:80]!r}"
        )
    number = {"latest": None, "best": best(folder).step}.get(step) if not is_number else int(step)
    if step == "best" and number is None:
        raise UserError(
            f"step must be 'latest' or one of {saved_steps(folder)}: none was evaluated, got 'best'"
        )
    shapes = jax.eval_shape(lambda: init_params(model, 0))
    target = jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), shapes)
    restored = restore_readonly(folder, {"params": target}, report, number)
    return restored.step, restored.items["params"]


def _write_json(path: Path, value: dict) -> None:
    atomic.write_text(path, json.dumps(value, indent=2) + "\n")
