"""Find the collectives of a compiled program, with their bytes on wire, the mesh axes that they span, and how often they run.

They are read from HLO text (`compiled.as_text()`), so that the devices need not be present. Devices are numbered like the
partitions of the program: row-major over the mesh. Bytes on wire follow Thakur, Rabenseifner and Gropp (2005). To tell a
reduce-scatter from an all-reduce, `find_slices` finds the slice of a value that each device keeps, at an offset computed from
`partition-id`.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.shard.hlo.parse import CALLS, UNCHANGED, Array, Computation, HloProgram, Instruction, parse_hlo
from penstock.shard.mesh.shapes import describe_mesh, inner_sizes

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
_COMPARE: dict[str, np.ufunc] = {
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
      element: the index of an element, if the value is a tuple; None if it is an array.
      array: the shape of the element, or of the value.
    """
    found: list[tuple[Computation, Instruction]] = []
    seen = set()
    todo: list[tuple[Computation, str, int | None]] = [(where, value.name, element)]
    while todo:
        where, name, element = todo.pop()
        if (where.name, name, element) in seen:
            continue
        seen.add((where.name, name, element))
        if name == where.root:
            call = program.only_call(where)
            if call is None:
                return None
            todo.append((call[0], call[1].name, element))
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
                call = program.only_call(where)
                if call is None:
                    return None
                todo += [(call[0], call[1].name, i) for i, used in enumerate(user.operands) if used == name]
            elif user.arrays[0].elements == array.elements and (user.opcode in UNCHANGED or user.opcode in _ELEMENTWISE):
                todo.append((where, user.name, None))
            else:
                return None
    return found


def index_values(program: HloProgram, where: Computation, name: str, devices: int) -> IndexValues | None:
    """Compute a small integer value on each device [devices, n], or on all [1, n]; None if the text does not determine it."""
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
    """Return whether a value depends on the id of the device."""
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


_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")

DeviceGroups = Sequence[Sequence[int]]
"""Groups of devices; each group runs the collective on its own."""

_REPORT = "this XLA prints it in a form that penstock cannot read; please report it with that line of the program"

_MEGASCALE = "_xla_megascale_transfer_type"
_IDS_OF_A_SLICE = 100_000

_PHASE = "async_collective_fusion_config"
"""The TPU compiler writes this at an asynchronous collective in each of the fusions that run a phase of it. Channels do not tell
phases apart: each collective that the compiler combined from others has channel 1, and so may an asynchronous collective."""


@dataclass(frozen=True)
class Collective:
    """A collective of a compiled program.

    Attributes:
      kind: "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute" or "collective-broadcast".
      bytes: bytes of the full array on one device: gathered (all-gather), unreduced (reduce-scatter), else of the operands.
      group: the number of devices in each group; for a permute, in the longest chain.
      count: how often it runs in one run of the program.
      axes: the mesh axes that its groups span; () if the groups match no mesh axes.
      guessed: whether its kind, all-reduce or reduce-scatter, was guessed from the size, because the text does not show it.
      inside: how many devices of a group are in one domain (`Hardware.domain`); 0 if that is unknown.

    Examples:
      >>> gather = Collective("all-gather", 1 << 20, group=4, count=1.0, axes=("data",))
      >>> gather.bytes_on_wire / (1 << 20)
      0.75
    """

    kind: str
    bytes: int
    group: int
    count: float
    axes: tuple[str, ...]
    guessed: bool = False
    inside: int = 0

    @property
    def bytes_on_wire(self) -> float:
        """Return the bytes that one device sends each time that the collective runs.

        It assumes the algorithms that send the fewest bytes, rings for example: Thakur, Rabenseifner and Gropp, "Optimization of
        collective communication operations in MPICH" (2005), §4. A broadcast counts like a permute: in a chain, each device
        passes on all bytes once, piece by piece.
        """
        if self.kind in ("collective-permute", "collective-broadcast"):
            return float(self.bytes)
        share = (self.group - 1) / self.group * self.bytes
        return 2 * share if self.kind == "all-reduce" else share


