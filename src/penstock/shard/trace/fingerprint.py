"""Tell whether a step is the one that a plan was made for: a fingerprint of its program, and what differs in words."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, Protocol

import jax
import numpy as np
from jax.extend import core


class Described(Protocol):
    """A leaf, of a step or of a plan."""

    @property
    def path(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...


def fingerprint(inputs: Sequence[Described], jaxpr: Any) -> str:
    """Return 16 hexadecimal digits that identify the paths, shapes and dtypes of the arguments, and the program.

    Args:
      inputs: leaves of all arguments, in order.
      jaxpr: the open jaxpr of the step.
    """
    described = [f"{leaf.path}{leaf.shape}{leaf.dtype}" for leaf in inputs]
    hashed = hashlib.sha256("\n".join(described).encode())
    _feed(hashed, jaxpr)
    return hashed.hexdigest()[:16]


def describe_difference(
    planned_inputs: Sequence[Described],
    planned_outputs: Sequence[Described],
    inputs: Sequence[Described],
    outputs: Sequence[Described],
) -> str:
    """Describe what differs between the step of a plan and the step at hand.

    Args:
      planned_inputs, planned_outputs: leaves of the arguments and results of the plan.
      inputs, outputs: leaves of those of the step.
    """
    said = [*_leaves_differ(planned_inputs, inputs, "argument"), *_leaves_differ(planned_outputs, outputs, "result")]
    if not said:
        return (
            "arguments and results are the same, and the program differs: in an operation, or in a number written in it, such as "
            "a learning rate; plan it again"
        )
    more = f", and {len(said) - 3} differences more" if len(said) > 3 else ""
    return "; ".join(said[:3]) + more


def _leaves_differ(planned: Sequence[Described], traced: Sequence[Described], what: str) -> list[str]:
    here, there = ({leaf.path: leaf for leaf in leaves} for leaves in (traced, planned))
    said = []
    for path, leaf in there.items():
        if path not in here:
            said.append(f"the plan has the {what} {path!r}, {_type(leaf)}, which the step has not")
        elif _type(leaf) != _type(here[path]):
            said.append(f"the {what} {path!r} is {_type(leaf)} in the plan, and {_type(here[path])} in the step")
    said += [f"the step has the {what} {path!r}, which the plan has not" for path in here if path not in there]
    if not said and list(here) != list(there):
        one, other = next(pair for pair in zip(there, here, strict=True) if pair[0] != pair[1])
        said.append(f"the {what}s are in another order: the plan has {one!r} where the step has {other!r}")
    return said


def _type(leaf: Described) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"


_SAYS_NOTHING = frozenset(["name", "ctx_mesh", "debug_info", "precision"])
"""Parameters of equations that differ where what is computed does not: names, and how exactly it is computed, which is often a
setting of the process (jax_default_matmul_precision) and changes no layout."""


_SAYS_NO_MORE = _SAYS_NOTHING | {"sharding", "out_sharding"}
"""Of equations that ask for no layout these say only whether a mesh was set around the step (`jax.set_mesh`)."""

_ASKS_FOR_A_LAYOUT = frozenset(["sharding_constraint", "reshard", "device_put"])


def _described(value: Any) -> str:
    """A parameter of an equation as text that is the same in every process; of functions and the like, nothing.

    So two steps that differ in nothing else have one fingerprint. The text of a function would differ between processes.
    """
    if value is None or isinstance(value, (bool, int, float, complex, str, Enum)):
        return str(value)
    if isinstance(value, (np.dtype, np.generic, jax.sharding.PartitionSpec, type)):
        return str(value)
    if isinstance(value, (tuple, list)):
        return f"({','.join(map(_described, value))})"
    if isinstance(value, (set, frozenset)):
        return f"({','.join(sorted(map(_described, value)))})"
    if isinstance(value, Mapping):
        return f"({','.join(f'{key}={_described(value[key])}' for key in sorted(value, key=str))})"
    if isinstance(value, jax.sharding.NamedSharding):
        return f"{value.spec}{dict(value.mesh.shape)}"
    if is_dataclass(value) and not hasattr(value, "jaxpr"):
        return _described({each.name: getattr(value, each.name) for each in fields(value)})
    return ""


def _feed(hashed: Any, jaxpr: Any) -> None:
    """The operations of a program, and what they read, to a hash."""
    number: dict[Any, int] = {}
    for variable in (*jaxpr.constvars, *jaxpr.invars):
        number[variable] = len(number)
    for equation in jaxpr.eqns:
        read = [str(each) if isinstance(each, core.Literal) else str(number[each]) for each in equation.invars]
        made = [f"{each.aval.str_short()}" for each in equation.outvars]
        asked = equation.primitive.name in _ASKS_FOR_A_LAYOUT
        said = _described(
            {key: value for key, value in equation.params.items() if key not in (_SAYS_NOTHING if asked else _SAYS_NO_MORE)}
        )
        hashed.update(f"{equation.primitive.name} {' '.join(read)} {' '.join(made)} {said}\n".encode())
        for variable in equation.outvars:
            number[variable] = len(number)
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                if hasattr(inner, "jaxpr") or hasattr(inner, "eqns"):
                    _feed(hashed, getattr(inner, "jaxpr", inner))
    hashed.update(" ".join(str(each) if isinstance(each, core.Literal) else str(number[each]) for each in jaxpr.outvars).encode())
