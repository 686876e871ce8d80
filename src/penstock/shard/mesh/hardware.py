"""What devices can do: arithmetic, memory and the links between them, from datasheets or measured."""

from __future__ import annotations

import difflib
import json
import math
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from numbers import Real
from pathlib import Path
from typing import Any

_GB = 10**9
_GIB = 2**30
_TERA = 1e12

# Order of magnitude of one step of a ring: a hop over ICI takes about 1 µs (Google, "How to scale your model", part 2),
# NCCL some µs for a step over NVLink and over PCIe, most of it in starting kernels (nccl-tests, latency of small sizes
# divided by the steps). No datasheet gives them; they decide only between exchanges of a few kB.
_ICI, _NVLINK, _PCIE = 1e-6, 3e-6, 10e-6

THIS_MACHINE = "this machine"


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


def _tpu(
    version: str, bfloat16: float, int8: float, gib: int, gbps_memory: float, gbps_links: float, links: int, page: str
) -> Hardware:
    """`gbps_links`: of a chip in one direction over all its links, which Google gives in Gbit/s."""
    return Hardware(
        name=f"tpu-{version}",
        flops={"bfloat16": bfloat16 * _TERA, "float32": bfloat16 * _TERA, "int8": int8 * _TERA},
        memory=gib * _GIB,
        memory_bandwidth=gbps_memory * _GB,
        link_bandwidth=gbps_links / 8 / links * _GB,
        link_latency=_ICI,
        source=page,
    )


def _gpu(
    name: str, tera: Mapping[str, float], gb: int, gbps_memory: float, gbps_link: float, sheet: str, latency: float = _NVLINK
) -> Hardware:
    flops = {dtype: peak * _TERA for dtype, peak in tera.items()}
    return Hardware(name, flops, gb * _GB, gbps_memory * _GB, gbps_link * _GB, latency, sheet)


_HOPPER = {"bfloat16": 989.4, "float32": 494.7, "float8": 1978.9, "int8": 1978.9, "float64": 66.9}

_TABLE = {
    each.name: each
    for each in (
        _tpu("v4", 275, 275, 32, 1228, 2400, 6, "Google Cloud, TPU v4; Jouppi et al., ISCA 2023, table 4: 6 links of 50 GB/s"),
        _tpu("v5e", 197, 393, 16, 819, 1600, 4, "Google Cloud, TPU v5e (cloud.google.com/tpu/docs/v5e)"),
        _tpu("v5p", 459, 918, 95, 2765, 4800, 6, "Google Cloud, TPU v5p (cloud.google.com/tpu/docs/v5p)"),
        _tpu("v6e", 918, 1836, 32, 1600, 3200, 4, "Google Cloud, TPU v6e (cloud.google.com/tpu/docs/v6e)"),
        _gpu(
            "a100",
            {"bfloat16": 312, "float32": 156, "int8": 624, "float64": 19.5},
            80,
            2039,
            300,
            "NVIDIA A100 datasheet, 80 GB SXM: NVLink 600 GB/s both ways",
        ),
        _gpu(
            "h100",
            _HOPPER,
            80,
            3350,
            450,
            "NVIDIA H100 datasheet, SXM, half of the peaks with sparsity: NVLink 900 GB/s both ways",
        ),
        _gpu(
            "h200",
            _HOPPER,
            141,
            4800,
            450,
            "NVIDIA H200 datasheet, SXM, half of the peaks with sparsity: NVLink 900 GB/s both ways",
        ),
        _gpu(
            "b200",
            {"bfloat16": 2250, "float32": 1100, "float8": 4500, "int8": 4500, "float64": 40},
            180,
            8000,
            900,
            "NVIDIA Blackwell architecture brief, HGX B200 at 1,000 W, dense: NVLink 1,800 GB/s both ways",
        ),
        _gpu(
            "l4",
            {"bfloat16": 121, "float32": 60, "float8": 242.5, "int8": 242.5},
            24,
            300,
            32,
            "NVIDIA L4 datasheet, half of the peaks with sparsity: PCIe 4.0 ×16, 32 GB/s one way",
            _PCIE,
        ),
    )
}