def find_collectives(text: str, mesh: Mapping[str, int], domain: int = 0) -> list[Collective]:
    """Return the collectives of a program, in program order. Collectives of a single device send nothing and are left out.

    An asynchronous collective counts once: `-start` and `-done`, or the TPU compiler's fusions of its phases. The body and the
    condition of a loop count as often as `HloProgram.counted_trips` says. For a conditional, the branch that sends most bytes
    counts.

    **Reduce-scatters.** An all-reduce counts as a reduce-scatter if each device keeps only a slice of the result. The slice is
    taken by `dynamic-slice`, at an offset that depends on the device. XLA:CPU forms no reduce-scatter, and the TPU compiler
    writes them this way in a fusion. An all-reduce that the TPU and GPU compilers leave outside of a fusion always counts as
    an all-reduce.

    If its group spans axes `a` and `b`, and the slice differs along `a` only, it counts as two: a reduce-scatter of all bytes
    over `a`, and an all-reduce of the slice over `b`. A tuple all-reduce is read element by element; elements with the same
    outcome are summed. If the offset of a slice cannot be computed from the text, the size of the slice decides, and the
    collectives are marked as `guessed`.

    **Slices.** The TPU compiler makes one program for all slices. Its groups count the devices of a slice. A collective over the
    network is a `send` and a `recv` of the Megascale runtime, of which the `send` counts.

    Args:
      text: the text of `jax.stages.Compiled.as_text()`, for a program with one partition per device, or per device of a slice. It
        leaves out the elements of long constants, so that offsets are unknown from 16 devices on; `measure` has the elements
        printed.
      mesh: sizes of the mesh axes, in the order of the mesh.
      domain: the number of devices of a domain (`Hardware.domain`); 0 if all are in one, or it is unknown.

    Raises:
      ValueError: the text is not HLO text, names devices that the mesh does not have, or writes groups or types in a form that
        is unknown here.
    """
    return _Collectives(parse_hlo(text), mesh, domain).of(parse_hlo(text).entry)


