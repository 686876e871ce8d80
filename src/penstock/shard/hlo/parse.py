"""HLO text as data: a compiled program, its computations, instructions and shapes.

Reads what `jax.stages.Compiled.as_text()` prints, on any backend. Only what accounting needs is read; the grammar is
that of https://openxla.org/xla/operation_semantics as printed by XLA, which has no specification of its own.
"""

from __future__ import annotations

import functools
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

# Instructions that run the computations they name, each once.
CALLS = ("fusion", "call", "async-start", "custom-call")

# Types whose names do not tell how many bits an element has. A token only orders instructions.
_BITS = {"pred": 8, "token": 0}

# Results that hold what the operand held, element for element.
UNCHANGED = ("bitcast", "copy", "convert", "reshape", "transpose", "copy-start", "copy-done")


class Array(NamedTuple):
    """An array's element type, as XLA names it, and its dimensions."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Bytes of all elements; those of types smaller than a byte are packed.

        Raises:
          ValueError: the name of the type does not tell its size.
        """
        named = re.match(r"[a-z]+?(\d+)", self.dtype)
        bits = _BITS.get(self.dtype) if named is None else int(named[1])
        if bits is None:
            raise ValueError(
                f"the program exchanges arrays of type {self.dtype!r}, whose size is unknown: sizes are known of "
                f"{', '.join(_BITS)} and of types that name their bits, as bf16; cast them to one of these"
            )
        return -(-self.elements * bits // 8)


@dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      arrays: the result's; those of a tuple in order, nested tuples flattened.
      operands: names of instructions of the same computation.
      literal: what stands between the brackets after the opcode.
      attributes: what follows them, without `metadata`.
    """

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    literal: str
    attributes: str

    @property
    def elements(self) -> int:
        return sum(array.elements for array in self.arrays)

    def attribute(self, pattern: str) -> str | None:
        """The first group of what follows a comma and matches; None if nothing does."""
        found = re.search(rf"(?:^|, ){pattern}", self.attributes)
        return found[1] if found else None

    def numbers(self, attribute: str) -> tuple[int, ...]:
        """Of `attribute={1,2}`; () where it is not there."""
        return tuple(map(int, re.findall(r"\d+", self.attribute(attribute + r"=\{([\d,]*)\}") or "")))

    @property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that it runs once: not the body of a loop, nor the function of a reduction."""
        if self.opcode not in CALLS:
            return ()
        one = self.attribute(r"(?:calls|to_apply)=%([\w.\-]+)")
        many = self.attribute(r"(?:called_computations|calls)=\{([^}]*)\}")
        return (one,) if one else tuple(re.findall(r"%([\w.\-]+)", many or ""))

    @property
    def branches(self) -> tuple[str, ...]:
        """Names of the computations of which a conditional runs one, in the order of its operands."""
        if self.opcode != "conditional":
            return ()
        many = self.attribute(r"branch_computations=\{([^}]*)\}")
        two = [self.attribute(rf"{which}_computation=(%[\w.\-]+)") or "" for which in ("true", "false")]
        return tuple(re.findall(r"%([\w.\-]+)", many or ",".join(two)))


class Computation:
    """Instructions by name, in their order; `root` names the one whose result is the computation's."""

    def __init__(self, name: str, instructions: Mapping[str, Instruction], root: str) -> None:
        self.name = name
        self.instructions = instructions
        self.root = root
        self.users: dict[str, list[Instruction]] = defaultdict(list)
        self.parameters: dict[int, str] = {}
        for instruction in instructions.values():
            for operand in dict.fromkeys(instruction.operands):
                self.users[operand].append(instruction)
            if instruction.opcode == "parameter":
                self.parameters[int(instruction.literal)] = instruction.name

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions.values())

    def operand(self, instruction: Instruction, position: int = 0) -> Instruction:
        return self.instructions[instruction.operands[position]]

    def operand_arrays(self, instruction: Instruction) -> list[Array]:
        """Of all operands, in order."""
        return [array for name in instruction.operands for array in self.instructions[name].arrays]


