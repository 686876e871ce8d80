"""Read the layouts and meshes that a program itself prescribes, in `with_sharding_constraint` and `shard_map`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from penstock.shard.trace.rules import Rule


def find_meshes(jaxpr: Any) -> list[Any]:
    """Return the meshes, concrete or abstract, that a program itself names in `with_sharding_constraint` and `shard_map`.

    Args:
      jaxpr: an open jaxpr; nested ones are searched too.
    """
    meshes: list[Any] = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "shard_map":
            meshes.append(equation.params["mesh"])
            continue  # The body of a `shard_map` works on local shards and constrains no global array.
        sharding = equation.params.get("sharding")
        if equation.primitive.name == "sharding_constraint" and isinstance(sharding, jax.sharding.NamedSharding):
            meshes.append(sharding.mesh)
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                if hasattr(inner, "jaxpr") or hasattr(inner, "eqns"):
                    meshes += find_meshes(getattr(inner, "jaxpr", inner))
    return meshes


def prescribed_layouts(equation: Any) -> tuple[tuple[tuple[str, ...] | None, ...], ...] | None:
    """Return the layouts that a program prescribes for one equation.

    Args:
      equation: an equation of a jaxpr.

    Returns:
      A layout for each operand, then for each result, or None if the equation prescribes none. A layout has for each dimension
      a tuple of mesh axes, or None where it is unconstrained.
    """
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


def independent_dims(operands: Sequence[Any], results: Sequence[Any]) -> Rule:
    """Return the rule of a `shard_map`: each dimension has its own factor, as each layout is prescribed separately.

    Args:
      operands, results: anything with a `shape`.
    """
    sizes: list[int] = []
    dims: list[tuple[int, ...]] = []
    for aval in (*operands, *results):
        dims.append(tuple(range(len(sizes), len(sizes) + len(aval.shape))))
        sizes.extend(aval.shape)
    return Rule(tuple(sizes), tuple(dims[: len(operands)]), tuple(dims[len(operands) :]))
