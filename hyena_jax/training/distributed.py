"""Several processes, through `jax.distributed`: how they meet, and the few things they must agree on.

Everything here also holds for one process, where it costs nothing.
"""

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np

from hyena_jax.config import Cluster, UserError

T = TypeVar("T")

STATUS = "(UNKNOWN|INTERNAL|UNAVAILABLE|ABORTED|CANCELLED|DEADLINE_EXCEEDED): "
"""How messages of the runtime begin that are about another process."""


def join(cluster: Cluster, heartbeat_timeout: int) -> None:
    """Joins the other processes, if there are to be any. Must come before anything is computed.

    Args:
      heartbeat_timeout: seconds; a process that is silent for longer is taken for dead, and JAX ends the
        others. A process that ended waits as long for the others to end.

    Raises:
      UserError: if nothing says where the others are.
      OSError: if they cannot be reached within that time, but at least a minute.
    """
    if not cluster.distributed and cluster.coordinator is None:
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # Its handler of SIGTERM would take the place of ours; the loop agrees on stopping by itself.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            cluster.coordinator,
            cluster.num_processes,
            cluster.process_id,
            cluster_detection_method="deactivate" if cluster.coordinator else None,
            initialization_timeout=max(60, heartbeat_timeout),
            heartbeat_timeout_seconds=heartbeat_timeout,
            shutdown_timeout_seconds=heartbeat_timeout,
        )
    except ValueError as error:
        raise UserError(
            f"distributed: this environment names no other processes ({error}); give --coordinator, "
            "--num-processes and --process-id"
        ) from error
    except RuntimeError as error:
        raise OSError(f"the other processes cannot be reached: {error}") from error


def part() -> None:
    """Parts from the other processes; what follows is computed alone. Waits until all call this."""
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()


def leave_at_once(code: int) -> NoReturn:
    """Ends this process without waiting for the others, which may wait for it and now see that it ended."""
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def lost_another(error: BaseException | None) -> bool:
    """Whether an error means that of several processes another, or this one, cannot go on.

    Errors that all raise (wrong input, a stop, a loss that is not finite) are not of this kind.
    """
    return jax.process_count() > 1 and (isinstance(error, OSError) or _in_communication(error))


def _in_communication(error: BaseException | None) -> bool:
    """Whether the runtime failed. What gloo has to say of a closed connection comes as a ValueError, too."""
    is_status = isinstance(error, ValueError) and re.match(STATUS, str(error))
    return isinstance(error, jax.errors.JaxRuntimeError) or bool(is_status)


@contextmanager
def leaving_on_failure(report: Callable[[object, int], int]) -> Iterator[None]:
    """Reports an error after which several processes cannot go on, and ends this one at once with code 3."""
    try:
        yield
    except Exception as error:
        if not lost_another(error):
            raise
        is_ours = isinstance(error, OSError)
        with suppress(OSError):  # the reader of our output may be gone
            report(error if is_ours else f"another process is lost: {str(error).splitlines()[0]}", 3)
        leave_at_once(3)


def is_first() -> bool:
    """Whether this is process 0, which alone prints and writes."""
    return jax.process_index() == 0


def gather(value: T) -> list[T]:
    """The JSON values that all processes call this with, in their order. All must call it."""
    if jax.process_count() == 1:
        return [value]
    from jax.experimental import multihost_utils

    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(len(text)))
    # A power of two, so that few lengths are compiled.
    padded = np.zeros(1 << int(sizes.max()).bit_length(), np.uint8)
    padded[: len(text)] = text
    rows = multihost_utils.process_allgather(padded)
    return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


def together(make: Callable[[], T]) -> T:
    """What `make` returns here. Where it raises in one process, all raise, and none waits for another.

    Every process must call this. The UserError or OSError is that of the first process that had one.
    """
    if jax.process_count() == 1:
        return make()
    value, error = None, None
    try:
        value = make()
    except (UserError, OSError) as raised:
        error = raised
    for i, found in enumerate(gather(None if error is None else [isinstance(error, UserError), str(error)])):
        if found is not None:
            is_user_error, text = found
            raise (UserError if is_user_error else OSError)(f"in process {i}: {text}") from error
    return value


def from_first(make: Callable[[], T]) -> T:
    """What `make` returns (a JSON value) on process 0, which alone runs it; all get it, or its error."""
    return gather(together(lambda: make() if is_first() else None))[0]


def require_equal(what: str, value: Any) -> None:
    """Raises UserError, on all processes, unless all call this with the same JSON value."""
    values = gather(value)
    others = [i for i, other in enumerate(values) if other != values[0]]
    if others:
        raise UserError(f"{what} must be the same in all processes, but differs in process {others[0]}")


def first_request(name: str | None) -> str | None:
    """The signal that the first process that got one got; None if none did. All must call it."""
    return next((asked for asked in gather(name) if asked is not None), None)
