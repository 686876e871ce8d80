"""The compiler's own figures for one program: memory, FLOPs and collectives, of one device and one run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from penstock._jax import program_text
from penstock.shard.errors import CompileError
from penstock.shard.hlo.collectives import Collective, collectives
from penstock.shard.hlo.flops import flops, unknown
from penstock.shard.mesh.hardware import Hardware
from penstock.shard.mesh.lookup import find_hardware
from penstock.shard.unknown_costs import about_collectives


@dataclass(frozen=True)
class Measured:
    """What the compiler says of a program, of one device.

    Attributes:
      arguments: bytes, as are outputs, temporaries, and aliased: those of outputs that lie where donated arguments lay.
      flops: of one run, loops multiplied (`penstock.shard.hlo.collectives.flops`).
      collectives: of one run (`penstock.shard.hlo.collectives.collectives`).
      seconds_to_compile: without tracing and lowering; 0 where nobody looked.
      unknown: what `flops` and `collectives` leave open, a sentence each; () where nothing. Bytes of memory are exact.
    """

    arguments: int
    outputs: int
    temporaries: int
    aliased: int
    flops: float
    collectives: tuple[Collective, ...]
    seconds_to_compile: float
    unknown: tuple[str, ...] = ()

    @property
    def memory(self) -> int:
        """Bytes that a run needs."""
        return self.arguments + self.temporaries + self.outputs - self.aliased

    @property
    def bytes_on_wire(self) -> float:
        """Bytes that a device sends in a run."""
        return sum(collective.bytes_on_wire * collective.count for collective in self.collectives)

    def seconds(self, on: str | Hardware, dtype: Any) -> float:
        """The score of a plan: FLOPs at the peak, and then the bytes of each collective over the link of its axes.

        A bound to compare plans by and no forecast: nothing overlaps, nothing waits for memory or latency, and all
        FLOPs are those of products of `dtype`.
        """
        machine = find_hardware(on)
        sent = (each.bytes_on_wire * each.count / machine.bandwidth(each.axes) for each in self.collectives)
        return self.flops / machine.peak(dtype) + sum(sent)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Measured:
        read = json.loads(text)
        found = tuple(Collective(**{**each, "axes": tuple(each["axes"])}) for each in read["collectives"])
        return cls(**{**read, "collectives": found, "unknown": tuple(read["unknown"])})


def measure(compiled: Any, mesh: Mapping[str, int], *, seconds_to_compile: float = 0.0) -> Measured:
    """What a `jax.stages.Compiled` does.

    Args:
      mesh: sizes of the axes of the mesh that it was compiled for, in order.

    Raises:
      CompileError: the compiler does not tell what memory the program needs.
    """
    memory, text = compiled.memory_analysis(), program_text(compiled)
    if memory is None:
        raise CompileError(
            "the compiler of these devices does not tell what memory a program needs (memory_analysis() is None): verify for a "
            "topology of TPUs, or where JAX_PLATFORMS=cpu"
        )
    found = tuple(collectives(text, mesh))
    return Measured(
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        flops=flops(text),
        collectives=found,
        seconds_to_compile=seconds_to_compile,
        unknown=(*unknown(text), *about_collectives(sum(each.guessed for each in found))),
    )