class _Collectives:
    """The collectives of one program on one mesh.

    Attributes:
      devices: the numbers of the devices in the groups, by place in the mesh: of all devices, or of the devices of one slice.
      slices: the numbers of the slices, by place in the mesh; a single one if the groups number all devices.
    """

    def __init__(self, program: HloProgram, mesh: Mapping[str, int], domain: int) -> None:
        self.program = program
        self.mesh = mesh
        self.domain = domain
        sizes = tuple(mesh.values())
        inner = inner_sizes(sizes, program.partitions) if program.partitions < math.prod(sizes) else None
        inner = inner or sizes
        self.devices = np.arange(math.prod(inner)).reshape(inner)
        outer = tuple(size // own for size, own in zip(sizes, inner, strict=True))
        self.slices = np.arange(math.prod(outer)).reshape(outer)

    def of(self, where: Computation) -> list[Collective]:
        """Return the collectives of a computation and of the computations that it runs."""
        found: list[Collective] = []
        for instruction in where:
            kind = instruction.opcode.removesuffix("-start").removeprefix("ragged-")
            if kind in _KINDS:
                found += self._of_instruction(kind, where, instruction)
            elif instruction.opcode == "send" and _MEGASCALE in instruction.attributes:
                found += self._over_network(where, instruction)
            elif instruction.opcode == "while":
                trips = self.program.counted_trips(where, instruction)
                once = [each for part in self.program.loop_computations(instruction) for each in self.of(part)]
                found += [replace(each, count=each.count * trips) for each in once if trips]
            elif instruction.branches:
                branches = [self.of(self.program.computations[name]) for name in instruction.branches]
                found += max(branches, key=lambda branch: sum(c.bytes_on_wire * c.count for c in branch))
            else:
                for name in instruction.called:
                    found += self.of(self.program.computations[name])
        return found

    def _of_instruction(self, kind: str, where: Computation, instruction: Instruction) -> list[Collective]:
        """Return the collectives that one instruction counts as."""
        if _PHASE in instruction.attributes and not _is_start(where):
            return []  # a later phase of a collective that an AsyncCollectiveStart began
        operands = where.operand_arrays(instruction)
        total = sum(array.bytes for array in operands)
        if kind == "collective-permute":
            return self._permute(_pairs(instruction), total)
        groups = self._groups(instruction)
        if kind == "all-reduce":
            return self._all_reduce(where, instruction, operands, groups)
        bytes_ = total * len(groups[0]) if kind == "all-gather" else total
        return self._sized(kind, bytes_, groups)

    def _over_network(self, where: Computation, send: Instruction) -> list[Collective]:
        """Return the collective between slices that a `send` starts."""
        transfer = send.attribute(r'.*?_xla_megascale_transfer_type="(\w+)"') or ""
        kind = transfer.lower().replace("_", "-")
        bytes_ = where.operand(send).arrays[0].bytes
        # Slices are numbered from 1, and a device has a hundred thousand times the number of its slice in its own number.
        together = re.search(r'_xla_megascale_target="\{([\d,]+)\}x', send.attributes)
        if together:
            members = [int(slice_) for slice_ in together[1].split(",")]
        else:
            first = re.search(r"_xla_megascale_target=\{\{([^}]*)\}", send.attributes)
            members = [int(device) // _IDS_OF_A_SLICE for device in re.findall(r"\d+", first[1])] if first else []
        crossed = sorted(set(members))
        if not crossed:
            raise ValueError(f"{send.name} has no _xla_megascale_target of slices: {_REPORT}")
        axes = self._axes([[slice_ - 1 for slice_ in crossed]], self.slices, partly=True)
        if kind not in _KINDS:  # a transfer from device to device
            return [Collective("collective-permute", bytes_, 2, 1.0, axes, inside=1)]
        bytes_ *= len(members) if kind == "all-gather" else 1
        return [Collective(kind, bytes_, len(members), 1.0, axes, inside=len(members) // len(crossed))]

    def _sized(self, kind: str, bytes_: int, groups: DeviceGroups) -> list[Collective]:
        """Return a collective over groups of devices; none if each group is a single device."""
        size = max(map(len, groups))
        return [Collective(kind, bytes_, size, 1.0, self._axes(groups), inside=self._inside(groups))] if size > 1 else []

    def _inside(self, groups: DeviceGroups) -> int:
        """Return the least number of devices of a group that are in one domain; 0 if the domains are unknown."""
        if self.slices.size > 1:
            return len(groups[0])
        if not self.domain:
            return 0
        return min(min(Counter(device // self.domain for device in group).values()) for group in groups)

    def _permute(self, pairs: Iterable[tuple[int, int]], bytes_: int) -> list[Collective]:
        """Return a permute, given its pairs of sender and receiver."""
        chains: list[set[int]] = []
        axes: set[str] = set()
        for pair in pairs:
            near, far = (np.unravel_index(device, self.devices.shape) for device in pair)
            axes |= {name for name, a, b in zip(self.mesh, near, far, strict=True) if a != b}
            touched = [chain for chain in chains if chain & set(pair)]
            chains = [chain for chain in chains if chain not in touched] + [set(pair).union(*touched)]
        size = max(map(len, chains), default=1)
        named = tuple(name for name in self.mesh if name in axes)
        inside = self._inside([sorted(chain) for chain in chains]) if size > 1 else 0
        return [Collective("collective-permute", bytes_, size, 1.0, named, inside=inside)] if size > 1 else []

    def _all_reduce(
        self, where: Computation, instruction: Instruction, operands: Sequence[Array], groups: DeviceGroups
    ) -> list[Collective]:
        """Return the collectives that an all-reduce counts as: an all-reduce, a reduce-scatter, or both."""
        totals: dict[tuple[DeviceGroups, bool], int] = {}  # (groups that scatter the result, guessed) → bytes
        for position, array in enumerate(operands):
            element = position if len(operands) > 1 else None
            kept = self._scattered(where, instruction, element, array, groups)
            totals[kept] = totals.get(kept, 0) + array.bytes
        found: list[Collective] = []
        for (scattered, guessed), bytes_ in totals.items():
            ways = max(map(len, scattered), default=1)
            collectives = self._sized("reduce-scatter", bytes_, scattered) if ways > 1 else []
            if ways == 1:
                collectives = self._sized("all-reduce", bytes_, groups)
            elif ways < len(groups[0]):
                collectives += self._sized("all-reduce", bytes_ // ways, _across(groups, scattered))
            found += [replace(each, guessed=guessed) for each in collectives]
        return found

    def _scattered(
        self, where: Computation, instruction: Instruction, element: int | None, array: Array, groups: DeviceGroups
    ) -> tuple[DeviceGroups, bool]:
        """Return the subgroups whose devices keep different slices of the result, and whether they are a guess.

        There are no subgroups if all devices keep the full result.
        """
        fused = any(caller.opcode == "fusion" for _, caller in self.program.callers[where.name])
        if "backend_config=" in instruction.attributes and not fused:
            return (), False  # this compiler forms reduce-scatters itself, so this is a real all-reduce
        taken = find_slices(self.program, where, instruction, element, array)
        if not taken:
            return (), False
        found = [self._scattered_by(*each, groups) for each in taken]
        if ((), False) in found:
            return (), False  # one use needs the full result
        parts, _ = min(found, key=lambda each: max(map(len, each[0]), default=0))
        return parts, any(guessed for _, guessed in found)

    def _scattered_by(self, where: Computation, taken: Instruction, groups: DeviceGroups) -> tuple[DeviceGroups, bool]:
        """Return the same as `_scattered`, for one slice of the result."""
        names = taken.operands[1:]
        offsets = {name: index_values(self.program, where, name, self.devices.size) for name in names}
        known = [found for found in offsets.values() if found is not None]
        if any(found is None and depends_on_device(self.program, where, name) for name, found in offsets.items()):
            # The text does not give the offset, for example because its table is too long to be printed. The size decides, and
            # among several axes the innermost is taken.
            ways = where.operand(taken).elements // max(1, taken.elements)
            return self._innermost(groups, ways), True
        if not known:
            return (), False
        table = np.hstack([np.broadcast_to(found, (self.devices.size, 1)) for found in known])
        parts: list[tuple[int, ...]] = []
        for group in groups:
            by_offset: dict[tuple[int, ...], list[int]] = {}
            for device in group:
                by_offset.setdefault(tuple(table[device]), []).append(device)
            disjoint = len(by_offset) * taken.elements <= where.operand(taken).elements
            if not disjoint or len(set(map(len, by_offset.values()))) > 1:
                return (), False  # the slices overlap, or are not kept by equally many devices
            parts += zip(*by_offset.values(), strict=True)
        return (tuple(parts) if len(parts[0]) > 1 else ()), False

    def _innermost(self, groups: DeviceGroups, ways: int) -> DeviceGroups:
        """Return subgroups of `ways` adjacent devices; () if the groups cannot be divided in this way."""
        size = len(groups[0])
        if ways % size == 0:
            return tuple(map(tuple, groups))
        if size % ways or ways == 1:
            return ()
        return tuple(tuple(group[start : start + ways]) for group in groups for start in range(0, size, ways))

    def _groups(self, instruction: Instruction) -> DeviceGroups:
        """Return the groups of devices of a collective, which have equal sizes."""
        groups = _replica_groups(instruction.attributes, self.devices.size)
        last = max(itertools.chain.from_iterable(groups))
        if last >= self.devices.size:
            raise ValueError(
                f"{instruction.name} runs on device {last}, and the mesh {describe_mesh(self.mesh)} has {self.devices.size}: "
                "give the mesh that the program was compiled for"
            )
        return groups

    def _axes(self, groups: DeviceGroups, places: np.ndarray | None = None, partly: bool = False) -> tuple[str, ...]:
        """Return the mesh axes that the groups span; () if the groups match no axes.

        Args:
          places: what the groups count, by the place in the mesh; None: the devices.
          partly: whether the groups are only some of those that span these axes.
        """
        devices = self.devices if places is None else places
        found = np.unravel_index(list(groups[0]), devices.shape)
        varying = [position for position, values in enumerate(found) if len(set(values)) > 1]
        kept = [position for position in range(devices.ndim) if position not in varying]
        size = math.prod(devices.shape[position] for position in varying)
        spans = {frozenset(map(int, span)) for span in devices.transpose(kept + varying).reshape(-1, size)}
        given = {frozenset(group) for group in groups}
        if not (given <= spans if partly else given == spans):
            return ()
        return tuple(name for position, name in enumerate(self.mesh) if position in varying)


def _pairs(instruction: Instruction) -> list[tuple[int, int]]:
    """Return the pairs of sender and receiver of a permute."""
    pairs = instruction.attribute(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
    if pairs is None:
        raise ValueError(f"{instruction.name} has no source_target_pairs={{{{0,1}},…}} of devices: {_REPORT}")
    return [(int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)\}", pairs)]


def _is_start(where: Computation) -> bool:
    """Return whether the TPU compiler starts a collective in this fusion, which other fusions continue."""
    return any('custom_call_target="AsyncCollectiveStart"' in instruction.attributes for instruction in where)


def _across(groups: DeviceGroups, parts: DeviceGroups) -> DeviceGroups:
    """Return the groups of devices that keep the same slice, given the subgroups whose devices keep different ones."""
    found: list[tuple[int, ...]] = []
    for group in groups:
        found += zip(*(part for part in parts if part[0] in group), strict=True)
    return tuple(found)


def _replica_groups(attributes: str, devices: int) -> DeviceGroups:
    """Read `replica_groups` in any of the forms in which XLA prints them."""
    lists = re.search(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}", attributes)
    if lists:
        groups = tuple(tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", lists[1]))
        return groups or (tuple(range(devices)),)
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", attributes)
    if iota:
        return _rows(_iota(iota[2]).reshape(int(iota[1].split(",")[0]), -1))
    # By axis names: mesh['a'=2,'b'=8], device_ids=([8,2]T(1,0)) {'a','b':(1)4}. An axis may be split: '(1)4' is the sub-axis of
    # size 4 whose more major part has size 1.
    named = re.search(r"replica_groups=@?[\w.]*\[(.*?)\](?:, device_ids=\((.*?\)?)\))? \{([^}]*)\}", attributes)
    if not named and "replica_groups=" in attributes:
        raise ValueError(f"replica_groups={attributes.partition('replica_groups=')[2][:80]} are no groups of devices: {_REPORT}")
    if not named:  # without groups, all devices take part
        return (tuple(range(devices)),)
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", named[1])}
    ids = _iota(named[2]) if named[2] else np.arange(math.prod(sizes.values()))
    wanted = {name: (before, part) for name, before, part in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", named[3])}
    shape: list[int] = []
    inside: list[int] = []  # positions in shape
    for name, size in sizes.items():
        before, part = (int(text or default) for text, default in zip(wanted.get(name, ("1", "1")), (1, size), strict=True))
        inside += [len(shape) + 1] if name in wanted else []
        shape += [before, part, size // (before * part)]
    order = [position for position in range(len(shape)) if position not in inside] + inside
    return _rows(ids.reshape(shape).transpose(order).reshape(-1, math.prod(shape[position] for position in inside)))


def _iota(text: str) -> np.ndarray:
    """Read device numbers: `[4,2]T(1,0)` is 0, 1, … in that shape, transposed; otherwise a list of numbers.

    >>> _iota("[2,4]T(1,0)").tolist()
    [0, 4, 1, 5, 2, 6, 3, 7]
    """
    found = re.match(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if not found:
        return np.array([int(number) for number in re.findall(r"\d+", text)])
    shape = tuple(map(int, found[1].split(",")))
    ids = np.arange(math.prod(shape)).reshape(shape)
    return (ids.transpose(tuple(map(int, found[2].split(",")))) if found[2] else ids).reshape(-1)


def _rows(table: np.ndarray) -> DeviceGroups:
    """Return the rows of a table as groups."""
    return tuple(tuple(map(int, row)) for row in table)
