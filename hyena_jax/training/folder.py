"""A run's folder: it describes itself, and one experiment cannot overwrite another.

config.json          the experiment, with the fields filled in that the model takes from the data
optimizers.json      only if values of the optimizer were changed on purpose: from which step on which values
data.json            tokenizer and fingerprint of the text, or normalization and fingerprint of the images;
                     both files carry their own digest, see `config/files.py`
metrics.jsonl, learning_curves.png; sample.txt (text) or predictions.png (images)
tensorboard/; wandb/ and wandb_id.txt: see `trackers.py` and `wandb.py`
checkpoints/         see `checkpoint.py`
base.safetensors, base.json: of a run that started from given parameters, see `initial.py`
"""

import json
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from hyena_jax import config
from hyena_jax.config import Experiment, OptimizerConfig
from hyena_jax.config.files import STAGES, with_digest, without_digest
from hyena_jax.data.dataset import Dataset, Encoding, encoding_from_json
from hyena_jax.parallel.processes import on_first
from hyena_jax.system import files
from hyena_jax.system.errors import UserError, require
from hyena_jax.system.files import (
    EVENTS,
    LOCK,
    METRICS,
    RUN_CONFIG,
    STEP_FOLDER,
    WANDB,
    locked,
    read_bytes,
    read_json,
)
from hyena_jax.system.storage.lease import Lease
from hyena_jax.system.storage.location import location_of
from hyena_jax.system.storage.mirror import Mirror
from hyena_jax.training.metrics import read_rows
from hyena_jax.training.options import StartOptions

CHECKPOINTS = "checkpoints"
BASE, DESCRIPTION = "base.safetensors", "base.json"
# Besides drafts, the files that a kill can leave in a new run folder; config.json is written last.
UNFINISHED = {LOCK, "data.json", BASE, DESCRIPTION}


KeepsState = Callable[[OptimizerConfig], bool]


class RunFolder(NamedTuple):
    """How a run folder describes itself."""

    experiment: Experiment
    encoding: Encoding
    fingerprint: str
    checkpoints: Path
    plugins: Mapping[str, Any]
    """The plugins whose parts the run uses: see `config.plugins_in`."""


class Held(NamedTuple):
    """A run folder that this process may write to."""

    run: RunFolder | None = None
    """The run in it, as `check_run` finds it."""
    put: Callable[[], None] = lambda: None
    """Brings what was written into the bucket; nothing to do on a disk."""
    lease: Lease | None = None
    """The lock of a folder in a bucket; None on a disk, and in all processes but the first."""


def check_run(
    workdir: Path,
    experiment: Experiment,
    data: Dataset,
    options: StartOptions,
    keeps_state: KeepsState,
) -> RunFolder | None:
    """The run in `workdir`, None if there is none yet; UserError if it cannot be this experiment's folder.

    It cannot if it holds other files, another experiment, a run on other data, or a link that leads outside.
    Changes nothing.

    Args:
      options: may accept changed data, or other values of the optimizer if its state stays as it is.
      keeps_state: whether the experiment's optimizer can continue the state of another one.
    """
    is_run = config.is_run(workdir)
    if workdir.exists() and not workdir.is_dir():
        raise UserError(f"must be a folder, got the file {str(workdir)!r}", "workdir")
    _refuse_links(workdir)
    _refuse_inside_text(workdir, experiment.data)
    if not is_run:
        if workdir.is_dir() and not all(map(_is_unfinished, workdir.iterdir())):
            found = f"must be empty or a run's folder, but {str(workdir)!r} holds other files"
            raise UserError(found, "workdir")
        return None
    run = read_folder(workdir)
    differences, faults, offer = config.identity_differences(experiment, run.experiment), [], ""
    if differences and all(line.startswith("optimizer.") for line in differences):
        flag, can_continue = "--accept-changed-optimizer", keeps_state(run.experiment.optimizer)
        if options.accept_changed_optimizer and can_continue:
            differences = []
        elif options.accept_changed_optimizer:
            offer = f"{flag} does not continue it, since the optimizer's state would differ; "
        elif can_continue:
            offer = f"{flag} continues it with the new values; "
    if differences:
        kept, quoted = shlex.quote(str(workdir / "config.json")), shlex.quote(str(workdir))
        new = f"hyena-jax train {kept} --workdir NEW --init-from {quoted}"
        faults.append(
            f"workdir {str(workdir)!r} holds a different experiment: {'; '.join(differences)}"
            f" ({offer}a new run may start from its parameters: {new}, with your flags)"
        )
    is_other_data = run.fingerprint != data.fingerprint and not options.accept_changed_data
    if is_other_data and not any(line.startswith("data.") for line in differences):
        changes = config.runtime_differences(experiment, run.experiment)
        named = "; ".join(line for line in changes if line.startswith("data."))
        resume = f"hyena-jax train --resume {shlex.quote(str(workdir))}{config.plugin_flags(experiment)}"
        offer = f" {named}; {resume} reads the earlier ones;" if named else ""
        faults.append(
            f"the {data.kind} changed since workdir {str(workdir)!r} was started (its fingerprint differs;"
            f"{offer} --accept-changed-data continues with the current {data.kind})"
        )
    if faults:
        raise UserError("; ".join(faults))
    return run


