"""Compares the copies that devices hold bit by bit, to find memory that fails silently."""

import hashlib

import jax
import numpy as np

from hyena_jax.parallel.processes import gather
from hyena_jax.parallel.strategy import Tree
from hyena_jax.system.trees import path_name


def check_replicas(tree: Tree, step: int) -> None:
    """Compares all copies of every shard of every leaf, within this process and between processes.

    `tree` holds arrays over all devices, as `Strategy.to_global` returns them. All processes must call this;
    all raise OSError, which names `step`, the leaf and the devices, if two copies differ in a bit.
    """
    first_seen: dict[str, tuple[str, str]] = {}
    for where, part, digest in (copy for copies in gather(_digests(tree)) for copy in copies):
        seen = first_seen.setdefault(part, (where, digest))
        if seen[1] != digest:
            raise OSError(
                f"after step {step} the copies of {part} on {seen[0]} and {where} differ: memory or a device "
                "is faulty; earlier checkpoints are not affected"
            )


def _digests(tree: Tree) -> list[tuple[str, str, str]]:
    """(device, leaf and its shard, SHA-256) of everything that this process's devices hold."""
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = path_name(path)
        for shard in leaf.addressable_shards:
            whole = all(span == slice(None) for span in shard.index)
            part = name if whole else f"{name}[{', '.join(map(_span, shard.index))}]"
            digest = hashlib.sha256(np.ascontiguousarray(shard.data)).hexdigest()[:32]
            found.append((f"device {shard.device.id}", part, digest))
    return found


def _span(span: slice) -> str:
    return f"{'' if span.start is None else span.start}:{'' if span.stop is None else span.stop}"
