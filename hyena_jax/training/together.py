"""Runs of one model that are trained in one program, each in its own folder, as if it were alone."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NamedTuple

import jax
from rich.console import Console

from hyena_jax.config import Experiment
from hyena_jax.system.signals import Interrupted, StopRequest, stop_requests
from hyena_jax.training.hooks import Hook, LiveRun
from hyena_jax.training.options import StartOptions
from hyena_jax.training.run import batches, ended, start_run
from hyena_jax.training.setup import LoadData, make_setup
from hyena_jax.training.step import Metrics, TrainState, make_gradients, make_joint_step


class Job(NamedTuple):
    """A run to train: the arguments of `run.train`."""

    experiment: Experiment
    workdir: Path
    console: Console
    options: StartOptions
    load_data: LoadData
    make_hooks: Callable[[LiveRun], Sequence[Hook]]


def train_together(jobs: Mapping[str, Job], report: Callable[[str, Exception | None], None]) -> None:
    """Trains runs whose experiments differ in seed and optimizer alone, and not in its accumulation_steps.

    A run that ends, diverges or fails leaves the others, whose step is then compiled again; `report` gets its
    name, and its error or None. Runs may begin at different steps. If asked to stop, raises Interrupted, and
    the runs that had not ended are saved.
    """
    with stop_requests() as stop, ExitStack() as at_end:
        members = {name: _Member(job, stop, at_end.enter_context(ExitStack())) for name, job in jobs.items()}

        def each(act: Callable[[_Member], None]) -> None:
            for name, member in list(members.items()):
                try:
                    with ExitStack() as on_error:
                        on_error.push(member.files)
                        act(member)
                        on_error.pop_all()
                    if not member.now.stops:
                        continue
                    member.end()
                    report(name, None)
                except Interrupted:
                    pass  # saved, and not ended
                except Exception as error:
                    report(name, error)
                del members[name]

        each(_Member.begin)
        compiled = None
        while members:
            each(_Member.read)
            if compiled != tuple(members) and members:
                compiled, joint_step = tuple(members), _mapped_joint_step(list(members.values()))
            states, rows = [[getattr(one, part) for one in members.values()] for part in ("state", "batch")]
            try:
                answers = zip(*joint_step(tuple(states), tuple(rows)), strict=True) if members else ()
            except Exception as error:
                each(lambda _, error=error: _raise(error))
            else:
                for member, answer in zip(members.values(), answers, strict=True):
                    member.state, member.metrics = answer
                each(_Member.after_step)
        if stop.is_set:
            raise Interrupted(f"stopped by {stop.name}")


class _Member:
    """One of the runs; `run.train` shows its steps in one place."""

    state: TrainState
    metrics: Metrics

    def __init__(self, job: Job, stop: StopRequest, files: ExitStack):
        """Nothing is read or opened yet; `files` closes what will be."""
        self.job, self.stop, self.files = job, stop, files

    def begin(self) -> None:
        job = self.job
        self.setup = make_setup(job.experiment, job.console, job.workdir, job.options, job.load_data)
        opened = start_run(self.setup, job.workdir, job.console, self.stop, job.options)
        self.run, self.state = self.files.enter_context(opened)
        self.batches = self.files.enter_context(closing(batches(self.run)))
        self.hooks, self.now = job.make_hooks(self.run), self.run.now(self.run.start, self.state)
        if self.run.must_evaluate:
            for hook in self.hooks:
                hook(self.now)

    def read(self) -> None:
        self.t, batch = next(self.batches)
        self.batch = self.setup.strategy.place_batch(batch)

    def after_step(self) -> None:
        self.now = self.run.now(self.t + 1, self.state, self.metrics)
        for hook in self.hooks:
            hook(self.now)

    def end(self) -> None:
        """Closes the run; raises Interrupted if a signal ended it."""
        self.stop.defer()
        params = self.setup.strategy.host_copy(self.state.model_params)
        self.files.close()
        ended(self.setup, self.job.workdir, params, self.stop.name)


def _mapped_joint_step(members: Sequence[_Member]) -> Callable:
    setup, states = members[0].setup, tuple(member.state for member in members)
    gradients = make_gradients(
        setup.model,
        setup.strategy.axis_name,
        setup.experiment.optimizer.accumulation_steps,
        setup.loss,
        setup.metrics,
    )
    optimizers = [member.setup.optimizer for member in members]
    seeds = [member.setup.experiment.seed for member in members]
    joint_step = make_joint_step(setup.model, optimizers, seeds, gradients)
    return setup.strategy.map_train_step(joint_step, jax.eval_shape(lambda: states))


def _raise(error: Exception) -> None:
    raise error