@contextmanager
def hold(
    workdir: Path,
    experiment: Experiment,
    data: Dataset,
    options: StartOptions,
    keeps_state: KeepsState,
    report: Callable[[str], None],
) -> Iterator[Held]:
    """Checks and locks `workdir` in process 0 alone; its errors are raised in all. All processes must call
    this."""
    check = partial(check_run, workdir, experiment, data, options, keeps_state)
    on_first(check)  # before the folder is created
    with ExitStack() as stack:
        held = Held()
        if location_of(workdir) is None:
            on_first(lambda: stack.enter_context(locked(workdir)))
        elif (mirror := on_first(lambda: stack.enter_context(Mirror(workdir, report)))) is not None:
            held = Held(put=mirror.put, lease=mirror.lease)
        run = on_first(check)  # once more: from here on nobody else changes the folder
        on_first(lambda: read_rows(workdir / METRICS))  # refuses a file that the log could not continue
        yield held._replace(run=run)


def open_run(
    workdir: Path, run: RunFolder | None, experiment: Experiment, data: Dataset, step: int
) -> list[str]:
    """Makes `workdir`, which is locked, the folder of this experiment, which continues after `step`.

    `run` is what `check_run` found in it. Returns the differences from the last start, as readable lines.
    """
    if run is not None:
        stages = config.stages_after(config.read_stages(workdir, run.experiment), experiment, step)
        if len(stages) > 1 or (workdir / STAGES).exists():  # before config.json: see `read_stages`
            _write_json(workdir / STAGES, {"stages": [stage._asdict() for stage in stages]})
    write_description(workdir, experiment, data.to_json())
    if run is None:
        return []
    changes = config.identity_differences(experiment, run.experiment)
    changes += config.runtime_differences(experiment, run.experiment)
    if run.fingerprint != data.fingerprint:
        changes.insert(0, f"{data.kind}: fingerprint {run.fingerprint[:12]} -> {data.fingerprint[:12]}")
    changes += [
        f"{part} is left out; its plugin is not imported"
        for parts in config.missing_parts(run.plugins).values()
        for part in parts
    ]
    return changes + config.changed_plugins(experiment, run.plugins)


def _is_unfinished(path: Path) -> bool:
    """Whether `path` can be in the folder of a run that is about to start."""
    is_ready = path.name == CHECKPOINTS and path.is_symlink() and not any(path.iterdir())
    return is_ready or path.name in UNFINISHED or bool(files.DRAFT.fullmatch(path.name))


