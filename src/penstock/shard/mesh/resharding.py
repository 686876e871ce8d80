"""Find the collectives that reshard an array from one layout to another, and price them.

A set of mesh axes is a bitmask, in which bit 0 is the first axis of the mesh. A *layout* is a tuple with one bitmask per
dimension: the mesh axes that shard it. No axis shards two dimensions. Bytes are counted for ring collectives (Thakur,
Rabenseifner, Gropp 2005), and seconds by the α–β model (Hockney 1994).

Several axes shard a dimension in an order: over (a, b), it is split into blocks over a, and each block over b. An all-gather over
b moves data only within the blocks of a. An all-gather over a alone would join blocks that are not next to each other, so that
the array is permuted before. All dimensions have the axes in one order.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.shard.mesh.compiler_models import COMPILER_MODELS, CompilerModel
from penstock.shard.mesh.hardware import Hardware

Layout = tuple[int, ...]


@dataclass(frozen=True)
class ReshardStep:
    """A collective that is part of resharding an array.

    Attributes:
      kind: "all-reduce", "reduce-scatter", "all-gather", "all-to-all" or "collective-permute".
      axes: the mesh axes that it runs over.
      bytes: bytes of the larger of its operand and its result, on one device: gathered bytes of an all-gather, unreduced bytes
        of a reduce-scatter or an all-reduce, local bytes of an all-to-all or a permute.
      bytes_on_wire: bytes that one device sends if the collective runs as a ring.
      after: the layout of the array after it.
      sliced: whether a device keeps only a slice of its result.
    """

    kind: str
    axes: int
    bytes: float
    bytes_on_wire: float
    after: Layout
    sliced: bool = False

    def times(self, size: int) -> ReshardStep:
        """Return the collective for an array that is larger by a factor."""
        return ReshardStep(self.kind, self.axes, self.bytes * size, self.bytes_on_wire * size, self.after, self.sliced)


@dataclass
class MeshLinks:
    """A mesh with the speed of its links. Results are cached, as the search asks for the same ones many times.

    Attributes:
      names: names of the mesh axes.
      sizes: number of devices along each axis. Devices are numbered row by row.
      bandwidth, latency: bytes/s, and seconds of one step of a ring, between devices of one domain.
      domain: the number of devices of a domain; 0 if all devices are in one.
      network_bandwidth, network_latency: the same figures between devices of different domains.
      scatters, scatters_over_network: where the compiler scatters a sum, as in `CompilerModel`.
      reduce_scatters: whether a reduce-scatter takes half the time of an all-reduce (`Hardware.reduce_scatters`).
      last_is_major: whether axes shard a dimension in the order from the last axis of the mesh to the first.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    bandwidth: float
    latency: float
    domain: int = 0
    network_bandwidth: float = 0.0
    network_latency: float = 0.0
    scatters: float = math.inf
    scatters_over_network: bool = True
    reduce_scatters: bool = True
    last_is_major: bool = False
    _steps: dict = field(default_factory=dict, repr=False, init=False)
    _plans: dict = field(default_factory=dict, repr=False, init=False)
    _shards: dict = field(default_factory=dict, repr=False, init=False)
    _speeds: dict = field(default_factory=dict, repr=False, init=False)

    @classmethod
    def of(cls, mesh: Mapping[str, int], hardware: Hardware, compiler: CompilerModel | None = None) -> MeshLinks:
        """Return the links of a mesh of this hardware.

        Args:
          compiler: the compiler that makes the programs; None: the compiler of the hardware.
        """
        compiler = compiler or COMPILER_MODELS[hardware.platform]
        return cls(
            tuple(mesh),
            tuple(mesh.values()),
            hardware.link_bandwidth,
            hardware.link_latency,
            hardware.domain_of(math.prod(mesh.values())),
            hardware.network_bandwidth,
            hardware.network_latency,
            compiler.scatters,
            compiler.scatters_over_network,
            hardware.reduce_scatters,
        )

    def shards(self, axes: int) -> int:
        """Return the number of shards that some axes give: the product of their sizes."""
        if axes not in self._shards:
            self._shards[axes] = math.prod(size for bit, size in enumerate(self.sizes) if axes >> bit & 1)
        return self._shards[axes]

    def waypoints(self, source: Layout, target: Layout, partial: int) -> tuple[Layout, ...]:
        """Return the layout of an array after each step of a reshard; the last is the target.

        The source is not included, except where it is the layout after an all-reduce or the target itself. `partial` are the mesh
        axes over which the array is still to be summed.
        """
        stops = [step.after for step in self.reshard_steps(source, target, partial, 1)]
        if not stops or stops[-1] != target:
            stops.append(target)
        return tuple(stops)

    def axes(self, bits: int) -> tuple[str, ...]:
        """Return the names of mesh axes, in the order of the mesh."""
        return tuple(name for bit, name in enumerate(self.names) if bits >> bit & 1)

    def bits(self, names: tuple[str, ...]) -> int:
        """Return mesh axes as bits."""
        return sum(1 << self.names.index(name) for name in names)

    def reshard_steps(self, source: Layout, target: Layout, partial: int, size: int) -> tuple[ReshardStep, ...]:
        """Return the collectives that reshard an array, in order, without collectives over axes of one device.

        Args:
          partial: the mesh axes over which the array is still to be summed.
          size: bytes of the global array.

        >>> links = MeshLinks(("data", "model"), (2, 4), 50e9, 1e-6)
        >>> [(step.kind, links.axes(step.axes), step.bytes_on_wire) for step in links.reshard_steps((0b10, 0), (0, 0), 0, 800)]
        [('all-gather', ('model',), 600.0)]
        """
        key = (source, target, partial, size)
        if key not in self._steps:
            steps = self._plan_steps(source, target, partial)
            self._steps[key] = tuple(step.times(size) for step in steps if self.shards(step.axes) > 1)
        return self._steps[key]

    def classify(self, sources: np.ndarray, partial: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Return a number for each pair of layouts [sources, targets]. Pairs of one number need the same collectives.

        Args:
          sources: the masks of the layouts before [sources, dimensions].
          partial: the mesh axes over which the array is still to be summed [sources].
          targets: the masks of the layouts after [targets, dimensions].
        """
        most = 1 << len(self.sizes)
        scatterable = np.array([self.scatterable(axes) for axes in range(most)])
        before, after = [each[:, None] for each in sources.T], [each[None] for each in targets.T]
        have, want, scattered, reduced, _, exchanged, gathered = _find_masks(
            before, after, partial[:, None], lambda axes: scatterable[axes]
        )
        permuted = self._find_permuted(before, after, gathered)
        number = np.zeros((len(sources), len(targets)), dtype=np.int64)
        for mask in (have, want, scattered, reduced, exchanged, permuted):
            number = number * most + mask
        for pair in (1 << one | 1 << other for one, other in itertools.combinations(range(len(self.sizes)), 2)):
            # Axes of one dimension may be exchanged together.
            from_one, to_one = (((masks & pair) == pair).any(axis=1) for masks in (sources, targets))
            number = 4 * number + ((exchanged & pair) == pair) * (2 * from_one[:, None] + to_one[None])
        return number

    def _find_permuted(self, source: Sequence[Any], target: Sequence[Any], gathered: Any = 0) -> Any:
        """Return the mesh axes of dimensions whose blocks before a reshard are neither parts of the blocks after it, nor reverse.

        The axes on one side have to be the major ones of the axes on the other. Masks may be integers or arrays of them.

        Args:
          gathered: the axes that are gathered at the end of the reshard, and stay until then.
        """
        permuted: Any = 0
        between = [after | before & gathered for before, after in zip(source, target, strict=True)]
        for before, after in (*zip(source, between, strict=True), *zip(between, target, strict=True)):
            one, other = before & self._several, after & self._several
            both, more = one & other, one ^ other
            # The lowest bit of a mask is its first axis.
            is_major = more < (both & -both) if self.last_is_major else both < (more & -more)
            nested = ((both == one) | (both == other)) & ((both == 0) | (more == 0) | is_major)
            permuted = permuted | (one | other) * (1 - nested)
        return permuted

    def scatterable(self, axes: int) -> int:
        """Return the axes over which the compiler scatters a sum, of those over which it could be scattered."""
        axes &= self._scatterable
        return axes if self.shards(axes) <= self.scatters else 0

    @functools.cached_property
    def _scatterable(self) -> int:
        """Return the axes over which the compiler scatters a sum, whatever their size."""
        axes = (1 << bit for bit in range(len(self.sizes)) if self._several >> bit & 1)
        return sum(axis for axis in axes if self.scatters_over_network or self.inside(axis) == self.shards(axis))

    @functools.cached_property
    def _several(self) -> int:
        """Return the axes that have several devices."""
        return sum(1 << bit for bit, size in enumerate(self.sizes) if size > 1)

    def seconds(self, step: ReshardStep) -> float:
        """Return the seconds of a collective by the α–β model: bytes on wire / bandwidth + latency.

        The latency counts once and not once per step of the ring.
        """
        bandwidth, latency = self.speed(step.kind, step.axes)
        return sent_times(step.kind, self.reduce_scatters) * step.bytes_on_wire / bandwidth + latency

    def speed(self, kind: str, axes: int) -> tuple[float, float]:
        """Return the bytes on wire per second of a collective over some axes, and the latency of its slowest link in seconds.

        A ring over several domains crosses each border once, and the devices of a domain share the work: as many rings run side
        by side as it has devices, each over the network card of another one (as NCCL does on a host with several cards). An
        all-to-all sends `(n - inside) / (n - 1)` of the bytes on wire of each device over its own card, and a permute all bytes.
        """
        key = (kind, axes)
        if key not in self._speeds:
            self._speeds[key] = self.speed_within(kind, self.shards(axes), self.inside(axes))
        return self._speeds[key]

    def speed_within(self, kind: str, devices: int, inside: int) -> tuple[float, float]:
        """Return the same for a collective over a number of devices, of which `inside` are in one domain."""
        if inside >= devices:
            return self.bandwidth, self.latency
        ways = {"all-to-all": (devices - 1) / (devices - inside), "collective-permute": 1, "collective-broadcast": 1}
        return min(self.bandwidth, self.network_bandwidth * ways.get(kind, inside)), self.network_latency

    def inside(self, axes: int) -> int:
        """Return how many of the devices of a collective over some axes are in one domain.

        It is the least number, if the domains cut the mesh unevenly.

        >>> MeshLinks(("data", "model"), (8, 4), 450e9, 3e-6, domain=8, network_bandwidth=50e9).inside(0b01)
        2
        """
        if not self.domain:
            return self.shards(axes)
        places = np.arange(math.prod(self.sizes)).reshape(self.sizes)
        spanned = [axis for axis in range(len(self.sizes)) if axes >> axis & 1]
        others = [axis for axis in range(len(self.sizes)) if axis not in spanned]
        groups = places.transpose(*others, *spanned).reshape(-1, self.shards(axes)) // self.domain
        return min(int(np.unique(group, return_counts=True)[1].min()) for group in np.unique(groups, axis=0))

    def _plan_steps(self, source: Layout, target: Layout, partial: int) -> list[ReshardStep]:
        """Return the collectives of a reshard of one byte, including those over axes of one device.

        The order keeps the bytes low: sum first (scattering where the target is sharded), then slice locally, which sends
        nothing, then permute, exchange between dimensions, and gather last.
        """
        if (source, target, partial) in self._plans:
            return self._plans[source, target, partial]
        self._plans[source, target, partial] = steps = list[ReshardStep]()
        masks = _find_masks(source, target, partial, self.scatterable)
        have, _, scattered, reduced, sliced, exchanged, gathered = masks
        local_bytes = 1 / self.shards(have)
        layout = list(source)
        if scattered:
            n = self.shards(scattered)
            layout = [mask | wanted & scattered for mask, wanted in zip(layout, target, strict=True)]
            steps.append(ReshardStep("reduce-scatter", scattered, local_bytes, local_bytes * (n - 1) / n, tuple(layout)))
            local_bytes /= n
        if reduced:
            n = self.shards(reduced)
            on_wire = 2 * local_bytes * (n - 1) / n
            steps.append(ReshardStep("all-reduce", reduced, local_bytes, on_wire, tuple(layout), sliced=bool(sliced)))
        local_bytes /= self.shards(sliced)
        layout = [mask | wanted & sliced for mask, wanted in zip(layout, target, strict=True)]
        permuted = self._find_permuted(source, target, gathered)
        if permuted:
            steps.append(ReshardStep("collective-permute", permuted, local_bytes, local_bytes, tuple(layout)))
        for axes, after in self._exchange(tuple(layout), target, exchanged):
            n = self.shards(axes)
            steps.append(ReshardStep("all-to-all", axes, local_bytes, local_bytes * (n - 1) / n, after))
        if gathered:
            n = self.shards(gathered)
            local_bytes *= n
            steps.append(ReshardStep("all-gather", gathered, local_bytes, local_bytes * (n - 1) / n, tuple(target)))
        return steps

    def _exchange(self, layout: Layout, target: Layout, exchanged: int) -> list[tuple[int, Layout]]:
        """Return the all-to-alls of a reshard, as the axes and the layout after each.

        One all-to-all moves axes from one dimension to another. If several are requested at once, XLA gathers the array. They are
        in an order in which no layout between has to be permuted, if there is one.
        """
        moves = [
            (axes, at, to)
            for at, to in itertools.permutations(range(len(layout)), 2)
            if (axes := layout[at] & target[to] & exchanged)
        ]
        for order in itertools.permutations(moves):
            found, before = list[tuple[int, Layout]](), layout
            for axes, at, to in order:
                moved = with_axes(before, to, axes)
                after = (*moved[:at], moved[at] & ~axes, *moved[at + 1 :])
                if self._find_permuted(before, after):
                    break
                found.append((axes, after))
                before = after
            else:
                return found
        after = tuple(mask & ~exchanged | wanted & exchanged for mask, wanted in zip(layout, target, strict=True))
        return [(exchanged, after)]


def _find_masks(source: Sequence[Any], target: Sequence[Any], partial: Any, scatter: Callable[[Any], Any]) -> tuple[Any, ...]:
    """Return the mesh axes before a reshard, after it, and those that it scatters, reduces, slices, exchanges and gathers.

    The masks of both layouts and of the partial axes are integers, or arrays of them.

    Args:
      scatter: returns axes over which a sum can be scattered, or 0 if the compiler does not scatter over so many devices. Then
        the full sum is sliced.
    """
    have, want = union(source), union(target)
    scattered = scatter(partial & want & ~have)
    # Compilers scatter into one dimension. For more, they send the full sum and take a slice.
    scattered = scattered * (sum((wanted & scattered) != 0 for wanted in target) <= 1)
    reduced = partial & ~scattered & ~have
    sliced = want & ~have & ~scattered
    exchanged = 0
    for before, wanted in zip(source, target, strict=True):
        exchanged = exchanged | before & want & ~wanted
    return have, want, scattered, reduced, sliced, exchanged, have & ~want


def sent_times(kind: str, reduce_scatters: bool) -> int:
    """Return how often a collective sends its bytes: 2 for a reduce-scatter that is run as an all-reduce, else 1."""
    return 2 if kind == "reduce-scatter" and not reduce_scatters else 1


def union(layout: Iterable[Any]) -> Any:
    """Return the mesh axes that shard any dimension of a layout, as bits. Masks may be integers or arrays of them."""
    axes = 0
    for mask in layout:
        axes = axes | mask
    return axes


def with_axes(layout: Layout, dim: int, axes: int) -> Layout:
    """Return a layout in which some mesh axes shard a dimension too."""
    return (*layout[:dim], layout[dim] | axes, *layout[dim + 1 :])
