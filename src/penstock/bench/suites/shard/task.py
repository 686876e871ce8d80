"""What is to be planned: a model, a mesh, and the hardware whose speed counts."""

from __future__ import annotations

import math
from dataclasses import dataclass

MESHES = {
    "8": {"data": 8},
    "2x4": {"data": 2, "model": 4},
    "2x2x2": {"data": 2, "fsdp": 2, "model": 2},
}
HARDWARE = "tpu-v5e"
LIMITS = ("loose", "half")


@dataclass(frozen=True)
class Task:
    """A model of the zoo on a mesh.

    Attributes:
      model: its name in the zoo.
      mesh: a name in `MESHES`.
      hardware: a name that `penstock.shard.mesh.hardware` knows: its peaks and links turn bytes and FLOPs into seconds, and its
        memory is the loose limit.
      limits: of memory, that it is planned for: "loose", the hardware's, and "half" of what replicated data parallel needs.
    """

    model: str
    mesh: str
    hardware: str = HARDWARE
    limits: tuple[str, ...] = LIMITS

    @property
    def name(self) -> str:
        """From which `parse` makes the task again."""
        return f"{self.model}/{self.mesh}/{self.hardware}"

    @property
    def axes(self) -> dict[str, int]:
        """Sizes of the mesh axes, in order."""
        return MESHES[self.mesh]

    @property
    def devices(self) -> int:
        return math.prod(self.axes.values())


def parse(name: str) -> Task:
    """The task of a name.

    >>> parse("gpt2/2x4/h100").axes
    {'data': 2, 'model': 4}
    """
    model, mesh, hardware = name.split("/")
    return Task(model, mesh, hardware)
