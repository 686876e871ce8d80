"""Find how the values of a step depend on the rows of its batch, so that the step can run in parts of it.

A step is traced with its whole batch and with a part of it. A dimension whose size differs between both programs is a dimension
of rows. The sharding rules say which dimension of a result has the rows of an operand, and over which an operation sums.

A part has the same number of rows of each *group* of consecutive rows, so that devices with a group each take the rows of a part
from their own. A dimension of rows may hold something else besides, as in [rows × words, features]: its rows are in *blocks*.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import jax
import numpy as np

from penstock._jax import scan_counts
from penstock.errors import SplitError
from penstock.shard.trace.calls import LOOP_BODIES, find_call, held_jaxprs, open_jaxpr
from penstock.shard.trace.lines import Line, is_literal
from penstock.shard.trace.rules import RULES, find_rule
from penstock.shard.trace.source_lines import describe_source

_SUMS = frozenset(["dot_general", "reduce_sum", "conv_general_dilated", "scatter-add", "ragged_dot_general"])
"""Primitives whose results are sums over the dimensions that their results lack."""
_MOVES = frozenset(
    [
        *("neg", "convert_element_type", "reduce_precision", "real", "imag", "copy", "sharding_constraint", "cumsum"),
        *("transpose", "reshape", "broadcast_in_dim", "squeeze", "slice", "rev", "reduce_sum"),
    ]
)
"""Linear functions of one operand."""
_BILINEAR = frozenset(["mul", "dot_general", "conv_general_dilated"])
_OF_FIRST = frozenset(["div", "gather", "dynamic_slice"])
"""Linear functions of the first operand."""
_ADDITIVE = frozenset(["add", "sub", "add_any", "concatenate", "dynamic_update_slice", "scatter-add", "pad"])
"""Linear functions of several operands, and others with the same effect on zeros."""
_ELEMENTWISE = frozenset(
    [
        *("abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "bessel_i0e", "bessel_i1e", "cbrt", "ceil", "clz", "conj"),
        *("convert_element_type", "copy", "cos", "cosh", "digamma", "eq_to", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1"),
        *("floor", "igamma", "igamma_grad_a", "igammac", "imag", "integer_pow", "is_finite", "le_to", "lgamma", "log", "log1p"),
        *("log2", "logistic", "lt_to", "mulhi", "neg", "not", "one_minus_square", "polygamma", "population_count", "real"),
        *("reduce_precision", "regularized_incomplete_beta", "round", "rsqrt", "sharding_constraint", "sign", "sin", "sinh"),
        *("sqrt", "square", "stop_gradient", "tan", "tanh", "threefry2x32", "zeta"),
    ]
)
"""Primitives without a rule of their own that compute each element from the elements at its position."""
_BY_POSITION = frozenset(["random_gamma", "rng_uniform", "rng_bit_generator"])
"""Primitives with a rule whose results depend on the positions of the rows."""
_SIZES = frozenset(["shape", "new_sizes", "limit_indices", "slice_sizes"])
"""Parameters that are sizes of dimensions, which the shapes of operands and results have as well."""


class Kind(Enum):
    """The role of a value without rows in the program of a part.

    ZERO: zeros, which are the sum of any number of parts.
    FIXED: it does not depend on the rows.
    SUM: a sum over the rows of a part. The value for the whole batch is the sum over the parts.
    LEAST, GREATEST: the least or greatest of the rows of a part.
    LATER: it is computed from values over all parts.
    """

    ZERO = 0
    FIXED = 1
    SUM = 2
    LEAST = 3
    GREATEST = 4
    LATER = 5


_EXTREMES = {"reduce_min": Kind.LEAST, "reduce_and": Kind.LEAST, "reduce_max": Kind.GREATEST, "reduce_or": Kind.GREATEST}


@dataclass(frozen=True)
class Rows:
    """The role of a value with rows in the program of a part.

    Attributes:
      dim: the dimension of rows.
      block: how many consecutive elements of this dimension are of the same part. The next ones are of the next part. 0 if all
        rows are equal, so that it does not matter.
    """

    dim: int
    block: int


Role = Kind | Rows


@dataclass(frozen=True)
class Parts:
    """Finds the roles of values, equation by equation.

    Attributes:
      count: the number of parts.
      groups: the number of groups of consecutive rows.
      nested: whether the equations are inside of a loop, a branch or a call, so that what is computed from sums cannot run later.
      made: the `id` of an equation that makes values which differ from row to row, and reads none with rows → the equation of
        the whole batch, and the rows of its result. Each part makes the values of all rows, and takes its own.
    """

    count: int
    groups: int
    nested: bool = False
    made: dict[int, tuple[Any, Rows]] = field(default_factory=dict)

    def in_order(self, part: Any, whole: Any) -> Rows | None:
        """Return the rows of a value that has them in the order of the batch, such as an argument; None if it has none.

        Args:
          part, whole: its abstract values in both programs.
        """
        dim = _differing(part, whole)
        if dim is None:
            return None
        own, theirs = part.shape[dim], whole.shape[dim]
        if own * self.count != theirs:
            raise SplitError(f"an array of {list(whole.shape)} is one of {list(part.shape)} with a part of the batch")
        if own % self.groups:
            raise SplitError(f"{theirs} rows do not divide into {self.groups} groups of {self.count} parts")
        return Rows(dim, own // self.groups)

    def of_jaxpr(self, part: Any, whole: Any, given: Sequence[Role], sources: tuple[Any, ...] = ()) -> list[Role]:
        """Return the roles of the results of a jaxpr, given the roles of its arguments."""
        body, other = open_jaxpr(part), open_jaxpr(whole)
        known: dict[Any, Role] = dict.fromkeys(body.constvars, Kind.FIXED)
        if any(_differing(*each) is not None for each in avals_of(body.constvars, other.constvars)):
            raise _error("the step closes over an array with a row for each row of the batch", sources)
        known.update(zip(body.invars, given, strict=True))
        for own, theirs in zip(body.eqns, other.eqns, strict=True):
            roles = self.of_equation(own, theirs, [role_of(atom, known) for atom in own.invars], sources)
            known.update(zip(own.outvars, roles, strict=True))
        return [role_of(atom, known) for atom in body.outvars]

    def of_equation(self, own: Any, theirs: Any, operands: Sequence[Role], sources: tuple[Any, ...]) -> list[Role]:
        """Return the roles of the results of an equation."""
        sources = (own.source_info, *sources)
        name, call = own.primitive.name, find_call(own)
        control = call is not None or name in (*LOOP_BODIES, "cond")
        if not has_rows(own, theirs) and not (self.nested and control and Kind.SUM in operands):
            return [self._without_rows(own, operands, sources)] * len(own.outvars)
        if self.nested and own.effects and not control:
            raise _error("an operation with a side effect would run once for each part", sources)
        inside = replace(self, nested=True)
        if call is not None:
            other = find_call(theirs)
            assert other is not None
            return inside.of_jaxpr(call.jaxpr, other.jaxpr, [operands[at] for at in call.operands], sources)
        if name == "scan":
            return inside._of_scan(own.params, theirs.params, operands, sources)
        if name == "while":
            return inside._of_while(own.params, theirs.params, operands, sources)
        if name == "cond":
            return inside._of_branches(own.params, theirs.params, operands, sources)
        if own.effects:
            raise _error("an operation with a side effect depends on the rows", sources)
        return self._with_rows(own, theirs, operands, sources)

    def _without_rows(self, equation: Any, operands: Sequence[Role], sources: tuple[Any, ...]) -> Role:
        """Return the role of the results of an equation without rows."""
        if not {Kind.ZERO, Kind.FIXED}.issuperset(operands):
            if not self.nested:
                return Kind.LATER
            if Kind.LATER in operands or not _is_linear(equation, operands):
                raise _error("a sum over the rows is used where it is computed", sources)
            return Kind.SUM
        name = equation.primitive.name
        zero = operands and (all(each is Kind.ZERO for each in operands) or (name == "mul" and Kind.ZERO in operands))
        return Kind.ZERO if zero and name in (_MOVES | _BILINEAR | _ADDITIVE) else Kind.FIXED

    def _with_rows(self, own: Any, theirs: Any, operands: Sequence[Role], sources: tuple[Any, ...]) -> list[Role]:
        """Return the roles of the results of an equation with rows, in its operands or results."""
        name = own.primitive.name
        rows = {number: role for number, role in enumerate(operands) if isinstance(role, Rows)}
        if not {Kind.ZERO, Kind.FIXED}.issuperset(set(operands) - set(rows.values())):
            raise _error("what each row gets depends on a value over all rows, as in batch normalization", sources)
        _refuse_other_params(own, theirs, sources)
        if not rows:
            return self._of_new_rows(own, theirs, sources)
        if name == "reshape":
            return [self._of_reshape(rows[0], own, theirs, sources)]
        if name in _BY_POSITION or not (name in RULES or name in _ELEMENTWISE):
            raise _error(f"nothing is known about the rows of the operation {name}", sources)
        whole = [[atom.aval for atom in atoms] for atoms in (theirs.invars, theirs.outvars)]
        rule = find_rule(name, theirs.params, *whole)
        factors = {rule.operands[number][role.dim] for number, role in rows.items()}
        blocks = {role.block for role in rows.values() if role.block} or {0}
        if len(factors) != 1 or None in factors or len(blocks) != 1 or _moves_rows(theirs, rows):
            raise _error("an operation moves or mixes rows of the batch", sources)
        (factor,), (block,) = factors, blocks
        roles: list[Role] = []
        for number, avals in enumerate(avals_of(own.outvars, theirs.outvars)):
            dim = _differing(*avals)
            if dim is not None and rule.results[number][dim] == factor:
                roles.append(Rows(dim, block))
            elif dim is not None or factor in rule.results[number]:
                raise _error("an operation moves or mixes rows of the batch", sources)
            elif name in _SUMS:
                roles.append(Kind.SUM)
            elif name in _EXTREMES and not self.nested:
                roles.append(_EXTREMES[name])
            else:
                raise _error("a result over all rows is not a sum", sources)
        if name == "scatter-add" and Kind.SUM in roles and operands[0] is not Kind.ZERO:
            raise _error("a sum over the rows is added to other values", sources)
        return roles

    def _of_new_rows(self, own: Any, theirs: Any, sources: tuple[Any, ...]) -> list[Role]:
        """Return the roles of the results of an equation that creates rows."""
        name = own.primitive.name
        made = [self.in_order(*avals) for avals in avals_of(own.outvars, theirs.outvars)]
        rows = made[-1]
        equal = name == "broadcast_in_dim" or (name == "iota" and rows is not None and rows.dim != own.params["dimension"])
        if name in ("iota", "random_bits", "rng_bit_generator") and not equal and rows is not None:
            self.made[id(own)] = theirs, rows
        elif not equal:
            raise _error("an operation makes values that differ from row to row", sources)
        return [Kind.FIXED if each is None else Rows(each.dim, 0) if equal else each for each in made]

    def _of_reshape(self, rows: Rows, own: Any, theirs: Any, sources: tuple[Any, ...]) -> Rows:
        """Return the rows of the result of a reshape: the parts keep their places in the order of all elements."""
        before, after = theirs.invars[0].aval.shape, theirs.outvars[0].aval.shape
        size = own.invars[0].aval.shape[rows.dim]
        block = rows.block or (size // self.groups if size % self.groups == 0 else size)
        stride = block * math.prod(before[rows.dim + 1 :])
        dim = _differing(own.outvars[0].aval, theirs.outvars[0].aval)
        assert dim is not None
        unit = math.prod(after[dim + 1 :])
        if stride % unit or (unit * after[dim]) % (stride * self.count):
            raise _error("an operation puts rows of different parts together", sources)
        return Rows(dim, stride // unit)

    def _of_scan(
        self, own: Mapping[str, Any], theirs: Mapping[str, Any], operands: Sequence[Role], sources: tuple[Any, ...]
    ) -> list[Role]:
        """Return the roles of the results of a loop."""
        if own["length"] != theirs["length"]:
            raise _error("a loop runs once for some of the rows", sources)
        consts, carries = scan_counts(own)
        given = [*operands[: consts + carries], *(_shifted(role, -1) for role in operands[consts + carries :])]

        def run(given: Sequence[Role]) -> list[Role]:
            return self.of_jaxpr(own["jaxpr"], theirs["jaxpr"], given, sources)

        results = self._repeat(run, given, consts, carries, sources)
        return [*results[:carries], *(_shifted(role, 1) for role in results[carries:])]

    def _of_while(
        self, own: Mapping[str, Any], theirs: Mapping[str, Any], operands: Sequence[Role], sources: tuple[Any, ...]
    ) -> list[Role]:
        """Return the roles of the results of a `while` loop."""
        tests, consts = own["cond_nconsts"], own["body_nconsts"]

        def run(given: Sequence[Role]) -> list[Role]:
            return self.of_jaxpr(own["body_jaxpr"], theirs["body_jaxpr"], given, sources)

        given = list(operands[tests:])
        results = self._repeat(run, given, consts, len(given) - consts, sources)
        state = [*operands[:tests], *given[consts:]]
        (again,) = self.of_jaxpr(own["cond_jaxpr"], theirs["cond_jaxpr"], state, sources)
        if again not in (Kind.ZERO, Kind.FIXED):
            raise _error("how often a loop runs depends on the rows", sources)
        return results

    @staticmethod
    def _repeat(run: Any, given: list[Role], consts: int, carries: int, sources: tuple[Any, ...]) -> list[Role]:
        """Return the roles of the results of a loop's body, with carries that have the same roles before it; mend `given`."""
        while True:
            results = run(given)
            state = given[consts : consts + carries]
            joined = [_join(*each, sources) for each in zip(state, results[:carries], strict=True)]
            if joined == state:
                return [*joined, *results[carries:]]
            given[consts : consts + carries] = joined

    def _of_branches(
        self, own: Mapping[str, Any], theirs: Mapping[str, Any], operands: Sequence[Role], sources: tuple[Any, ...]
    ) -> list[Role]:
        """Return the roles of the results of a `cond`."""
        if operands[0] not in (Kind.ZERO, Kind.FIXED):
            raise _error("which branch is taken depends on the rows", sources)
        branches = zip(own["branches"], theirs["branches"], strict=True)
        first, *others = [self.of_jaxpr(*each, operands[1:], sources) for each in branches]
        for each in others:
            first = [_join(*pair, sources) for pair in zip(first, each, strict=True)]
        return first


