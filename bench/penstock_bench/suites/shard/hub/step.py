"""Make the train step of a backbone of Keras Hub: the function that Keras's trainer runs, of named arrays.

In: the name of a backbone. Out: a `Model` of the planner's suites, with the layout map of Keras Hub where the class has one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from penstock_bench.suites.shard.hub import batch, trained
from penstock_bench.suites.shard.zoo.model import Model, PyTree, Split

ROWS = 8
"""Rows of a batch: one for each of eight devices, so that the variables take much of the memory."""

# Mistral has no layout map of its own, and its layers have the names of Llama's.
_MAPS = {"MistralBackbone": "LlamaBackbone"}


def load(name: str) -> Model:
    """Return the train step of a backbone with AdamW, by the name of its class.

    Raises:
      ValueError: there is no configuration of this name.
    """
    import os

    os.environ["KERAS_BACKEND"] = "jax"
    from penstock.keras.model_step import ModelStep, abstract_batch, complete

    model = trained(name)
    complete(model, abstract_batch(sample(name, 0)))
    whole = ModelStep(model, "train")
    arguments = whole.arguments(abstract_batch(sample(name, 0)))
    values = [[variable.value for variable in group] for group in whole.variables().values()]
    run = whole.step()

    def init() -> PyTree:
        """Return the state by groups. Its values are the values of the model's variables."""
        return {
            group: type(named)(named.names, list(each))
            for group, named, each in zip(whole.groups, arguments.state, values, strict=True)
        }

    def step(state: PyTree, data: PyTree) -> tuple[PyTree, Any]:
        logs, new = run(*(state[group] for group in whole.groups), data)
        return dict(zip(whole.groups, new, strict=True)), logs["loss"]

    splits = {"Keras Hub's map": found} if (found := _layout_map(name)) else {}
    return Model(name, "Keras", init, lambda seed: sample(name, seed), step, splits=splits)


def sample(name: str, seed: int) -> tuple[Any, np.ndarray]:
    """Return a batch as `fit` takes it: the inputs of the backbone, and targets that the loss ignores."""
    return batch(name, ROWS, seed), np.zeros(ROWS, np.float32)


def _layout_map(name: str) -> Callable[[str, dict[str, int]], Split | None] | None:
    """Return the layout of a variable by its path under the layout map of Keras Hub; None if the class has no map."""
    import keras
    import keras_hub

    make = getattr(getattr(keras_hub.models, _MAPS.get(name, name)), "get_layout_map", None)
    if make is None:
        return None

    @functools.cache
    def layouts_on(shape: tuple[int, ...]) -> Any:
        return make(keras.distribution.DeviceMesh(shape, ("batch", "model")))

    def split(path: str, mesh: dict[str, int]) -> Split | None:
        axes = dict(zip(("batch", "model"), mesh, strict=True)) if len(mesh) > 1 else {"batch": None, "model": next(iter(mesh))}
        layouts = layouts_on((1, *mesh.values())[-2:])
        # "trainable/decoder_block_0/…" and "optimizer/momentum/decoder_block_0/…" end with the path of the variable.
        parts = path.split("/")
        found = next((each for start in range(len(parts)) if (each := layouts["/".join(parts[start:])]) is not None), None)
        if found is None:
            return None
        return tuple((axis,) if entry and (axis := axes[entry]) else () for entry in found.axes)

    return split
