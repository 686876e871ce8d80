"""Name the devices for which programs can be compiled without having them: slices of TPUs, and hosts of GPUs.

The names are "v5e:2x4" for a slice of 2 × 4 chips, "2xv5e:2x4" for two of them, "h100:8" for a host of 8 GPUs, and "h100:4x8" for
four of them.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import itertools
import math
import os
import re
from dataclasses import dataclass, replace

from penstock.shard.mesh.hardware import DATASHEETS, Hardware


@dataclass(frozen=True)
class _Chip:
    """A kind of TPU chip, and the largest torus of such chips.

    Attributes:
      dimensions: the dimensions of the torus.
      cores: the JAX devices of a chip. The cores of a v4 chip are one device (`compile_worker.tpu_mesh`).
      most: the number of chips of a pod, by the pages of Google Cloud about each version.
      longest: the longest side. In two dimensions, it is the longest side of a pod; the compiler for v5e aborts at longer ones.
        In three dimensions, it is the longest for which programs were compiled.
    """

    dimensions: int
    cores: int
    most: int
    longest: int


CHIPS = {
    "v2": _Chip(2, 2, 256, 16),
    "v3": _Chip(2, 2, 1024, 32),
    "v4": _Chip(3, 1, 4096, 256),
    "v5e": _Chip(2, 1, 256, 16),
    "v5p": _Chip(3, 1, 8960, 256),
    "v6e": _Chip(2, 1, 256, 16),
    "tpu7x": _Chip(3, 2, 9216, 128),
}
"""The chips for which libtpu compiles.

