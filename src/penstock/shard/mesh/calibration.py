"""Measure the devices of this process: peak FLOP/s, memory bandwidth, and the bandwidth and latency of their links.

The link figures come from an all-reduce over all devices and the formula of a ring. The results are stored in the user's cache.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from penstock._atomic_write import replace
from penstock.shard.mesh.datasheets import DATASHEETS
from penstock.shard.mesh.hardware import Hardware

THIS_MACHINE = "this machine"

_UNLINKED_LATENCY = 1e-6
"""Seconds of a ring step where the links are unknown because there is only one device: about a hop over ICI (`datasheets.py`)."""


def this_machine() -> Hardware:
    """Return the figures of the devices of this process.

    The first call measures them, which takes seconds. Later calls read `penstock/hardware.json` in the user's cache folder.
    This starts JAX.

    Raises:
      ValueError: the device is an accelerator that does not report the size of its memory.
    """
    import jax

    devices = jax.local_devices()
    kind = f"{len(devices)}×{devices[0].device_kind}"
    key = f"{platform.node()} {platform.machine()} {os.cpu_count()} {kind} jax {jax.__version__} 2"  # the version of the figures
    path = _cache_path()
    cached = _read_cache(path)
    try:
        return Hardware(**cached[key])
    except (KeyError, TypeError, ValueError):  # not measured yet, or written by a version with other fields
        pass
    measured = measure_devices(devices)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace(path, json.dumps({**cached, key: asdict(measured)}, indent=1))
    return measured


def _cache_path() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock" / "hardware.json"


def _read_cache(path: Path) -> dict[str, Any]:
    try:
        cached = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return cached if isinstance(cached, dict) else {}


def measure_devices(devices: list[Any]) -> Hardware:
    """Measure some devices of one kind: products of 1024 × 1024 matrices, a copy, and an all-reduce over all of them.

    With one device, the links count as being as fast as its memory. Virtual CPU devices share one machine: compute and memory
    bandwidth are measured on the first while the others are idle, and the host's memory is divided among them.

    Args:
      devices: JAX devices; the first stands for all.

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
    source = f"measured on {platform.node()}"
    source += "" if len(devices) > 1 else "; the links are unknown, and taken to be as fast as the memory"
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
      device: a JAX device.
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
    return _host_memory() // count if limit is None else int(limit)


def _host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
