"""Define a model of the zoo, or of other packages: a complete train step with its state and its batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jax import Array

PyTree = Any
Spec = tuple[str | None, ...]  # a mesh axis per dimension of a leaf
Layout = tuple[tuple[str, Spec], ...]
Split = tuple[tuple[str, ...], ...]  # the mesh axes that split each dimension of a leaf


@dataclass(frozen=True)
class Model:
    """A train step with its state and its batches, without any device or sharding.

    Attributes:
      name: such as "llama-gqa".
      front_end: "NNX", "Linen", "Equinox" or "JAX"; outside of the zoo also "Haiku" or "NumPyro".
      init: () → state: parameters, optimizer state and what else the step carries along. Its leaves are arrays only, and the
        same ones at each call. Jitted; `jax.eval_shape(init)` allocates nothing.
      batch: seed → batch, a pytree of NumPy arrays, always the same one for a seed.
      step: state, batch → state, loss []. Pure; the returned state has the structure, shapes and dtypes of the given one.
      megatron: the tensor-parallel layout that an expert writes by hand (Shoeybi et al. 2019, arXiv:1909.08053): pairs of a
        regular expression and a spec, which has an entry for each dimension of the leaf. The expression is searched in the leaf's
        path in the state, so it also finds the optimizer's moments of a parameter. The first one found counts. A leaf without one
        is replicated. Empty where the model is not a transformer.
      splits: layouts by hand that come with the model, by name: from the path of a leaf of the state and the sizes of the mesh
        axes to its layout, or None where it is replicated. The rows of a batch are then split over the first axis of several.
    """

    name: str
    front_end: str
    init: Callable[[], PyTree]
    batch: Callable[[int], PyTree]
    step: Callable[[PyTree, PyTree], tuple[PyTree, Array]]
    megatron: Layout = ()
    splits: Mapping[str, Callable[[str, dict[str, int]], Split | None]] = field(default_factory=dict)
