"""Describe what fusion decides: which values of a step are stored, and from when until when each is needed."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.shard.mesh.compiler_models import CPU, CompilerModel
from penstock.shard.trace.flat_program import Value


@dataclass(frozen=True)
class Buffer:
    """A stored value during a part of its life.

    Attributes:
      value: index of the value in the program.
      share: the bytes that are stored, as a fraction of those of the value: 0.5 for a bfloat16 copy of float32.
      start, end: indices of the first and the last operation at which it is in memory.
    """

    value: int
    share: float
    start: int
    end: int


@dataclass
class Need:
    """The uses of a value by the operations after the one that is decided.

    Attributes:
      last: index of the last operation that needs it as it is; -1 if none does.
      last_product: index of the last product that reads it; -1 if none does.
      first: index of the first operation that needs it.
      readers: the operations that store something computed from it; not more than two are kept.
    """

    last: int = -1
    last_product: int = -1
    first: int = 1 << 60
    readers: set[int] = field(default_factory=set)

    @property
    def end(self) -> int:
        """Return the index of the last operation that needs it in any form; -1 if none does."""
        return max(self.last, self.last_product)


@dataclass
class Fusion:
    """The values that a compiler stores, and those that it computes again.

    Attributes:
      stored: the stored values; inputs and constants are among them.
      sources: for each value, the stored values from which a reader computes it.
      buffers: the stored values other than inputs and constants.
      reads: the uses of each input and each constant.
      compiler: how the compiler fuses.
    """

    stored: set[int] = field(default_factory=set)
    sources: dict[int, frozenset[int]] = field(default_factory=dict)
    buffers: list[Buffer] = field(default_factory=list)
    reads: dict[int, Need] = field(default_factory=dict)
    compiler: CompilerModel = CPU

    def rounds(self, value: Value, need: Need) -> bool:
        """Return whether only a bfloat16 copy of a value is needed in the end."""
        return self.compiler.rounds(value.dtype) and need.last_product > need.last
