"""Write the layouts of an expert by hand: return named baselines of a model, its state and its batch.

A baseline has layouts of the state and the batch, and inside of the step at most of the weights. The batch is split along its
first dimension. The optimizer's moments have the layouts of their parameters. The layouts are data parallel, FSDP (Zhao et al.
2023), Megatron (Shoeybi et al. 2019), and the largest dimension of each leaf.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from penstock_bench.suites.shard.flat_step import FlatStep, flat_step
from penstock_bench.suites.shard.zoo import Model

Axes = tuple[str, ...]
Shape = tuple[int, ...]
Spec = tuple[Axes, ...]
"""The mesh axes that split each dimension."""

# Leaves of a state that the loss does not depend on, wherever a front end puts them.
_OPTIMIZER = re.compile(r"(^|/)(optimizer|opt_state|average)(/|$)")


@dataclass(frozen=True)
class Baseline:
    """A layout by hand.

    Attributes:
      state, batch: the stored layout of each leaf, in order.
      used: for each leaf of the state, the layout to which it is resharded at the start of the step, as by FSDP's all-gather.
        None leaves the leaf to the compiler.
    """

    name: str
    state: tuple[Spec, ...]
    batch: tuple[Spec, ...]
    used: tuple[Spec | None, ...] | None = None


def baselines(model: Model, state: Any, batch: Any, mesh: dict[str, int]) -> list[Baseline]:
    """Return the layouts for a model on a mesh.

    Args:
      state, batch: abstract, or arrays.
      mesh: sizes of its axes; the last is the one for tensors, where a layout has one.
    """
    every, last, others = tuple(mesh), tuple(mesh)[-1:], tuple(mesh)[:-1]
    shapes = [leaf.shape for leaf in jax.tree.leaves(state)]
    rows = [leaf.shape for leaf in jax.tree.leaves(batch)]
    weights = [_OPTIMIZER.search(path) is None for path in leaf_paths(state)]
    replicated = [((),) * len(shape) for shape in shapes]

    def split(axes: Axes) -> tuple[Spec, ...]:
        return tuple(along_first(shape, axes, mesh) for shape in rows)

    def gathered(specs: Iterable[Spec]) -> tuple[Spec | None, ...]:
        return tuple(spec if weight else None for spec, weight in zip(specs, weights, strict=True))

    sharded = tuple(along_largest(shape, spec, every, mesh) for shape, spec in zip(shapes, replicated, strict=True))
    largest = tuple(along_largest(shape, spec, last, mesh) for shape, spec in zip(shapes, replicated, strict=True))
    made = [
        Baseline("data parallel", tuple(replicated), split(every)),
        Baseline("FSDP", sharded, split(every)),
        Baseline("FSDP, gathered", sharded, split(every), gathered(replicated)),
        Baseline("largest axis", largest, split(others)),
    ]
    if model.megatron:
        tensor = by_pattern(model, state, last[0])
        made.append(Baseline("Megatron", tuple(tensor), split(others)))
        if others:
            both = tuple(along_largest(shape, spec, others, mesh) for shape, spec in zip(shapes, tensor, strict=True))
            made.append(Baseline("Megatron + FSDP", both, split(others)))
            made.append(Baseline("Megatron + FSDP, gathered", both, split(others), gathered(tensor)))
    for name, of_leaf in model.splits.items():
        given = (of_leaf(path, mesh) for path in leaf_paths(state))
        own = tuple(spec if spec is not None else ((),) * len(shape) for spec, shape in zip(given, shapes, strict=True))
        made.append(Baseline(name, own, split(others)))
    return made


def leaf_paths(tree: Any) -> list[str]:
    """Return the path of each leaf, as the patterns of the zoo name leaves."""
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]


def along_first(shape: Shape, axes: Axes, mesh: dict[str, int]) -> Spec:
    """Split the first dimension over all of the axes, if they divide it."""
    fits = bool(shape) and shape[0] % math.prod(mesh[axis] for axis in axes) == 0
    return tuple(axes if fits and dim == 0 else () for dim in range(len(shape)))


def along_largest(shape: Shape, spec: Spec, axes: Axes, mesh: dict[str, int]) -> Spec:
    """Split the largest dimension that is not split yet and that all of the axes divide; none if there is none."""
    count = math.prod(mesh[axis] for axis in axes)
    free = [dim for dim, size in enumerate(shape) if not spec[dim] and size % count == 0]
    best = max(free, key=lambda dim: (shape[dim], -dim), default=None)
    return tuple(axes if dim == best else entry for dim, entry in enumerate(spec))


def by_pattern(model: Model, state: Any, axis: str) -> list[Spec]:
    """Return the Megatron layout of the zoo, on this mesh axis."""
    return [
        next(
            (tuple((axis,) if entry else () for entry in spec) for pattern, spec in model.megatron if re.search(pattern, path)),
            ((),) * leaf.ndim,
        )
        for path, leaf in zip(leaf_paths(state), jax.tree.leaves(state), strict=True)
    ]


def laid_out(model: Model, state: Any, batch: Any, layout: Baseline, mesh: Any) -> FlatStep:
    """Return the step in a layout.

    Args:
      mesh: a `Mesh` or an `AbstractMesh`.
    """

    def step(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        if layout.used is not None:
            leaves, tree = jax.tree.flatten(state)
            brought = [_constrain(leaf, spec, mesh) for leaf, spec in zip(leaves, layout.used, strict=True)]
            state = jax.tree.unflatten(tree, brought)
        return model.step(state, batch)

    return flat_step(step, state, batch, _shardings(state, layout.state, mesh), _shardings(batch, layout.batch, mesh), mesh)


def _constrain(leaf: jax.Array, spec: Spec | None, mesh: Any) -> jax.Array:
    """Put a sharding constraint on a leaf, where there is a layout for it."""
    return leaf if spec is None else jax.lax.with_sharding_constraint(leaf, _sharding(spec, mesh))


def _shardings(tree: Any, specs: Sequence[Spec], mesh: Any) -> Any:
    return jax.tree.unflatten(jax.tree.structure(tree), [_sharding(spec, mesh) for spec in specs])


def _sharding(spec: Spec, mesh: Any) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*(entry or None for entry in spec)))
