"""Flatten the jaxpr of a step into one list of operations, on which the planner works.

Nested programs are inlined: the programs that `jit`, `remat`, `custom_jvp` and the like call, and the bodies of `scan`, `while`
and `cond`. Each stands in the list once, with the number of times it runs. A *same-sharding constraint* connects a value inside
of a body with the value outside that it comes from or goes to.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax.extend import core

from penstock._jax import ClosedJaxpr, scan_counts
from penstock.shard.trace.calls import CHECKPOINTS, CUSTOM_DERIVATIVES, LOOP_BODIES, Call, find_call, nested_jaxprs, open_jaxpr
from penstock.shard.trace.flops import count_flops, find_unknown_costs
from penstock.shard.trace.rules import Rule, find_rule, independent_dims
from penstock.shard.wording import about_loops, about_operations

Path = tuple[int | str, ...]
"""The position of an equation: its index in the step's jaxpr, then its index in each nested jaxpr."""

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
      sources: where its equation was traced, then where those around it were, as JAX has it.
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
      results: the path of each equation → its results; None for a literal.
    """

    values: list[Value] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    loops: list[Loop] = field(default_factory=list)
    conditionals: list[Conditional] = field(default_factory=list)
    same_sharding: list[SameSharding] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    constants: list[int] = field(default_factory=list)
    outputs: list[int | None] = field(default_factory=list)
    results: dict[Path, tuple[int, ...]] = field(default_factory=dict, repr=False)

    @property
    def unknown(self) -> tuple[str, ...]:
        """Return sentences about the costs that are unknown: loops of unknown length, operations of unknown cost."""
        loops = sum(loop.length is None for loop in self.loops)
        operations = Counter(name for op in self.ops for name in op.unknown)
        return (*about_loops(loops), *about_operations(operations, "one FLOP for each element of their results"))


def flatten(closed: ClosedJaxpr) -> FlatProgram:
    """Flatten a traced step, and find the sharding rule and the FLOPs of each operation.

    Raises:
      TypeError: an array has a dtype whose size is unknown.

    >>> program = flatten(jax.make_jaxpr(lambda x: jax.numpy.tanh(x).sum())(jax.ShapeDtypeStruct((4, 8), "float32")))
    >>> [op.primitive for op in program.ops]
    ['tanh', 'reduce_sum']
    """
    program = FlatProgram()
    environment: dict[Any, int] = {}
    for variables, numbers in ((closed.jaxpr.constvars, program.constants), (closed.jaxpr.invars, program.inputs)):
        for variable in variables:
            environment[variable] = _new_value(program, variable.aval)
            numbers.append(environment[variable])
    _flatten_jaxpr(program, closed.jaxpr, environment, _Place())
    program.outputs = [_read(environment, atom) for atom in closed.jaxpr.outvars]
    return program


def aval_bytes(aval: Any) -> int:
    """Return the bytes of a global array; a random key counts as the integers that it consists of.

    Raises:
      TypeError: the size of an element is unknown.
    """
    if not hasattr(aval, "shape"):  # A token, which only orders effects.
        return 0
    if not jax.numpy.issubdtype(aval.dtype, jax.dtypes.extended):
        return math.prod(aval.shape) * np.dtype(aval.dtype).itemsize
    if not hasattr(aval.dtype, "itemsize"):
        raise TypeError(f"the step has an array of type {aval.dtype}, whose size is unknown; penstock plans keys and numbers")
    return math.prod(aval.shape) * aval.dtype.itemsize


def _new_value(program: FlatProgram, aval: Any) -> int:
    program.values.append(Value(tuple(getattr(aval, "shape", ())), getattr(aval, "dtype", None), aval_bytes(aval)))
    return len(program.values) - 1


def _read(environment: Mapping[Any, int], atom: Any) -> int | None:
    """Return the index of the value of a variable, or None for a literal."""
    return None if isinstance(atom, core.Literal) else environment[atom]


@dataclass(frozen=True)
class _Place:
    """Where an equation or a jaxpr stands.

    Attributes:
      path: its position.
      count: how often it runs in a step.
      region: the path of the innermost `jax.checkpoint` around it.
      sources: as in `Op`.
    """

    path: Path = ()
    count: float = 1.0
    region: Path = ()
    sources: tuple[Any, ...] = ()

    def inside(self, part: int | str, times: float = 1.0) -> _Place:
        """Return the place of a part that runs `times` as often."""
        return replace(self, path=(*self.path, part), count=self.count * times)


def _flatten_jaxpr(program: FlatProgram, jaxpr: Any, environment: dict[Any, int], place: _Place) -> None:
    """Append the operations of a jaxpr to the program."""
    for index, equation in enumerate(jaxpr.eqns):
        here = replace(place, path=(*place.path, index), sources=(equation.source_info, *place.sources))
        name = equation.primitive.name
        if name in DEBUG or not (equation.invars or equation.outvars):
            continue
        call = find_call(equation)
        if call is not None:
            _inline_call(program, equation, call, environment, replace(here, region=here.path) if name in CHECKPOINTS else here)
        elif name == "optimization_barrier":
            for variable, atom in zip(equation.outvars, equation.invars, strict=True):
                value = _read(environment, atom)
                environment[variable] = _new_value(program, variable.aval) if value is None else value
            if not place.region:
                place = replace(place, region=here.path)
        elif name == "scan":
            _inline_scan(program, equation, environment, here)
        elif name == "while":
            _inline_while(program, equation, environment, here)
        elif name == "cond":
            _inline_cond(program, equation, environment, here)
        else:
            _append_op(program, equation, environment, here)
        program.results[here.path] = tuple(environment[variable] for variable in equation.outvars)


def _append_op(program: FlatProgram, equation: Any, environment: dict[Any, int], place: _Place) -> None:
    operands = [atom.aval for atom in equation.invars]
    results = [variable.aval for variable in equation.outvars]
    for variable in equation.outvars:
        environment[variable] = _new_value(program, variable.aval)
    name = equation.primitive.name
    rule = independent_dims(operands, results) if name == "shard_map" else find_rule(name, equation.params, operands, results)
    program.ops.append(
        Op(
            place.path,
            name,
            rule,
            tuple(_read(environment, atom) for atom in equation.invars),
            tuple(environment[variable] for variable in equation.outvars),
            place.count,
            count_flops(equation),
            prescribed_layouts(equation),
            find_unknown_costs(equation),
            place.region,
            _is_rounded(equation),
            place.sources,
        )
    )


def _is_rounded(equation: Any) -> bool:
    """Return whether a TPU rounds float32 operands to bfloat16: operands of products of the default precision."""
    precision = equation.params.get("precision", jax.lax.Precision.HIGHEST)
    each = precision if isinstance(precision, tuple) else (precision,)
    return all(one in (None, jax.lax.Precision.DEFAULT, jax.lax.DotAlgorithmPreset.DEFAULT) for one in each)


def _bind_operands(program: FlatProgram, jaxpr: Any, operands: Sequence[int | None]) -> tuple[Any, dict[Any, int]]:
    """Return the open jaxpr, and an environment that maps its arguments to the given operands."""
    body = open_jaxpr(jaxpr)
    environment: dict[Any, int] = {}
    for variable in body.constvars:
        environment[variable] = _new_value(program, variable.aval)
        program.constants.append(environment[variable])
    for variable, operand in zip(body.invars, operands, strict=True):
        environment[variable] = _new_value(program, variable.aval) if operand is None else operand
    return body, environment


def _inline_call(program: FlatProgram, equation: Any, call: Call, environment: dict[Any, int], place: _Place) -> None:
    operands = [_read(environment, equation.invars[index]) for index in call.operands]
    body, inner = _bind_operands(program, call.jaxpr, operands)
    _flatten_jaxpr(program, body, inner, place)
    for variable, result in zip(equation.outvars, body.outvars, strict=True):
        value = _read(inner, result)
        environment[variable] = _new_value(program, variable.aval) if value is None else value


def _inline_scan(program: FlatProgram, equation: Any, environment: dict[Any, int], place: _Place) -> None:
    """Append the body of a scan, which counts `length` times.

    A carry has the sharding of its initial and its final value. A slice [...] has the sharding of the stack [length, ...].
    """
    consts, carried = scan_counts(equation.params)
    length = equation.params["length"]
    outer = [_read(environment, atom) for atom in equation.invars]
    body = open_jaxpr(equation.params["jaxpr"])
    own = [_new_value(program, variable.aval) for variable in body.invars[consts:]]
    for index, (outside, value) in enumerate(zip(outer[consts:], own, strict=True)):
        _share_sharding(program, outside, value, skip=0 if index < carried else 1)
    body, inner = _bind_operands(program, equation.params["jaxpr"], [*outer[:consts], *own])
    start = len(program.ops)
    _flatten_jaxpr(program, body, inner, place.inside("body", length))
    carries, stacks = [], []
    for index, (variable, atom) in enumerate(zip(equation.outvars, body.outvars, strict=True)):
        result = environment[variable] = _new_value(program, variable.aval)
        after = _read(inner, atom)
        _share_sharding(program, result, after, skip=0 if index < carried else 1)
        if index < carried:
            _share_sharding(program, result, own[index])
            carries.append(Carry(outer[consts + index], own[index], after, result))
        else:
            stacks.append((after, result))
    slices = tuple(zip(outer[consts + carried :], own[carried:], strict=True))
    program.loops.append(Loop(place.path, start, len(program.ops), tuple(outer), length, tuple(carries), slices, tuple(stacks)))


def _inline_while(program: FlatProgram, equation: Any, environment: dict[Any, int], place: _Place) -> None:
    """Append the condition and the body of a while loop. They count once, and `FlatProgram.unknown` reports this."""
    cond_consts, body_consts = equation.params["cond_nconsts"], equation.params["body_nconsts"]
    outer = [_read(environment, atom) for atom in equation.invars]
    own = [_new_value(program, variable.aval) for variable in equation.outvars]
    initial = outer[cond_consts + body_consts :]
    for outside, value in zip(initial, own, strict=True):
        _share_sharding(program, outside, value)
    start = len(program.ops)
    body, inner = _bind_operands(program, equation.params["cond_jaxpr"], [*outer[:cond_consts], *own])
    _flatten_jaxpr(program, body, inner, place.inside("cond"))
    operands = [*outer[cond_consts : cond_consts + body_consts], *own]
    body, inner = _bind_operands(program, equation.params["body_jaxpr"], operands)
    _flatten_jaxpr(program, body, inner, place.inside("body"))
    carries = []
    for variable, outside, before, atom in zip(equation.outvars, initial, own, body.outvars, strict=True):
        result = environment[variable] = _new_value(program, variable.aval)
        after = _read(inner, atom)
        _share_sharding(program, result, before)
        _share_sharding(program, result, after)
        carries.append(Carry(outside, before, after, result))
    program.loops.append(Loop(place.path, start, len(program.ops), tuple(outer), None, tuple(carries)))


def _inline_cond(program: FlatProgram, equation: Any, environment: dict[Any, int], place: _Place) -> None:
    """Append the branches of a cond. Each counts 1 / (number of branches), as if all ran equally often."""
    operands = [_read(environment, atom) for atom in equation.invars[1:]]
    for variable in equation.outvars:
        environment[variable] = _new_value(program, variable.aval)
    branches = equation.params["branches"]
    start = len(program.ops)
    results = []
    for index, branch in enumerate(branches):
        body, inner = _bind_operands(program, branch, operands)
        _flatten_jaxpr(program, body, inner, place.inside(f"branch{index}", 1 / len(branches)))
        for variable, atom in zip(equation.outvars, body.outvars, strict=True):
            result = _read(inner, atom)
            _share_sharding(program, environment[variable], result)
            results.append((result, environment[variable], len(program.ops)))
    program.conditionals.append(Conditional(start, len(program.ops), tuple(results)))


def _share_sharding(program: FlatProgram, outer: int | None, inner: int | None, skip: int = 0) -> None:
    """Add a same-sharding constraint, unless one of the values is a literal."""
    if outer is not None and inner is not None:
        program.same_sharding.append(SameSharding(outer, inner, skip))


def find_meshes(jaxpr: Any) -> list[Any]:
    """Return the meshes, concrete or abstract, that a program names in `with_sharding_constraint` and `shard_map`."""
    meshes: list[Any] = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "shard_map":
            meshes.append(equation.params["mesh"])
            continue  # The body of a `shard_map` works on local shards and constrains no global array.
        sharding = equation.params.get("sharding")
        if equation.primitive.name == "sharding_constraint" and isinstance(sharding, jax.sharding.NamedSharding):
            meshes.append(sharding.mesh)
        for inner in nested_jaxprs(equation):
            meshes += find_meshes(inner)
    return meshes


def prescribed_layouts(equation: Any) -> tuple[tuple[tuple[str, ...] | None, ...], ...] | None:
    """Return the layouts that an equation prescribes for each operand, then for each result (`Op.fixed`), or None."""
    name = equation.primitive.name
    if name == "sharding_constraint":
        sharding = equation.params["sharding"]
        if not isinstance(sharding, jax.sharding.NamedSharding):
            return None
        dims = _spec_entries(sharding.spec, equation.outvars[0].aval.ndim)
        return (dims, dims)
    if name == "shard_map":
        specs = (*equation.params["in_specs"], *equation.params["out_specs"])
        atoms = (*equation.invars, *equation.outvars)
        return tuple(_spec_entries(spec, len(atom.aval.shape)) for spec, atom in zip(specs, atoms, strict=True))
    return None


def _spec_entries(spec: Any, rank: int) -> tuple[tuple[str, ...] | None, ...]:
    """Return the mesh axes of each dimension in a `PartitionSpec`; None where it is unconstrained."""
    dims: list[tuple[str, ...] | None] = []
    for entry in (*spec, *(None,) * (rank - len(spec))):
        if entry is jax.sharding.PartitionSpec.UNCONSTRAINED:
            dims.append(None)
        elif entry is None:
            dims.append(())
        else:
            dims.append((entry,) if isinstance(entry, str) else tuple(entry))
    return tuple(dims)


# Dependencies between values


def reachable(following: Mapping[int, Iterable[int]], start: Iterable[int]) -> set[int]:
    """Return the nodes of a directed graph that paths from some nodes reach, and these nodes themselves."""
    found = set(start)
    queue = list(found)
    while queue:
        new = set(following.get(queue.pop(), ())) - found
        found |= new
        queue += new
    return found


def find_dependents(program: FlatProgram, values: Iterable[int]) -> set[int]:
    """Return all values that depend on some values, and these values themselves."""
    following = _shared(program)
    for op in program.ops:
        for operand in op.operands:
            if operand is not None:
                following[operand] += op.results
    return reachable(following, values)


def find_dependencies(program: FlatProgram, values: Iterable[int]) -> set[int]:
    """Return all values on which some values depend, and these values themselves."""
    sources = _shared(program)
    for op in program.ops:
        for result in op.results:
            sources[result] += [operand for operand in op.operands if operand is not None]
    return reachable(sources, values)


def _shared(program: FlatProgram) -> defaultdict[int, list[int]]:
    """Return for each value the values that a loop or branch shares with it."""
    shared: defaultdict[int, list[int]] = defaultdict(list)
    for pair in program.same_sharding:
        shared[pair.outer].append(pair.inner)
        shared[pair.inner].append(pair.outer)
    return shared


# Kinds of primitives, by what XLA's fusion passes do with them

ALIASES = frozenset(
    [
        *("reshape", "squeeze", "expand_dims", "transpose", "copy", "copy_p", "stop_gradient", "optimization_barrier"),
        *("sharding_constraint", "reshard", "name"),
    ]
)
"""Primitives whose results share the memory of their operands, perhaps read in another order."""
CONTRACTIONS = ("dot_general", "ragged_dot_general", "conv_general_dilated")
EXPENSIVE = frozenset(
    [
        *("exp", "exp2", "log", "log1p", "expm1", "tanh", "logistic", "sin", "cos", "tan", "erf", "erfc", "erf_inv", "sqrt"),
        *("rsqrt", "cbrt", "pow", "div", "rem", "atan2", "lgamma", "digamma", "sinh", "cosh", "asin", "acos", "atan", "asinh"),
        *("acosh", "atanh", "random_bits"),
    ]
)
"""Primitives that XLA does not compute twice on CPU and GPU (`InstructionFusion::IsExpensive`)."""
MOVES = frozenset(
    [
        *("broadcast_in_dim", "iota", "slice", "pad", "rev", "split", "unstack", "tile", "dynamic_slice", "bitcast_convert_type"),
        "random_bits",
    ]
)
"""Primitives that move or create elements, which fuse like elementwise ones."""
RANDOM_NUMBERS = frozenset(["random_bits", "threefry2x32"])
"""Primitives that make random numbers, by far the most operations per element of all that fuse."""
LOOKUPS = frozenset(["gather", "scatter", "scatter-add", "scatter_add", "dynamic_slice", "dynamic_update_slice"])
"""Primitives that read and write only the elements that they take or put."""
REDUCTIONS = frozenset(
    [
        *("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor", "argmax", "argmin"),
        *("concatenate", "stack"),
    ]
)
"""Primitives whose results are stored, while their operands may be computed on the way into them."""
IN_PLACE = frozenset(["dynamic_update_slice", "scatter", "scatter-add", "scatter_add"])
"""Primitives that write into the memory of their first operand, if nothing needs it later."""


def is_product(op: Op) -> bool:
    """Return whether an operation multiplies matrices."""
    return op.primitive in CONTRACTIONS and not is_outer_product(op)


def is_outer_product(op: Op) -> bool:
    """Return whether a product sums over nothing, so that XLA makes it a multiplication (`AlgebraicSimplifier::HandleDot`)."""
    if op.primitive != "dot_general":
        return False
    kept = {factor for result in op.rule.results for factor in result}
    summed = {factor for operand in op.rule.operands for factor in operand if factor is not None} - kept
    return all(op.rule.sizes[factor] == 1 for factor in summed)


def is_one_hot(op: Op) -> bool:
    """Return whether a scatter puts one element into each row, as the gradient of a cross-entropy does.

    The TPU compiler makes it a comparison of indices, which it fuses.
    """
    if op.primitive not in ("scatter-add", "scatter_add"):
        return False
    table, indices = op.rule.operands[:2]
    return sum(factor is None or factor not in indices for factor in table) == 1


# Sums of sums

_SUM = "reduce_sum"
_RESHAPES = ("reshape", "squeeze", "expand_dims", "broadcast_in_dim")
_BODIES = {**{name: tuple(parts) for name, parts in LOOP_BODIES.items()}, "cond": ("branches",)}
"""Loops and branches → the parameters that hold jaxprs in which sums are merged, too."""


def merge_sums(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return a closed jaxpr in which a sum over some dimensions of a sum over others is one sum over both.

    XLA does this before it partitions a program. The gradient of a parameter that `jax.vmap` broadcasts is first summed over the
    batch, and then over the other dimensions of an example. If the planner chose a layout between both sums, the compiler would
    have to sum the large array there over devices.

    >>> import jax
    >>> step = lambda x: x.sum(0).sum(1)
    >>> merged = merge_sums(jax.make_jaxpr(step)(jax.ShapeDtypeStruct((4, 8, 2), "float32")))
    >>> [(equation.primitive.name, equation.params["axes"]) for equation in merged.jaxpr.eqns]
    [('reduce_sum', (0, 2))]
    """
    return closed.replace(jaxpr=_merge(closed.jaxpr))


