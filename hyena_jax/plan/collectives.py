"""What the devices of a compiled program exchange: over the links of a slice, and between slices."""

import re
from math import prod
from typing import NamedTuple

from hyena_jax.plan.hlo import Array, Instruction, Program

BETWEEN_SLICES = "xla_megascale_runtime"
"""What handles transfers between slices, as XLA names it."""
KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")


class Collective(NamedTuple):
    """One exchange between devices."""

    kind: str
    bytes: int
    """Of its result on one device, in one round."""
    rounds: int
    """How often it runs in a step, in all the loops around it."""
    shapes: tuple[str, ...]
    """The arrays of its result, such as `bf16[2048,4096]`."""
    devices: int
    """How many exchange with each other; 0 means all."""
    source: str
    """See `Instruction.op_name`."""

    def received(self, n_devices: int) -> float:
        """Bytes that a device receives in one round, if rings are used, in a program of `n_devices`."""
        n = self.devices or n_devices
        match self.kind:
            case "all-reduce":  # a reduce-scatter, then an all-gather
                return 2 * (1 - 1 / n) * self.bytes
            case "reduce-scatter":  # each device receives a part from every other
                return (n - 1) * self.bytes
            case "collective-permute":
                return self.bytes
        return (1 - 1 / n) * self.bytes


def collectives(program: Program) -> list[Collective]:
    """The exchanges of a program.

    One that XLA spread over several fusions, to overlap it with their work, counts once: its parts share a
    channel and shapes, and a part may run in a loop whose rounds each advance it a little.
    """
    found: dict[tuple, Collective] = {}
    for instruction, rounds in program.running():
        # Bodies and branches run by themselves; the computations of all others are part of them.
        is_outer = instruction.opcode in ("while", "call", "conditional")
        for one in [instruction] if is_outer else program.within(instruction):
            kind = one.opcode.removesuffix("-start")
            if kind not in KINDS:
                continue
            arrays = _received_arrays(one, kind)
            size, shapes = sum(array.bytes for array in arrays), tuple(map(str, arrays))
            key = (one.name,)  # all exchanges of `shard_map` and `pmap` share one channel
            if one is not instruction:
                key = (one.attribute("channel_id"), shapes)
            if key not in found or found[key].rounds > rounds:
                found[key] = Collective(kind, size, rounds, shapes, _group_size(one), one.op_name)
    return list(found.values())


def received_between_slices(program: Program, n_slices: int) -> float:
    """Bytes that a chip receives in a step through the network between S slices.

    XLA first reduces within a slice, whose links are fast; then each chip's host reduces its part with those
    of the other slices. By rings a chip receives 2 (1 - 1/S) times the array; others count as what arrives.
    """
    total = 0.0
    for instruction, rounds in program.running():
        if instruction.opcode == "recv" and BETWEEN_SLICES in instruction.attributes:
            size = instruction.results[0].bytes
            is_reduced = 'transfer_type="ALL_REDUCE"' in instruction.attributes
            total += rounds * (2 * (1 - 1 / n_slices) * size if is_reduced else size)
    return total


def _received_arrays(instruction: Instruction, kind: str) -> tuple[Array, ...]:
    """The arrays that an exchange returns; the result of a start also holds its operands, and counters."""
    arrays = instruction.results
    if instruction.opcode == kind or kind == "all-reduce":
        return arrays
    if kind == "collective-permute":
        return arrays[:1]
    return arrays[len(arrays) // 2 :]


def _group_size(instruction: Instruction) -> int:
    """See `Collective.devices`."""
    listed = re.search(r"replica_groups=\{\{([\d,]+)\}", instruction.attributes)
    if listed is not None:
        return listed[1].count(",") + 1
    counted = re.search(r"replica_groups=\[\d+,(\d+)\]", instruction.attributes)
    if counted is not None:
        return int(counted[1])
    named = re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", instruction.attributes)
    if named is None:
        return 0
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
    return prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", named[2]))
