"""What each instruction of a compiled program costs at the public peaks of its chip.

Not measured. An instruction's three terms are the time of its matrix products, of the bytes that it moves
from and to the main memory (HBM), and of its elementwise operations. From them follow two ends:

- roofline: the largest term alone, as if the other two hid behind it;
- pessimistic: after the cycles that libtpu's compiler estimates for its own instructions. The memory reaches
  half its peak; products and elementwise operations add up; each register of a result takes at least 24
  cycles, or 12 if there are products. Pallas kernels, which overlap their terms themselves, take the
  largest.

Copies that run in the background are free, but a step takes no less than all its bytes at the memory's peak,
or at half of it.

A product in float32 takes several passes: on TPUs six in bfloat16 at precision "highest", three at "high".
The pessimistic end of other chips has the same form, but was not fitted to anything.
"""

import re
from collections.abc import Iterator, Mapping
from math import gcd, log2, prod
from typing import Any, NamedTuple

import numpy as np

from hyena_jax.plan.collectives import KINDS as EXCHANGES
from hyena_jax.plan.hlo import Array, Frame, Instruction, Program
from hyena_jax.plan.kernels import KernelWork
from hyena_jax.system.chips import Chip

PRODUCTS, CONVOLUTION, RECURRENCE = "matrix products", "long convolution", "recurrence"
ELEMENTWISE, COPIES, LOSS, OPTIMIZER = "elementwise", "copies and relayouts", "loss", "optimizer"
KINDS = (PRODUCTS, CONVOLUTION, RECURRENCE, ELEMENTWISE, COPIES, LOSS, OPTIMIZER)
TERMS = ("products", "memory", "vector")

# The kind of what a file of this package computes, of some files only in one function; other files are models
# and mixers.
SOURCES = {
    "ops/long_conv.py": CONVOLUTION,
    "ops/fast/matmul_fft.py": CONVOLUTION,
    "ops/kernels/long_conv.py": CONVOLUTION,
    "ops/online_conv.py": CONVOLUTION,
    "ops/modal_conv.py": CONVOLUTION,
    "ops/linear_recurrence.py": RECURRENCE,
    "ops/kernels/recurrence.py": RECURRENCE,
    "ops/kernels/delta_rule.py": PRODUCTS,
    "ops/rg_lru.py": RECURRENCE,
    "training/loss.py": LOSS,
    "training/step.py": OPTIMIZER,
    "training/optimizer.py": OPTIMIZER,
}
HEAD = ("models/language_model.py", "logits")
# Files that compute for others: the kind is that of the line that called them.
HELPERS = ("ops/fast/dense.py", "ops/fast/derivatives.py", "ops/shards.py")

FREE = frozenset(
    """
    parameter constant tuple get-tuple-element bitcast copy-done async-done async-update after-all
    partition-id replica-id opt-barrier while call conditional add-dependency send recv
    """.split()
)
MOVES = FREE | frozenset(
    """
    broadcast concatenate convert copy copy-start async-start dynamic-slice dynamic-update-slice gather iota
    pad reshape reverse slice transpose bitcast-convert
    """.split()
)
SLICES = ("slice", "dynamic-slice", "gather")
# Elementwise operations for which a TPU's vector unit takes several; other operations count as one. Rough.
SEVERAL = {
    **dict.fromkeys(("divide", "sqrt", "rsqrt", "remainder"), 4),
    **dict.fromkeys(("exponential", "log", "tanh", "logistic", "exponential-minus-one", "log-plus-one"), 8),
    **dict.fromkeys(("sine", "cosine", "power", "erf", "atan2"), 20),
}
# Of libtpu 0.0.41's estimates for v5e: the part of the memory's peak that copies reach.
REACHED, REGISTER = 0.5, 8 * 128
KERNEL = "tpu_custom_call"


class Cost(NamedTuple):
    """What one instruction costs in a step, in seconds at peak, all its rounds together."""

    kind: str
    products: float
    memory: float
    vector: float
    registers: float
    """Of its largest result, in registers of 8 x 128 elements."""
    in_background: bool
    """Whether it runs while others do."""
    is_kernel: bool
    name: str
    source: str
    """The line of Python that it comes from, `file:line`; empty if unknown."""

    @property
    def roofline(self) -> float:
        return 0.0 if self.in_background else max(self.products, self.memory, self.vector)

    @property
    def pessimistic(self) -> float:
        if self.in_background:
            return 0.0
        if self.is_kernel:
            return self.roofline
        registers = self.registers / 2 if self.products else self.registers
        return max(self.products + self.vector, self.memory / REACHED, registers)

    @property
    def bound(self) -> str:
        return largest_term(self)


def largest_term(of: Any) -> str:
    """Which of TERMS, the fields, is the largest."""
    return max(TERMS, key=lambda name: getattr(of, name))


