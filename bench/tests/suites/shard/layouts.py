"""Check the layouts that are written by hand against the states that they are for."""

from __future__ import annotations

import re
from typing import Any

import jax

from penstock_bench.suites.shard.zoo import Model

MODEL_AXIS = 8  # the most devices that a hand-written layout has to divide over


def paths(tree: Any) -> dict[str, jax.ShapeDtypeStruct]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def assert_layout_fits(model: Model, state: Any) -> None:
    """Assert that each pattern finds leaves of its own, with as many dimensions as its spec, and that it splits one evenly."""
    leaves, taken = paths(state), set()
    for pattern, spec in model.megatron:
        matched = {path for path in leaves if re.search(pattern, path)}
        assert matched - taken, f"{pattern} finds nothing that is not found before"
        for path in matched - taken:
            shape = leaves[path].shape
            assert len(spec) == len(shape), f"{pattern}: {path} is {shape}"
            split = [size for size, axis in zip(shape, spec, strict=True) if axis == "model"]
            assert len(split) == 1, f"{pattern}: {spec}"
            assert split[0] % MODEL_AXIS == 0, f"{pattern}: {path} is {shape}"
        taken |= matched
