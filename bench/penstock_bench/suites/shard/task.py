"""Define a planning task: a step, a mesh, limits of memory, and the compiler that judges the plans."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

CPU = "cpu"
HARDWARE = "tpu-v5e"
LIMITS = ("loose", "half", "tight")
TIGHT = 1.02
"""The ratio of the limit "tight" to the memory of the smallest layout by hand."""
_CPU_DEVICES = 8
_AXES = {1: ("data",), 2: ("data", "model"), 3: ("data", "fsdp", "model")}


@dataclass(frozen=True)
class Compiler:
    """The compiler whose programs are scored, and the hardware whose speed and memory count.

    Attributes:
      name: "cpu", or a topology: "v5e:2x4", "h100:8".
      hardware: a name that `penstock.shard.mesh.hardware` knows. Its peaks and links turn FLOPs and bytes into seconds, and its
        memory is the loose limit.
    """

    name: str = CPU
    hardware: str = HARDWARE

    @classmethod
    def of_label(cls, label: str) -> Compiler:
        """Return the compiler of a label.

        Raises:
          ValueError: there is no such topology, or no datasheet of its chip.

        >>> Compiler.of_label("v5e:2x4")
        Compiler(name='v5e:2x4', hardware='tpu-v5e')
        """
        from penstock.shard.hlo.topologies import find_topology

        if label.startswith(f"{CPU}-"):
            return cls(CPU, label.removeprefix(f"{CPU}-"))
        found = find_topology(label)
        if found.hardware is None:
            raise ValueError(f"{label}: there is no datasheet of {found.chip} here, so that nothing on it can be scored")
        return cls(found.name, found.hardware)

    @property
    def label(self) -> str:
        """Return a name for workloads, which `of_label` reads.

        >>> Compiler("cpu", "h100").label
        'cpu-h100'
        """
        return self.name if self.topology else f"{CPU}-{self.hardware}"

    @property
    def topology(self) -> str | None:
        """Return the topology; None for the CPU's compiler."""
        return None if self.name == CPU else self.name

    @property
    def devices(self) -> int:
        """Return the number of devices that it compiles for."""
        from penstock.shard.hlo.topologies import find_topology

        return find_topology(self.topology).devices if self.topology else _CPU_DEVICES

    @property
    def meshes(self) -> tuple[str, ...]:
        """Return the names of the meshes of these devices: of one, two and three axes.

        >>> Compiler().meshes, Compiler("v5e:2x2").meshes
        (('8', '2x4', '2x2x2'), ('4', '2x2'))
        """
        sizes = [(2,) * axes + (self.devices // 2**axes,) for axes in range(len(_AXES))]
        return tuple("x".join(map(str, each)) for each in sizes if each[-1] > 1)

    def __str__(self) -> str:
        from penstock.shard.hlo.topologies import find_topology

        return str(find_topology(self.topology)) if self.topology else "the CPU compiler"


@dataclass(frozen=True)
class Task:
    """A step on a mesh, for which plans are made and compared with layouts by hand.

    Attributes:
      model: its name in its suite.
      mesh: the sizes of the mesh axes, "2x4"; "searched" if the planner chooses them.
      compiler: the compiler that judges.
      suite: "zoo", "outside", "keras" or "real".
      limits: the limits of memory to plan for: "loose" is the hardware's memory, "half" is half of what replicated data
        parallel needs, and "tight" is 1.02 times what the smallest layout by hand needs.
    """

    model: str
    mesh: str
    compiler: Compiler = field(default_factory=Compiler)
    suite: str = "zoo"
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
        """Return the sizes of the mesh axes, in order.

        >>> Task("gpt2", "2x4").axes
        {'data': 2, 'model': 4}
        """
        sizes = [int(size) for size in self.mesh.split("x")]
        return dict(zip(_AXES[len(sizes)], sizes, strict=True))

    @property
    def compared_with_own_baselines(self) -> bool:
        """Return whether its plans are also compared with the planner's own baselines.

        That takes as long as all else, and says nothing new for the 74 steps of Keras Hub.
        """
        return self.suite != "keras"

    @property
    def devices(self) -> int:
        """Return the number of devices of the mesh."""
        return math.prod(self.axes.values())
