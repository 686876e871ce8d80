"""Define a step as one flat list of operations, on which the planner works. `flatten.py` makes it from a jaxpr.

The bodies of loops and branches stand in the list once each. A *same-sharding constraint* connects a value inside of a body with
the value outside that it comes from or goes to.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from penstock.shard.trace.rules import Rule
from penstock.shard.wording import about_loops, about_operations

Path = tuple[int | str, ...]
"""The position of an equation: its index in the step's jaxpr, then its index in each nested jaxpr."""

CHECKPOINTS = frozenset(["checkpoint", "remat", "remat2"])
"""Primitives of `jax.checkpoint`."""
CUSTOM_DERIVATIVES = ("custom_jvp_call", "custom_vjp_call")
"""Primitives that call a function with a derivative of its own."""

INLINED = {
    "jit": "jaxpr",
    "call": "call_jaxpr",
    "closed_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
    **dict.fromkeys(CUSTOM_DERIVATIVES, "call_jaxpr"),
}
"""Primitives that call a jaxpr on their own operands → the parameter that holds the jaxpr."""

DEBUG = frozenset(["debug_callback", "debug_print"])
"""Primitives of `jax.debug`. They are not operations of the flat program, so that they change no plan."""


@dataclass(frozen=True)
class Value:
    """An array in the program.

    Attributes:
      shape: global shape.
      dtype: dtype; random keys have an extended dtype.
      bytes: bytes of the global array.
    """

    shape: tuple[int, ...]
    dtype: Any
    bytes: int


@dataclass(frozen=True)
class Op:
    """An operation: one equation with the values that it reads and writes.

    Attributes:
      path: its position in the jaxpr.
      primitive: the name of its primitive.
      rule: which of its dimensions may be sharded.
      operands: indices of values; None for a literal.
      results: indices of values.
      count: how often it runs in a step.
      flops: FLOPs of one run on one device that computes all of it.
      fixed: layouts that the program itself prescribes, by a `sharding_constraint` or at the boundary of a `shard_map`, for
        each operand, then for each result. A layout has one entry per dimension: a tuple of mesh axes, or None if it is
        unconstrained.
      unknown: names of the primitives in the operation whose cost is unknown.
      region: the path of the innermost `jax.checkpoint` that it is in; () if it is in none.
      rounded: whether a TPU rounds its float32 operands to bfloat16, as it does for products of the default precision.
      sources: where its equation was traced, then where those around it were, as JAX has it (`source.py`).
    """

    path: Path
    primitive: str
    rule: Rule
    operands: tuple[int | None, ...]
    results: tuple[int, ...]
    count: float
    flops: float
    fixed: tuple[tuple[tuple[str, ...] | None, ...], ...] | None = None
    unknown: tuple[str, ...] = ()
    region: Path = ()
    rounded: bool = False
    sources: tuple[Any, ...] = field(default=(), repr=False, compare=False)


@dataclass(frozen=True)
class SameSharding:
    """A same-sharding constraint: a value inside of a loop or branch has the sharding of a value outside.

    Attributes:
      outer, inner: indices of the values.
      skip: the number of leading dimensions of `outer` that `inner` does not have: 1 where a scan slices a stack, else 0.
        These dimensions are replicated.
    """

    outer: int
    inner: int
    skip: int = 0


@dataclass(frozen=True)
class Carry:
    """A value that each iteration of a loop passes to the next. None stands for a literal.

    Attributes:
      initial: the value before the loop.
      before, after: the values inside of the body with which an iteration starts and ends.
      result: the value after the loop.
    """

    initial: int | None
    before: int
    after: int | None
    result: int


@dataclass(frozen=True)
class Loop:
    """A loop, whose body is a range of operations.

    Attributes:
      path: the position of the loop in the jaxpr.
      start, end: indices of the first operation of the body, and of the first after it.
      operands: the values from outside that it reads; None for literals.
      length: the number of iterations; None if it is unknown.
      carries: the values that iterations pass on.
      slices: pairs (stack outside, slice inside) of the values of which each iteration reads a slice.
      stacks: pairs (slice inside, stack outside) of the results of which each iteration writes a slice.
    """

    path: Path
    start: int
    end: int
    operands: tuple[int | None, ...]
    length: int | None
    carries: tuple[Carry, ...]
    slices: tuple[tuple[int | None, int], ...] = ()
    stacks: tuple[tuple[int | None, int], ...] = ()

    @property
    def read(self) -> tuple[int, ...]:
        """Return the operands that are values and not literals."""
        return tuple(operand for operand in self.operands if operand is not None)


@dataclass(frozen=True)
class Conditional:
    """A `cond`, whose branches are ranges of operations, one after the other.

    Attributes:
      start, end: indices of the first operation of the branches, and of the first after them.
      results: for each branch, triples (result of the branch, result of the `cond`, index of the operation after the branch).
    """

    start: int
    end: int
    results: tuple[tuple[int | None, int, int], ...]


@dataclass
class FlatProgram:
    """A step as flat lists. Values are referred to by their index in `values`.

    Attributes:
      values: all arrays.
      ops: all operations in program order; the body of a loop stands where the loop is.
      loops: all loops, inner ones before those that contain them.
      conditionals: all conditionals.
      same_sharding: constraints between values inside of loops and branches and values outside.
      inputs: the arguments of the step, flattened.
      constants: the values that the step closes over.
      outputs: the results of the step, flattened; None for a literal.
    """

    values: list[Value] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    loops: list[Loop] = field(default_factory=list)
    conditionals: list[Conditional] = field(default_factory=list)
    same_sharding: list[SameSharding] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    constants: list[int] = field(default_factory=list)
    outputs: list[int | None] = field(default_factory=list)

    @property
    def unknown(self) -> tuple[str, ...]:
        """Return sentences about the costs that are unknown: loops of unknown length, operations of unknown cost."""
        loops = sum(loop.length is None for loop in self.loops)
        operations = Counter(name for op in self.ops for name in op.unknown)
        return (*about_loops(loops), *about_operations(operations, "one FLOP for each element of their results"))
