"""What a compiled, partitioned program does: its collectives and its FLOPs, each as often as it runs.

Functions of HLO text (`compiled.as_text()`), so that they work for programs compiled for devices that are not there.
Devices are numbered as the partitions of the program are: row-major over the mesh.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.shard.hlo.parse import Array, Computation, HloProgram, Instruction, parse
from penstock.shard.hlo.slices import depends_on_device, index_values, slices
from penstock.shard.mesh.shapes import describe_mesh

_KINDS = {
    "all-reduce": "all-reduce",
    "all-gather": "all-gather",
    "reduce-scatter": "reduce-scatter",
    "all-to-all": "all-to-all",
    "ragged-all-to-all": "all-to-all",
    "collective-permute": "collective-permute",
    "collective-broadcast": "collective-broadcast",
}

DeviceGroups = Sequence[Sequence[int]]

_ASK = "this XLA prints it in a way that penstock does not read; report it with the line of the program"


@dataclass(frozen=True)
class Collective:
    """An exchange between devices.

    Attributes:
      kind: "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute" or "collective-broadcast".
      bytes: the full ones on a device: gathered (all-gather), unreduced (reduce-scatter), else those of its operands.
      group: devices that take part, each group of them on its own; for a permute the longest chain of them.
      count: times that it runs in a run of the program.
      axes: of the mesh, those that its groups span; () if the groups are not those of any axes.
      guessed: unknown whether it is an all-reduce or a reduce-scatter; it was taken for one by size.
    """

    kind: str
    bytes: int
    group: int
    count: float
    axes: tuple[str, ...]
    guessed: bool = False

    @property
    def bytes_on_wire(self) -> float:
        """Bytes that a device sends in one run of it, by the algorithms that move fewest (rings, for instance).

        Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH" (2005), §4. A
        broadcast counts as a permute does: in a chain, each device passes on all of it, once, piece by piece.
        """
        if self.kind in ("collective-permute", "collective-broadcast"):
            return float(self.bytes)
        share = (self.group - 1) / self.group * self.bytes
        return 2 * share if self.kind == "all-reduce" else share


def collectives(text: str, mesh: Mapping[str, int]) -> list[Collective]:
    """The collectives of a program, in its order; those with a group of one device move nothing and are left out.

    Counted once: an asynchronous one (`-start` and `-done`, or the TPU compiler's fusions of its phases). A loop runs
    its body and its condition as often as `Program.turns` says. Of a conditional, that branch counts which moves most.

    **Reduce-scatters.** An all-reduce of which each device keeps only a part, taken by `dynamic-slice` at a place that
    depends on the device, stands for a reduce-scatter: XLA:CPU forms none, and the TPU compiler writes them so in a fusion.
    What the TPU and GPU compilers leave as an all-reduce outside of a fusion is one, whatever becomes of its result.
    Where its group spans axes `a` and `b` and the part differs along `a` only, it counts as a reduce-scatter of all
    bytes over `a` and an all-reduce of that part over `b`. A tuple all-reduce is taken element by element; the
    elements that turn out alike are summed. Where the place of a slice cannot be computed from the text, the size of the
    slice decides, and the collectives are marked as `guessed`.

    Args:
      text: of `jax.stages.Compiled.as_text()`, for a program with one partition per device. It leaves out the elements of
        long constants, so that from 16 devices on such places are unknown; `measure` has the elements put in.
      mesh: sizes of the mesh axes in the order of the mesh.

    Raises:
      ValueError: this is not HLO text, names devices that the mesh does not have, or writes groups or types in a way that
        is not known here.
    """
    return _Collectives(parse(text), mesh).of(parse(text).entry)


class _Collectives:
    def __init__(self, program: HloProgram, mesh: Mapping[str, int]) -> None:
        self.program = program
        self.mesh = mesh
        self.devices = np.arange(math.prod(mesh.values())).reshape(tuple(mesh.values()))
        self.started = {
            instruction.attribute(r"channel_id=(\d+)")
            for computation in program.computations.values()
            if _is_start(computation)
            for instruction in computation
        } - {None}

    def of(self, where: Computation) -> list[Collective]:
        found: list[Collective] = []
        for instruction in where:
            kind = _KINDS.get(instruction.opcode.removesuffix("-start"))
            if kind:
                found += self._one(kind, where, instruction)
            elif instruction.opcode == "while":
                turns = self.program.turns(where, instruction)
                turn = [c for part in self.program.parts(instruction) for c in self.of(part)]
                found += [replace(c, count=c.count * turns) for c in turn if turns]
            elif instruction.branches:
                branches = [self.of(self.program.computations[name]) for name in instruction.branches]
                found += max(branches, key=lambda branch: sum(c.bytes_on_wire * c.count for c in branch))
            else:
                for name in instruction.called:
                    found += self.of(self.program.computations[name])
        return found

    def _one(self, kind: str, where: Computation, instruction: Instruction) -> list[Collective]:
        channel = instruction.attribute(r"channel_id=(\d+)")
        if channel in self.started and not _is_start(where):
            return []  # a later phase of what an AsyncCollectiveStart has begun
        operands = where.operand_arrays(instruction)
        total = sum(array.bytes for array in operands)
        if kind == "collective-permute":
            return self._permute(_pairs(instruction), total)
        groups = self._groups(instruction)
        if kind == "all-reduce":
            return self._all_reduce(where, instruction, operands, groups)
        bytes_ = total * len(groups[0]) if kind == "all-gather" else total
        return self._sized(kind, bytes_, groups)

    def _sized(self, kind: str, bytes_: int, groups: DeviceGroups) -> list[Collective]:
        size = max(map(len, groups))
        return [Collective(kind, bytes_, size, 1.0, self._axes(groups))] if size > 1 else []

    def _permute(self, pairs: Iterable[tuple[int, int]], bytes_: int) -> list[Collective]:
        chains: list[set[int]] = []
        axes: set[str] = set()
        for pair in pairs:
            near, far = (np.unravel_index(device, self.devices.shape) for device in pair)
            axes |= {name for name, a, b in zip(self.mesh, near, far, strict=True) if a != b}
            touched = [chain for chain in chains if chain & set(pair)]
            chains = [chain for chain in chains if chain not in touched] + [set(pair).union(*touched)]
        size = max(map(len, chains), default=1)
        named = tuple(name for name in self.mesh if name in axes)
        return [Collective("collective-permute", bytes_, size, 1.0, named)] if size > 1 else []

    def _all_reduce(
        self, where: Computation, instruction: Instruction, operands: Sequence[Array], groups: DeviceGroups
    ) -> list[Collective]:
        totals: dict[tuple[DeviceGroups, bool], int] = {}  # groups that scatter the result among them, if guessed → bytes
        for position, array in enumerate(operands):
            element = position if len(operands) > 1 else None
            kept = self._scattered(where, instruction, element, array, groups)
            totals[kept] = totals.get(kept, 0) + array.bytes
        found: list[Collective] = []
        for (scattered, guessed), bytes_ in totals.items():
            ways = max(map(len, scattered), default=1)
            made = self._sized("reduce-scatter", bytes_, scattered) if ways > 1 else []
            if ways == 1:
                made = self._sized("all-reduce", bytes_, groups)
            elif ways < len(groups[0]):
                made += self._sized("all-reduce", bytes_ // ways, _across(groups, scattered))
            found += [replace(each, guessed=guessed) for each in made]
        return found

    def _scattered(
        self, where: Computation, instruction: Instruction, element: int | None, array: Array, groups: DeviceGroups
    ) -> tuple[DeviceGroups, bool]:
        """The parts of the groups whose devices keep different parts of the result, and whether that is a guess.

        No parts if all devices keep all of the result.
        """
        fused = any(caller.opcode == "fusion" for _, caller in self.program.callers[where.name])
        if "backend_config=" in instruction.attributes and not fused:
            return (), False  # its compiler forms reduce-scatters, and has chosen to run this as an all-reduce
        taken = slices(self.program, where, instruction, element, array)
        if not taken:
            return (), False
        found = [self._parted(*each, groups) for each in taken]
        if ((), False) in found:
            return (), False  # what one use does not scatter has to be there whole
        parts, _ = min(found, key=lambda each: max(map(len, each[0]), default=0))
        return parts, any(guessed for _, guessed in found)

    def _parted(self, where: Computation, taken: Instruction, groups: DeviceGroups) -> tuple[DeviceGroups, bool]:
        """As `_scattered`, of one slice."""
        names = taken.operands[1:]
        places = {name: index_values(self.program, where, name, self.devices.size) for name in names}
        known = [found for found in places.values() if found is not None]
        if any(found is None and depends_on_device(self.program, where, name) for name, found in places.items()):
            # The text does not tell the place (of a table too long for it, say): by size, of several axes the innermost.
            ways = where.operand(taken).elements // max(1, taken.elements)
            return self._innermost(groups, ways), True
        if not known:
            return (), False
        table = np.hstack([np.broadcast_to(found, (self.devices.size, 1)) for found in known])
        parts: list[tuple[int, ...]] = []
        for group in groups:
            by_place: dict[tuple[int, ...], list[int]] = {}
            for device in group:
                by_place.setdefault(tuple(table[device]), []).append(device)
            apart = len(by_place) * taken.elements <= where.operand(taken).elements
            if not apart or len(set(map(len, by_place.values()))) > 1:
                return (), False  # parts that overlap, or are not kept by as many devices each
            parts += zip(*by_place.values(), strict=True)
        return (tuple(parts) if len(parts[0]) > 1 else ()), False

    def _innermost(self, groups: DeviceGroups, ways: int) -> DeviceGroups:
        size = len(groups[0])
        if ways % size == 0:
            return tuple(map(tuple, groups))
        if size % ways or ways == 1:
            return ()
        return tuple(tuple(group[start : start + ways]) for group in groups for start in range(0, size, ways))

    def _groups(self, instruction: Instruction) -> DeviceGroups:
        """The groups of devices, of equal size, in any of the ways in which XLA prints them."""
        groups = _replica_groups(instruction.attributes, self.devices.size)
        last = max(itertools.chain.from_iterable(groups))
        if last >= self.devices.size:
            raise ValueError(
                f"{instruction.name} runs on device {last}, and the mesh {describe_mesh(self.mesh)} has {self.devices.size}: "
                "give the mesh that the program was compiled for"
            )
        return groups

    def _axes(self, groups: DeviceGroups) -> tuple[str, ...]:
        """The axes of the mesh whose lines, planes and so on the groups are."""
        places = np.unravel_index(list(groups[0]), self.devices.shape)
        varying = [position for position, values in enumerate(places) if len(set(values)) > 1]
        kept = [position for position in range(self.devices.ndim) if position not in varying]
        size = math.prod(self.devices.shape[position] for position in varying)
        spans = self.devices.transpose(kept + varying).reshape(-1, size)
        if {frozenset(group) for group in groups} != {frozenset(map(int, span)) for span in spans}:
            return ()
        return tuple(name for position, name in enumerate(self.mesh) if position in varying)


def _pairs(instruction: Instruction) -> list[tuple[int, int]]:
    """The devices that a permute sends from and to."""
    pairs = instruction.attribute(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
    if pairs is None:
        raise ValueError(f"{instruction.name} does not tell source_target_pairs={{{{0,1}},…}} of devices: {_ASK}")
    return [(int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)\}", pairs)]


def _is_start(where: Computation) -> bool:
    """Whether it is a fusion in which the TPU compiler starts a collective that other fusions go on with."""
    return any('custom_call_target="AsyncCollectiveStart"' in instruction.attributes for instruction in where)


def _across(groups: DeviceGroups, parts: DeviceGroups) -> DeviceGroups:
    """The devices of the groups that hold the same part, where each part of a group is in the same order."""
    found: list[tuple[int, ...]] = []
    for group in groups:
        found += zip(*(part for part in parts if part[0] in group), strict=True)
    return tuple(found)


def _replica_groups(attributes: str, devices: int) -> DeviceGroups:
    lists = re.search(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}", attributes)
    if lists:
        groups = tuple(tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", lists[1]))
        return groups or (tuple(range(devices)),)
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", attributes)
    if iota:
        return _rows(_iota(iota[2]).reshape(int(iota[1].split(",")[0]), -1))
    # By names: mesh['a'=2,'b'=8], device_ids=([8,2]T(1,0)) {'a','b':(1)4}. An axis may stand there in part: '(1)4' are 4 of
    # its devices, with 1 before them.
    named = re.search(r"replica_groups=@?[\w.]*\[(.*?)\](?:, device_ids=\((.*?\)?)\))? \{([^}]*)\}", attributes)
    if not named and "replica_groups=" in attributes:
        raise ValueError(f"replica_groups={attributes.partition('replica_groups=')[2][:80]} are no groups of devices: {_ASK}")
    if not named:  # all devices, where none are named
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
    """`[4,2]T(1,0)`: 0, 1, … in that shape, transposed so; or a list of numbers as they are."""
    found = re.match(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if not found:
        return np.array([int(number) for number in re.findall(r"\d+", text)])
    shape = tuple(map(int, found[1].split(",")))
    ids = np.arange(math.prod(shape)).reshape(shape)
    return (ids.transpose(tuple(map(int, found[2].split(",")))) if found[2] else ids).reshape(-1)


def _rows(table: np.ndarray) -> DeviceGroups:
    return tuple(tuple(map(int, row)) for row in table)
