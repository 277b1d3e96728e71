"""Reads the text of an optimised HLO program: its computations, instructions, arrays and source lines."""

import re
from collections.abc import Iterator
from functools import cached_property
from math import prod
from typing import NamedTuple

# Bytes of an element whose type does not end with its number of bits.
SIZES = {"pred": 1, "c64": 8, "c128": 16}

# A computation starts with its name and its parameters, and ends with a brace in the first column.
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*?) ([\w\-]+)\(")
# An element type, a shape and a layout: `f32[8,32]{0,1:T(8,128)S(1)}`.
_ARRAY = re.compile(r"\b([a-z]+[0-9]*(?:e\dm\d\w*)?)\[([\d,]*)\](?:\{([\d,]*)(?::([^}]*))?\})?")
_CALLED = re.compile(r"(?:calls|body|condition|to_apply)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_ROUNDS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_TABLE_ROW = re.compile(r"^(\d+) (.*)$")


class Array(NamedTuple):
    """An array of a program, in the memory of one device."""

    element: str
    """Its type, such as `bf16`."""
    shape: tuple[int, ...]
    minor_to_major: tuple[int, ...] = ()
    """Its axes from the one whose entries are neighbours in memory; empty if unknown."""
    tile: tuple[int, ...] = ()
    """Sizes of a tile, of the most minor axes, the minor last; the array fills whole ones. Or empty."""
    space: int = 0
    """The memory that holds it: 0 is the device's main memory (HBM), 1 a TPU's vector memory."""

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element; types of less than a byte count as one byte."""
        bits = re.search(r"[0-9]+", self.element)
        return SIZES.get(self.element) or (max(int(bits[0]) // 8, 1) if bits else 0)

    @property
    def bytes(self) -> int:
        return self.size * self.itemsize

    @property
    def padded_size(self) -> int:
        """Number of elements that whole tiles hold."""
        sizes = list(self.shape)
        for axis, multiple in zip(self.minor_to_major, reversed(self.tile), strict=False):
            sizes[axis] = -(-sizes[axis] // multiple) * multiple
        return prod(sizes)

    @property
    def padded_bytes(self) -> int:
        return self.padded_size * self.itemsize

    def __str__(self) -> str:
        return f"{self.element}[{','.join(map(str, self.shape))}]"


class Instruction(NamedTuple):
    """One instruction, and the names of its operands."""

    name: str
    """Unique in its program."""
    opcode: str
    """`fusion`, `convolution`, `while`, ..."""
    results: tuple[Array, ...]
    """Of a tuple all."""
    operands: tuple[str, ...]
    called: tuple[str, ...]
    """Names of the computations that it runs: a fusion's, a loop's body and condition, branches."""
    rounds: int
    """Of a loop, how often it runs, if XLA says so; else 0."""
    attributes: str
    """Its line from the operands on."""
    is_root: bool
    """Whether it is its computation's result."""

    def attribute(self, name: str) -> str:
        """The value of `name={...}` or `name=word`; empty if there is none."""
        found = re.search(rf"\b{name}=(?:\{{([^}}]*)\}}|([^\s,]+))", self.attributes)
        return "" if found is None else found[1] if found[1] is not None else found[2]

    @property
    def number(self) -> int:
        """Of a parameter, which of its computation's it is; of a constant, its value."""
        return int(re.match(r"\d+", self.attributes)[0])

    @property
    def op_name(self) -> str:
        """The JAX operations that it comes from, as XLA's metadata names them."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return "" if found is None else found[1]


class Frame(NamedTuple):
    """A line of Python that an instruction comes from."""

    file: str
    function: str
    line: int


class Program:
    """A program, given its text: `compiled.as_text()`, or a file that XLA dumped."""

    def __init__(self, text: str):
        self.computations: dict[str, list[Instruction]] = {}
        """Instructions by the name of the computation, in the order in which they run."""
        self.entry = ""
        """The computation that runs first."""
        self._text, current = text, None
        for line in text.splitlines():
            start = _COMPUTATION.match(line)
            if start is not None:
                current = self.computations.setdefault(start[2], [])
                self.entry = start[2] if start[1] else self.entry
            elif line.startswith("}"):
                current = None
            elif current is not None and (match := _INSTRUCTION.match(line)):
                current.append(_instruction(match, line))
        if not self.entry:
            raise ValueError("text must be HLO with an ENTRY computation")

    def running(self, computation: str = "", rounds: int = 1) -> Iterator[tuple[Instruction, int]]:
        """(instruction, rounds) of all that runs by itself, not within a fusion, from the entry on.

        `rounds` is how often it runs in a call of the program. Of a condition's branches, all are given.
        """
        for instruction in self.computations.get(computation or self.entry, ()):
            yield instruction, rounds
            if instruction.opcode in ("while", "call", "conditional"):
                more = self._rounds(instruction) if instruction.opcode == "while" else 1
                for called in instruction.called:
                    yield from self.running(called, rounds * more)

    def _rounds(self, loop: Instruction) -> int:
        """How often a loop runs: as XLA says, or as often as its counter, from 0 on, stays below a constant.

        A loop that ends otherwise counts as one round.
        """
        condition, body = (
            {one.name: one for one in self.computations.get(loop.attribute(name).lstrip("%"), ())}
            for name in ("condition", "body")
        )
        test = next((one for one in condition.values() if one.is_root), None)
        if loop.rounds or test is None or test.opcode != "compare" or test.attribute("direction") != "LT":
            return loop.rounds or 1
        counter, bound = (condition.get(name) for name in test.operands)
        if bound is None or bound.opcode != "constant":
            return 1
        return -(-bound.number // _step(body, counter))

    def within(self, instruction: Instruction) -> Iterator[Instruction]:
        """The instruction, and all of the computations that it calls."""
        yield instruction
        for name in instruction.called:
            for inner in self.computations.get(name, ()):
                yield from self.within(inner)

    def frames(self, instruction: Instruction) -> tuple[Frame, ...]:
        """The lines of Python that it comes from, the innermost first; without any, those of an inner one."""
        for one in self.within(instruction):
            found = re.search(r"stack_frame_id=(\d+)", one.attributes)
            if found is not None:
                return self._frames.get(int(found[1]), ())
        return ()

    @cached_property
    def _frames(self) -> dict[int, tuple[Frame, ...]]:
        """Stack frames by their number in the metadata."""
        files, functions = (
            {i: row.strip('"') for i, row in _table(self._text, name)}
            for name in ("FileNames", "FunctionNames")
        )
        places = {
            i: Frame(files[row["file_name_id"]], functions[row["function_name_id"]], row["line"])
            for i, row in _rows(self._text, "FileLocations").items()
        }
        links = _rows(self._text, "StackFrames")
        # Some versions of XLA print a parent's number plus one, so that frame 2 seems to be its own parent.
        more = int(any(link.get("parent_frame_id") == i for i, link in links.items()))

        def chain(i: int) -> Iterator[Frame]:
            while i in links:
                yield places[links[i]["file_location_id"]]
                i = links[i].get("parent_frame_id", 0) - more

        return {i: tuple(chain(i)) for i in links}


def _step(body: dict[str, Instruction], counter: Instruction | None) -> int:
    """By how much a loop's body increases the counter that its condition reads; XLA unrolls some loops."""
    results = next((one.operands for one in body.values() if one.is_root), ())
    index = int(counter.attribute("index") or 0) if counter is not None else 0
    added = body.get(results[index]) if index < len(results) else None
    while added is not None and added.opcode == "copy":
        added = body.get(added.operands[0])
    terms = [body.get(name) for name in added.operands] if added is not None and added.opcode == "add" else []
    return next((one.number for one in terms if one is not None and one.opcode == "constant"), 1)


def read_arrays(text: str) -> tuple[Array, ...]:
    """The arrays of a type, such as `(f32[8]{0}, bf16[2,3]{1,0:T(8,128)(2,1)S(1)})`."""

    def numbers(words: str | None) -> tuple[int, ...]:
        return tuple(int(word) for word in (words or "").split(",") if word)

    found = []
    for element, shape, order, rest in _ARRAY.findall(text):
        tile, space = re.search(r"T\(([\d,]+)\)", rest), re.search(r"S\((\d+)\)", rest)
        sizes = numbers(tile[1]) if tile else ()
        found.append(Array(element, numbers(shape), numbers(order), sizes, int(space[1]) if space else 0))
    return tuple(found)


def _instruction(match: re.Match[str], line: str) -> Instruction:
    root, name, result, opcode = match.groups()
    end = _closing(line, match.end())
    attributes = line[match.end() :]
    called = _CALLED.findall(attributes)
    for names in _BRANCHES.findall(attributes):
        called += re.findall(r"[\w.\-]+", names)
    trips = _ROUNDS.search(attributes)
    return Instruction(
        name,
        opcode,
        read_arrays(result),
        tuple(re.findall(r"%([\w.\-]+)", line[match.end() : end])),
        tuple(called),
        int(trips[1]) if trips else 0,
        attributes,
        root is not None,
    )


def _closing(line: str, start: int) -> int:
    """Index of the parenthesis that closes the one before `start`."""
    depth = 1
    for i in range(start, len(line)):
        depth += {"(": 1, ")": -1}.get(line[i], 0)
        if depth == 0:
            return i
    return len(line)


def _table(text: str, name: str) -> Iterator[tuple[int, str]]:
    """The numbered rows of a table at the start of the text, which an empty line ends."""
    start = text.find(f"\n{name}\n")
    if start >= 0:
        for line in text[start + len(name) + 2 :].split("\n"):
            row = _TABLE_ROW.match(line)
            if row is None:
                return
            yield int(row[1]), row[2]


def _rows(text: str, name: str) -> dict[int, dict[str, int]]:
    return {
        i: {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", row)}
        for i, row in _table(text, name)
    }