With libtpu 0.0.52, a small program was compiled for all sizes up to 16 × 16 and 8 × 8 × 8, and for the largest sizes. It compiles
for the sizes for which `_exists` is true. Two exceptions, 1 × 2 × 2 and 6 × 6 × 3 of v4, abort for some programs."""


@dataclass(frozen=True)
class _Gpu:
    """The figures of a GPU that its compiler asks for, by NVIDIA's architecture papers and the CUDA programming guide.

    Attributes:
      kind: the name that the driver gives it.
      capability: the compute capability.
      cores: the streaming multiprocessors.
      fpus: the units for float32 of each of them.
      ghz: the highest clock rate.
      cache: MiB of the level 2 cache.
      shared: KiB of shared memory of a multiprocessor; a block may have 1 KiB less.
      links: the NVLinks.
    """

    kind: str
    capability: tuple[int, int]
    cores: int
    fpus: int
    ghz: float
    cache: int
    shared: int
    links: int


GPUS = {
    "a100": _Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 1.41, 40, 164, 12),
    "h100": _Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 1.98, 50, 228, 18),
    "h200": _Gpu("NVIDIA H200", (9, 0), 132, 128, 1.98, 50, 228, 18),
    "b200": _Gpu("NVIDIA B200", (10, 0), 148, 128, 1.965, 126, 228, 18),
    "l4": _Gpu("NVIDIA L4", (8, 9), 58, 128, 2.04, 48, 100, 0),
}
"""The GPUs for which XLA compiles without a driver."""

_GPU_PLUGINS = ("jax-cuda12-pjrt", "jax-cuda13-pjrt")
"""The packages of the GPU compiler. Their modules are `jax_plugins.xla_cuda12` and `jax_plugins.xla_cuda13`."""


OWN_HARDWARE = "hardware=penstock.shard.Hardware(...) of your own"
"""The argument that a plan for a chip without a datasheet needs, in words."""

_NAMED = (1, 4, 8, 16, 32, 64, 128, 256)
"""Numbers of devices for which an error names a topology."""


@dataclass(frozen=True)
class Topology:
    """Chips of one kind in one or several domains: slices of TPUs, each a torus, or hosts of GPUs.

    Attributes:
      name: the name: "v5e:2x4", "2xv5e:2x4", "h100:4x8".
      chip: the name of the chip: "v5e".
      devices: the number of JAX devices.
      domains: the number of slices or hosts.
    """

    name: str
    chip: str
    devices: int
    domains: int = 1

    @property
    def platform(self) -> str:
        """Return "gpu" or "tpu"."""
        return "gpu" if self.chip in GPUS else "tpu"

    @property
    def hardware(self) -> str | None:
        """Return the name of the datasheet of the chip, "tpu-v5e"; None if there is none."""
        name = self.chip if self.chip in GPUS else f"tpu-{self.chip}"
        return name if name in DATASHEETS else None

    @property
    def slice_name(self) -> str:
        """Return the name of one slice of TPUs: "v5e:2x4"."""
        return self.name[self.name.index(self.chip) :]

    def __str__(self) -> str:
        return f"the {self.platform.upper()} compiler for {self.name}"

    def place(self, hardware: Hardware) -> Hardware:
        """Return hardware with the domains of this topology. Hardware without a network has none."""
        if hardware.name not in DATASHEETS and not hardware.network_bandwidth:
            return hardware
        return replace(hardware, domain=self.devices // self.domains)


def find_topology(name: str) -> Topology:
    """Return the topology of a name.

    Raises:
      ValueError: there is no such topology; the message has names that work.

    >>> find_topology("v5p:2x2x2").devices
    8
    >>> find_topology("2xv5e:4x4").devices, find_topology("h100:4x8").domains
    (32, 4)
    """
    read = re.fullmatch(r"(?:tpu |gpu )?(?:(\d+)x)?([a-z]\w*):(\d+(?:x\d+)*)", name.strip().lower())
    if read is None or read[2] not in (*CHIPS, *GPUS):
        given = "" if read is None else f"the chip {read[2]!r} is not known; "
        raise ValueError(f"there is no topology {name!r}: {given}names that work: {', '.join(examples())}{_others()}")
    slices, chip, sizes = int(read[1] or 1), read[2], tuple(map(int, read[3].split("x")))
    if chip in GPUS:
        most = int(DATASHEETS[chip].domain)
        if read[1] or len(sizes) > 2 or not 1 <= sizes[-1] <= most or not sizes[0]:
            raise ValueError(
                f"there is no topology {name!r}: of {chip}, a host has 1 to {most} devices, {chip}:{most}, and several hosts are "
                f"hosts × devices, {chip}:4x{most}"
            )
        return Topology(f"{chip}:{read[3]}", chip, math.prod(sizes), math.prod(sizes[:-1]))
    several = f"{slices}x" if read[1] else ""
    found = Topology(f"{several}{chip}:{read[3]}", chip, slices * math.prod(sizes) * CHIPS[chip].cores, slices)
    if slices < 1 or not _exists(sizes, chip):
        most = CHIPS[chip].most
        too_large = f": {chip} has at most {most:,} chips in a slice" if math.prod(sizes) > most else ""
        own = "" if found.hardware else f"; a plan for {found.chip} needs {OWN_HARDWARE}"
        raise ValueError(
            f"there is no topology {name!r}{too_large}; of {found.chip}, these work, for example: "
            f"{', '.join(_names_of(found.chip))}{own}"
        )
    return found


def default_topology(hardware: str, devices: int) -> Topology | None:
    """Return the topology of a number of devices: full hosts, or one slice, closest to a cube or square. None if there is none.

    Args:
      hardware: the name of a chip or of its datasheet.

    >>> default_topology("v5e", 8).name, default_topology("v4", 4).name, default_topology("v5e", 3)
    ('v5e:2x4', 'v4:2x2x1', None)
    >>> default_topology("h100", 8).name, default_topology("h100", 12).name
    ('h100:8', 'h100:2x6')
    """
    chip = hardware.removeprefix("tpu-")
    if chip in GPUS:
        of_a_host = DATASHEETS[chip].domain_of(devices) or devices
        hosts = f"{devices // of_a_host}x" if devices > of_a_host else ""
        return Topology(f"{chip}:{hosts}{of_a_host}", chip, devices, devices // of_a_host)
    if chip not in CHIPS:
        return None
    dimensions, cores = CHIPS[chip].dimensions, CHIPS[chip].cores
    found = [sizes for sizes in _factorisations(devices // cores, dimensions) if _exists(sizes, chip)]
    if devices % cores or not found:
        return None
    # Among equally compact ones, the sizes ascend and ones come last, as in Google's names: 2x2x4, 2x2x1.
    best = min(found, key=lambda sizes: (max(sizes), sum(sizes), [size if size > 1 else math.inf for size in sizes]))
    return Topology(f"{chip}:{'x'.join(map(str, best))}", chip, devices)


def topologies_of(devices: int) -> list[str]:
    """Return the names of a topology of each chip with a datasheet that has a number of devices.

    >>> topologies_of(16)[:5]
    ['v4:2x2x4', 'v5e:4x4', 'v5p:2x2x4', 'v6e:4x4', 'a100:2x8']
    """
    return [found.name for chip in (*CHIPS, *GPUS) if (found := default_topology(chip, devices)) and found.hardware]


def examples() -> list[str]:
    """Return names of topologies of all chips with a datasheet."""
    return [name for devices in (8, 64) for name in topologies_of(devices)]


def describe_missing_compiler(topology: Topology) -> str:
    """Return why the compiler for a topology cannot be used, and what to install; "" if it can be. Nothing is imported."""
    if topology.platform == "tpu":
        installed = importlib.util.find_spec("libtpu") is not None or bool(os.environ.get("TPU_LIBRARY_PATH"))
        return "" if installed else 'the TPU compiler is not installed: pip install "penstock[tpu]"'
    plugin = gpu_plugin()
    if plugin is None:
        return 'the GPU compiler is not installed: pip install "penstock[gpu-compiler]"'
    release, needed = (importlib.metadata.version(package) for package in (plugin, "jaxlib"))
    if release == needed:
        return ""
    both = [f"{package}=={needed}" for package in (plugin, plugin.replace("pjrt", "plugin"))]
    return f"the GPU compiler is {plugin} {release}, and jaxlib is {needed}: pip install --no-deps {' '.join(both)}"


def gpu_plugin() -> str | None:
    """Return the package of the GPU compiler that is installed; None if there is none."""
    for package in _GPU_PLUGINS:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            importlib.metadata.version(package)
            return package
    return None


def gpu_target(chip: str) -> str:
    """Return a GPU as XLA's compiler takes it: a `GpuTargetConfigProto` in text form.

    The fields that this leaves out are prices of single operations, with which XLA chooses tiles and no collectives.
    """
    gpu, sheet = GPUS[chip], DATASHEETS[chip]
    major, minor = gpu.capability
    accelerated = "feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""  # as compilers for sm_90a and sm_100a
    return f"""
        gpu_device_info {{
          threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
          thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
          block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
          registers_per_core_limit: 65536 registers_per_block_limit: 65536
          shared_memory_per_block: 49152
          shared_memory_per_core: {gpu.shared << 10} shared_memory_per_block_optin: {(gpu.shared - 1) << 10}
          core_count: {gpu.cores} fpus_per_core: {gpu.fpus} clock_rate_ghz: {gpu.ghz} l2_cache_size: {gpu.cache << 20}
          device_memory_size: {sheet.memory} memory_bandwidth: {sheet.memory_bandwidth:.0f}
          cuda_compute_capability {{ major: {major} minor: {minor} {accelerated} }}
          device_interconnect_info {{ active_links: {gpu.links} }}
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: 9 minor: 10 }}
        runtime_version {{ major: 12 minor: 8 }}
        device_description_str: "{gpu.kind}"
    """


def _exists(sizes: tuple[int, ...], chip: str) -> bool:
    """Return whether there is a torus of these sizes for which libtpu compiles.

    A host has 2 × 2 chips, so that the first two sizes are even; a size of 1 is allowed too.
    """
    limits = CHIPS[chip]
    in_hosts = all(size == 1 or (size > 0 and size % 2 == 0) for size in sizes[:2])
    if not in_hosts or len(sizes) not in (2, limits.dimensions) or min(sizes) <= 0:
        return False
    if math.prod(sizes) > limits.most or max(sizes) > limits.longest:
        return False
    # libtpu finds no routes for v5e on most others: 2 × 16 and 10 × 8 do not compile, 16 × 2 and 8 × 10 do.
    return chip != "v5e" or max(sizes) <= 8 or sizes[0] in (1, 4, 8, 16) or sizes[1] == 1


def _factorisations(number: int, rank: int) -> list[tuple[int, ...]]:
    """Return the ways to write a number as an ordered product of `rank` sizes."""
    divisors = [size for size in range(1, number + 1) if number % size == 0]
    return [sizes for sizes in itertools.product(divisors, repeat=rank) if math.prod(sizes) == number]


def _names_of(chip: str) -> list[str]:
    """Return the names of topologies of a chip, small and large."""
    return [found.name for devices in _NAMED if (found := default_topology(chip, devices))]


def _others() -> str:
    """Return the end of a sentence about the chips without a datasheet."""
    without = [chip for chip in CHIPS if not Topology("", chip, 1).hardware]
    return f"; a plan for {', '.join(without[:-1])} or {without[-1]} needs {OWN_HARDWARE}" if without else ""
