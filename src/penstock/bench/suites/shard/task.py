"""Define a planning task: a model, a mesh, limits of memory, and the hardware whose speed counts."""

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
      hardware: a name that `penstock.shard.mesh.lookup` knows. Its peaks and links turn FLOPs and bytes into seconds, and its
        memory is the loose limit.
      limits: the limits of memory to plan for: "loose" is the hardware's memory, "half" is half of what replicated data
        parallel needs.
    """

    model: str
    mesh: str
    hardware: str = HARDWARE
    limits: tuple[str, ...] = LIMITS

    @property
    def name(self) -> str:
        """Return the name of the task's variant.

        >>> Task("gpt2", "2x4").name
        'gpt2 2x4'
        """
        return f"{self.model} {self.mesh}"

    @property
    def axes(self) -> dict[str, int]:
        """Return the sizes of the mesh axes, in order."""
        return MESHES[self.mesh]

    @property
    def devices(self) -> int:
        """Return the number of devices of the mesh."""
        return math.prod(self.axes.values())
