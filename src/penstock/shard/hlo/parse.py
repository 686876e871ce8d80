"""Parse the HLO text of a compiled program, which `jax.stages.Compiled.as_text()` prints on any backend.

Only the parts that the cost analysis needs are read: computations, instructions, shapes, and trip counts of loops. The operations
are described in https://openxla.org/xla/operation_semantics; the printed form has no specification.
"""

from __future__ import annotations

import functools
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

# Instructions that run each of the computations that they name once.
CALLS = ("fusion", "fusion-start", "call", "async-start", "custom-call")

# Types whose names do not contain the bits of an element. A token only orders instructions.
_BITS = {"pred": 8, "token": 0}

# Instructions whose result has the elements of the operand, in the same order or another.
UNCHANGED = ("bitcast", "copy", "convert", "reshape", "transpose", "copy-start", "copy-done")


_METADATA = re.compile(r', metadata=\{(?:[^{}"]|"(?:[^"\\]|\\.)*")*\}')
_COMMENT = re.compile(r"/\*.*?\*/")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*)")
_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) .*\{$")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\]")


class Array(NamedTuple):
    """The element type of an array, as XLA names it, and its dimensions."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Return the number of elements."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Return the bytes of all elements; types smaller than a byte are packed.

        Raises:
          ValueError: the size of the type is unknown.

        >>> Array("s4", (3,)).bytes
        2
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
      opcode: the operation.
      arrays: the arrays of the result: for a tuple, of its elements in order, nested tuples flattened.
      operands: names of instructions in the same computation.
      literal: the text in the brackets after the opcode, of a constant, parameter or iota.
      attributes: the text after the brackets, without `metadata`.
    """

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    literal: str
    attributes: str

    @property
    def elements(self) -> int:
        """Return the number of elements of all arrays of the result."""
        return sum(array.elements for array in self.arrays)

    def attribute(self, pattern: str) -> str | None:
        """Return the first group of the first attribute that matches a pattern; None if none matches."""
        found = re.search(rf"(?:^|, ){pattern}", self.attributes)
        return found[1] if found else None

    def numbers(self, attribute: str) -> tuple[int, ...]:
        """Return the numbers of an attribute such as `dimensions={1,2}`; () if it is missing."""
        return tuple(map(int, re.findall(r"\d+", self.attribute(attribute + r"=\{([\d,]*)\}") or "")))

    @property
    def called(self) -> tuple[str, ...]:
        """Return the names of the computations that it runs once, without bodies of loops and functions of reductions."""
        if self.opcode not in CALLS:
            return ()
        one = self.attribute(r"(?:calls|to_apply)=%([\w.\-]+)")
        many = self.attribute(r"(?:called_computations|calls)=\{([^}]*)\}")
        return (one,) if one else tuple(re.findall(r"%([\w.\-]+)", many or ""))

    @property
    def branches(self) -> tuple[str, ...]:
        """Return the names of the branches of a conditional, in the order of its operands; () for any other instruction."""
        if self.opcode != "conditional":
            return ()
        many = self.attribute(r"branch_computations=\{([^}]*)\}")
        two = [self.attribute(rf"{which}_computation=(%[\w.\-]+)") or "" for which in ("true", "false")]
        return tuple(re.findall(r"%([\w.\-]+)", many or ",".join(two)))


class Computation:
    """A computation: instructions in program order.

    Attributes:
      instructions: name → instruction.
      root: the name of the instruction whose result the computation returns.
      users: name → the instructions that read its result.
      parameters: number of a parameter → name of its instruction.
    """

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
        """Return an operand of an instruction."""
        return self.instructions[instruction.operands[position]]

    def operand_arrays(self, instruction: Instruction) -> list[Array]:
        """Return the arrays of all operands, in order."""
        return [array for name in instruction.operands for array in self.instructions[name].arrays]


