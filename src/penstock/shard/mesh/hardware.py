"""A device and its links as numbers: peak FLOP/s, memory, and the bandwidth and latency along each mesh axis.

They are the constants of the roofline (Williams, Waterman, Patterson 2009) and of the α–β model (Hockney 1994).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from penstock.shard.mesh.compiler_models import COMPILER_MODELS


@dataclass(frozen=True)
class Hardware:
    """A kind of device, with the links between devices of this kind.

    Attributes:
      name: the name by which `find_hardware` finds it.
      flops: peak FLOP/s of dense matrix products by dtype, without sparsity. "float32" is the peak of what JAX runs for float32
        by default (`jax.default_matmul_precision`): one bfloat16 pass on TPUs, TensorFloat-32 on GPUs.
      memory: bytes of a device.
      memory_bandwidth: bytes/s, read and written together.
      link_bandwidth: bytes/s that a device can send along one mesh axis, in one direction. TPU: one link of the torus; an
        axis that closes to a ring can have up to twice as much. NVLink: all links of a GPU, as the switch lets
        the active axis use all of them. PCIe: the bus.
      link_latency: seconds of a step from one device to the next; an order of magnitude.
      source: the datasheet.
      axis_bandwidth: bytes/s by mesh axis, where it is not `link_bandwidth`, such as for an axis between nodes.
      axis_latency: seconds by mesh axis, where it is not `link_latency`.
      axis_size: the number of devices along a mesh axis, where the machine decides it: {"node": 2} for two nodes.
      platform: the compiler that makes its programs: "tpu", "gpu" or "cpu" (`compiler_models.py`).
      fast_memory: bytes of memory on the chip in which the compiler keeps temporary arrays: VMEM on TPUs.
      reduce_scatters: whether it runs reduce-scatters. On CPUs, XLA runs an all-reduce instead, and each device takes its slice,
        which takes twice the time. The bytes sent count as those of a reduce-scatter, as in `Plan.verify`.

    A mesh has all axes that `axis_bandwidth`, `axis_latency` and `axis_size` name. If the planner chooses the mesh, it adds these
    axes, in the size that `axis_size` gives. Without one, each factor of the number of devices is searched.
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
    axis_size: Mapping[str, int] = field(default_factory=dict)
    platform: str = "gpu"
    fast_memory: int = 0
    reduce_scatters: bool = True

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
          TypeError: a figure is not a number, or a mapping is not a dict.
          ValueError: the platform is unknown, a size or speed is not above 0, the memory is infinite, or a latency is negative or
            infinite.
        """
        if self.platform not in COMPILER_MODELS:
            raise ValueError(f"Hardware {self.name!r}: platform={self.platform!r} is none of {', '.join(COMPILER_MODELS)}")
        numbers: dict[str, Any] = {
            name: getattr(self, name) for name in ("memory", "memory_bandwidth", "link_bandwidth", "link_latency")
        }
        axes = ("axis_bandwidth", "axis_latency", "axis_size")
        for name, key in (("flops", "dtype"), *((name, "mesh axis") for name in axes)):
            given = getattr(self, name)
            if not isinstance(given, Mapping):
                raise TypeError(f"Hardware {self.name!r}: {name}={given!r} is not a dict by {key}")
            numbers |= {f"{name}[{each!r}]": number for each, number in given.items()}
        for name, number in numbers.items():
            shown = f"Hardware {self.name!r}: {name}={number!r}"
            if isinstance(number, bool) or not isinstance(number, Real):
                raise TypeError(f"{shown} is not a number")
            size = float(number)
            if name.startswith("axis_size"):
                if not (1 <= size < math.inf and size == int(size)):
                    raise ValueError(f"{shown}: it is a number of devices, 1 or more")
            elif name.startswith(("link_latency", "axis_latency")):
                if not 0 <= size < math.inf:
                    raise ValueError(f"{shown}: it is in seconds, 0 or more")
            elif not size > 0 or (name == "memory" and size == math.inf):
                raise ValueError(f"{shown}: it has to be above 0{', and finite' if name == 'memory' else ''}")

    @property
    def named_axes(self) -> tuple[str, ...]:
        """Return the mesh axes that the machine names, because their links or their sizes are given."""
        return tuple(dict.fromkeys((*self.axis_size, *self.axis_bandwidth, *self.axis_latency)))

    def peak(self, dtype: Any) -> float:
        """Return the peak FLOP/s of matrix products of a dtype.

        A dtype that is not in `flops` has the peak of the nearest dtype that can hold it: bfloat16 for float8, int8 and
        float16, and float32 for all others. This overestimates float64 where it is emulated.

        Args:
          dtype: its name, or the dtype itself, of NumPy or JAX.

        Raises:
          ValueError: `flops` has neither the dtype nor one that can stand for it.

        Examples:
          >>> from penstock.shard import find_hardware
          >>> find_hardware("h100").peak("float16")
          989400000000000.0
        """
        name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
        eight_bits = name.startswith(("float8", "float4"))
        if eight_bits and "float8" in self.flops:
            return self.flops["float8"]
        if name in ("int4", "uint4", "uint8") and "int8" in self.flops:
            return self.flops["int8"]
        small = eight_bits or name in ("int8", "uint8", "int4", "uint4", "float16", "bfloat16")
        for candidate in (name, "bfloat16" if small else "float32", "float32", "bfloat16"):
            if candidate in self.flops:
                return self.flops[candidate]
        raise ValueError(f"{self.name} has no peak for {name}: flops must have at least float32 or bfloat16")

    def bandwidth(self, axes: Iterable[str]) -> float:
        """Return the bytes/s that a collective over some mesh axes can send: those of the slowest axis.

        Args:
          axes: names of mesh axes; if there are none, the slowest of all links counts.
        """
        speeds = [self.axis_bandwidth.get(axis, self.link_bandwidth) for axis in axes]
        return min(speeds or [self.link_bandwidth, *self.axis_bandwidth.values()])

    def latency(self, axes: Iterable[str]) -> float:
        """Return the seconds of a step of a ring over some mesh axes: those of the slowest axis.

        Args:
          axes: names of mesh axes; if there are none, the slowest of all links counts.
        """
        delays = [self.axis_latency.get(axis, self.link_latency) for axis in axes]
        return max(delays or [self.link_latency, *self.axis_latency.values()])
