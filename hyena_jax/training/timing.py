"""What the steps of a run take: their speed without the time for other things, traces, and their FLOPs."""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from hyena_jax import models
from hyena_jax.config import Experiment, ModelConfig
from hyena_jax.ops.counts import Work, count
from hyena_jax.ops.forms import Layout
from hyena_jax.parallel.processes import is_first, on_first
from hyena_jax.system.errors import require
from hyena_jax.system.files import require_can_hold_files
from hyena_jax.training.folder import leads_outside
from hyena_jax.training.options import StartOptions
from hyena_jax.training.step import init_params

# Late enough for compilation to be over, long enough to see the pattern of a step.
PROFILE_FROM, PROFILE_STEPS = 5, 10
PASSES_OF_TRAINING = 3
"""The backward pass takes two products for each of the forward pass; nothing that is recomputed counts."""


class Clock:
    """Training speed, without the time that evaluation and saving take; and the shares of these."""

    def __init__(self, units_per_step: int):
        self.units_per_step = units_per_step
        self._seconds: dict[str, float] = {"data_wait": 0.0, "evaluating": 0.0, "saving": 0.0}
        self._began = None
        self.flops_per_unit: float | None = None
        """FLOPs of training on a token or an image; None until they are counted, 0 if they cannot be."""
        self.restart(0)

    @property
    def seconds(self) -> float:
        """Since the first step."""
        return 0.0 if self._began is None else time.perf_counter() - self._began

    def shares(self) -> dict[str, float]:
        """The part of the time since the first step that went into waiting and each kind of pause, 0 to 1."""
        return {part: spent / max(self.seconds, spent, 1e-9) for part, spent in self._seconds.items()}

    def begin(self, step: int) -> None:
        """Begins the first interval: compilation is over."""
        self._began = time.perf_counter()
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        self.restart(step)

    def restart(self, step: int) -> None:
        """Begins a new interval after `step`."""
        self._step, self._start, self._waited = step, time.perf_counter(), 0.0

    def units_per_second(self, step: int) -> float | None:
        """The speed since the interval began, or None if it began at this step; begins a new one."""
        if step == self._step:
            return None
        units = (step - self._step) * self.units_per_step
        speed = units / (time.perf_counter() - self._start)
        self.restart(step)
        return speed

    @property
    def wait_share(self) -> float:
        """The part of the time since the interval began that `waiting` took, from 0 to 1."""
        return self._waited / (time.perf_counter() - self._start)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Time in this context is time without data to train on."""
        began = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - began
            self._waited += took
            self._seconds["data_wait"] += took

    @contextmanager
    def paused(self, part: str | None = None) -> Iterator[None]:
        """Time in this context does not count; its share is kept under the name of `part`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - began
            self._start += took
            if part is not None:
                self._seconds[part] += took


def check_profile(options: StartOptions, workdir: Path) -> None:
    """Raises UserError unless traces can be written where the options name it."""
    folder = options.profile
    if folder is not None:
        on_first(lambda: require_can_hold_files("profile", folder))
    for name in ("profile_at", "profile_every"):
        value = getattr(options, name)
        require(folder is not None or not value, name, value, "absent without profile")
    traces = () if folder is None else (folder, *folder.glob("step_*"))
    leads_out = any(leads_outside(workdir, trace / "plugins" / "profile") for trace in traces)
    require(not leads_out, "profile", str(folder), "no link that leads out of the run folder")


class Profile(ExitStack):
    """Traces PROFILE_STEPS steps into a folder, PROFILE_FROM steps after the start; earlier in a short run.

    With `profile_at` or `profile_every`, after these steps and after every so many, each trace in its own
    subfolder. A context manager, which ends the trace; does nothing without a folder, nor in later processes.
    """

    def __init__(self, options: StartOptions, start: int, steps: int):
        super().__init__()
        self._folder = options.profile if is_first() else None
        self._at, self._every = options.profile_at, options.profile_every
        self._first = None
        if not self._at and self._every is None:
            self._first = start + max(0, min(PROFILE_FROM, steps - start - PROFILE_STEPS))
        self._end = start

    def before_step(self, t: int) -> None:
        """Starts or stops the trace at its steps; `t` counts steps from 0."""
        if t == self._end:
            self.close()
        is_due = t in self._at or (self._every is not None and t > 0 and t % self._every == 0)
        if self._folder is not None and t >= self._end and (is_due or t == self._first):
            self._end = t + PROFILE_STEPS
            self.enter_context(jax.profiler.trace(self._folder / f"step_{t}" if is_due else self._folder))


def forward_work(config: ModelConfig, params: Any, inputs: Any) -> Work:
    """The work of a forward pass on arrays or shapes: transforms by n log n, as CPUs take them."""
    if hasattr(config, "remat"):
        config = replace(config, remat="none")
    model = models.build(config, None, Layout("cpu"))

    def forward(params: Any, inputs: jax.Array) -> jax.Array:
        return model.apply({"params": params}, inputs, None, True)

    return count(forward, params, inputs)


def flops_per_unit(experiment: Experiment, units_per_row: int) -> float:
    """FLOPs of products and transforms of training on a token or an image; 0 with LoRA, which trains factors.

    Model FLOPs as in PaLM (2204.02311, appendix B): three forward passes, whatever is recomputed.
    """
    config, n_rows = experiment.model, experiment.data.batch_size
    if getattr(getattr(config, "lora", None), "rank", None) is not None:
        return 0.0
    shape, dtype = config.input_row()
    if config.input_kind.is_tokens:
        shape = (getattr(experiment.data, "seq_len", shape[0]), *shape[1:])
    model = models.build(config)
    params = jax.eval_shape(lambda: init_params(model, experiment.seed))
    work = forward_work(config, params, jax.ShapeDtypeStruct((n_rows, *shape), dtype))
    return PASSES_OF_TRAINING * (work.products + work.transforms) / (n_rows * units_per_row)