def hardware(which: str | Hardware) -> Hardware:
    """Hardware by its name: "tpu-v5e" or "v5e", "h100", …; "this machine" measures what is here (`this_machine`).

    Raises:
      TypeError, ValueError: it is no name, or there is none of that name; it tells the nearest names.

    >>> hardware("tpu-v5e").link_bandwidth
    50000000000.0
    """
    if isinstance(which, Hardware):
        return which
    if not isinstance(which, str):
        raise TypeError(f"hardware={which!r} is neither a name, such as 'tpu-v5e', nor a penstock.shard.mesh.hardware.Hardware")
    name = which.strip().lower().replace("_", "-").replace(" ", "-")
    if name == THIS_MACHINE.replace(" ", "-"):
        return this_machine()
    found = _TABLE.get(name) or _TABLE.get(f"tpu-{name}")
    if found:
        return found
    near = difflib.get_close_matches(name, _TABLE, n=3, cutoff=0.5)
    raise ValueError(
        f'hardware "{which}" is not known{"; nearest: " if near else ""}{", ".join(near)}. Give one of {", ".join(_TABLE)}, '
        f'"{THIS_MACHINE}", or a penstock.shard.mesh.hardware.Hardware of your own'
    )


_KINDS = (
    ("v5 lite", "tpu-v5e"),
    ("v5e", "tpu-v5e"),
    ("v6 lite", "tpu-v6e"),
    ("v6e", "tpu-v6e"),
    ("v5", "tpu-v5p"),
    ("v4", "tpu-v4"),
    ("a100", "a100"),
    ("h100", "h100"),
    ("h200", "h200"),
    ("b200", "b200"),
    ("l4", "l4"),
)
"""What `device_kind` of a JAX device has in it → name; the first that fits."""


def present() -> Hardware:
    """That of JAX's default device: from the table, if it is in there, else measured. Starts JAX."""
    import jax

    kind = jax.devices()[0].device_kind.lower()
    if jax.default_backend() != "cpu":
        for part, name in _KINDS:
            if re.search(rf"\b{part}\b", kind):
                return hardware(name)
    return this_machine()


def this_machine() -> Hardware:
    """The devices of this process, measured: seconds the first time, then from a file in the user's cache folder.

    Starts JAX. Matrix products of 1024², a copy, and an all-reduce over all local devices; with one device, what it
    could be linked to counts as being as fast as its memory. Virtual CPU devices share one machine: each is measured
    while the others are idle, and memory is divided among them.
    """
    import jax

    devices = jax.local_devices()
    key = f"{platform.node()} {platform.machine()} {os.cpu_count()} {len(devices)}×{devices[0].device_kind} jax {jax.__version__}"
    path = _cache()
    known = _read(path)
    try:
        return Hardware(**known[key])
    except (KeyError, TypeError, ValueError):  # not measured, or by a version that kept something else
        pass
    measured = _measure(devices)
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(f".{os.getpid()}")
    written.write_text(json.dumps({**known, key: asdict(measured)}, indent=1))
    written.replace(path)  # another process may be reading it
    return measured


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock" / "hardware.json"


def _read(path: Path) -> dict[str, Any]:
    try:
        known = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _measure(devices: list[Any]) -> Hardware:
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    device = devices[0]
    n = 1024
    flops = {}
    for dtype in ("float32", "bfloat16"):
        with jax.default_device(device):
            square = jnp.ones((n, n), dtype)
        flops[dtype] = 2 * n**3 / _seconds(jax.jit(jnp.matmul), square, square)
    with jax.default_device(device):
        long = jnp.ones(16 << 20, jnp.float32)
    memory_bandwidth = 2 * long.nbytes / _seconds(jax.jit(lambda x: x + 1), long)

    link_bandwidth, link_latency = memory_bandwidth, _ICI
    if len(devices) > 1:
        count = len(devices)
        split, whole = PartitionSpec("all"), PartitionSpec()
        sharding = NamedSharding(Mesh(devices, ("all",)), split)
        reduced = jax.jit(lambda x: x.sum(0), out_shardings=NamedSharding(sharding.mesh, whole))
        small, large = (jax.device_put(jnp.ones((count, size), jnp.float32), sharding) for size in (1, 1 << 20))
        steps = 2 * (count - 1)  # of a ring
        link_latency = _seconds(reduced, small) / steps
        link_bandwidth = steps / count * (large.nbytes / count) / _seconds(reduced, large)
    source = f"measured on {platform.node()}"
    source += "" if len(devices) > 1 else "; the links are unknown, and taken to be as fast as the memory"
    memory = _memory(device, len(devices))
    return Hardware(THIS_MACHINE, flops, memory, memory_bandwidth, link_bandwidth, link_latency, source)


def _seconds(function: Callable[..., Any], *arguments: Any) -> float:
    """Median of a few runs, after one that compiles."""
    function(*arguments).block_until_ready()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        function(*arguments).block_until_ready()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _memory(device: Any, devices: int) -> int:
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit is None and device.platform != "cpu":
        raise ValueError(
            f"{device.device_kind} does not tell how much memory it has: give hardware= one of {', '.join(_TABLE)}, or a "
            "penstock.shard.mesh.hardware.Hardware with its memory"
        )
    return _host_memory() // devices if limit is None else int(limit)  # CPU devices share the host's


def _host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