class HloProgram:
    """Computations by name.

    Attributes:
      callers: name of a computation → the instructions that run it, and the computations which these are in.
    """

    def __init__(self, computations: Mapping[str, Computation], entry: str) -> None:
        self.computations = computations
        self.entry = computations[entry]
        self.callers: dict[str, list[tuple[Computation, Instruction]]] = defaultdict(list)
        for computation in computations.values():
            for instruction in computation:
                for name in (*instruction.called, *instruction.branches, *_loop(instruction)):
                    self.callers[name].append((computation, instruction))

    def parts(self, loop: Instruction) -> tuple[Computation, Computation]:
        """What a turn of a `while` runs: its body and its condition."""
        body, condition = (self.computations[name] for name in _loop(loop))
        return body, condition

    def turns(self, where: Computation, loop: Instruction) -> int:
        """Return how often the body of a `while` counts: as often as it runs, and once where that is unknown."""
        trips = self.trips(where, loop)
        return 1 if trips is None else trips

    def trips(self, where: Computation, loop: Instruction) -> int | None:
        """Return how often a `while` runs its body, as XLA says or as its condition does; None if it is unknown.

        XLA says it on CPU and GPU (`known_trip_count`); the TPU compiler leaves it to the condition. That says it if it
        compares with a constant an integer that begins as a constant, and to which each turn adds a constant.
        """
        known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes)
        if known:
            return int(known[1])
        body, condition = self.parts(loop)
        where_test, test = self._inside_of_fusion(condition)
        direction = test.attribute(r"direction=(\w+)")
        if test.opcode != "compare" or direction not in ("LT", "LE", "NE", "GT", "GE"):
            return None
        left, right = (self.source(where_test, name) for name in test.operands)
        counter, limit = left, self._integer(*right)
        if limit is None:  # 5 > counter
            counter, limit = right, self._integer(*left)
            direction = {"GT": "LT", "GE": "LE", "LT": "GT", "LE": "GE"}.get(direction, direction)
        index = _index(counter[1])
        if limit is None or index is None or counter[0] is not condition:
            return None
        start = self._integer(*self.source(*self._maker(where, loop.operands[0], index)))
        step = self._step(body, index)
        if start is None or step is None:
            return None
        return _trips(limit - start, direction, step)

    def _inside_of_fusion(self, computation: Computation) -> tuple[Computation, Instruction]:
        root = computation.instructions[computation.root]
        while root.called:
            computation = self.computations[root.called[0]]
            root = computation.instructions[computation.root]
        return computation, root

    def source(self, where: Computation, name: str) -> tuple[Computation, Instruction]:
        """What a value is a copy of, out of fusions and into what loops were started with where they leave it be."""
        while True:
            instruction = where.instructions[name]
            if instruction.opcode in UNCHANGED:
                name = instruction.operands[0]
            elif instruction.opcode == "parameter" and len(self.callers[where.name]) == 1:
                where_caller, caller = self.callers[where.name][0]
                if where.name not in caller.called:
                    return where, instruction
                where, name = where_caller, caller.operands[int(instruction.literal)]
            elif instruction.opcode == "get-tuple-element":
                inner = self.invariant(where, instruction)
                if inner is None:
                    return where, instruction
                where, name = inner
            else:
                return where, instruction

    def invariant(self, where: Computation, element: Instruction) -> tuple[Computation, str] | None:
        """Where a `get-tuple-element` has its value from: out of a tuple, or what a loop that never changes it began with."""
        source, index = where.operand(element), _index(element)
        if source.opcode == "tuple" and index is not None:
            return where, source.operands[index]
        loops = [(outer, loop) for outer, loop in self.callers[where.name] if loop.opcode == "while"]
        if source.opcode != "parameter" or len(loops) != 1 or index is None:
            return None
        outer, loop = loops[0]
        body, _ = self.parts(loop)
        after = body.instructions[_element(body, body.root, index)]
        while after.opcode in UNCHANGED:
            after = body.operand(after)
        if _index(after) != index or body.operand(after).opcode != "parameter":
            return None
        return outer, _element(outer, loop.operands[0], index)

    def _integer(self, where: Computation, instruction: Instruction) -> int | None:
        if instruction.opcode != "constant" or not re.match(r"[su]\d", instruction.arrays[0].dtype):
            return None  # a float may be printed as an integer is
        constant = re.fullmatch(r"\{?(-?\d+)\}?", instruction.literal)
        return int(constant[1]) if constant else None

    def _maker(self, where: Computation, name: str, element: int | None = None) -> tuple[Computation, str]:
        """The instruction that a value, or an element of a tuple, is the result of: inside of fusions and behind copies."""
        while True:
            instruction = where.instructions[name]
            if instruction.opcode == "tuple" and element is not None:
                name, element = instruction.operands[element], None
            elif instruction.opcode in ("fusion", "call"):
                where = self.computations[instruction.called[0]]
                name = where.root
            elif instruction.opcode in UNCHANGED:
                name = instruction.operands[0]
            elif element is None and instruction.opcode == "get-tuple-element" and where.operand(instruction).called:
                name, element = instruction.operands[0], _index(instruction)
            else:
                return where, name

    def _step(self, body: Computation, index: int) -> int | None:
        """The constant that a turn of the loop adds to its counter; None if it does anything else to it."""
        where, name = self._maker(body, body.root, index)
        sum_ = where.instructions[name]
        if sum_.opcode not in ("add", "subtract"):
            return None
        left, right = (self.source(where, operand) for operand in sum_.operands)
        if sum_.opcode == "add" and self._integer(*right) is None:
            left, right = right, left
        step = self._integer(*right)
        home, counter = left
        if step is None or home is not body or _index(counter) != index or body.operand(counter).opcode != "parameter":
            return None
        return -step if sum_.opcode == "subtract" else step


