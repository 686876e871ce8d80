"""Describe the devices to plan for by numbers: peak FLOP/s, memory, and the bandwidth and latency of their links.

They are the constants of the roofline (Williams, Waterman, Patterson 2009) and of the α–β model (Hockney 1994). The figures of
known devices are from the vendors' datasheets, which each entry names. The devices of this process are measured, and their links
by an all-reduce over all devices and the formula of a ring.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import math
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from numbers import Real
from pathlib import Path
from typing import Any

from penstock._arguments import brief
from penstock._atomic_write import replace
from penstock._cache_folder import user_cache
from penstock.shard.mesh.compiler_models import COMPILER_MODELS

_ZERO_OR_MORE = {
    "link_latency": "in seconds",
    "domain": "a number of devices",
    "network_bandwidth": "in bytes/s",
    "network_latency": "in seconds",
}
"""The figures of a `Hardware` that may be 0, and their units."""


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
      domain: the number of devices that these links connect: the GPUs of a host, or the chips of a TPU slice. Devices of
        different domains exchange data over the network. 0: the links connect all devices.
      network_bandwidth: bytes/s that a device can send to other domains; 0 if there is no network.
      network_latency: seconds of a step from a device to one of another domain; an order of magnitude.
      platform: the compiler that makes its programs: "tpu", "gpu" or "cpu" (`compiler_models.py`).
      fast_memory: bytes of memory on the chip in which the compiler keeps temporary arrays: VMEM on TPUs.
      reduce_scatters: whether it runs reduce-scatters. On CPUs, XLA runs an all-reduce instead, and each device takes its slice,
        which takes twice the time. It sends as many bytes as a reduce-scatter, as in `Plan.verify`.

    The devices of a mesh are numbered row by row, and each `domain` of them is connected. So the last axes of a mesh are within
    the domains, and the first ones cross the network.
    """

    name: str
    flops: Mapping[str, float]
    memory: int
    memory_bandwidth: float
    link_bandwidth: float
    link_latency: float
    source: str
    domain: int = 0
    network_bandwidth: float = 0.0
    network_latency: float = 0.0
    platform: str = "gpu"
    fast_memory: int = 0
    reduce_scatters: bool = True

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
          TypeError: a figure is not a number, or `flops` is not a dict.
          ValueError: the platform is unknown, a size or speed is not above 0, the memory is infinite, a latency is negative or
            infinite, or there are domains without a network.
        """
        if self.platform not in COMPILER_MODELS:
            raise ValueError(f"Hardware {self.name!r}: platform={self.platform!r} is none of {', '.join(COMPILER_MODELS)}")
        if not isinstance(self.flops, Mapping):
            raise TypeError(f"Hardware {self.name!r}: flops={self.flops!r} is not a dict by dtype")
        speeds = ("memory", "memory_bandwidth", "link_bandwidth")
        numbers: dict[str, Any] = {name: getattr(self, name) for name in (*speeds, *_ZERO_OR_MORE)}
        numbers |= {f"flops[{each!r}]": number for each, number in self.flops.items()}
        for name, number in numbers.items():
            shown = f"Hardware {self.name!r}: {name}={number!r}"
            if isinstance(number, bool) or not isinstance(number, Real):
                raise TypeError(f"{shown} is not a number")
            size = float(number)
            if name in _ZERO_OR_MORE:
                if not 0 <= size < math.inf:
                    raise ValueError(f"{shown}: it is {_ZERO_OR_MORE[name]}, 0 or more")
            elif not size > 0 or (name == "memory" and size == math.inf):
                raise ValueError(f"{shown}: it has to be above 0{', and finite' if name == 'memory' else ''}")
        if self.domain != int(self.domain):
            raise ValueError(f"Hardware {self.name!r}: domain={self.domain!r}: it is a number of devices, 0 or more")
        if self.domain and not self.network_bandwidth:
            raise ValueError(
                f"Hardware {self.name!r}: domain={self.domain} has no network to others: give network_bandwidth in bytes/s"
            )

    def domain_of(self, devices: int) -> int:
        """Return how many of a number of devices are in one domain; 0 if all are.

        The domains have equal sizes, and are as few as that allows.

        >>> [find_hardware("h100").domain_of(devices) for devices in (4, 8, 12, 32)]
        [0, 0, 6, 8]
        """
        if not self.domain or devices <= self.domain:
            return 0
        return max(size for size in range(1, int(self.domain) + 1) if devices % size == 0)

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


THIS_MACHINE = "this machine"
"""The name of the devices of this process, in `find_hardware`."""


def find_hardware(which: str | Hardware) -> Hardware:
    """Find hardware by its name.

    Args:
      which: "tpu-v5e" or "v5e", "h100", …; "this machine" for the devices of this process, measured; or a `Hardware`, which
        is returned as it is.

    Raises:
      TypeError: it is neither a name nor a `Hardware`.
      ValueError: no hardware has this name; the message has the nearest names.

    Examples:
      >>> find_hardware("tpu-v5e").link_bandwidth
      50000000000.0
    """
    if isinstance(which, Hardware):
        return which
    if not isinstance(which, str):
        raise TypeError(f"hardware={brief(which)} is neither a name, such as 'tpu-v5e', nor a penstock.shard.Hardware")
    name = which.strip().lower().replace("_", "-").replace(" ", "-")
    if name == THIS_MACHINE.replace(" ", "-"):
        return this_machine()
    listed = DATASHEETS.get(name) or DATASHEETS.get(f"tpu-{name}")
    if listed:
        return listed
    near = difflib.get_close_matches(name, DATASHEETS, n=3, cutoff=0.5)
    raise ValueError(
        f'hardware "{which}" is not known{"; nearest: " if near else ""}{", ".join(near)}. Give one of {", ".join(DATASHEETS)}, '
        f'"{THIS_MACHINE}", or a penstock.shard.Hardware of your own'
    )


_NAME_BY_DEVICE_KIND = (
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
"""Pairs of a word in the `device_kind` of a JAX device and the name of the hardware. The first word that the
`device_kind` contains counts."""


def detect_hardware() -> Hardware:
    """Return the hardware of JAX's default device: from the table of datasheets, or measured if it is not in the table.

    TPUs of several slices have the domains of these slices. This starts JAX.
    """
    import jax

    devices = jax.devices()
    kind = devices[0].device_kind.lower()
    if jax.default_backend() != "cpu":
        for word, name in _NAME_BY_DEVICE_KIND:
            if re.search(rf"\b{word}\b", kind):
                slices = {getattr(device, "slice_index", 0) for device in devices} if name.startswith("tpu-") else {0}
                found = find_hardware(name)
                return found if len(slices) == 1 else dataclasses.replace(found, domain=len(devices) // len(slices))
    return this_machine()


# Datasheets

_GB = 10**9
_GIB, _MIB = 2**30, 2**20
_TERA = 1e12

# MiB of vector memory (VMEM) that a program of one device uses: Google, "How to scale your model", part 2.
_VMEM = {"v4": 32, "v5e": 128, "v5p": 64, "v6e": 128}

# Seconds of one step of a ring, as an order of magnitude. No datasheet gives them. A hop over ICI takes about 1 µs (Google,
# "How to scale your model", part 2). NCCL takes some µs for a step over NVLink or PCIe, most of it to start kernels
# (nccl-tests, latency of small sizes divided by the steps). They affect only the choice between collectives of a few kB.
_ICI_LATENCY, _NVLINK_LATENCY, _PCIE_LATENCY = 1e-6, 3e-6, 10e-6
_NETWORK_LATENCY = 20e-6  # a message between hosts, through the cards and switches, with the kernel or host thread that sends it


def _tpu(
    version: str,
    bfloat16: float,
    int8: float,
    gib: int,
    gbps_memory: float,
    gbps_links: float,
    links: int,
    gbps_network: float,
    page: str,
) -> Hardware:
    """Return the figures of a TPU: peaks in TFLOP/s and TOP/s, memory in GiB and GB/s.

    Args:
      gbps_links: bandwidth of a chip over all its links in one direction, in Gbit/s, the unit that Google gives.
      gbps_network: the share of a chip in the network cards of its host, in Gbit/s.
    """
    return Hardware(
        name=f"tpu-{version}",
        flops={"bfloat16": bfloat16 * _TERA, "float32": bfloat16 * _TERA, "int8": int8 * _TERA},
        memory=gib * _GIB,
        memory_bandwidth=gbps_memory * _GB,
        link_bandwidth=gbps_links / 8 / links * _GB,
        link_latency=_ICI_LATENCY,
        source=page,
        network_bandwidth=gbps_network / 8 * _GB,
        network_latency=_NETWORK_LATENCY,
        platform="tpu",
        fast_memory=_VMEM[version] * _MIB,
    )


def _gpu(
    name: str,
    tera: Mapping[str, float],
    gb: int,
    gbps_memory: float,
    gbps_link: float,
    gbps_network: float,
    sheet: str,
    latency: float = _NVLINK_LATENCY,
) -> Hardware:
    """Return the figures of a GPU: peaks in TFLOP/s or TOP/s, memory in GB and GB/s, latency in seconds.

    Args:
      gbps_link: bandwidth of all links of a GPU in one direction, in GB/s.
      gbps_network: the share of a GPU in the network cards of its host, in GB/s.
    """
    return Hardware(
        name,
        {dtype: peak * _TERA for dtype, peak in tera.items()},
        gb * _GB,
        gbps_memory * _GB,
        gbps_link * _GB,
        latency,
        sheet,
        domain=_GPUS_OF_A_HOST,
        network_bandwidth=gbps_network * _GB,
        network_latency=_NETWORK_LATENCY,
    )


_AMPERE = {"bfloat16": 312, "float32": 156, "int8": 624, "float64": 19.5}
_HOPPER = {"bfloat16": 989.4, "float32": 494.7, "float8": 1978.9, "int8": 1978.9, "float64": 66.9}
_BLACKWELL = {"bfloat16": 2250, "float32": 1100, "float8": 4500, "int8": 4500, "float64": 40}
_ADA = {"bfloat16": 121, "float32": 60, "float8": 242.5, "int8": 242.5}
_HOPPER_SHEET = "datasheet, SXM, half of the peaks with sparsity: NVLink 900 GB/s both ways; DGX: 8 cards of 400 Gbit/s"
_B200_SHEET = (
    "NVIDIA Blackwell architecture brief, HGX B200 at 1,000 W, dense: NVLink 1,800 GB/s both ways; DGX: 8 cards of 400 Gbit/s"
)
_A100_SHEET = "NVIDIA A100 datasheet, 80 GB SXM: NVLink 600 GB/s both ways; DGX: 8 cards of 200 Gbit/s"
_L4_SHEET = (
    "NVIDIA L4 datasheet, half of the peaks with sparsity: PCIe 4.0 ×16, 32 GB/s one way; Google Cloud G2: 100 Gbit/s for 8"
)
_V4_SHEET = (
    "Google Cloud, TPU v4; Jouppi et al., ISCA 2023, table 4: 6 links of 50 GB/s; network: Google, 'How to scale your model'"
)
_GPUS_OF_A_HOST = 8  # NVIDIA's DGX and HGX, and Google Cloud's G2 for the L4

DATASHEETS = {
    device.name: device
    for device in (
        _tpu("v4", 275, 275, 32, 1228, 2400, 6, 50, _V4_SHEET),
        _tpu("v5e", 197, 393, 16, 819, 1600, 4, 25, "Google Cloud, TPU v5e (cloud.google.com/tpu/docs/v5e): 200 Gbit/s for 8"),
        _tpu("v5p", 459, 918, 95, 2765, 4800, 6, 50, "Google Cloud, TPU v5p (cloud.google.com/tpu/docs/v5p)"),
        _tpu("v6e", 918, 1836, 32, 1600, 3200, 4, 100, "Google Cloud, TPU v6e (cloud.google.com/tpu/docs/v6e): 800 Gbit/s for 8"),
        _gpu("a100", _AMPERE, 80, 2039, 300, 25, _A100_SHEET),
        _gpu("h100", _HOPPER, 80, 3350, 450, 50, f"NVIDIA H100 {_HOPPER_SHEET}"),
        _gpu("h200", _HOPPER, 141, 4800, 450, 50, f"NVIDIA H200 {_HOPPER_SHEET}"),
        _gpu("b200", _BLACKWELL, 180, 8000, 900, 50, _B200_SHEET),
        _gpu("l4", _ADA, 24, 300, 32, 1.5625, _L4_SHEET, _PCIE_LATENCY),
    )
}


# Measurements

_UNLINKED_LATENCY = 1e-6
"""Seconds of a ring step where the links are unknown because there is only one device: about a hop over ICI."""


def this_machine() -> Hardware:
    """Return the figures of the devices of this process.

    The first call measures them, which takes seconds. Later calls read `penstock/hardware.json` in the user's cache folder,
    if it can be written.
    This starts JAX.

    Raises:
      ValueError: the device is an accelerator that does not report the size of its memory.
    """
    import jax

    devices = jax.local_devices()
    kind = f"{len(devices)}×{devices[0].device_kind}"
    key = f"{platform.node()} {platform.machine()} {os.cpu_count()} {kind} jax {jax.__version__} 3"  # the version of the figures
    cache = user_cache()
    path = None if cache is None else cache / "hardware.json"
    cached = {} if path is None else _read_cache(path)
    try:
        return Hardware(**cached[key])
    except (KeyError, TypeError, ValueError):  # not measured yet, or written by a version with other fields
        pass
    measured = measure_devices(devices)
    if path is not None:
        with contextlib.suppress(OSError):  # a folder that is not writable costs the next plan some seconds
            path.parent.mkdir(parents=True, exist_ok=True)
            replace(path, json.dumps({**cached, key: asdict(measured)}, indent=1))
    return measured


def _read_cache(path: Path) -> dict[str, Any]:
    try:
        cached = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return cached if isinstance(cached, dict) else {}


def measure_devices(devices: list[Any]) -> Hardware:
    """Measure JAX devices of one kind: products of 1024 × 1024 matrices, a copy, and an all-reduce over all of them.

    With one device, the links count as being as fast as its memory. Virtual CPU devices share one machine: compute and memory
    bandwidth are measured on the first while the others are idle, and the host's memory is divided among them.

    Raises:
      ValueError: the device is an accelerator that does not report the size of its memory.
    """
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
        vector = jnp.ones(16 << 20, jnp.float32)
    memory_bandwidth = 2 * vector.nbytes / _seconds(jax.jit(lambda x: x + 1), vector)

    link_bandwidth, link_latency = memory_bandwidth, _UNLINKED_LATENCY
    if len(devices) > 1:
        count = len(devices)
        sharding = NamedSharding(Mesh(devices, ("all",)), PartitionSpec("all"))
        all_reduce = jax.jit(lambda x: x.sum(0), out_shardings=NamedSharding(sharding.mesh, PartitionSpec()))
        small, large = (jax.device_put(jnp.ones((count, size), jnp.float32), sharding) for size in (1, 1 << 20))
        ring_steps = 2 * (count - 1)
        link_latency = _seconds(all_reduce, small) / ring_steps
        link_bandwidth = ring_steps / count * (large.nbytes / count) / _seconds(all_reduce, large)
    unlinked = "" if len(devices) > 1 else "; the links are unknown, and taken to be as fast as the memory"
    source = f"measured on {platform.node()}{unlinked}"
    memory = device_memory(device, len(devices))
    compiled_as = device.platform if device.platform in ("tpu", "cpu") else "gpu"
    return Hardware(
        THIS_MACHINE,
        flops,
        memory,
        memory_bandwidth,
        link_bandwidth,
        link_latency,
        source,
        platform=compiled_as,
        reduce_scatters=compiled_as != "cpu",
    )


def _seconds(function: Callable[..., Any], *arguments: Any) -> float:
    """Return the median of five runs, after one that compiles."""
    function(*arguments).block_until_ready()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        function(*arguments).block_until_ready()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def device_memory(device: Any, count: int) -> int:
    """Return the bytes of memory of a device.

    Args:
      count: the number of devices of this process, among which CPU devices divide the host's memory.

    Raises:
      ValueError: the device is an accelerator that does not report the size of its memory.
    """
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if limit is None and device.platform != "cpu":
        raise ValueError(
            f"{device.device_kind} does not tell how much memory it has: give hardware= one of {', '.join(DATASHEETS)}, or a "
            "penstock.shard.Hardware with its memory"
        )
    host_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return host_memory // count if limit is None else int(limit)