def _merge(jaxpr: Any) -> Any:
    """Return an open jaxpr with consecutive sums merged. Sums are only merged if nothing else reads the value between them."""
    reads = _count_reads(jaxpr.eqns, jaxpr.outvars)
    # Sums, and arrays that differ from them in dimensions of size 1 → the array that is summed, and for each dimension the
    # dimension of the summed array, or None.
    sums: dict[Any, tuple[Any, list[int | None]]] = {}
    equations = []
    for equation in map(_merge_inside, jaxpr.eqns):
        kept = _kept_dims(equation)
        if kept is not None:
            (operand,), (result,) = equation.invars, equation.outvars
            before = sums.get(operand) if reads[operand] == 1 else None
            if before is not None:
                kept = [None if dim is None else before[1][dim] for dim in kept]
            if equation.primitive.name == _SUM and before is not None and None not in kept:
                axes = tuple(dim for dim in range(len(before[0].aval.shape)) if dim not in kept)
                equation = equation.replace(invars=[before[0]], params={**equation.params, "axes": axes})
            if equation.primitive.name == _SUM or before is not None:
                sums[result] = (operand if before is None else before[0], kept)
        equations.append(equation)
    return jaxpr.replace(eqns=_without_unread(equations, jaxpr.outvars, sums))


def _count_reads(equations: Iterable[Any], results: Iterable[Any]) -> Counter[Any]:
    """Return how often each variable is read."""
    atoms = (*(atom for equation in equations for atom in equation.invars), *results)
    return Counter(atom for atom in atoms if not isinstance(atom, core.Literal))


