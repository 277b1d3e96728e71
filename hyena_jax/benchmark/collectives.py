"""What the devices of a compiled program exchange, read from its optimised HLO text."""

import re
from collections.abc import Iterator
from math import prod
from typing import NamedTuple

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
BYTES = {"pred": 1, "c64": 8, "c128": 16}
"""Bytes of an element whose type does not end with its number of bits."""

# A computation starts with its name and its parameters, and ends with a brace in the first column.
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\(")
_ARRAY = re.compile(r"\b([a-z]+[0-9]*(?:e\dm\d\w*)?)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:calls|body|condition|to_apply)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_ROUNDS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


class Collective(NamedTuple):
    """One exchange between devices.

    Attributes:
      kind: one of `KINDS`.
      bytes: of its result on one device, in one round.
      rounds: how often it runs in a step: the product of the rounds of the loops around it.
      shapes: the arrays of its result, such as `bf16[2048,4096]`.
      source: the JAX operations that it comes from, as XLA's metadata names them.
    """

    kind: str
    bytes: int
    rounds: int
    shapes: tuple[str, ...]
    source: str


def collectives(text: str) -> list[Collective]:
    """The exchanges of a program, given its `compiled.as_text()`.

    An exchange that XLA split into several instructions, or copied into several fusions, counts once: the
    parts share a channel. A loop whose number of rounds XLA does not know counts as one round.
    """
    computations, entry = _computations(text)
    found: dict[str, Collective] = {}

    def visit(name: str, rounds: int) -> None:
        for line in computations.get(name, ()):
            instruction = _INSTRUCTION.match(line)
            if instruction is None:
                continue
            label, result, operation = instruction.groups()
            kind = operation.removesuffix("-start")
            if kind in KINDS:
                channel = re.search(r"channel_id=(\d+)", line)
                arrays = _result_arrays(kind, result, is_start=operation != kind)
                source = re.search(r'op_name="([^"]*)"', line)
                one = Collective(kind, sum(map(_size, arrays)), rounds, arrays, source[1] if source else "")
                key = channel[1] if channel else label
                if key not in found or found[key].rounds < rounds:
                    found[key] = one
            trips = _ROUNDS.search(line) if operation == "while" else None
            for callee in _callees(line):
                visit(callee, rounds * int(trips[1]) if trips else rounds)

    visit(entry, 1)
    return list(found.values())


def bytes_by_kind(found: list[Collective]) -> dict[str, int]:
    """Bytes on one device in one step, by kind; only kinds that occur."""
    sums = {kind: sum(one.bytes * one.rounds for one in found if one.kind == kind) for kind in KINDS}
    return {kind: size for kind, size in sums.items() if size}


def _computations(text: str) -> tuple[dict[str, list[str]], str]:
    """The lines of each computation, and the name of the first that runs.

    Raises:
      ValueError: if there is none.
    """
    computations, current, entry = {}, None, None
    for line in text.splitlines():
        start = _COMPUTATION.match(line)
        if start is not None:
            current = computations.setdefault(start[2], [])
            entry = start[2] if start[1] else entry
        elif line.startswith("}"):
            current = None
        elif current is not None:
            current.append(line)
    if entry is None:
        raise ValueError("text must be HLO with an ENTRY computation")
    return computations, entry


def _callees(line: str) -> Iterator[str]:
    yield from _CALLED.findall(line)
    for names in _BRANCHES.findall(line):
        yield from re.findall(r"[\w.\-]+", names)


def _result_arrays(kind: str, result: str, is_start: bool) -> tuple[str, ...]:
    """The arrays that an exchange returns; the result of a start also holds its operands, and counters."""
    arrays = [f"{element}[{shape}]" for element, shape in _ARRAY.findall(result)]
    if not is_start or kind == "all-reduce":
        return tuple(arrays)
    if kind == "collective-permute":
        return tuple(arrays[:1])
    return tuple(arrays[len(arrays) // 2 :])


def _size(array: str) -> int:
    element, shape = _ARRAY.match(array).groups()
    bits = re.match(r"[a-z]+(\d+)", element)
    one = BYTES.get(element) or max(int(bits[1]) // 8, 1)
    return one * prod(int(n) for n in shape.split(",") if n)
