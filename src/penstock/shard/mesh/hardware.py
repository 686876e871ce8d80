"""A device and its links, as numbers: peak FLOP/s, memory, and the bandwidth and latency along each mesh axis."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any


@dataclass(frozen=True)
class Hardware:
    """One kind of device, and how it is linked to its like.

    Attributes:
      name: what `hardware` finds it by.
      flops: peak FLOP/s of dense matrix products by dtype, without sparsity. "float32" is what JAX does with float32 by
        default (`jax.default_matmul_precision`): one bfloat16 pass on TPUs, TensorFloat-32 on GPUs.
      memory: bytes of a device.
      memory_bandwidth: bytes/s, read and written together.
      link_bandwidth: bytes/s that a device can send along one mesh axis, in one direction. TPU: one link of the torus one way,
        so that an axis that closes to a ring can have up to twice as much. NVLink: all links of a GPU one way,
        as the switch gives them all to whichever axis is active. PCIe: one way.
      link_latency: seconds of a step from one device to the next; an order of magnitude.
      source: the datasheet.
      axis_bandwidth: by mesh axis, where it is not `link_bandwidth`: an axis between nodes, say.
      axis_latency: as `axis_bandwidth`, for `link_latency`.
    """

    name: str
    flops: Mapping[str, float]
    memory: int
    memory_bandwidth: float
    link_bandwidth: float
    link_latency: float
    source: str
    axis_bandwidth: Mapping[str, float] = field(default_factory=dict)
    axis_latency: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Times are quotients of these numbers, and a limit is one of them."""
        numbers: dict[str, Any] = {
            name: getattr(self, name) for name in ("memory", "memory_bandwidth", "link_bandwidth", "link_latency")
        }
        for name, key in (("flops", "dtype"), ("axis_bandwidth", "mesh axis"), ("axis_latency", "mesh axis")):
            given = getattr(self, name)
            if not isinstance(given, Mapping):
                raise TypeError(f"Hardware {self.name!r}: {name}={given!r} is no dict by {key}")
            numbers |= {f"{name}[{each!r}]": number for each, number in given.items()}
        for name, number in numbers.items():
            wrong = f"Hardware {self.name!r}: {name}={number!r}"
            if isinstance(number, bool) or not isinstance(number, Real):
                raise TypeError(f"{wrong} is no number")
            size = float(number)
            if name.startswith(("link_latency", "axis_latency")):
                if not 0 <= size < math.inf:
                    raise ValueError(f"{wrong}: it is in seconds, 0 or more")
            elif not size > 0 or (name == "memory" and size == math.inf):
                raise ValueError(f"{wrong}: it has to be above 0{', and finite' if name == 'memory' else ''}")

    def peak(self, dtype: Any) -> float:
        """FLOP/s of matrix products of a dtype, given by name or as NumPy or JAX has it.

        Of a dtype that is not in `flops`, the peak of the nearest that can hold it: float8 and int8 of bfloat16, float16 of
        bfloat16, all else of float32, which flatters float64 where it is emulated.
        """
        name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
        eight_bits = name.startswith(("float8", "float4"))
        if eight_bits and "float8" in self.flops:
            return self.flops["float8"]
        if name in ("int4", "uint4", "uint8") and "int8" in self.flops:
            return self.flops["int8"]
        small = eight_bits or name in ("int8", "uint8", "int4", "uint4", "float16", "bfloat16")
        for each in (name, "bfloat16" if small else "float32", "float32", "bfloat16"):
            if each in self.flops:
                return self.flops[each]
        raise ValueError(f"{self.name} has no peak for {name}: flops must have at least float32 or bfloat16")

    def overlapping(self, part: float) -> Hardware:
        """The same, if it hid a part of memory's traffic and of latency behind other work."""
        left = 1 - part
        return replace(
            self,
            memory_bandwidth=self.memory_bandwidth / left,
            link_latency=self.link_latency * left,
            axis_latency={axis: delay * left for axis, delay in self.axis_latency.items()},
        )

    def bandwidth(self, axes: Iterable[str]) -> float:
        """Bytes/s along mesh axes: of several the slowest; of none that are known, the slowest that there is."""
        speeds = [self.axis_bandwidth.get(axis, self.link_bandwidth) for axis in axes]
        return min(speeds or [self.link_bandwidth, *self.axis_bandwidth.values()])

    def latency(self, axes: Iterable[str]) -> float:
        """Seconds a step along mesh axes, chosen as in `bandwidth`."""
        delays = [self.axis_latency.get(axis, self.link_latency) for axis in axes]
        return max(delays or [self.link_latency, *self.axis_latency.values()])