class HloProgram:
    """A compiled program.

    Attributes:
      computations: name → computation.
      entry: the computation that the program runs.
      callers: name of a computation → the instructions that run it, each with its own computation.
      partitions: the number of devices that its groups of devices count; 0 if the text does not say. The TPU compiler counts
        the devices of a slice.
    """

    def __init__(self, computations: Mapping[str, Computation], entry: str, partitions: int = 0) -> None:
        self.computations = computations
        self.partitions = partitions
        self.entry = computations[entry]
        self.callers: dict[str, list[tuple[Computation, Instruction]]] = defaultdict(list)
        for computation in computations.values():
            for instruction in computation:
                for name in (*instruction.called, *instruction.branches, *_loop(instruction)):
                    self.callers[name].append((computation, instruction))

    def loop_computations(self, loop: Instruction) -> tuple[Computation, Computation]:
        """Return the body and the condition of a `while`."""
        body, condition = (self.computations[name] for name in _loop(loop))
        return body, condition

    def counted_trips(self, where: Computation, loop: Instruction) -> int:
        """Return how often the body of a `while` counts: its trip count, or 1 if this is unknown."""
        trips = self.trip_count(where, loop)
        return 1 if trips is None else trips

    def trip_count(self, where: Computation, loop: Instruction) -> int | None:
        """Return how often a `while` runs its body; None if it is unknown.

        XLA prints `known_trip_count` on CPU and GPU. For the TPU compiler, it is computed from the condition. The condition has
        to compare a constant with an integer that starts as a constant, and to which each iteration adds a constant.
        """
        known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes)
        if known:
            return int(known[1])
        body, condition = self.loop_computations(loop)
        where_test, test = self._fused_root(condition)
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
        start = self._integer(*self.source(*self._producer(where, loop.operands[0], index)))
        step = self._counter_step(body, index)
        if start is None or step is None:
            return None
        return _trips(limit - start, direction, step)

    def _fused_root(self, computation: Computation) -> tuple[Computation, Instruction]:
        """Return the root of a computation; if the root is a fusion, the root inside of it."""
        root = computation.instructions[computation.root]
        while root.called:
            computation = self.computations[root.called[0]]
            root = computation.instructions[computation.root]
        return computation, root

    def only_call(self, callee: Computation) -> tuple[Computation, Instruction] | None:
        """Return the call of a computation, with its own computation; None if there are several, or it is a loop or branch."""
        callers = self.callers[callee.name]
        return callers[0] if len(callers) == 1 and callee.name in callers[0][1].called else None

    def source(self, where: Computation, name: str) -> tuple[Computation, Instruction]:
        """Return the instruction that a value is a copy of, with its computation.

        It follows a value out of fusions to their operands, and out of a loop that does not change it to its initial value.
        """
        while True:
            instruction = where.instructions[name]
            if instruction.opcode in UNCHANGED:
                name = instruction.operands[0]
            elif instruction.opcode == "parameter" and (call := self.only_call(where)) is not None:
                where, name = call[0], call[1].operands[int(instruction.literal)]
            elif instruction.opcode == "get-tuple-element":
                origin = self.tuple_element(where, instruction)
                if origin is None:
                    return where, instruction
                where, name = origin
            else:
                return where, instruction

    def tuple_element(self, where: Computation, element: Instruction) -> tuple[Computation, str] | None:
        """Return the name and computation of the value that a `get-tuple-element` reads; None if it is unknown.

        It is an operand of a tuple, or the initial value of a loop that does not change it.
        """
        source, index = where.operand(element), _index(element)
        if source.opcode == "tuple" and index is not None:
            return where, source.operands[index]
        loops = [(outer, loop) for outer, loop in self.callers[where.name] if loop.opcode == "while"]
        if source.opcode != "parameter" or len(loops) != 1 or index is None:
            return None
        outer, loop = loops[0]
        body, _ = self.loop_computations(loop)
        after = body.instructions[_element(body, body.root, index)]
        while after.opcode in UNCHANGED:
            after = body.operand(after)
        if _index(after) != index or body.operand(after).opcode != "parameter":
            return None
        return outer, _element(outer, loop.operands[0], index)

    def _integer(self, where: Computation, instruction: Instruction) -> int | None:
        """Return the value of an integer constant; None if it is something else."""
        if instruction.opcode != "constant" or not re.match(r"[su]\d", instruction.arrays[0].dtype):
            return None  # a float constant may be printed like an integer
        constant = re.fullmatch(r"\{?(-?\d+)\}?", instruction.literal)
        return int(constant[1]) if constant else None

    def _producer(self, where: Computation, name: str, element: int | None = None) -> tuple[Computation, str]:
        """Return the instruction that computes a value or an element of a tuple, inside of fusions and before copies."""
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

    def _counter_step(self, body: Computation, index: int) -> int | None:
        """Return the constant that each iteration adds to the counter of a loop; None if it does anything else."""
        where, name = self._producer(body, body.root, index)
        sum_ = where.instructions[name]
        if sum_.opcode not in ("add", "subtract"):
            return None
        left, right = (self.source(where, operand) for operand in sum_.operands)
        if sum_.opcode == "add" and self._integer(*right) is None:
            left, right = right, left
        step = self._integer(*right)
        computation, counter = left
        if step is None or computation is not body or _index(counter) != index or body.operand(counter).opcode != "parameter":
            return None
        return -step if sum_.opcode == "subtract" else step