def _kept_dims(equation: Any) -> list[int | None] | None:
    """Return for each dimension of the result the dimension of the operand, or None for a new one of size 1.

    Return None if the equation is neither a sum nor a change of dimensions of size 1.
    """
    name, params = equation.primitive.name, equation.params
    if name not in (_SUM, *_RESHAPES) or len(equation.invars) != 1 or isinstance(equation.invars[0], core.Literal):
        return None
    before, after = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    if name == _SUM:
        return [dim for dim in range(len(before)) if dim not in params["axes"]]
    large = [dim for dim, size in enumerate(before) if size != 1]
    if [before[dim] for dim in large] != [size for size in after if size != 1]:
        return None
    remaining = iter(large)
    return [None if size == 1 else next(remaining) for size in after]


def _without_unread(equations: Sequence[Any], results: Iterable[Any], merged: Container[Any]) -> list[Any]:
    """Return the equations without merged sums that nothing reads any longer."""
    read = set(_count_reads((), results))
    kept = []
    for equation in reversed(equations):
        if all(result in merged and result not in read for result in equation.outvars) and equation.outvars:
            continue
        read.update(_count_reads([equation], ()))
        kept.append(equation)
    return kept[::-1]


def _merge_inside(equation: Any) -> Any:
    """Return an equation with consecutive sums merged in the jaxprs nested in it."""
    name, params = equation.primitive.name, equation.params
    if name in CUSTOM_DERIVATIVES:
        return equation
    if (call := find_call(equation)) is not None:
        return equation.replace(params=call.with_jaxpr(params, _merge_nested(call.jaxpr)))
    changed = {key: _merge_nested(params[key]) for key in _BODIES.get(name, ())}
    return equation.replace(params={**params, **changed}) if changed else equation


def _merge_nested(nested: Any) -> Any:
    """Return a parameter that holds jaxprs, open, closed or several, with consecutive sums merged."""
    if isinstance(nested, tuple):
        return tuple(map(_merge_nested, nested))
    return merge_sums(nested) if hasattr(nested, "consts") else _merge(nested)
