"""Split Equinox modules in two: the arrays, which are the parameters, and all else, which the step closes over."""

from __future__ import annotations

from collections.abc import Callable

import equinox as eqx
import jax
from jax import Array

from penstock_bench.suites.shard.zoo.model import PyTree
from penstock_bench.suites.shard.zoo.training import SEED

Make = Callable[[Array], eqx.Module]  # of a key


def params_of(make: Make) -> PyTree:
    return eqx.filter(make(jax.random.key(SEED)), eqx.is_array)


def static_of(make: Make) -> PyTree:
    """Return the part that `eqx.combine` needs beside parameters to make a module, without having parameters."""
    abstract = eqx.filter_eval_shape(make, jax.random.key(SEED))
    return eqx.filter(abstract, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct), inverse=True)
