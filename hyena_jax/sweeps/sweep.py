"""A sweep: runs that worker processes train, in a folder that says which of them are done.

DIR/sweep.json        the runs: their experiments, and how each ended
DIR/NAME/             an ordinary run folder for each
DIR/NAME.log          what its training printed
"""

import json
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyena_jax import config
from hyena_jax.config import Experiment
from hyena_jax.config.files import with_digest, without_digest
from hyena_jax.sweeps.grid import MAX_RUNS
from hyena_jax.sweeps.pool import (
    DIVERGED,
    DONE,
    FAILED,
    INSIDE,
    PLAN,
    PLANNED,
    STEP,
    STOPPED,
    TRAIN,
    Event,
    Pool,
    RunRequest,
    ThisMachine,
)
from hyena_jax.sweeps.progress import MOST, SweepProgress
from hyena_jax.system import files
from hyena_jax.system.errors import UserError, require
from hyena_jax.system.files import LOCK, METRICS, SWEEP, locked, read_json
from hyena_jax.system.output import Output, bar
from hyena_jax.system.signals import Interrupted, noted_signals
from hyena_jax.system.storage.location import is_url, location_of
from hyena_jax.system.storage.mirror import Mirror, opened, renew
from hyena_jax.training.metrics import read_rows

if TYPE_CHECKING:
    from hyena_jax.sweeps.cluster import RayCluster, RayPool

LONGEST_NAME = 200
WAITING = "waiting"
ENDS = (DONE, DIVERGED)
"""Results that another start would not change."""
KEPT = {
    "status": str,
    "error": str | None,
    "step": int,
    "seconds": int | float,
    "planned": int | float | None,
    "init_from": str | None,
}
"""What sweep.json says about a run besides its config, and the types."""


@dataclass(frozen=True)
class Outcome:
    """A run of a sweep, and how it ended."""

    workdir: Path
    experiment: Experiment
    status: str = WAITING
    """`done`, also if it reached its target early; `diverged`; `failed`; `waiting` if it has not ended."""
    error: str | None = None
    """Why it failed or diverged."""
    step: int = 0
    """The last step that was evaluated."""
    seconds: float = 0.0
    """How long its workers took for it, over all starts but those that were killed."""
    planned: float | None = None
    """The seconds that were planned; None if that could not be estimated."""
    init_from: str | None = None
    """The file of parameters or the folder of a run from which it starts; None if they are drawn."""
    values: dict[str, float | None] | None = None
    """Held-out values of the last evaluation by name, None if not finite; None before the first."""


