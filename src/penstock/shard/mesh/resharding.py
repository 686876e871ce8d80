"""Layouts, and what it costs to go from one to another.

A layout is a tuple with, for each dimension, the set of mesh axes that shard it, as bits: bit 0 is the first axis of the
mesh. No axis stands in two dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

Layout = tuple[int, ...]


@dataclass(frozen=True)
class ReshardStep:
    """A collective on the way from one layout to another.

    Attributes:
      after: the layout that it leaves the array in.
      kind: "all-reduce", "reduce-scatter", "all-gather" or "all-to-all".
      axes: over which it runs, as bits.
      bytes: gathered, unreduced or (all-to-all) local bytes of a device.
      wire: bytes that a device sends, by the formula of a ring.
    """

    kind: str
    axes: int
    bytes: float
    bytes_on_wire: float
    after: Layout


@dataclass
class MeshLinks:
    """A mesh, and how fast it is.

    Attributes:
      names: of the axes.
      sizes: of the axes.
      bandwidth: bytes/s along each axis.
      latency: seconds that a step of a ring takes along each axis.
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    bandwidth: tuple[float, ...]
    latency: tuple[float, ...]
    _steps: dict = field(default_factory=dict, repr=False)
    _shards: dict = field(default_factory=dict, repr=False)
    _speeds: dict = field(default_factory=dict, repr=False)

    def shards(self, axes: int) -> int:
        """The product of the sizes of some axes."""
        if axes not in self._shards:
            self._shards[axes] = math.prod(size for bit, size in enumerate(self.sizes) if axes >> bit & 1)
        return self._shards[axes]

    def waypoints(self, source: Layout, target: Layout, partial: int) -> tuple[Layout, ...]:
        """The layouts to go through from one to another, the last included; without the first, if that is not partial."""
        stops = [step.after for step in self.reshard_steps(source, target, partial, 1)]
        if not stops or stops[-1] != target:
            stops.append(target)
        return tuple(stops)

    def axes(self, bits: int) -> tuple[str, ...]:
        return tuple(name for bit, name in enumerate(self.names) if bits >> bit & 1)

    def bits(self, names: Mapping | tuple[str, ...]) -> int:
        return sum(1 << self.names.index(name) for name in names)

    def reshard_steps(self, source: Layout, target: Layout, partial: int, size: int) -> tuple[ReshardStep, ...]:
        """The collectives that take an array of `size` bytes from one layout to another, summed over the axes `partial`."""
        key = (source, target, partial, size)
        if key not in self._steps:
            # Along axes of one device nothing moves.
            self._steps[key] = tuple(
                step for step in self._plan_steps(source, target, partial, size) if self.shards(step.axes) > 1
            )
        return self._steps[key]

    def seconds(self, step: ReshardStep) -> float:
        """α–β: the bytes over the slowest link that takes part, and one latency, as compilers combine small collectives."""
        bandwidth, latency = self.speed(step)
        return step.bytes_on_wire / bandwidth + latency

    def speed(self, step: ReshardStep) -> tuple[float, float]:
        """Bytes/s and latency of the slowest axis that a collective runs over."""
        if step.axes not in self._speeds:
            bits = [bit for bit in range(len(self.sizes)) if step.axes >> bit & 1]
            self._speeds[step.axes] = (min(self.bandwidth[bit] for bit in bits), max(self.latency[bit] for bit in bits))
        return self._speeds[step.axes]

    def _plan_steps(self, source: Layout, target: Layout, partial: int, size: int) -> list[ReshardStep]:
        """Sum first, scattering where the target is sharded; cut what need not travel; exchange; gather at last."""
        reshard_steps = []
        have, want = union(source), union(target)
        local = size / self.shards(have)
        now = list(source)
        if scattered := partial & want & ~have:
            n = self.shards(scattered)
            now = [mask | there & scattered for mask, there in zip(now, target, strict=True)]
            reshard_steps.append(ReshardStep("reduce-scatter", scattered, local, local * (n - 1) / n, tuple(now)))
            local /= n
        if left := partial & ~scattered & ~have:
            n = self.shards(left)
            reshard_steps.append(ReshardStep("all-reduce", left, local, 2 * local * (n - 1) / n, tuple(now)))
        cut = want & ~have & ~scattered
        local /= self.shards(cut)
        now = [mask | there & cut for mask, there in zip(now, target, strict=True)]
        exchanged = 0
        for one, other in zip(source, target, strict=True):
            exchanged |= one & want & ~other
        if exchanged:
            n = self.shards(exchanged)
            now = [mask & ~exchanged | there & exchanged for mask, there in zip(now, target, strict=True)]
            reshard_steps.append(ReshardStep("all-to-all", exchanged, local, local * (n - 1) / n, tuple(now)))
        if gathered := have & ~want:
            n = self.shards(gathered)
            local *= n
            reshard_steps.append(ReshardStep("all-gather", gathered, local, local * (n - 1) / n, tuple(target)))
        return reshard_steps


def union(layout: Layout) -> int:
    union = 0
    for mask in layout:
        union |= mask
    return union