def _refuse_links(workdir: Path) -> None:
    """Refuses links to folders, through which files would be written outside; links to files get replaced.

    `checkpoints` may be a link to a folder on a larger disk that holds nothing else.
    """
    for folder in (workdir / EVENTS, workdir / WANDB):
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            raise UserError(f"{folder} must be a folder, but is a symbolic link or a file: remove it")
    checkpoints = workdir / CHECKPOINTS
    target = checkpoints.resolve()
    allowed = "a folder, or a link to a folder that holds only this run's checkpoints"
    if checkpoints.exists() or checkpoints.is_symlink():
        require(target.is_dir(), "checkpoints", str(target), allowed)
        for path in target.iterdir():
            if path.is_fifo():  # Orbax would wait for a writer
                raise UserError(f"{path} must be a folder, but is a pipe: remove it")
    if checkpoints.is_symlink():
        others, is_other_run = [], target.parent != workdir.resolve() and config.is_run(target.parent)
        for path in target.iterdir():
            step, _, rest = path.name.partition(".")
            is_whole = rest or path.is_symlink() or (path / "_CHECKPOINT_METADATA").is_file()
            if not (STEP_FOLDER.fullmatch(step) and is_whole):
                others.append(path.name)
        require(not is_other_run and not others, "checkpoints", f"{checkpoints} -> {target}", allowed)


def _refuse_inside_text(workdir: Path, data: config.DataConfig) -> None:
    """Refuses a workdir in a folder whose files are all read as text, the run's own among them."""
    for name in ("path", "validation_path") if isinstance(data, config.TextConfig) else ():
        folder = getattr(data, name)
        if folder is not None and Path(folder).is_dir():
            inner, outer = workdir.resolve(), Path(folder).resolve()
            is_inside = inner.is_relative_to(outer)
            is_inside &= not any(part.startswith(".") for part in inner.parts[len(outer.parts) :])  # not read
            must = f"outside of the folder data.{name} {folder!r}, whose files are read as text"
            require(not is_inside, "workdir", str(workdir), must)


def kept_encoding(workdir: Path, experiment: Experiment) -> Encoding | None:
    """The encoding of the run in `workdir`; None if there is no run, or its data are of another kind."""
    if not config.is_run(workdir):
        return None
    run = read_folder(workdir)
    return run.encoding if type(run.experiment.data) is type(experiment.data) else None


def write_description(workdir: Path, experiment: Experiment, data: dict[str, Any]) -> None:
    """Writes config.json and data.json where they differ; `data` is the result of `Dataset.to_json`."""
    _write_json(workdir / "data.json", data)
    _write_json(workdir / "config.json", config.encode(experiment))


def read_folder(workdir: Path) -> RunFolder:
    """Reads a run folder; UserError if it holds no run, or one of its files is damaged."""
    experiment = config.read_run(workdir)
    plugins = read_json("workdir", workdir / RUN_CONFIG).get("plugins", {})
    data = read_json("workdir", workdir / "data.json")
    try:
        data = without_digest(data)
        encoding = encoding_from_json(data)
        require(isinstance(data["fingerprint"], str), "fingerprint", data["fingerprint"], "a text")
        return RunFolder(experiment, encoding, data["fingerprint"], workdir / CHECKPOINTS, plugins)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{workdir / 'data.json'} cannot be read: {error}") from error


def require_checkpoint_if_logged(workdir: Path, run: RunFolder | None) -> None:
    """Refuses a run without a checkpoint whose log goes beyond the steps at which there must be one.

    The checkpoints were deleted, or their disk is missing: a run that starts over would drop the log.
    """
    if run is None:
        return
    rows = read_rows(workdir / METRICS)
    last = rows[-1]["step"] if rows else 0
    # Writing a second checkpoint waits until the first is whole.
    if last > 2 * run.experiment.training.checkpoint_every:
        raise UserError(
            f"workdir {str(workdir)!r} has logged step {last} but holds no checkpoint: bring its"
            f" {CHECKPOINTS!r} back, or remove {METRICS} to start the run over"
        )


def leads_outside(workdir: Path, path: Path) -> bool:
    """Whether a path in a run folder leads out of it through a link."""
    is_inside = path.absolute().is_relative_to(workdir.absolute())
    return is_inside and not path.resolve().is_relative_to(workdir.resolve())


def _write_json(path: Path, value: dict) -> None:
    text = json.dumps(with_digest(value), indent=2) + "\n"
    try:
        is_there = read_bytes("workdir", path, most=len(text)).decode() == text
    except ValueError:  # no file, or one with another text
        is_there = False
    if not is_there:
        files.write_text(path, text)
