"""Collect the compiler's figures for one compiled program: memory, FLOPs and collectives of one device in one run."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from penstock._jax import program_text
from penstock.errors import CompileError, CompilerFailedError, CompilerMemoryError
from penstock.shard.hlo.collectives import Collective, find_collectives
from penstock.shard.hlo.flops import count_flops, describe_unknown_costs
from penstock.shard.mesh.hardware import Hardware, find_hardware
from penstock.shard.mesh.resharding import MeshLinks
from penstock.shard.wording import about_collectives


@dataclass(frozen=True)
class Measured:
    """The compiler's figures for one run of a program on one device.

    Attributes:
      arguments: bytes of the arguments.
      outputs: bytes of the results.
      temporaries: bytes of everything else that is live at the peak.
      aliased: bytes of results that are written in place of donated arguments.
      flops: FLOPs, loops multiplied by their trip count (`penstock.shard.hlo.flops.count_flops`).
      collectives: the collectives, in the order of the program (`penstock.shard.hlo.collectives.find_collectives`).
      seconds_to_compile: seconds without tracing and lowering; 0 if they were not measured.
      unknown: sentences about costs that `flops` and `collectives` leave out; () if there are none. Bytes of memory are exact.
      compiled_for: the compiler and its devices, in words: "the TPU compiler for v5e:2x4"; "" if that was not recorded.
      constants: bytes of the arrays that the step closes over. No compiler counts them: they are a part of the program.

    Examples:
      >>> sent = Collective("all-reduce", 1 << 20, group=4, count=2.0, axes=("data",))
      >>> measured = Measured(1000, 600, 400, 500, 1e12, (sent,), seconds_to_compile=0.0)
      >>> measured.memory
      1500
      >>> measured.bytes_on_wire / (1 << 20)
      3.0
      >>> Measured.from_json(measured.to_json()) == measured
      True
    """

    arguments: int
    outputs: int
    temporaries: int
    aliased: int
    flops: float
    collectives: tuple[Collective, ...]
    seconds_to_compile: float
    unknown: tuple[str, ...] = ()
    compiled_for: str = ""
    constants: int = 0

    @property
    def memory(self) -> int:
        """Return the bytes that a run needs: arguments + constants + temporaries + outputs − aliased."""
        return self.arguments + self.constants + self.temporaries + self.outputs - self.aliased

    @property
    def bytes_on_wire(self) -> float:
        """Return the bytes that one device sends in a run."""
        return sum(collective.bytes_on_wire * collective.count for collective in self.collectives)

    def seconds(self, on: str | Hardware, dtype: Any, mesh: Mapping[str, int], *, latency: bool = False) -> float:
        """Return the score of a plan: the seconds of its FLOPs at the peak, and of its bytes over the links.

        The score compares plans; it is not a forecast. Nothing overlaps, and HBM traffic takes no time. All FLOPs count as matrix
        products of one dtype.

        Args:
          on: the hardware, or its name.
          dtype: the dtype of the matrix products.
          mesh: sizes of the axes of the mesh that the program was compiled for, in order. Collectives over a part of an axis
            count as if they ran over all devices.
          latency: whether each collective also takes the latency of its slowest link, once.

        Raises:
          ValueError: there is no hardware of that name, or its peak for the dtype is unknown.

        >>> Measured(0, 0, 0, 0, 197e12, (), seconds_to_compile=0.0).seconds("tpu-v5e", "bfloat16", {"data": 8})
        1.0
        """
        machine = find_hardware(on)
        links = MeshLinks.of(mesh, machine)
        found = self.flops / machine.peak(dtype)
        for each in self.collectives:
            speed, wait = speed_of(links, each)
            found += each.count * (each.bytes_on_wire / speed + (wait if latency else 0.0))
        return found

    def to_json(self) -> str:
        """Return all figures as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Measured:
        """Read the figures that `to_json` wrote.

        Args:
          text: the JSON.
        """
        read = json.loads(text)
        found = tuple(Collective(**{**each, "axes": tuple(each["axes"])}) for each in read["collectives"])
        return cls(**{**read, "collectives": found, "unknown": tuple(read["unknown"])})


def speed_of(links: MeshLinks, collective: Collective) -> tuple[float, float]:
    """Return the bytes on wire per second and the latency of a collective of a compiled program, as `MeshLinks.speed`."""
    if collective.inside:
        return links.speed_within(collective.kind, collective.group, collective.inside)
    return links.speed(collective.kind, links.bits(collective.axes or links.names))


def measure(compiled: Any, mesh: Mapping[str, int], *, domain: int = 0, seconds_to_compile: float = 0.0) -> Measured:
    """Return the compiler's figures for a compiled program.

    Args:
      compiled: a `jax.stages.Compiled`.
      mesh: sizes of the axes of the mesh that it was compiled for, in order.
      domain: the number of devices of a domain (`Hardware.domain`); 0 if all are in one, or it is unknown.
      seconds_to_compile: seconds to store with the figures.

    Raises:
      CompileError: the compiler does not report how much memory the program needs.
    """
    memory, text = compiled.memory_analysis(), program_text(compiled)
    if memory is None:
        raise CompileError(
            "the compiler of these devices does not report how much memory a program needs (memory_analysis() is None): verify "
            "for a TPU topology, or with JAX_PLATFORMS=cpu"
        )
    found = tuple(find_collectives(text, mesh, domain))
    return Measured(
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        flops=count_flops(text),
        collectives=found,
        seconds_to_compile=seconds_to_compile,
        unknown=(*describe_unknown_costs(text), *about_collectives(sum(each.guessed for each in found))),
    )


_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def compile_error(message: str) -> CompileError:
    """Return the error for a message of a compiler.

    >>> compile_error("RESOURCE_EXHAUSTED: the total memory required (34.50G) exceeds available HBM (15.75G).").needed / 2**30
    34.5
    """
    if "libtpu multi-process lockfile" in message or "TPU is already in use" in message:
        return CompilerFailedError(
            "the TPU compiler is in use by another process, which holds /tmp/libtpu_lockfile: plan again when that has ended, or "
            f"remove the file if no process has it ({message.splitlines()[0][:200]})"
        )
    if "RESOURCE_EXHAUSTED" in message and re.search(r"ran out of memory|exceeds", message, re.IGNORECASE):
        size = re.search(r"\(([\d.]+)([KMGT])i?B?\) exceeds|Used ([\d.]+)([KMGT])i?B? of", message)
        number, unit = [part for part in size.groups() if part] if size else ("", "")
        return CompilerMemoryError(message, int(float(number) * _UNITS[unit]) if number else None)
    return CompileError(message)
