"""Several processes through `jax.distributed`: how they join, and what they and their devices must agree on.

Everything here also works with one process, at no cost.
"""

import hashlib
import importlib.metadata
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import jax
import numpy as np

from hyena_jax.config import Cluster
from hyena_jax.parallel.roll_call import call_roll, must_be_same
from hyena_jax.system.errors import UserError
from hyena_jax.system.trees import path_name

T = TypeVar("T")

STATUS = "(UNKNOWN|INTERNAL|UNAVAILABLE|ABORTED|CANCELLED|DEADLINE_EXCEEDED): "
"""How the runtime's messages about another process begin."""


def join(cluster: Cluster, heartbeat_timeout: int) -> None:
    """Joins the other processes, if the flags name any. Call it before anything is computed.

    A process that is silent for `heartbeat_timeout` seconds counts as dead, and JAX ends the others; a
    process that is done waits this long for them. OSError if they cannot be reached within
    `cluster.join_timeout` seconds.
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
    # Its handler of SIGTERM would replace ours: see `watch_preemption`.
    jax.config.update("jax_enable_preemption_service", False)
    # gRPC would look for the other processes through a proxy, even on this machine, and wait in vain.
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
    from jax._src import clusters  # the public API detects them only inside `initialize`, too late for us

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


def leave() -> None:
    """Disconnects from the other processes once all of them call this; the caller then computes alone."""
    if jax.distributed.is_initialized():
        jax.distributed.shutdown()


def lost_another(error: BaseException | None) -> bool:
    """Whether an error means that one of several processes, this one or another, cannot continue.

    Errors that all processes raise (wrong input, a stop, a loss that is not finite) do not count.
    """
    if jax.process_count() == 1:
        return False
    # gloo reports a closed connection as a ValueError.
    is_status = isinstance(error, ValueError) and re.match(STATUS, str(error)) is not None
    return is_status or isinstance(error, OSError | jax.errors.JaxRuntimeError)


@contextmanager
def leaving_on_failure(report: Callable[[object, int], int], is_remote: bool) -> Iterator[None]:
    """Reports an error after which several processes cannot continue, and exits at once with code 3.

    `is_remote`: the run writes to a bucket, for which threads may wait long after an OSError.
    """
    try:
        yield
    except Exception as error:
        if not lost_another(error) and not (is_remote and isinstance(error, OSError)):
            raise
        is_ours = isinstance(error, OSError)
        with suppress(OSError):  # whoever read our output may be gone
            report(error if is_ours else f"another process is lost: {str(error).splitlines()[0]}", 3)
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(3)  # peers that wait for this process see it disconnect


def is_first() -> bool:
    """Whether this is process 0, the only one that prints and writes."""
    return jax.process_index() == 0


def gather(value: T) -> list[T]:
    """The JSON values of all processes, in the order of processes. All processes must call this."""
    if jax.process_count() == 1:
        return [value]
    from jax.experimental import multihost_utils

    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(len(text)))
    # Padded to a power of two, so that few lengths are compiled.
    padded = np.zeros(1 << int(sizes.max()).bit_length(), np.uint8)
    padded[: len(text)] = text
    rows = multihost_utils.process_allgather(padded)
    return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


def on_all(make: Callable[[], T]) -> T:
    """The result of `make` in this process; if `make` raises in one process, all processes raise.

    All processes must call this. They raise the UserError or OSError of the first process that had one.
    """
    if jax.process_count() == 1:
        return make()
    value, error, told = None, None, None
    try:
        value = make()
    except UserError as raised:
        error, told = raised, [raised.message, raised.argument]
    except OSError as raised:
        error, told = raised, [str(raised)]
    for i, found in enumerate(gather(told)):
        if found is not None:
            text, *argument = found
            raise (UserError if argument else OSError)(f"{text} (in process {i})", *argument) from error
    return value


def from_first(make: Callable[[], T]) -> T:
    """The JSON value of `make`, which only process 0 runs; all processes get the value, or the error."""
    return gather(on_first(make))[0]


def on_first(make: Callable[[], T]) -> T | None:
    """The result of `make`, which only process 0 runs; None on the others. Its error is raised on all."""
    return on_all(lambda: make() if is_first() else None)


def require_equal_devices() -> None:
    """Raises UserError, on all processes, unless all of them have the same number of devices."""
    counts = Counter(device.process_index for device in jax.devices())
    if len(set(counts.values())) > 1:
        raise UserError(f"every process must have the same number of devices, got {dict(counts)}")


def require_equal(values: Mapping[str, Any]) -> None:
    """Raises UserError, on all processes, unless all call this with equal JSON values; names a difference."""
    first, *others = gather(dict(values))
    for i, other in enumerate(others, 1):
        for name in first | other:
            if name not in first or name not in other or first[name] != other[name]:
                raise UserError(must_be_same(first.get(name), i, other.get(name)), name)


def watch_preemption() -> None:
    """From now on, SIGTERM to any of several processes makes `is_preempted` true in all of them.

    It replaces this process's handler of SIGTERM. Nothing changes with a single process.
    """
    if jax.process_count() == 1:
        return
    from jax._src.distributed import global_state  # publicly, only `initialize` starts it: too early for us

    if global_state.preemption_sync_manager is None:
        jax.config.update("jax_enable_preemption_service", True)
        global_state.initialize_preemption_sync_manager()


def is_preempted(step: int) -> bool:
    """Whether all processes stop after this step, since one of them got SIGTERM: the same in all of them.

    All must call this after every step. After SIGTERM, they agree on the step after the latest that any
    reached.
    """
    if jax.process_count() == 1:
        return False
    from jax.experimental import multihost_utils

    return multihost_utils.reached_preemption_sync_point(step)


def check_replicas(tree: Any, step: int) -> None:
    """Compares all copies of every shard of every leaf, to find memory that fails silently.

    They are compared bit by bit, within this process and between processes. `tree` holds arrays over all
    devices, as `Strategy.to_global` returns them. All processes must call this; all raise OSError, which
    names `step`, the leaf and the devices, if two copies differ.
    """
    ours = []  # device, leaf and its shard, SHA-256
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = path_name(path)
        for shard in leaf.addressable_shards:
            whole = all(span == slice(None) for span in shard.index)
            ends = ((s.start, s.stop) for s in shard.index)
            spans = ", ".join(":".join("" if end is None else str(end) for end in pair) for pair in ends)
            part = name if whole else f"{name}[{spans}]"
            digest = hashlib.sha256(np.ascontiguousarray(shard.data)).hexdigest()[:32]
            ours.append((f"device {shard.device.id}", part, digest))
    first_seen: dict[str, tuple[str, str]] = {}
    for where, part, digest in (copy for copies in gather(ours) for copy in copies):
        seen = first_seen.setdefault(part, (where, digest))
        if seen[1] != digest:
            raise OSError(
                f"after step {step} the copies of {part} on {seen[0]} and {where} differ: memory or a device "
                "is faulty; earlier checkpoints are not affected"
            )
