"""A profiler trace of a few steps in the middle of a run."""

from pathlib import Path
from types import TracebackType

import jax

# Late enough for compilation to be over, long enough to see the pattern of a step.
FIRST, COUNT = 5, 10


class Profile:
    """Traces COUNT steps into `folder`, FIRST steps after the start, or earlier in a short run.

    Does nothing if `folder` is None.
    """

    def __init__(self, folder: Path | None, start: int, steps: int):
        self._folder = folder
        self._first = start + max(0, min(FIRST, steps - start - COUNT))
        self._is_tracing = False

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop()

    def before_step(self, t: int) -> None:
        """Starts or stops the trace at its steps; `t` counts steps from 0."""
        if self._folder is not None and t == self._first:
            jax.profiler.start_trace(self._folder)
            self._is_tracing = True
        if t == self._first + COUNT:
            self._stop()

    def _stop(self) -> None:
        if self._is_tracing:
            jax.profiler.stop_trace()
            self._is_tracing = False
