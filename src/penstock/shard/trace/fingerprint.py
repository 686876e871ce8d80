"""Identify a step by a hash of its program and its arguments, and describe in words how two steps differ.

A plan stores the fingerprint of its step, so that it is not used for another step. Numbers written in the program, such as a
learning rate, change no layout. They are not in the fingerprint, and have a hash of their own (`hash_numbers`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, Protocol

import jax
import numpy as np
from jax.extend import core

from penstock.shard.trace.calls import nested_jaxprs
from penstock.shard.wording import format_type


class LeafLike(Protocol):
    """A leaf of a step or of a plan: an array with its path."""

    @property
    def path(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...


def fingerprint(inputs: Sequence[LeafLike], jaxpr: Any) -> str:
    """Return 16 hexadecimal digits that identify the paths, shapes and dtypes of the arguments, and the program.

    Shapes, axes and lengths of loops are parts of the program; the values of numbers written in it are not. The digits are the
    beginning of a SHA-256 hash, and the same in every process.
    """
    leaves = [f"{leaf.path}{leaf.shape}{leaf.dtype}" for leaf in inputs]
    hasher = hashlib.sha256("\n".join(leaves).encode())
    _hash_jaxpr(hasher, jaxpr)
    return hasher.hexdigest()[:16]


def hash_numbers(jaxpr: Any) -> str:
    """Return 16 hexadecimal digits that identify the numbers written in a program, in order, as in `fingerprint`."""
    hasher = hashlib.sha256()
    _hash_numbers(hasher, jaxpr)
    return hasher.hexdigest()[:16]


def describe_difference(
    planned_inputs: Sequence[LeafLike],
    planned_outputs: Sequence[LeafLike],
    inputs: Sequence[LeafLike],
    outputs: Sequence[LeafLike],
) -> str:
    """Describe up to three differences between the step of a plan and another step."""
    differences = [*_leaf_differences(planned_inputs, inputs, "argument"), *_leaf_differences(planned_outputs, outputs, "result")]
    return _first_three(differences) or (
        "arguments and results are the same, and the program differs: in an operation, an axis or the length of a loop; plan "
        "it again"
    )


def describe_arguments(planned: Sequence[LeafLike], inputs: Sequence[LeafLike]) -> str:
    """Describe up to three differences between the arguments of a plan and of a call; "" if there are none."""
    return _first_three(_leaf_differences(planned, inputs, "argument"))


def _first_three(differences: Sequence[str]) -> str:
    more = f", and {len(differences) - 3} differences more" if len(differences) > 3 else ""
    return "; ".join(differences[:3]) + more


def _leaf_differences(planned: Sequence[LeafLike], traced: Sequence[LeafLike], what: str) -> list[str]:
    in_step, in_plan = ({leaf.path: leaf for leaf in leaves} for leaves in (traced, planned))
    differences = []
    for path, leaf in in_plan.items():
        if path not in in_step:
            differences.append(f"the plan has the {what} {path!r}, {format_type(leaf)}, which the step has not")
        elif format_type(leaf) != format_type(in_step[path]):
            differences.append(
                f"the {what} {path!r} is {format_type(leaf)} in the plan, and {format_type(in_step[path])} in the step"
            )
    differences += [f"the step has the {what} {path!r}, which the plan has not" for path in in_step if path not in in_plan]
    if not differences and list(in_step) != list(in_plan):
        one, other = next(pair for pair in zip(in_plan, in_step, strict=True) if pair[0] != pair[1])
        differences.append(f"the {what}s are in another order: the plan has {one!r} where the step has {other!r}")
    return differences


_IGNORED_PARAMS = frozenset(["name", "ctx_mesh", "debug_info", "precision", "accuracy"])
"""Parameters of equations that do not change a plan: names, the precision of products, and the accuracy of functions such as exp.
The precision is often a setting of the process (jax_default_matmul_precision) and changes no layout."""

_NUMBERS = {"integer_pow": ("y",), "reduce_precision": ("exponent_bits", "mantissa_bits")}
"""Elementwise primitives → their parameters that are numbers as literals are: they change neither shapes nor layouts."""


_IGNORED_WITHOUT_LAYOUT = _IGNORED_PARAMS | {"sharding", "out_sharding"}
"""Parameters that are also ignored in equations that prescribe no layout: there, the sharding tells only whether a mesh was set
around the step (`jax.set_mesh`)."""

_PRESCRIBES_LAYOUT = frozenset(["sharding_constraint", "reshard", "device_put"])


def _stable_text(value: Any) -> str:
    """Return a parameter of an equation as text that is the same in every process, without the values of floating-point numbers.

    Functions and similar objects give an empty text, because theirs would differ between processes. Two steps that differ in
    nothing else therefore have the same fingerprint.
    """
    if isinstance(value, (float, complex)):
        return type(value).__name__
    if value is None or isinstance(value, (bool, int, str, Enum)):
        return str(value)
    if isinstance(value, (np.dtype, np.generic, jax.sharding.PartitionSpec, type)):
        return str(value)
    if isinstance(value, (tuple, list)):
        return f"({','.join(map(_stable_text, value))})"
    if isinstance(value, (set, frozenset)):
        return f"({','.join(sorted(map(_stable_text, value)))})"
    if isinstance(value, Mapping):
        return f"({','.join(f'{key}={_stable_text(value[key])}' for key in sorted(value, key=str))})"
    if isinstance(value, jax.sharding.NamedSharding):
        return f"{value.spec}{dict(value.mesh.shape)}"
    if is_dataclass(value) and not hasattr(value, "jaxpr"):
        return _stable_text({field.name: getattr(value, field.name) for field in fields(value)})
    return ""


def _hash_jaxpr(hasher: Any, jaxpr: Any) -> None:
    """Update a hash with the operations of a program, their parameters, and the values that they read and write."""
    number: dict[Any, int] = {}
    for variable in (*jaxpr.constvars, *jaxpr.invars):
        number[variable] = len(number)
    for equation in jaxpr.eqns:
        operands = [_operand_text(atom, number) for atom in equation.invars]
        results = [f"{variable.aval.str_short()}" for variable in equation.outvars]
        ignored = _IGNORED_PARAMS if equation.primitive.name in _PRESCRIBES_LAYOUT else _IGNORED_WITHOUT_LAYOUT
        ignored |= set(_NUMBERS.get(equation.primitive.name, ()))
        params = _stable_text({key: value for key, value in equation.params.items() if key not in ignored})
        hasher.update(f"{equation.primitive.name} {' '.join(operands)} {' '.join(results)} {params}\n".encode())
        for variable in equation.outvars:
            number[variable] = len(number)
        for inner in nested_jaxprs(equation):
            _hash_jaxpr(hasher, inner)
    hasher.update(" ".join(_operand_text(atom, number) for atom in jaxpr.outvars).encode())


def _operand_text(atom: Any, number: Mapping[Any, int]) -> str:
    """Return the number of a variable, or the type of a literal, without its value."""
    return f"a {atom.aval.str_short()}" if isinstance(atom, core.Literal) else str(number[atom])


def _hash_numbers(hasher: Any, jaxpr: Any) -> None:
    """Update a hash with the literals of a program, and with the numbers among its parameters."""
    for equation in jaxpr.eqns:
        literals = [str(atom) for atom in equation.invars if isinstance(atom, core.Literal)]
        named = _NUMBERS.get(equation.primitive.name, ())
        numbers = [
            f"{key}={value}"
            for key, value in sorted(equation.params.items())
            if key in named or isinstance(value, (float, complex))
        ]
        hasher.update(f"{' '.join((*literals, *numbers))}\n".encode())
        for inner in nested_jaxprs(equation):
            _hash_numbers(hasher, inner)
    hasher.update(" ".join(str(atom) for atom in jaxpr.outvars if isinstance(atom, core.Literal)).encode())
