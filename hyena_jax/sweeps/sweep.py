"""A sweep: runs that worker processes train, in a folder that says which of them are done.

DIR/sweep.json        the runs: their experiments, and how each ended
DIR/NAME/             an ordinary run folder for each
DIR/NAME.log          what its training printed
"""

import json
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hyena_jax import config, files
from hyena_jax.config import Experiment, UserError, require
from hyena_jax.config.files import with_digest, without_digest
from hyena_jax.files import LOCK, locked
from hyena_jax.output import Output, bar
from hyena_jax.signals import Interrupted, noted_signals
from hyena_jax.sweeps.grid import MAX_RUNS
from hyena_jax.sweeps.pool import INSIDE, STOPPED, Event, Pool
from hyena_jax.sweeps.progress import SweepProgress
from hyena_jax.sweeps.worker import DIVERGED, DONE, FAILED, PLAN, PLANNED, STEP, TRAIN, Request
from hyena_jax.training.metrics import FILE as METRICS
from hyena_jax.training.metrics import read_rows

FILE = "sweep.json"
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
    """The values of the last evaluation on held-out data, by name; None before the first.

    A value that was not finite is None.
    """


def sweep(
    runs: Mapping[str, Experiment],
    workdir: str | Path,
    *,
    jobs: int = 1,
    init_from: str | Path | None = None,
    quiet: bool = False,
) -> dict[str, Outcome]:
    """Trains runs, each in its folder `workdir/NAME`; continues a sweep that was stopped or killed.

    Each run is checked, and its time estimated, before anything is written. A run that fails is reported, and
    the others are trained. Runs that are done are not trained again; runs may be added to an earlier sweep.

    Args:
      runs: the experiments by name; see `make_runs` for grids.
      jobs: runs that are trained at the same time, each on an equal part of the CPUs.
      init_from: file of parameters from `hyena-jax export`, or folder of a run, from which each run starts.
      quiet: print nothing.

    Returns:
      How each run ended, in the order of `runs`.

    Raises:
      UserError: if an argument, one of the experiments, or the folder is wrong; nothing was written then.
      Interrupted: if it was asked to stop; the same call continues it.
    """
    if INSIDE in os.environ:
        raise UserError(
            "a plugin of this sweep starts a sweep: call sweep under `if __name__ == '__main__':`"
        )
    root, console = Path(workdir), Output(quiet=quiet)
    require(0 < len(runs) <= MAX_RUNS, "runs", len(runs), f"in 1..{MAX_RUNS}")
    cores = _divided_cores(jobs)
    start = None if init_from is None else str(Path(init_from).absolute())
    outcomes = _read(root, runs, start)  # before the folder is created
    if all(outcome.status in ENDS for outcome in outcomes.values()):
        console.print(f"all {len(runs)} runs have ended: {root}", soft_wrap=True)
        return outcomes
    # Workers hold the lock too: one that outlives a killed sweep, to save, keeps others away until then.
    with noted_signals() as asked, locked(root) as lock:
        outcomes = _read(root, runs, start)  # once more: from here on nobody else changes the folder
        todo = [name for name, outcome in outcomes.items() if outcome.status not in ENDS]
        with Pool(cores[: len(todo)], [lock]) as pool:
            outcomes |= _planned({name: outcomes[name] for name in todo}, pool, asked, console)
            if asked and asked[0] == signal.SIGINT:
                raise KeyboardInterrupt
            if asked:
                raise Interrupted("stopped before a run was started. Rerun the command to continue.")
            _write(root, outcomes)
            with SweepProgress(console, outcomes, todo, len(cores)) as progress:
                requests = [(name, _request(TRAIN, outcomes[name])) for name in todo]
                for event in pool.run(requests, asked):
                    if event.kind == STEP:
                        progress.step(event.work, event.values["step"])
                    else:
                        outcomes[event.work] = _ended(outcomes[event.work], event)
                        _write(root, outcomes)
                        progress.ended(event.work, outcomes[event.work])
    if asked:
        n_done = sum(outcome.status in ENDS for outcome in outcomes.values())
        stopped = f"stopped by {signal.Signals(asked[0]).name}; {n_done} of {len(runs)} runs are done"
        raise Interrupted(f"{stopped}. Rerun the command to continue.")
    return outcomes


