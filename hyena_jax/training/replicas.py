"""Whether the copies that devices hold are copies: compared bit by bit, to find memory that fails silently.

Knows pytrees, not models.
"""

import hashlib
from typing import Any

import jax
import numpy as np

from hyena_jax.training.distributed import gather

Tree = Any


def check_replicas(tree: Tree, step: int) -> None:
    """Compares all copies of every part of every leaf, within this process and between processes.

    Args:
      tree: arrays over all devices, as `Strategy.to_global` gives them. All processes must call this.
      step: for the message.

    Raises:
      OSError: on all processes, if two copies differ in a bit; it names the leaf and the devices.
    """
    first_seen: dict[str, tuple[str, str]] = {}
    for where, part, digest in (copy for copies in gather(_digests(tree)) for copy in copies):
        seen = first_seen.setdefault(part, (where, digest))
        if seen[1] != digest:
            raise OSError(
                f"after step {step} the copies of {part} on {seen[0]} and {where} differ: memory or a device "
                "is faulty; the checkpoints before are not affected"
            )


def _digests(tree: Tree) -> list[tuple[str, str, str]]:
    """(device, leaf and its part, SHA-256) for all that this process' devices hold."""
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        for shard in leaf.addressable_shards:
            whole = all(span == slice(None) for span in shard.index)
            part = name if whole else f"{name}[{', '.join(map(_span, shard.index))}]"
            digest = hashlib.sha256(np.ascontiguousarray(shard.data)).hexdigest()[:32]
            found.append((f"device {shard.device.id}", part, digest))
    return found


def _span(span: slice) -> str:
    return f"{'' if span.start is None else span.start}:{'' if span.stop is None else span.stop}"