def sweep(
    runs: Mapping[str, Experiment],
    workdir: str | Path,
    *,
    jobs: int = 1,
    engine: "ThisMachine | RayCluster | None" = None,
    init_from: str | Path | None = None,
    together: Sequence[str] = (),
    quiet: bool = False,
) -> dict[str, Outcome]:
    """Trains runs, each in its folder `workdir/NAME`; continues a sweep that was stopped or killed.

    Each run is checked, and its time estimated, before anything is written. A run that fails is reported, and
    the others are trained. Runs that are done are not trained again; runs may be added to an earlier sweep.

    Args:
      runs: the experiments by name; see `make_runs` for grids.
      workdir: the sweep's folder, or gs://BUCKET/NAME.
      jobs: runs that are trained at the same time, each on an equal part of the CPUs of this machine.
      engine: where they are trained instead, such as a `RayCluster`, which knows its own `jobs`.
      init_from: file of parameters from `hyena-jax export`, or folder of a run, from which each run starts.
      together: fields, `seed` and those of the optimizer: runs that differ in these alone are trained in one
        program, which computes their gradients at once.
      quiet: print nothing.

    Returns:
      How each run ended, in the order of `runs`.

    Raises:
      UserError: if an argument, one of the experiments, or the folder is wrong; nothing was written then.
      Interrupted: if it was asked to stop; the same call continues it.

    >>> axes, flags = {"optimizer.learning_rate": [1e-3, 3e-3]}, ["--training.steps", "2"]
    >>> runs = hyena_jax.make_runs("tasks:recall", axes, flags)
    >>> outcomes = hyena_jax.sweep(runs, "runs/rates", quiet=True)
    >>> rows = hyena_jax.compare("runs/rates", by="optimizer.learning_rate")
    >>> sorted(row.label for row in rows)
    ['optimizer.learning_rate=0.001', 'optimizer.learning_rate=0.003']
    """
    if INSIDE in os.environ:
        raise UserError(
            "a plugin of this sweep starts a sweep: call sweep under `if __name__ == '__main__':`"
        )
    root, console = opened(workdir), Output(quiet=quiet)
    require(0 < len(runs) <= MAX_RUNS, "runs", len(runs), f"in 1..{MAX_RUNS}")
    require(engine is None or jobs == 1, "jobs", jobs, "1 with an engine, which has its own")
    for field in together:
        is_possible = field == "seed" or (field.startswith("optimizer.") and "accumulation" not in field)
        must = "of `seed` and fields of the optimizer but accumulation_steps, such as optimizer.learning_rate"
        require(is_possible, "together", field, must)
    engine = ThisMachine(jobs) if engine is None else engine
    if init_from is not None and not is_url(init_from):
        init_from = _named(Path(init_from))
    start = None if init_from is None else str(init_from)
    outcomes = _read(root, runs, start)  # before the folder is created
    _alike(outcomes, list(runs), together)
    if all(outcome.status in ENDS for outcome in outcomes.values()):
        console.print(f"all {len(runs)} runs have ended: {root}", soft_wrap=True)
        return outcomes
    with noted_signals() as asked, ExitStack() as held:
        mirror = None
        if location_of(root) is not None:
            mirror = held.enter_context(Mirror(root, partial(console.print, soft_wrap=True)))
        lock = held.enter_context(locked(root))
        outcomes = _read(root, runs, start)  # once more: from here on nobody else changes the folder
        todo = [name for name, outcome in outcomes.items() if outcome.status not in ENDS]
        with engine.pool(len(todo), lock) as pool:
            outcomes |= _planned({name: outcomes[name] for name in todo}, pool, asked, console)
            if asked and asked[0] == signal.SIGINT:
                raise KeyboardInterrupt
            if asked:
                raise Interrupted("stopped before a run was started. Rerun the command to continue.")
            _write(root, outcomes, mirror)
            with SweepProgress(console, outcomes, todo, engine.n_workers) as progress:
                groups = {names[0]: names for names in _alike(outcomes, todo, together)}
                requests = []
                for name, names in groups.items():
                    first, *others = (_request(TRAIN, outcomes[name]) for name in names)
                    requests.append((name, first._replace(others=tuple(others))))
                left = set(todo)
                for event in pool.run(requests, asked):
                    if event.kind == STEP:
                        if event.work in left:  # a group that another worker continues trains all of its runs
                            progress.step(event.work, event.values["step"])
                        continue
                    about = [event.work] if "run" in event.values else groups[event.work]
                    for name in [name for name in about if name in left]:
                        left.remove(name)
                        outcomes[name] = _ended(outcomes[name], event)
                        _write(root, outcomes, mirror)
                        progress.ended(name, outcomes[name])
    if asked:
        n_done = sum(outcome.status in ENDS for outcome in outcomes.values())
        stopped = f"stopped by {signal.Signals(asked[0]).name}; {n_done} of {len(runs)} runs are done"
        raise Interrupted(f"{stopped}. Rerun the command to continue.")
    return outcomes


