"""Measure the devices of this process: peak FLOP/s, memory bandwidth and the all-reduce between them, kept in a file."""

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

from penstock.shard.mesh.datasheets import DATASHEETS
from penstock.shard.mesh.hardware import Hardware

THIS_MACHINE = "this machine"

_UNLINKED_LATENCY = 1e-6
"""Seconds a ring step takes on a machine of one device, whose links are unknown: about a hop over ICI (`datasheets.py`)."""


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

    link_bandwidth, link_latency = memory_bandwidth, _UNLINKED_LATENCY
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
            f"{device.device_kind} does not tell how much memory it has: give hardware= one of {', '.join(DATASHEETS)}, or a "
            "penstock.shard.Hardware with its memory"
        )
    return _host_memory() // devices if limit is None else int(limit)  # CPU devices share the host's


def _host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