def costs(program: Program, chip: Chip, kernels: Mapping[str, KernelWork] | None = None) -> list[Cost]:
    """The costs of all instructions that are not exchanges, in the order in which they run.

    `kernels` are by name and results, such as `conv(f32[8,128], f32[8])`; of others only the bytes count.
    """
    by_name = {one.name: one for body in program.computations.values() for one in body}
    found = []
    for instruction, rounds in program.running():
        if instruction.opcode in FREE or instruction.opcode.removesuffix("-start") in EXCHANGES:
            continue
        target = instruction.attribute("custom_call_target").strip('"')
        is_call = instruction.opcode == "custom-call"
        # Of calls, others than kernels and a GPU's libraries only tell XLA where arrays lie.
        is_free = is_call and target != KERNEL and not target.startswith("__")
        if instruction.opcode.endswith("-done") or is_free:
            continue
        flops = vector = 0.0
        for inner in _parts(program, instruction):
            if inner.opcode in ("convolution", "dot"):
                flops += _product_flops(inner, by_name, chip.passes)
            else:
                vector += _operations(inner, by_name)
        if is_call:
            name, results = (
                re.sub(r"[.0-9]*$", "", instruction.name),
                ", ".join(map(str, instruction.results)),
            )
            work = (kernels or {}).get(f"{name}({results})", KernelWork(0.0, 0.0))
            flops, vector = work.products, work.vector
        registers = max((array.padded_size for array in instruction.results), default=0) / REGISTER
        line = _line(program.frames(instruction))
        found.append(
            Cost(
                _kind(program, instruction, line),
                rounds * flops / chip.flops,
                rounds * _moved(program, instruction, by_name) / chip.memory_rate,
                rounds * vector / chip.vector_rate,
                rounds * registers / chip.register_rate,
                instruction.opcode.endswith("-start"),
                is_call,
                instruction.name,
                f"{line.file}:{line.line}" if line is not None else "",
            )
        )
    return found


def _parts(program: Program, instruction: Instruction) -> Iterator[Instruction]:
    """The instructions that a fusion holds, or the instruction itself."""
    if instruction.opcode != "fusion":
        yield instruction
        return
    for name in instruction.called:
        for inner in program.computations.get(name, ()):
            yield from _parts(program, inner)


def _product_flops(
    one: Instruction, by_name: Mapping[str, Instruction], passes: Mapping[str, float]
) -> float:
    left, right = (by_name[name].results[0] for name in one.operands[:2])
    result = one.results[0]
    if one.opcode == "dot":
        terms = prod(_sizes(left, one.attribute("lhs_contracting_dims")))
        columns = right.size // max(terms * prod(_sizes(right, one.attribute("rhs_batch_dims"))), 1)
        rows = result.size // max(columns, 1)
    else:
        rows, terms, columns = _convolution(one, left, right, result)
    precision = one.attribute("operand_precision").split(",")[0] or "default"
    times = passes.get(precision, 1) if left.element == "f32" else 1
    return 2.0 * rows * terms * columns * times


def _sizes(array: Array, axes: str) -> list[int]:
    return [array.shape[int(axis)] for axis in axes.split(",") if axis]


def _convolution(one: Instruction, left: Array, right: Array, result: Array) -> tuple[float, int, int]:
    """(rows, terms, columns) of the matrix product that a convolution is; TPUs write all products so.

    Positions of the window that only meet padding, or the holes of a dilated input, count nothing.
    """
    left_labels, right_labels, result_labels = re.match(
        r"(\w+)_(\w+)->(\w+)", one.attribute("dim_labels")
    ).groups()
    groups = int(one.attribute("feature_group_count") or 1)
    batch_groups = int(one.attribute("batch_group_count") or 1)
    terms = left.shape[left_labels.index("f")] // groups
    columns = result.shape[result_labels.index("f")]
    rows = left.shape[left_labels.index("b")] / batch_groups
    window = dict(pair.split("=") for pair in one.attribute("window").split() if "=" in pair)
    for axis in sorted(set(left_labels) - {"b", "f"}):
        n, taps = left.shape[left_labels.index(axis)], right.shape[right_labels.index(axis)]
        outputs = result.shape[result_labels.index(axis)]

        def option(name: str, default: str, axis: str = axis) -> str:
            return window[name].split("x")[int(axis)] if name in window else default

        stride, spread = int(option("stride", "1")), int(option("rhs_dilate", "1"))
        holes, before = int(option("lhs_dilate", "1")), int(option("pad", "0_0").split("_")[0])
        rows *= _n_valid(n, taps, outputs, stride, spread, holes, before)
    return rows, terms, columns