def _divided_cores(jobs: int) -> list[str]:
    """The CPUs of each worker; all of them, as an empty text, for a single one."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    most = max(1, len(cores))
    require(1 <= jobs <= most, "jobs", jobs, f"in 1..{most}, the number of CPUs")
    if jobs == 1:
        return [""]
    size = len(cores) // jobs
    return [",".join(map(str, cores[i * size : (i + 1) * size])) for i in range(jobs)]


def _read(root: Path, runs: Mapping[str, Experiment], init_from: str | None) -> dict[str, Outcome]:
    """How the runs have ended so far, in the folder of a new or an earlier sweep; changes nothing.

    Raises:
      UserError: if a name cannot be a folder's, or `root` holds anything but these runs.
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
    file = root / FILE
    require(not root.exists() or root.is_dir(), "workdir", str(root), "a folder, not a file")
    if not file.exists():
        names = [path.name for path in root.iterdir()] if root.exists() else []
        # A sweep that was killed as it started can have left a lock or a draft.
        others = [name for name in names if name != LOCK and not files.DRAFT.fullmatch(name)]
        allowed = f"new, empty, or the folder of a sweep; it holds {others[0]!r}" if others else ""
        require(not others, "workdir", str(root), allowed)
        return new
    try:
        kept = without_digest(config.read_json("workdir", file))["runs"]
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
    """How a run has ended, given its entry in the file; raises UserError if that is of another run."""
    workdir, theirs = run.workdir, config.decode(kept["config"])
    if differences := config.identity_differences(run.experiment, theirs):
        shown = "; ".join(differences[:3])
        raise UserError(f"workdir {str(workdir.parent)!r} holds another sweep: {workdir.name}: {shown}")
    kept = {"init_from": None, **kept}  # which the file has not always held
    ended = {name: kept[name] for name in KEPT}
    for name, kind in KEPT.items():
        if not isinstance(ended[name], kind):
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
    if ended["status"] == DONE and (values is None or not _holds(workdir, run.experiment)):
        ended["status"] = WAITING
    return replace(run, **ended, values=values)


def _holds(workdir: Path, experiment: Experiment) -> bool:
    """Whether a folder still holds a run of this experiment, with a checkpoint."""
    from hyena_jax.training.checkpoint import saved_steps
    from hyena_jax.training.folder import CHECKPOINTS

    try:
        found = config.read_run(workdir)
    except UserError:
        return False
    # Sizes that the model takes from its data are None in the experiment of a sweep.
    differences = config.identity_differences(experiment, found)
    return all(line.endswith(" -> None") for line in differences) and bool(saved_steps(workdir / CHECKPOINTS))


def _write(root: Path, outcomes: Mapping[str, Outcome]) -> None:
    runs = {}
    for name, outcome in outcomes.items():
        about = {name: getattr(outcome, name) for name in KEPT}
        runs[name] = {**about, "config": _encoded(outcome.experiment)}
    files.write_text(root / FILE, json.dumps(with_digest({"runs": runs}), indent=1) + "\n")


def _encoded(experiment: Experiment) -> dict[str, Any]:
    return json.loads(json.dumps(config.encode(experiment)))  # as it is read again: lists, not tuples


def _request(kind: str, outcome: Outcome) -> Request:
    return Request(kind, _encoded(outcome.experiment), str(outcome.workdir.absolute()), outcome.init_from)


def _planned(
    outcomes: dict[str, Outcome], pool: Pool, asked: Sequence[int], console: Output
) -> dict[str, Outcome]:
    """The runs with the seconds that each will take; runs that differ in seed and rate share them.

    Raises:
      UserError: if one of them cannot be trained.
    """
    alike: dict[str, list[str]] = {}
    for name, outcome in outcomes.items():
        if outcome.planned is None:
            encoded = _encoded(outcome.experiment)
            encoded.pop("seed")
            encoded["optimizer"].pop("learning_rate", None)
            alike.setdefault(json.dumps(encoded), []).append(name)
    requests = [(names[0], _request(PLAN, outcomes[names[0]])) for names in alike.values()]
    same = {names[0]: names for names in alike.values()}
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


def _ended(outcome: Outcome, event: Event) -> Outcome:
    """The run as it ended."""
    status = {DONE: DONE, DIVERGED: DIVERGED, STOPPED: WAITING}.get(event.kind, FAILED)
    said = filter(None, (event.values.get("argument"), event.values.get("error")))
    error, seconds = " ".join(said) or None, outcome.seconds + event.seconds
    ended = replace(outcome, status=status, error=error, seconds=seconds)
    try:
        step, values = _last_evaluation(outcome.workdir)
    except UserError as error:  # its rows cannot be read; the other runs go on
        return replace(ended, status=FAILED, error=str(error))
    return replace(ended, step=step, values=values)


def _last_evaluation(workdir: Path) -> tuple[int, dict[str, float | None] | None]:
    """The step and the held-out values of a run's last evaluation; 0 and None before the first."""
    start = "validation/"
    for row in reversed(read_rows(workdir / METRICS)):
        values = {name.removeprefix(start): value for name, value in row.items() if name.startswith(start)}
        if values:
            return row["step"], values
    return 0, None
