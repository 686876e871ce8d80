"""Find which slice of a value each device keeps.

In: a parsed program and a value in it. Out: the `dynamic-slice` instructions that read it, and their offsets on each device,
computed from `partition-id`. `collectives.py` uses them to tell a reduce-scatter from an all-reduce.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from penstock.shard.hlo.parse import CALLS, UNCHANGED, Array, Computation, HloProgram, Instruction

IndexValues = np.ndarray
"""Integers [devices, n]: n of them on each device."""

# The shape stays, and each element depends on the same element of the operands: a slice of the result needs only that slice.
# fmt: off
_ELEMENTWISE = frozenset((
    "abs", "add", "and", "clamp", "compare", "cosine", "divide", "exponential", "log", "maximum", "minimum", "multiply",
    "negate", "not", "or", "power", "remainder", "rsqrt", "select", "sign", "sine", "sqrt", "subtract", "tanh",
))
# fmt: on
_BINARY: dict[str, Callable[[IndexValues, IndexValues], IndexValues]] = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "divide": lambda a, b: np.where(b == 0, 0, a // np.where(b == 0, 1, b)),
    "remainder": lambda a, b: np.where(b == 0, 0, a % np.where(b == 0, 1, b)),
    "minimum": np.minimum,
    "maximum": np.maximum,
    "and": np.bitwise_and,
    "shift-right-logical": np.right_shift,
    "shift-left": np.left_shift,
}
_COMPARE: dict[str, Callable[[IndexValues, IndexValues], IndexValues]] = {
    "EQ": np.equal,
    "NE": np.not_equal,
    "LT": np.less,
    "LE": np.less_equal,
    "GT": np.greater,
    "GE": np.greater_equal,
}


def find_slices(
    program: HloProgram, where: Computation, value: Instruction, element: int | None, array: Array
) -> list[tuple[Computation, Instruction]] | None:
    """Return the `dynamic-slice` instructions that read a value; None if another instruction needs all of it.

    It follows the value through copies, elementwise operations and `-done`, and into and out of fusions and calls.

    Args:
      program: the program.
      where: the computation of the value.
      value: the instruction that computes it.
      element: the index of an element, if the value is a tuple; None if it is an array.
      array: the shape of that element, or of the value.
    """
    found: list[tuple[Computation, Instruction]] = []
    seen = set()
    todo: list[tuple[Computation, str, int | None]] = [(where, value.name, element)]
    while todo:
        here = todo.pop()
        if (here[0].name, *here[1:]) in seen:
            continue
        seen.add((here[0].name, *here[1:]))
        where, name, element = here
        if name == where.root:
            callers = program.callers[where.name]
            if len(callers) != 1 or where.name not in callers[0][1].called:
                return None
            todo.append((callers[0][0], callers[0][1].name, element))
        for user in where.users[name]:
            if user.opcode == "get-tuple-element":
                if element is None or user.attribute(r"index=(\d+)") == str(element):
                    todo.append((where, user.name, None))
            elif user.opcode.endswith(("-done", "-update")):
                todo.append((where, user.name, element))
            elif user.opcode == "dynamic-slice" and user.operands[0] == name:
                found.append((where, user))
            elif user.opcode in CALLS and user.called:
                callee = program.computations[user.called[0]]
                todo += [(callee, callee.parameters[i], element) for i, used in enumerate(user.operands) if used == name]
            elif user.opcode == "tuple" and user.name == where.root and element is None:
                callers = program.callers[where.name]
                if len(callers) != 1 or where.name not in callers[0][1].called:
                    return None
                todo += [(callers[0][0], callers[0][1].name, i) for i, used in enumerate(user.operands) if used == name]
            elif user.arrays[0].elements == array.elements and (user.opcode in UNCHANGED or user.opcode in _ELEMENTWISE):
                todo.append((where, user.name, None))
            else:
                return None
    return found


def index_values(program: HloProgram, where: Computation, name: str, devices: int) -> IndexValues | None:
    """Compute a small integer value on each device; None if the text does not determine it.

    Args:
      program: the program.
      where: the computation of the value.
      name: the name of the instruction that computes it.
      devices: the number of devices.

    Returns:
      Integers [devices, n], or [1, n] if they are the same on all devices.
    """
    where, instruction = program.source(where, name)
    opcode = instruction.opcode
    if opcode == "partition-id":
        return np.arange(devices)[:, None]
    if opcode == "replica-id":  # jitted programs have one replica
        return np.zeros((1, 1), int)
    if opcode == "constant":
        if not re.fullmatch(r"[\s\d,{}+-]+|true|false", instruction.literal):
            return None
        numbers = re.findall(r"-?\d+", instruction.literal.replace("true", "1").replace("false", "0"))
        return np.array([[int(number) for number in numbers]]) if len(numbers) == instruction.elements else None
    inputs = [index_values(program, where, operand, devices) for operand in instruction.operands]
    known = [each for each in inputs if each is not None]
    if not known or len(known) < len(inputs):
        return None
    if opcode == "dynamic-slice" and len(known) == 2 and instruction.elements == 1:
        table, index = np.broadcast_arrays(known[0], np.zeros((devices, 1), int))[0], known[1]
        index = np.broadcast_to(np.clip(index, 0, table.shape[1] - 1), (devices, 1))
        return np.take_along_axis(table, index, axis=1)
    if opcode == "clamp":
        return np.clip(known[1], known[0], known[2])
    if opcode == "select":
        return np.where(known[0] != 0, known[1], known[2])
    if opcode == "compare":
        holds = _COMPARE.get(instruction.attribute(r"direction=(\w+)") or "")
        return None if holds is None else holds(known[0], known[1]).astype(int)
    if opcode == "broadcast" and known[0].shape[1] == 1:
        return known[0]
    return _BINARY[opcode](known[0], known[1]) if opcode in _BINARY and len(known) == 2 else None


def depends_on_device(program: HloProgram, where: Computation, name: str) -> bool:
    """Return whether a value depends on the id of the device.

    Args:
      program: the program.
      where: the computation of the value.
      name: the name of the instruction that computes it.
    """
    seen = set()
    todo = [(where, name)]
    while todo:
        where, instruction = program.source(*todo.pop())
        if instruction.opcode in ("partition-id", "replica-id"):
            return True
        if (where.name, instruction.name) not in seen:
            seen.add((where.name, instruction.name))
            todo += [(where, operand) for operand in instruction.operands]
    return False