def _n_valid(n: int, taps: int, outputs: int, stride: int, spread: int, holes: int, before: int) -> int:
    """How many pairs of an output o and a tap k meet an input of a convolution's axis.

    The pair is at o stride + k spread - before in an input that is n entries, `holes` apart.
    """
    shift = before - np.arange(taps) * spread  # o stride - shift must be a multiple of `holes`
    common = gcd(stride, holes)
    period = holes // common
    residue = (shift // common * pow(stride // common, -1, period)) % period
    low = np.maximum(0, -(-shift // stride))
    high = np.minimum(outputs - 1, (shift + (n - 1) * holes) // stride)
    first = low + (residue - low) % period
    return int(np.where((shift % common == 0) & (first <= high), (high - first) // period + 1, 0).sum())


def _operations(one: Instruction, by_name: Mapping[str, Instruction]) -> float:
    """Elementwise operations, on the elements that whole tiles hold."""
    if one.opcode in MOVES or one.opcode == "custom-call":
        return 0.0
    if one.opcode in ("reduce", "reduce-window", "scatter", "select-and-scatter"):
        read = by_name.get(one.operands[0]) if one.operands else None
        return float(read.results[0].padded_size) if read and read.results else 0.0
    size = one.results[0].padded_size if one.results else 0
    if one.opcode == "fft":
        return 5.0 * size * log2(max(int(one.attribute("fft_length").split(",")[-1]), 2))
    if one.opcode == "sort":
        return size * log2(max(size, 2)) ** 2 / 2
    return float(size * SEVERAL.get(one.opcode, 1))


def _moved(program: Program, one: Instruction, by_name: Mapping[str, Instruction]) -> int:
    """Bytes that an instruction reads from and writes to the main memory."""
    if one.opcode == "copy-start":  # (destination, source, context)
        return sum(array.padded_bytes for array in one.results[:2] if array.space == 0)
    if one.opcode == "async-start":  # a slice on its way to the vector memory: (operands, results, context)
        return sum(array.padded_bytes for array in one.results[len(one.operands) : -1])
    if one.opcode == "dynamic-update-slice":  # in place
        return 2 * by_name[one.operands[1]].results[0].padded_bytes
    if one.opcode in SLICES:
        return sum(2 * array.padded_bytes for array in one.results if array.space == 0)
    inner = program.computations.get(one.called[0], []) if one.opcode == "fusion" else []
    parameters = {part.number: part for part in inner if part.opcode == "parameter"}
    moved = 0
    for i, name in enumerate(one.operands):
        array = by_name[name].results[0] if name in by_name and by_name[name].results else None
        if array is None or array.space != 0:
            continue
        moved += _read(inner, parameters[i], array) if i in parameters else array.padded_bytes
    roots = _roots(inner)
    for i, array in enumerate(one.results):
        if array.space == 0:
            root = roots[i] if i < len(roots) else None
            moved += array.padded_bytes if root is None else _written(root, array, by_name)
    return moved


def _read(inner: list[Instruction], parameter: Instruction, array: Array) -> int:
    """Bytes of a fusion's parameter that it reads: of slices only, and nothing of what it overwrites."""
    names, read = {parameter.name}, 0
    for part in inner:
        if names.isdisjoint(part.operands):
            continue
        if part.opcode in ("bitcast", "reshape"):
            names.add(part.name)
        elif part.opcode in SLICES and part.operands[0] in names:
            read += part.results[0].padded_bytes
        elif part.opcode != "dynamic-update-slice" or part.operands[0] not in names:
            return array.padded_bytes
    return min(read, array.padded_bytes)


def _roots(inner: list[Instruction]) -> list[Instruction]:
    """The instructions whose results a fusion returns."""
    root = next((part for part in inner if part.is_root), None)
    if root is None or root.opcode != "tuple":
        return [] if root is None else [root]
    named = {part.name: part for part in inner}
    return [named[name] for name in root.operands if name in named]


def _written(root: Instruction, array: Array, by_name: Mapping[str, Instruction]) -> int:
    """Bytes of a fusion's result that it writes: of an updated slice, the slice."""
    while root.opcode == "bitcast" and root.operands[0] in by_name:
        root = by_name[root.operands[0]]
    if root.opcode == "dynamic-update-slice" and root.operands[1] in by_name:
        return by_name[root.operands[1]].results[0].padded_bytes
    return array.padded_bytes


def _kind(program: Program, one: Instruction, line: Frame | None) -> str:
    """A relayout is one wherever it is; the line that it comes from decides about the rest."""
    parts = list(_parts(program, one))
    if one.opcode != "custom-call" and all(part.opcode in MOVES for part in parts):
        return COPIES
    if line is not None and (line.file, line.function.rpartition(".")[2]) == HEAD:
        return LOSS
    if line is not None and line.file in SOURCES:
        return SOURCES[line.file]
    return PRODUCTS if any(part.opcode in ("convolution", "dot") for part in parts) else ELEMENTWISE


def _line(frames: tuple[Frame, ...]) -> Frame | None:
    """The innermost line of this package that does not compute for others; files as in SOURCES."""
    for frame in frames:
        _, found, file = frame.file.rpartition("hyena_jax/")
        if found and file not in HELPERS:
            return frame._replace(file=file)
    return None