def _read(root: Path, runs: Mapping[str, Experiment], init_from: str | None) -> dict[str, Outcome]:
    """How the runs have ended so far, in the folder of a new or an earlier sweep; changes nothing.

    Refuses a name that cannot be a folder's, and a `root` that holds anything but these runs.
    """
    new = {name: Outcome(root / name, run, init_from=init_from) for name, run in runs.items()}
    for name in runs:
        is_name = (
            name == Path(name).name and not name.startswith(".") and not name.endswith((".log", ".json"))
        )
        is_short = len(os.fsencode(name)) <= LONGEST_NAME
        allowed = f"a folder's name of at most {LONGEST_NAME} bytes, without .log or .json at its end"
        require(is_name and is_short, "a run's name", name, allowed)
        log = root / f"{name}.log"
        is_free = not log.is_symlink() and (log.is_file() or not log.exists())
        require(is_free, "the log of a run", str(log), "a file, and not a link or a pipe")
    file = root / SWEEP
    require(not root.exists() or root.is_dir(), "workdir", str(root), "a folder, not a file")
    if not file.exists():
        names = [path.name for path in root.iterdir()] if root.exists() else []
        # A sweep that was killed as it started can have left a lock or a draft.
        others = [name for name in names if name != LOCK and not files.DRAFT.fullmatch(name)]
        allowed = f"new, empty, or the folder of a sweep; it holds {others[0]!r}" if others else ""
        require(not others, "workdir", str(root), allowed)
        return new
    try:
        kept = without_digest(read_json("workdir", file))["runs"]
    except UserError as error:
        raise UserError(f"{file}: {error}") from error
    except (KeyError, TypeError) as error:
        raise UserError(f"{file} is not the file of a sweep: {error!r}") from error
    try:
        gone = [name for name in kept if name not in runs]
        if gone:
            raise UserError(
                f"workdir {str(root)!r} holds another sweep: its run {gone[0]!r} is not among these"
            )
        return {name: _continued(run, kept[name]) if name in kept else run for name, run in new.items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is not the file of a sweep: {error!r}") from error


def _continued(run: Outcome, kept: Mapping[str, Any]) -> Outcome:
    """How a run has ended, given its entry in the file; refuses the entry of another run."""
    workdir, theirs = run.workdir, config.decode(kept["config"])
    if differences := config.identity_differences(run.experiment, theirs):
        shown = "; ".join(differences[:3])
        raise UserError(f"workdir {str(workdir.parent)!r} holds another sweep: {workdir.name}: {shown}")
    kept = {"init_from": None, **kept}  # which the file has not always held
    ended = {name: kept[name] for name in KEPT}
    for name, kind in KEPT.items():
        is_known = not isinstance(ended[name], int | float) or 0 <= ended[name] <= MOST  # nor NaN
        if not isinstance(ended[name], kind) or not is_known:
            raise TypeError(f"{name} of {workdir.name} is {ended[name]!r}")
    allowed = f"{ended['init_from']!r}, as when {workdir.name} was first planned"
    require(run.init_from == ended["init_from"], "init_from", run.init_from, allowed)
    if not workdir.exists():  # its folder was deleted: it is trained again
        return replace(run, planned=ended["planned"])
    if theirs != run.experiment:  # runtime fields changed, such as the number of steps
        ended |= {"status": WAITING, "planned": None}
    try:
        ended["step"], values = _last_evaluation(workdir)
    except UserError:
        values = None
    if ended["status"] == DONE and (values is None or not _holds(workdir, run.experiment, ended["step"])):
        ended["status"] = WAITING
    return replace(run, **ended, values=values)


def _holds(workdir: Path, experiment: Experiment, step: int) -> bool:
    """Whether a folder still holds a run of this experiment, with a checkpoint of this step or later."""
    from hyena_jax.training.checkpoint import saved_steps
    from hyena_jax.training.folder import CHECKPOINTS, read_folder

    try:
        found = read_folder(workdir).experiment
    except UserError:
        return False
    # Sizes that the model takes from its data are None in the experiment of a sweep.
    differences = config.identity_differences(experiment, found)
    is_same = all(line.endswith(" -> None") for line in differences)
    return is_same and max(saved_steps(workdir / CHECKPOINTS), default=-1) >= step


def _write(root: Path, outcomes: Mapping[str, Outcome], mirror: Mirror | None) -> None:
    runs = {}
    for name, outcome in outcomes.items():
        about = {name: getattr(outcome, name) for name in KEPT}
        runs[name] = {**about, "config": _encoded(outcome.experiment)}
    files.write_text(root / SWEEP, json.dumps(with_digest({"runs": runs}), indent=1) + "\n")
    if mirror is not None:
        mirror.put()


def _encoded(experiment: Experiment) -> dict[str, Any]:
    return json.loads(json.dumps(config.encode(experiment)))  # as it is read again: lists, not tuples


def _request(kind: str, outcome: Outcome) -> RunRequest:
    return RunRequest(kind, _encoded(outcome.experiment), _named(outcome.workdir), outcome.init_from)


def _named(path: Path) -> str:
    """The path for another process: in a local copy of a folder in a bucket, its URL."""
    return str(location_of(path) or path.absolute())


def _planned(
    outcomes: dict[str, Outcome], pool: "Pool | RayPool", asked: Sequence[int], console: Output
) -> dict[str, Outcome]:
    """The runs with the seconds that each will take; runs that differ in seed and rate share them."""
    unplanned = [name for name, outcome in outcomes.items() if outcome.planned is None]
    alike = _alike(outcomes, unplanned, ("seed", "optimizer.learning_rate"))
    requests = [(names[0], _request(PLAN, outcomes[names[0]])) for names in alike]
    same = {names[0]: names for names in alike}
    with nullcontext(lambda: None) if console.quiet else bar("planning", len(requests), console) as advance:
        for event in pool.run(requests, asked):
            if event.kind == FAILED:
                raise UserError(
                    f"{event.values['error']} (in the run {event.work})", event.values.get("argument")
                )
            seconds = event.values["seconds"] if event.kind == PLANNED else None
            outcomes |= {name: replace(outcomes[name], planned=seconds) for name in same[event.work]}
            advance()
    return outcomes


def _alike(outcomes: Mapping[str, Outcome], names: Sequence[str], fields: Sequence[str]) -> list[list[str]]:
    """The names of runs, in groups of those that differ in these fields alone; without fields, one by one."""
    groups: dict[str, list[str]] = {}
    for name in names:
        encoded = _encoded(outcomes[name].experiment)
        for field in fields:
            *path, last = field.split(".")
            try:
                del reduce(lambda inner, name: inner[name], path, encoded)[last]
            except (KeyError, TypeError) as error:
                raise UserError(f"must be of fields of the runs, got {field!r}", "together") from error
        groups.setdefault(json.dumps(encoded) if fields else name, []).append(name)
    return list(groups.values())


def _ended(outcome: Outcome, event: Event) -> Outcome:
    status = {DONE: DONE, DIVERGED: DIVERGED, STOPPED: WAITING}.get(event.kind, FAILED)
    said = filter(None, (event.values.get("argument"), event.values.get("error")))
    error, seconds = " ".join(said) or None, outcome.seconds + event.seconds
    ended = replace(outcome, status=status, error=error, seconds=seconds)
    renew(outcome.workdir)
    try:
        step, values = _last_evaluation(outcome.workdir)
    except UserError as error:  # its rows cannot be read; the other runs go on
        return replace(ended, status=FAILED, error=str(error))
    if status == DONE and values is None:  # the file was removed after the last step, which is not repeated
        fault = f"{outcome.workdir / METRICS} holds no evaluation; remove that folder to train the run again"
        return replace(ended, status=FAILED, error=fault)
    return replace(ended, step=step, values=values)


def _last_evaluation(workdir: Path) -> tuple[int, dict[str, float | None] | None]:
    """The step and the held-out values of a run's last evaluation; 0 and None before the first."""
    start = "validation/"
    for row in reversed(read_rows(workdir / METRICS)):
        values = {name.removeprefix(start): value for name, value in row.items() if name.startswith(start)}
        if values:
            return row["step"], values
    return 0, None
