"""Define the functions of the modules that `Plan.code` prints, which apply tables of layouts to a step.

`code.py` prints the source of those sections below that a plan needs. So nothing here may use penstock, and a name that a section
uses has to be among the imports of `code.py`.
"""

import functools
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import Literal
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

# Shardings by path.


def find_spec(path: Any, table: Mapping[str, P]) -> P | None:
    """Return the layout at a path, from a table of paths, in which * stands for the digits of a number; None if it has none."""
    name = jax.tree_util.keystr(path)
    return table.get(name, table.get(re.sub(r"\d+", "*", name)))


def shard_like(tree: Any, table: Mapping[str, P], mesh: Any) -> Any:
    """Return a tree of shardings like a tree, from a table of paths.

    Raises:
      KeyError: the tree has a path that the table does not have.
    """

    def find(path: Any, _: Any) -> NamedSharding:
        spec = find_spec(path, table)
        if spec is None:
            raise KeyError(f"the plan has no leaf at {jax.tree_util.keystr(path)}; it has {', '.join(table)}")
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(find, tree)


# Arguments by keyword.


def by_position(step: Callable, first: int, keywords: Sequence[str]) -> Callable:
    """Return a step as a function of positional arguments: `jax.jit` takes shardings for these only.

    Args:
      first: the number of arguments before those by keyword.
    """

    @functools.wraps(step)
    def positional(*args: Any) -> Any:
        return step(*args[:first], **dict(zip(keywords, args[first:], strict=True)))

    return positional


# Layouts from the start of the step.


def starting_in(step: Callable, tables: Sequence[Mapping[str, P]], mesh: Any) -> Callable:
    """Return a step that gets the arguments of some paths in other layouts from its start."""

    def constrain(arg: Any, table: Mapping[str, P]) -> Any:
        def at(path: Any, value: Any) -> Any:
            spec = find_spec(path, table)
            return value if spec is None else jax.lax.with_sharding_constraint(value, NamedSharding(mesh, spec))

        return jax.tree_util.tree_map_with_path(at, arg)

    @functools.wraps(step)
    def planned(*args: Any) -> Any:
        return step(*map(constrain, args, tables))

    return planned


# Rows of sharding constraints.


class Row(NamedTuple):
    """The layouts of operations of the step.

    Attributes:
      operation: the form of the operations, as `describe` returns it.
      operands, results: the number of an operand or a result → the layouts to request, one after the other. After a layout that
        an operand has twice in a row, there is a barrier, and what follows is done again for each operation.
      numbers: which operations of this form, counted in the order of evaluation from 0; () stands for all of them.
      of: how many operations of this form the step has, if they are numbered.
    """

    operation: str
    operands: Mapping[int, Sequence[P]] = {}
    results: Mapping[int, Sequence[P]] = {}
    numbers: Sequence[int] = ()
    of: int = 0


# Sharding constraints inside of the step.


INLINED = ("jit", "call", "closed_call", "eval_jaxpr", "custom_vmap_call")
"""Operations that only call their jaxpr. Its operations are evaluated in their place."""
CHECKPOINTS = ("checkpoint", "remat2")
LINEAR_SOLVE = "custom_linear_solve"
CALLS = ("custom_jvp_call", "custom_vjp_call", "linear_call", "composite", LINEAR_SOLVE, *CHECKPOINTS)
NESTED = ("scan", "while", "cond", *CALLS)
"""Other operations with jaxprs, which are traced again with constraints in them."""


def describe(equation: Any) -> str:
    """Return the form of an operation: its name, its first operands, and its first result."""
    avals = [variable.aval for variable in (*equation.invars[:3], *equation.outvars[:1])]
    types = [f"{getattr(aval, 'dtype', '')}[{','.join(map(str, getattr(aval, 'shape', ())))}]" for aval in avals]
    operands = len(equation.invars[:3])
    return " ".join([equation.primitive.name, *types[:operands], "->", *types[operands:]])


def held_jaxprs(equation: Any) -> dict[str, tuple[Any, ...]]:
    """Return the jaxprs that an operation runs, by the names of the parameters that hold them."""
    if equation.primitive.name == LINEAR_SOLVE:
        return {"jaxprs": (equation.params["jaxprs"].solve,)}
    values = {key: value if isinstance(value, tuple) else (value,) for key, value in equation.params.items()}
    return {key: each for key, each in values.items() if each and all(map(is_jaxpr, each))}


def is_jaxpr(value: Any) -> bool:
    """Return whether a parameter is a jaxpr, open or closed."""
    return hasattr(value, "eqns") or hasattr(value, "jaxpr")


