"""Runs of one model that are trained in one program, each in its own folder, as if it were alone."""

from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

from rich.console import Console

from hyena_jax.config import Experiment
from hyena_jax.system.signals import Interrupted, StopRequest, stop_requests
from hyena_jax.training.console import Progress
from hyena_jax.training.loop import Step, mapped_joint_step
from hyena_jax.training.run import LoadData, ended, load, prepare, steps
from hyena_jax.training.step import Metrics, TrainState

Run = Generator[Step, tuple[TrainState, Metrics], None]
"""Yields each step that is due, and is sent what it gives."""


def whole_run(
    experiment: Experiment,
    workdir: Path,
    console: Console,
    init_from: Path | None,
    load_data: LoadData,
    make_progress: Callable[[Console, int, int, str], Progress],
    stop: StopRequest,
) -> Run:
    """`run.train`, whose steps somebody else computes."""
    setup = prepare(*load(experiment, load_data, workdir, init_from), console, workdir, init_from)
    params = yield from steps(setup, workdir, console, stop, init_from, make_progress)
    ended(setup, workdir, params, stop.name)


def train_together(
    runs: Mapping[str, Callable[[StopRequest], Run]], report: Callable[[str, Exception | None], None]
) -> None:
    """Trains runs whose experiments differ in seed and optimizer alone, and not in its accumulation_steps.

    A run that ends, diverges or fails leaves the others, whose step is then compiled again. Runs may begin at
    different steps, as where they were killed.

    Args:
      runs: by name, see `whole_run`.
      report: called when a run has ended, with its name and its error, if there was one.

    Raises:
      Interrupted: if asked to stop; the runs that had not ended are saved.
    """
    with stop_requests() as stop, ExitStack() as at_end:
        started = {name: at_end.enter_context(closing(run(stop))) for name, run in runs.items()}
        due: dict[str, Step] = {}

        def proceed(name: str, move: Callable[[], Step]) -> None:
            """To the next step of a run, or to its end."""
            try:
                due[name] = move()
            except StopIteration:
                report(name, None)
            except Interrupted:
                pass  # saved, and not ended
            except Exception as error:
                report(name, error)

        for name, run in started.items():
            proceed(name, partial(next, run))
        compiled = None
        while due:
            now = dict(due)
            due.clear()
            if compiled != tuple(now):
                compiled, joint_step = tuple(now), mapped_joint_step(list(now.values()))
            states, batches = zip(*((step.state, step.batch) for step in now.values()), strict=True)
            try:
                answers = zip(*joint_step(states, batches), strict=True)
            except Exception as error:
                for name in now:
                    proceed(name, partial(started[name].throw, error))
            else:
                for name, answer in zip(now, answers, strict=True):
                    proceed(name, partial(started[name].send, answer))
        if stop.is_set:
            raise Interrupted(f"stopped by {stop.name}")