def _trips(distance: int, direction: str, step: int) -> int | None:
    """Return the iterations until a counter reaches its limit; None if it never does without an overflow.

    >>> _trips(10, "LT", 3), _trips(10, "NE", 3)
    (4, None)
    """
    if direction == "NE":
        ends = step != 0 and distance % step == 0 and distance // step >= 0
    else:
        ends = step > 0 if direction in ("LT", "LE") else step < 0
    if not ends:
        return None
    return max(0, distance // step + 1 if direction in ("LE", "GE") else -(-distance // step))


def _loop(instruction: Instruction) -> tuple[str, ...]:
    """Return the names of the body and the condition of a loop; () for any other instruction."""
    if instruction.opcode != "while":
        return ()
    return tuple(instruction.attribute(rf"{part}=%([\w.\-]+)") or "" for part in ("body", "condition"))


def _index(instruction: Instruction) -> int | None:
    """Return the index of a `get-tuple-element`; None if it is another instruction."""
    index = instruction.attribute(r"index=(\d+)") if instruction.opcode == "get-tuple-element" else None
    return None if index is None else int(index)


def _element(where: Computation, name: str, index: int) -> str:
    """Return the name of an element of a tuple; the tuple itself if it is not built in this computation."""
    instruction = where.instructions[name]
    return instruction.operands[index] if instruction.opcode == "tuple" else name


@functools.lru_cache(maxsize=2)  # collectives and FLOPs are read from the same text, which may have megabytes
def parse_hlo(text: str) -> HloProgram:
    """Parse the text of a compiled program.

    Raises:
      ValueError: the text has no entry computation.

    >>> import jax
    >>> text = jax.jit(lambda x: x + 1).lower(1.0).compile().as_text()
    >>> len(parse_hlo(text).entry.parameters)
    1
    """
    computations: dict[str, Computation] = {}
    entry = name = root = ""
    instructions: dict[str, Instruction] = {}
    for line in text.splitlines():
        if name and line.startswith("}"):
            # XLA leaves out ROOT where there is only one instruction.
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
    partitions = re.search(r"\bnum_partitions=(\d+)", text.partition("\n\n")[0])
    return HloProgram(computations, entry, int(partitions[1]) if partitions else 0)


def _instruction(name: str, rest: str) -> Instruction | None:
    """Parse the text right of the equals sign: `f32[8]{0} add(%a, %b), attributes`; None if it is not an instruction."""
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
    """Return the position after the bracket that closes the one at the start of the text."""
    depth = 0
    for position, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return position + 1
    return len(text)
