"""Name the TPU topologies for which programs can be compiled: they exist, and the TPU compiler (libtpu) compiles for them."""

from __future__ import annotations

import importlib.util
import itertools
import math
import os
import re
from dataclasses import dataclass

from penstock.shard.mesh.hardware import DATASHEETS


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

OWN_HARDWARE = "hardware=penstock.shard.Hardware(...) of your own"
"""The argument that a plan for a chip without a datasheet needs, in words."""

_NAMED = (1, 4, 8, 16, 32, 64, 128, 256)
"""Numbers of devices for which an error names a topology."""


@dataclass(frozen=True)
class Topology:
    """Chips of one kind, connected to a torus.

    Attributes:
      name: the name, as `jax.experimental.topologies` takes it: "v5e:2x4".
      chip: the name of the chip: "v5e".
      devices: the number of JAX devices.
    """

    name: str
    chip: str
    devices: int

    @property
    def hardware(self) -> str | None:
        """Return the name of the datasheet of the chip, "tpu-v5e"; None if there is none."""
        name = f"tpu-{self.chip}"
        return name if name in DATASHEETS else None


def find_topology(name: str) -> Topology:
    """Return the topology of a name.

    Raises:
      ValueError: there is no such topology; the message has names that work.

    >>> find_topology("v5p:2x2x2").devices
    8
    """
    read = re.fullmatch(r"(?:tpu )?(\w+):(\d+(?:x\d+)+)", name.strip().lower())
    if read is None or read[1] not in CHIPS:
        given = "" if read is None else f"the chip {read[1]!r} is not known; "
        raise ValueError(f"there is no TPU topology {name!r}: {given}names that work: {', '.join(examples())}{_others()}")
    sizes = tuple(map(int, read[2].split("x")))
    found = Topology(f"{read[1]}:{read[2]}", read[1], math.prod(sizes) * CHIPS[read[1]].cores)
    if not _exists(sizes, read[1]):
        most = CHIPS[read[1]].most
        too_large = f": {read[1]} has at most {most:,} chips" if math.prod(sizes) > most else ""
        own = "" if found.hardware else f"; a plan for {found.chip} needs {OWN_HARDWARE}"
        raise ValueError(
            f"there is no TPU topology {name!r}{too_large}; of {found.chip}, these work, for example: "
            f"{', '.join(_names_of(found.chip))}{own}"
        )
    return found


def default_topology(chip: str, devices: int) -> Topology | None:
    """Return the topology of a number of devices that is closest to a cube or square; None if the compiler has none.

    >>> default_topology("v5e", 8).name, default_topology("v4", 4).name, default_topology("v5e", 3)
    ('v5e:2x4', 'v4:2x2x1', None)
    """
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

    >>> topologies_of(16)
    ['v4:2x2x4', 'v5e:4x4', 'v5p:2x2x4', 'v6e:4x4']
    """
    return [found.name for chip in CHIPS if (found := default_topology(chip, devices)) and found.hardware]


def examples() -> list[str]:
    """Return names of topologies of all chips with a datasheet."""
    return [name for devices in (8, 64) for name in topologies_of(devices)]


def tpu_compiler_is_installed() -> bool:
    """Return whether the TPU compiler is installed. Nothing is imported."""
    return importlib.util.find_spec("libtpu") is not None or bool(os.environ.get("TPU_LIBRARY_PATH"))


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