def role_of(atom: Any, known: Mapping[Any, Role]) -> Role:
    """Return the role of an operand."""
    if not is_literal(atom):
        return known[atom]
    number = np.ndim(atom.val) == 0 and not jax.numpy.issubdtype(atom.aval.dtype, jax.dtypes.extended)
    return Kind.ZERO if number and atom.val == 0 else Kind.FIXED


def has_rows(own: Any, theirs: Any) -> bool:
    """Return whether an equation has rows in its operands or results, or in a jaxpr that it runs."""
    for part, whole in avals_of((*own.invars, *own.outvars), (*theirs.invars, *theirs.outvars)):
        if getattr(part, "shape", ()) != getattr(whole, "shape", ()):
            return True
    bodies = zip(map(open_jaxpr, held_jaxprs(own)), map(open_jaxpr, held_jaxprs(theirs)), strict=True)
    return any(has_rows(*each) for body, other in bodies for each in zip(body.eqns, other.eqns, strict=True))


def avals_of(own: Sequence[Any], theirs: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield the abstract values of variables or literals of both programs."""
    return ((a.aval, b.aval) for a, b in zip(own, theirs, strict=True))


def _differing(part: Any, whole: Any) -> int | None:
    """Return the dimension of rows of a value, given by its abstract values in both programs; None if it has none."""
    shape, other = getattr(part, "shape", ()), getattr(whole, "shape", ())
    differ = [dim for dim, (own, theirs) in enumerate(zip(shape, other, strict=True)) if own != theirs]
    if len(differ) > 1:
        raise SplitError(f"an array has {len(differ)} dimensions whose size depends on the batch: {list(other)}")
    return differ[0] if differ else None


def _shifted(role: Role, by: int) -> Role:
    return Rows(role.dim + by, role.block) if isinstance(role, Rows) else role


def _is_linear(equation: Any, operands: Sequence[Role]) -> bool:
    """Return whether an equation is linear in its operands that are sums."""
    name = equation.primitive.name
    summable = [each in (Kind.SUM, Kind.ZERO) for each in operands]
    sums = [each is Kind.SUM for each in operands]
    inexact = [jax.numpy.issubdtype(atom.aval.dtype, np.inexact) for atom in (equation.invars[0], equation.outvars[0])]
    if name == "convert_element_type":
        return inexact[1] or (not inexact[0] and equation.outvars[0].aval.dtype != bool)
    if name == "gather":
        fill = equation.params["fill_value"]  # None stands for NaN
        filled = "FILL" in str(equation.params["mode"]) and not (inexact[0] and (fill is None or np.isnan(fill)))
        return not filled and not any(sums[1:])
    if name in _MOVES or name in _OF_FIRST:
        return not any(sums[1:]) and (name != "div" or inexact[0])
    if name in _BILINEAR:
        return sum(sums) == 1
    if name == "select_n":
        return all(summable[1:]) and not sums[0]
    if name == "dynamic_update_slice":
        return all(summable[:2]) and not any(sums[2:])
    if name == "scatter-add":
        return summable[0] and summable[2] and not sums[1]
    return name in _ADDITIVE and all(summable)


def _moves_rows(whole: Any, rows: Mapping[int, Rows]) -> bool:
    """Return whether an equation, of the whole batch, writes at positions among the rows or takes rows in groups."""
    name, params = whole.primitive.name, whole.params
    if 0 not in rows:
        return False
    dim = rows[0].dim
    if name.startswith("scatter"):
        return dim in params["dimension_numbers"].scatter_dims_to_operand_dims
    if name == "dynamic_update_slice":
        return whole.invars[1].aval.shape[dim] != whole.invars[0].aval.shape[dim]
    return name == "ragged_dot_general" and dim in params["ragged_dot_dimension_numbers"].lhs_ragged_dimensions


def _refuse_other_params(own: Any, theirs: Any, sources: tuple[Any, ...]) -> None:
    """Raise an error if the parameters of an equation differ in more than sizes."""
    for key, value in own.params.items():
        other = theirs.params.get(key)
        if key in _SIZES or callable(value) or hasattr(value, "jaxpr") or hasattr(value, "eqns"):
            continue
        if repr(value) != repr(other):  # not ==, as a value may be NaN or an array
            raise _error(f"the operation {own.primitive.name} depends on the number of rows", sources)


def _join(one: Role, other: Role, sources: tuple[Any, ...]) -> Role:
    """Return the role of a value that is one or the other."""
    if one == other:
        return one
    if Kind.ZERO in (one, other):
        return other if one is Kind.ZERO else one
    if isinstance(one, Rows) and isinstance(other, Rows):
        if one.dim == other.dim and 0 in (one.block, other.block):
            return Rows(one.dim, one.block or other.block)
        raise _error("an operation moves or mixes rows of the batch", sources)
    raise _error("a sum over the rows is added to other values", sources)


def _error(reason: str, sources: tuple[Any, ...]) -> SplitError:
    line = describe_source(sources)
    return SplitError(f"{reason}{f': {line}' if line else ''}")


@dataclass
class RowNumbers:
    """Finds indices that are the numbers of the rows themselves, as in `x[jnp.arange(rows), labels]`.

    Attributes:
      numbers: values whose elements are the number of their row.
      never: values that are False.
      columns: indices of a gather or scatter → the columns of them that are numbers of rows.
    """

    numbers: set[int] = field(default_factory=set)
    never: set[int] = field(default_factory=set)
    columns: dict[int, frozenset[int]] = field(default_factory=dict)

    def read_constant(self, number: int, value: Any) -> None:
        """Find out about an array with rows, along its first dimension, that the step closes over."""
        array = np.asarray(value)
        rows = np.arange(len(array)).reshape(-1, *(1 for _ in array.shape[1:]))
        self.numbers.update([number] if np.issubdtype(array.dtype, np.integer) and np.all(array == rows) else [])
        self.never.update([number] if array.dtype == bool and not array.any() else [])

    def read(self, line: Line, roles: Mapping[int, Role]) -> None:
        """Find out about the result of an equation, given the roles of its operands and its result."""
        name, params, result = line.equation.primitive.name, line.equation.params, line.results[:1]
        operands = [None if is_literal(atom) else atom for atom in line.operands]
        role = roles[result[0]] if result else Kind.FIXED
        if not isinstance(role, Rows):
            return
        first, shape = operands[0] if operands else None, line.equation.outvars[0].aval.shape
        if name == "iota":
            found = params["dimension"] == role.dim
        elif name == "select_n":
            found = first in self.never and operands[1] in self.numbers
        elif name == "convert_element_type":
            found = first in self.numbers and params["new_dtype"].itemsize >= 4
        elif name == "reshape":
            before = line.equation.invars[0].aval.shape
            found = first in self.numbers and [size for size in before if size > 1] == [size for size in shape if size > 1]
        else:
            found = first in self.numbers and name in ("broadcast_in_dim", "squeeze", "copy")
        self.numbers.update(result if found else ())
        if name == "lt" and first in self.numbers and operands[1] is None and line.operands[1].val == 0:
            self.never.update(result)
        units = all(atom.aval.shape[-1:] == (1,) for atom in line.equation.invars)
        if name == "concatenate" and params["dimension"] == len(shape) - 1 and units:
            self.columns[result[0]] = frozenset(at for at, number in enumerate(operands) if number in self.numbers)

    def of_indexing(self, line: Line, operands: Sequence[Role]) -> tuple[Rows, int] | None:
        """Return the rows of the result of a gather or scatter whose rows are given by their numbers, and the column of these.

        Return None if it is another operation.
        """
        equation, name = line.equation, line.equation.primitive.name
        if not (name == "gather" or name.startswith("scatter")) or not all(isinstance(each, Rows) for each in operands[:2]):
            return None
        array, indices = operands[0], operands[1]
        assert isinstance(array, Rows)
        assert isinstance(indices, Rows)
        numbers = equation.params["dimension_numbers"]
        looked_up = numbers.start_index_map if name == "gather" else numbers.scatter_dims_to_operand_dims
        number = line.operands[1]
        columns = self.columns.get(number, [0] if number in self.numbers else [])
        if array.dim not in looked_up or looked_up.index(array.dim) not in columns:
            return None
        column = looked_up.index(array.dim)
        given = [role for role in operands if isinstance(role, Rows)]
        if any(role.block not in (0, indices.block) for role in given):
            return None
        if name == "gather":
            outer = [dim for dim in range(len(equation.outvars[0].aval.shape)) if dim not in numbers.offset_dims]
            return (Rows(outer[indices.dim], indices.block), column) if array.dim in numbers.collapsed_slice_dims else None
        outer = [dim for dim in range(len(equation.invars[2].aval.shape)) if dim not in numbers.update_window_dims]
        fits = len(given) == 3 and given[2].dim == outer[indices.dim] and array.dim in numbers.inserted_window_dims
        return (Rows(array.dim, indices.block), column) if fits else None
