"""Find the programs that are nested in an equation of a jaxpr.

An equation *calls* a jaxpr if it gives its operands to the jaxpr and returns the results. Calls are recognised by the shapes and
dtypes of both, and not by the names of primitives, which differ between releases of JAX.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.shard.trace.rules import RULES

CHECKPOINTS = frozenset(["checkpoint", "remat2"])
"""Primitives of `jax.checkpoint`."""
CUSTOM_DERIVATIVES = ("custom_jvp_call", "custom_vjp_call")
"""Primitives that call a function with a derivative of its own."""

LOOP_BODIES = {"scan": {"jaxpr": "body"}, "while": {"cond_jaxpr": "cond", "body_jaxpr": "body"}}
"""Loops → each parameter that holds a jaxpr → its part of a `Path`."""

_NOT_CALLS = frozenset([*LOOP_BODIES, "cond", "shard_map", "custom_partitioning", "pallas_call"])
"""Primitives whose jaxprs have another meaning although the shapes may agree: loops, branches and programs of one device."""

PLAIN_CALLS = frozenset(["jit", "call", "closed_call", "eval_jaxpr", "custom_vmap_call"])
"""Primitives that do nothing but call their jaxpr, so that a program can have its equations instead."""


@dataclass(frozen=True)
class Call:
    """The jaxpr that an equation calls.

    Attributes:
      jaxpr: the jaxpr, open or closed.
      operands: the operands of the equation that it reads, by their indices.
      key: the parameter of the equation that holds it.
      member: its name in a parameter that is a named tuple of jaxprs; "" if the parameter is the jaxpr.
    """

    jaxpr: Any
    operands: Sequence[int]
    key: str
    member: str = ""

    @property
    def consts(self) -> Sequence[Any]:
        """Return the values of the constants of the jaxpr; an open one has none."""
        return getattr(self.jaxpr, "consts", ())

    def with_jaxpr(self, params: Mapping[str, Any], jaxpr: Any) -> dict[str, Any]:
        """Return the parameters of the equation with another jaxpr in place of the one that it calls."""
        return {**params, self.key: params[self.key]._replace(**{self.member: jaxpr}) if self.member else jaxpr}


def find_call(equation: Any) -> Call | None:
    """Return the jaxpr that an equation calls, or None if it calls none.

    >>> import jax
    >>> jaxpr = jax.make_jaxpr(jax.checkpoint(jax.numpy.sin))(1.0)
    >>> find_call(jaxpr.eqns[0]).key
    'jaxpr'
    """
    name, params = equation.primitive.name, equation.params
    if name == "custom_linear_solve":
        # Its operands are the constants of four jaxprs, then the right-hand sides. Only `solve` is compiled.
        lengths = params["const_lengths"]
        first = lengths.matvec + lengths.vecmat
        right_hand_sides = range(sum(lengths), len(equation.invars))
        return Call(params["jaxprs"].solve, (*range(first, first + lengths.solve), *right_hand_sides), "jaxprs", "solve")
    if name in RULES or name in _NOT_CALLS:
        return None
    held = [(key, value) for key, value in params.items() if _is_jaxpr(value)]
    if len(held) != 1:
        return None
    ((key, value),) = held
    body = open_jaxpr(value)
    agree = _types(equation.invars) == _types(body.invars) and _types(equation.outvars) == _types(body.outvars)
    return Call(value, range(len(equation.invars)), key) if agree else None


def open_jaxpr(jaxpr: Any) -> Any:
    """Return the open jaxpr of a jaxpr that may be closed."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def held_jaxprs(equation: Any) -> Iterator[Any]:
    """Yield the jaxprs among the parameters of an equation, open or closed."""
    for value in equation.params.values():
        yield from filter(_is_jaxpr, value if isinstance(value, (tuple, list)) else (value,))


def nested_jaxprs(equation: Any) -> Iterator[Any]:
    """Yield the open jaxprs among the parameters of an equation."""
    return map(open_jaxpr, held_jaxprs(equation))


def _is_jaxpr(value: Any) -> bool:
    return hasattr(value, "jaxpr") or hasattr(value, "eqns")


def _types(atoms: Sequence[Any]) -> list[tuple[Any, Any]]:
    return [(getattr(atom.aval, "shape", None), getattr(atom.aval, "dtype", None)) for atom in atoms]