def _trips(distance: int, direction: str, step: int) -> int | None:
    """Return the turns of a counter to a limit; None where its steps lead elsewhere, and it ends by wrapping around."""
    if direction == "NE":
        ends = step != 0 and distance % step == 0 and distance // step >= 0
    else:
        ends = step > 0 if direction in ("LT", "LE") else step < 0
    if not ends:
        return None
    return max(0, distance // step + 1 if direction in ("LE", "GE") else -(-distance // step))


def _loop(instruction: Instruction) -> tuple[str, ...]:
    """Names of a loop's body and condition."""
    if instruction.opcode != "while":
        return ()
    return tuple(instruction.attribute(rf"{part}=%([\w.\-]+)") or "" for part in ("body", "condition"))


def _index(instruction: Instruction) -> int | None:
    index = instruction.attribute(r"index=(\d+)") if instruction.opcode == "get-tuple-element" else None
    return None if index is None else int(index)


def _element(where: Computation, name: str, index: int) -> str:
    """The operand that made an element of a tuple; the tuple itself where that is not to be seen."""
    instruction = where.instructions[name]
    return instruction.operands[index] if instruction.opcode == "tuple" else name


_METADATA = re.compile(r', metadata=\{(?:[^{}"]|"(?:[^"\\]|\\.)*")*\}')
_COMMENT = re.compile(r"/\*.*?\*/")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*)")
_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) .*\{$")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\]")


@functools.lru_cache(maxsize=2)  # collectives and FLOPs are asked for of the same text, which may be megabytes
def parse(text: str) -> HloProgram:
    """Raises ValueError if the text has no entry computation."""
    computations: dict[str, Computation] = {}
    entry = name = root = ""
    instructions: dict[str, Instruction] = {}
    for line in text.splitlines():
        if name and line.startswith("}"):
            # An instruction that is printed without ROOT is the only one.
            computations[name] = Computation(name, instructions, root or next(reversed(instructions), ""))
            name = ""
        elif name:
            found = _INSTRUCTION.match(line)
            instruction = _instruction(found[2], found[3]) if found else None
            if found and instruction:
                instructions[instruction.name] = instruction
                root = instruction.name if found[1] else root
        elif header := _HEADER.match(line):
            name, root, instructions = header[2], "", {}
            entry = name if header[1] else entry
    if not entry:
        raise ValueError("not a program in HLO text: there is no ENTRY computation in it")
    return HloProgram(computations, entry)


def _instruction(name: str, rest: str) -> Instruction | None:
    """What stands right of the equals sign: `f32[8]{0} add(%a, %b), attributes`."""
    rest = _METADATA.sub("", _COMMENT.sub("", rest))
    end = _closing(rest) if rest.startswith("(") else rest.find(" ")
    found = re.match(r"\s*([\w\-]+)", rest[end:])
    if end <= 0 or not found:
        return None
    arguments = rest[end + found.end() :]
    close = _closing(arguments)
    inside = arguments[1 : close - 1]
    arrays = tuple(
        Array(dtype, tuple(int(size.removeprefix("<=")) for size in dims.split(",") if size))
        for dtype, dims in _ARRAY.findall(re.sub(r"\{[^}]*\}", "", rest[:end]))
    )
    literal = found[1] in ("constant", "parameter", "iota")
    operands = () if literal else tuple(re.findall(r"%([\w.\-]+)", inside))
    return Instruction(name, found[1], arrays, operands, inside if literal else "", arguments[close:])


def _closing(text: str) -> int:
    """The position after the bracket that closes the one with which the text begins."""
    depth = 0
    for position, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return position + 1
    return len(text)