def constrained(step: Callable, rows: Sequence[Row], mesh: Any, lower: Callable[[Any], Any] = lambda closed: closed) -> Callable:
    """Return a step with sharding constraints inside. It takes arguments by position."""

    @functools.wraps(step)
    def planned(*args: Any) -> Any:
        closed, shapes = jax.make_jaxpr(step, return_shape=True)(*args)
        closed, evaluation = lower(closed), Evaluation(rows, mesh)
        results = evaluation.evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(args), {})
        evaluation.check()
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return planned


class Evaluation:
    """An evaluation of a jaxpr, operation by operation, with sharding constraints."""

    def __init__(self, rows: Sequence[Row], mesh: Any):
        self.rows = {(row.operation, number): row for row in rows for number in row.numbers or (None,)}
        self.seen: Counter[str] = Counter()
        self.mesh = mesh
        # On the CPU, XLA before 0.12 computes a scatter into an array that it cuts to a shard wrongly, without a barrier.
        self.keep_scatters_apart = mesh.devices.flat[0].platform == "cpu" and jax.__version_info__ < (0, 12)

    def check(self) -> None:
        """Raise an error if the step does not have the operations of the rows."""
        for row in self.rows.values():
            found = self.seen[row.operation]
            if not found or (row.of and found != row.of):
                raise ValueError(f"the step has {found} × {row.operation}, and the plan is for {row.of or 'at least one'}")

    def evaluate(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], done: dict) -> list[Any]:
        """Return the results of a jaxpr. `done` has the arrays that are constrained already."""
        values: dict[Any, Any] = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else values[atom]

        for equation in jaxpr.eqns:
            operation = describe(equation)
            number = self.seen[operation]
            self.seen[operation] += 1
            row = self.rows.get((operation, None)) or self.rows.get((operation, number)) or Row(operation)
            operands = [read(atom) for atom in equation.invars]
            again: dict[int, Sequence[P]] = {}
            for index, specs in row.operands.items():
                given = operands[index]
                end = next((n for n in range(1, len(specs)) if specs[n] == specs[n - 1]), len(specs))
                again |= {index: specs[end + 1 :]} if specs[end + 1 :] else {}
                for spec in specs[:end]:
                    key = (id(given), spec)
                    if key not in done:
                        done[key] = (given, self.constrain(operands[index], spec))  # `given` keeps its id from being used again
                    operands[index] = done[key][1]
            if again:
                operands = jax.lax.optimization_barrier(operands)
                for index, specs in again.items():
                    operands[index] = functools.reduce(self.constrain, specs, operands[index])
            if equation.primitive.name.startswith("scatter") and self.keep_scatters_apart:
                operands[0] = jax.lax.optimization_barrier(operands[0])
            with equation.ctx.manager:
                results = self.compute(equation, operands, done)
            for index, specs in row.results.items():
                for spec in specs:
                    results[index] = self.constrain(results[index], spec)
                done[id(results[index]), specs[-1]] = (results[index], results[index])
            values.update(zip(equation.outvars, results, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def compute(self, equation: Any, operands: list[Any], done: dict) -> list[Any]:
        """Return the results of one operation, with constraints in its jaxprs."""
        name, params = equation.primitive.name, equation.params
        if name in INLINED:
            ((jaxpr,),) = held_jaxprs(equation).values()
            return self.evaluate(getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ()), operands, done)
        if name in CHECKPOINTS:  # It takes a jaxpr without constants.
            consts = getattr(params["jaxpr"], "consts", ())
            operands, params = [*consts, *operands], {**params, "jaxpr": self.trace(params["jaxpr"], consts).jaxpr}
        elif name == LINEAR_SOLVE:
            jaxprs = params["jaxprs"]
            params = {**params, "jaxprs": jaxprs._replace(solve=self.trace(jaxprs.solve))}
        elif name in NESTED:
            traced = {key: tuple(map(self.trace, jaxprs)) for key, jaxprs in held_jaxprs(equation).items()}
            params = {**params, **{key: each if isinstance(params[key], tuple) else each[0] for key, each in traced.items()}}
        results = equation.primitive.bind(*operands, **equation.primitive.get_bind_params(params))
        return list(results) if equation.primitive.multiple_results else [results]

    def trace(self, jaxpr: Any, consts: Sequence[Any] = ()) -> Any:
        """Return a jaxpr with constraints in it. It takes `consts`, if they are given, as its first arguments."""
        body, own = getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ())
        avals = [(v.aval.shape, v.aval.dtype, getattr(v.aval, "weak_type", False)) for v in body.invars]
        shapes = [jax.ShapeDtypeStruct(shape, dtype, weak_type=weak) for shape, dtype, weak in avals]
        count = len(consts)

        def run(*args: Any) -> list[Any]:
            return self.evaluate(body, args[:count] if count else own, args[count:], {})

        return jax.make_jaxpr(run)(*consts, *shapes)

    def constrain(self, value: Any, spec: P) -> Any:
        """Return an array with one sharding constraint."""
        return jax.lax.with_sharding_constraint(value, NamedSharding(self.mesh, spec))
