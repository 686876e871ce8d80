"""Train steps as people write them, in every front end, for `ps.plan` to find layouts for."""

from __future__ import annotations

import dataclasses
import importlib

import jax

from penstock_bench.suites.shard.zoo.model import Model as Model

# The module, and the function in it. It is imported when it is asked for: most models need neither Flax nor Equinox.
_MAKERS = {
    "mlp": "mlp:mlp",
    "cnn-batchnorm": "cnn:cnn",
    "resnet": "resnet:resnet",
    "unet": "unet:unet",
    "vit": "vit:vit",
    "gpt2": "gpt2:gpt2",
    "llama-gqa": "llama:gqa",
    "llama-mqa": "llama:mqa",
    "llama-scan": "llama:scan",
    "moe-dense": "moe_dense:moe_dense",
    "moe-sorted": "moe_sorted:moe_sorted",
    "encoder-decoder": "encoder_decoder:encoder_decoder",
    "lstm": "lstm:lstm",
    "graph": "graph:graph",
    "dit": "dit:dit",
    "two-tower": "two_tower:two_tower",
    "lora": "lora:lora",
}

ZOO = tuple(_MAKERS)


def load(name: str, *, rows: int | None = None) -> Model:
    """Return a model of `ZOO`, by its name; nothing of its size is allocated.

    Args:
      rows: of the larger table of "two-tower", 10,000,000 unless said otherwise. No other model has one.
    """
    if name not in _MAKERS:
        raise ValueError(f"{name!r} is not in the zoo, which has {', '.join(ZOO)}.")
    module, function = _MAKERS[name].split(":")
    make = getattr(importlib.import_module(f"{__name__}.{module}"), function)
    if rows is not None and name != "two-tower":
        raise ValueError(f"rows={rows} is for two-tower: {name} has no table to make smaller. Leave it out.")
    model = make() if rows is None else make(rows)
    # Without jit, initialisers take several times as long.
    return dataclasses.replace(model, init=jax.jit(model.init))
