"""Name the TPU topologies for which programs can be compiled: those that the TPU compiler (libtpu) accepts.

In: a name such as "v5e:2x4", or a chip and a number of devices. Out: a `Topology`, or names that work.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import os
import re
from dataclasses import dataclass

CHIPS = {"v2": (2, 2), "v3": (2, 2), "v4": (3, 1), "v5e": (2, 1), "v5p": (3, 1), "v6e": (2, 1), "tpu7x": (3, 2)}
"""For each chip, the dimensions of its torus and the JAX devices of a chip.

libtpu 0.0.52 was asked for all sizes up to 16 × 16, and up to 8 × 8 × 8. It accepts the sizes for which `_is_accepted` is true.
The cores of a v4 chip are one device (`compile_worker.tpu_mesh`)."""

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
    def hardware(self) -> str:
        """Return the name of the hardware that plans for this topology are for: "tpu-v5e"."""
        return f"tpu-{self.chip}"


def find_topology(name: str) -> Topology:
    """Return the topology of a name.

    Args:
      name: such as "v5e:2x4".

    Raises:
      ValueError: there is no such topology; the message has names that work.

    >>> find_topology("v5p:2x2x2").devices
    8
    """
    read = re.fullmatch(r"(?:tpu )?(\w+):(\d+(?:x\d+)+)", name.strip().lower())
    if read is None or read[1] not in CHIPS:
        given = "" if read is None else f"the chip {read[1]!r} is not known; "
        raise ValueError(f"there is no TPU topology {name!r}: {given}names that work: {', '.join(_examples())}")
    sizes = tuple(map(int, read[2].split("x")))
    rank, cores = CHIPS[read[1]]
    if not _is_accepted(sizes, rank):
        raise ValueError(
            f"there is no TPU topology {name!r}; of {read[1]}, these work, for example: {', '.join(_names_of(read[1]))}"
        )
    return Topology(f"{read[1]}:{read[2]}", read[1], math.prod(sizes) * cores)


def default_topology(chip: str, devices: int) -> Topology | None:
    """Return the topology of a number of devices that is closest to a cube or square; None if the compiler has none.

    Args:
      chip: the name of the chip.
      devices: the number of devices.

    >>> default_topology("v5e", 8).name, default_topology("v4", 4).name, default_topology("v5e", 3)
    ('v5e:2x4', 'v4:2x2x1', None)
    """
    if chip not in CHIPS:
        return None
    rank, cores = CHIPS[chip]
    found = [sizes for sizes in _factorisations(devices // cores, rank) if _is_accepted(sizes, rank)]
    if devices % cores or not found:
        return None
    # Among equally compact ones, the sizes ascend and ones come last, as in Google's names: 2x2x4, 2x2x1.
    best = min(found, key=lambda sizes: (max(sizes), sum(sizes), [size if size > 1 else math.inf for size in sizes]))
    return Topology(f"{chip}:{'x'.join(map(str, best))}", chip, devices)


def topologies_of(devices: int) -> list[str]:
    """Return the names of a topology of each chip that has a number of devices.

    Args:
      devices: the number of devices.

    >>> topologies_of(16)
    ['v2:2x4', 'v3:2x4', 'v4:2x2x4', 'v5e:4x4', 'v5p:2x2x4', 'v6e:4x4', 'tpu7x:2x2x2']
    """
    return [found.name for chip in CHIPS if (found := default_topology(chip, devices))]


def tpu_compiler_is_installed() -> bool:
    """Return whether the TPU compiler is installed. Nothing is imported."""
    return importlib.util.find_spec("libtpu") is not None or bool(os.environ.get("TPU_LIBRARY_PATH"))


def _is_accepted(sizes: tuple[int, ...], rank: int) -> bool:
    """Return whether libtpu accepts the sizes of a torus.

    A host has 2 × 2 chips, so that the first two sizes are even; a size of 1 is allowed too.
    """
    in_hosts = all(size == 1 or (size > 0 and size % 2 == 0) for size in sizes[:2])
    return in_hosts and len(sizes) in (2, rank) and min(sizes) > 0


def _factorisations(number: int, rank: int) -> list[tuple[int, ...]]:
    """Return the ways to write a number as an ordered product of `rank` sizes."""
    divisors = [size for size in range(1, number + 1) if number % size == 0]
    return [sizes for sizes in itertools.product(divisors, repeat=rank) if math.prod(sizes) == number]


def _names_of(chip: str) -> list[str]:
    """Return the names of topologies of a chip, small and large."""
    return [found.name for devices in _NAMED if (found := default_topology(chip, devices))]


def _examples() -> list[str]:
    """Return names of topologies of all chips."""
    return [name for devices in (8, 64) for name in topologies_of(devices)]
