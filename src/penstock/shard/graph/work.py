"""Define the work of an operation: its dtype, FLOPs and HBM traffic."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from penstock.shard.graph.loop_reuse import Reuse
from penstock.shard.trace.flat_program import FlatProgram, Op

Dims = tuple[int | None, ...]


class Traffic(NamedTuple):
    """The HBM traffic of an array in a step, if nothing is sharded.

    Attributes:
      bytes: bytes that are read or written.
      dims: the dimensions of the node that divide them; None if all do.
      reuse: the iterations of a loop that may share it; None if none do.
    """

    bytes: float
    dims: Dims | None
    reuse: Reuse | None = None


Work = tuple[str, float, tuple[Traffic, ...]]
"""The work of an operation in a step if nothing is sharded: dtype, FLOPs, and its HBM traffic."""


def compute_dtype(program: FlatProgram, op: Op) -> str:
    """Return the name of the dtype in which an operation computes: that of its largest operand.

    Args:
      program: the step.
      op: the operation.
    """
    values = [program.values[value] for value in op.operands if value is not None] or [program.values[op.results[0]]]
    return _dtype_name(max(values, key=lambda value: value.bytes).dtype)


@functools.lru_cache(maxsize=256)
def _dtype_name(dtype: Any) -> str:
    """Return the name of a dtype, of the kind that products know."""
    try:
        return np.dtype(dtype).name
    except TypeError:  # Random keys have an extended dtype, and consist of uint32.
        return "uint32"
