"""Several processes, through `jax.distributed`: how they meet, and the few things they must agree on.

Everything here also holds for one process, where it costs nothing.
"""

import importlib.metadata
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, TypeVar

import jax
import numpy as np

from hyena_jax.config import Cluster, UserError
from hyena_jax.training.roll_call import call_roll, must_be_same

T = TypeVar("T")

STATUS = "(UNKNOWN|INTERNAL|UNAVAILABLE|ABORTED|CANCELLED|DEADLINE_EXCEEDED): "
"""How messages of the runtime begin that are about another process."""


def join(cluster: Cluster, heartbeat_timeout: int) -> None:
    """Joins the other processes, if there are to be any. Must come before anything is computed.

    Args:
      heartbeat_timeout: seconds; a process that is silent for longer is taken for dead, and JAX ends the
        others. A process that ended waits as long for the others to end.

    Raises:
      UserError: if nothing says where the others are, or they do not fit together: see `call_roll`.
      OSError: if they cannot be reached within `cluster.join_timeout` seconds.
    """
    if not cluster.distributed and cluster.coordinator is None:
        return
    found = _from_environment(cluster) if cluster.distributed else cluster
    packages = ("hyena_jax", "jax", "jaxlib")
    card = {
        "process_id": found.process_id,
        "num_processes": found.num_processes,
        "versions": {package: importlib.metadata.version(package) for package in packages},
    }
    bind_address = call_roll(found.coordinator, card, cluster.join_timeout)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # Its handler of SIGTERM would take the place of ours; the loop agrees on stopping by itself.
    jax.config.update("jax_enable_preemption_service", False)
    # gRPC would ask a proxy for the other processes, even on this machine, and wait for it in vain.
    os.environ.setdefault("no_grpc_proxy", found.coordinator.rpartition(":")[0].strip("[]"))
    jax.config.update("jax_check_proxy_envs", False)
    try:
        jax.distributed.initialize(
            found.coordinator,
            found.num_processes,
            found.process_id,
            cluster_detection_method=None if cluster.distributed else "deactivate",
            initialization_timeout=max(60, heartbeat_timeout),
            heartbeat_timeout_seconds=heartbeat_timeout,
            shutdown_timeout_seconds=heartbeat_timeout,
            coordinator_bind_address=bind_address,
        )
    except (RuntimeError, ValueError) as error:
        raise OSError(f"the other processes cannot be reached: {error}") from error


def _from_environment(cluster: Cluster) -> Cluster:
    """Where the others are, as the cluster's environment names them."""
    from jax._src import clusters  # JAX offers this as a part of `initialize` alone, which is too late for us

    address = os.environ.get("JAX_COORDINATOR_ADDRESS")
    detect = clusters.ClusterEnv.auto_detect_unset_distributed_params
    try:
        address, count, number, _ = detect(address, None, None, None, None, cluster.join_timeout)
        if None in (address, count, number):
            raise ValueError("nothing like Slurm, Open MPI, Kubernetes or a Cloud TPU was found")
        return Cluster(coordinator=address, num_processes=count, process_id=number)
    except (ValueError, KeyError, IndexError, RuntimeError) as error:
        raise UserError(
            f"distributed: this environment does not name the processes ({error}); give --coordinator, "
            "--num-processes and --process-id"
        ) from error


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


def require_equal_devices() -> None:
    """Raises UserError, on all processes, unless they have as many devices each, as all else here needs."""
    counts = Counter(device.process_index for device in jax.devices())
    if len(set(counts.values())) > 1:
        raise UserError(f"every process must have the same number of devices, got {dict(counts)}")


def require_equal(values: Mapping[str, Any]) -> None:
    """Raises UserError, on all processes, unless all call this with the same JSON values; names one."""
    first, *others = gather(dict(values))
    for i, other in enumerate(others, 1):
        for name in first | other:
            if name not in first or name not in other or first[name] != other[name]:
                raise UserError(must_be_same(name, first.get(name), i, other.get(name)))


def first_request(name: str | None) -> str | None:
    """The signal that the first process that got one got; None if none did. All must call it."""
    return next((asked for asked in gather(name) if asked is not None), None)
