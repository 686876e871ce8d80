"""Train steps of the backbones of Keras Hub: each class that `keras_hub.models` exports, small and with random weights.

Names are class names. `build` makes a backbone, and `batch` draws its inputs. `trained` makes a compiled model of one number per
row. So `fit` runs a step through all weights that the outputs depend on. They need the package keras-hub.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from penstock_bench.suites.shard.hub.configuration import Configuration, resolve
from penstock_bench.suites.shard.hub.configurations import CONFIGURATIONS

_NOISE = 0.05  # standard deviation of what is added to constant weights

BACKBONES = tuple(sorted(CONFIGURATIONS))

DEEP = (
    *("BertBackbone", "GPT2Backbone", "GemmaBackbone", "MistralBackbone", "Llama3Backbone", "MixtralBackbone", "T5Backbone"),
    *("WhisperBackbone", "ViTBackbone", "ResNetBackbone", "ViTDetBackbone", "DebertaV3Backbone"),
)
"""The backbones that are also fitted under `AutoShardDistribution`."""

NOT_BUILT: Mapping[str, str] = MappingProxyType(
    {
        "Backbone": "It is the base class of the others.",
        "FeaturePyramidBackbone": "It is the base class of those that have a feature pyramid.",
        "ESM2Backbone": "It is another name of ESMBackbone.",
        "Qwen2Backbone": "It is another name of QwenBackbone.",
        "SmolLMBackbone": "It is another name of SmolLM3Backbone.",
    }
)


def build(name: str) -> Any:
    """Return the backbone with random weights, a `keras.Model`.

    Raises:
      ValueError: there is no configuration of this name.
    """
    import keras_hub

    configuration = _configuration(name)
    backbone = getattr(keras_hub.models, name)(**resolve(configuration.arguments))
    for method, arguments in configuration.calls.items():
        operator.attrgetter(method)(backbone)(*arguments)
    _vary_constants(backbone)
    return backbone


def batch(name: str, rows: int, seed: int) -> dict[str, np.ndarray]:
    """Return the inputs of the backbone by their names, each [rows, ...].

    >>> batch("BertBackbone", 2, seed=0)["token_ids"].shape
    (2, 32)
    """
    rng = np.random.default_rng(seed)
    return {key: each.draw(rows, rng) for key, each in _configuration(name).inputs.items()}


def trained(name: str) -> Any:
    """Return a compiled `keras.Model` from `batch(name, B, seed)` to [B]: the mean squares of the outputs, summed over outputs.

    Its loss ignores the targets, so that `trained(name).fit(batch(name, 8, 0), np.zeros(8))` trains the backbone.
    """
    import keras
    import keras_hub

    configuration = _configuration(name)
    backbone = build(name)
    forward = getattr(keras_hub.models, configuration.task)(backbone) if configuration.task else backbone
    inputs = {key: keras.Input(each.shape, dtype=each.dtype, name=key) for key, each in configuration.inputs.items()}
    takes_array = len(inputs) == 1 and not isinstance(forward.input, dict)
    outputs = forward(next(iter(inputs.values())) if takes_array else inputs)
    squares = [_mean_square(each) for each in keras.tree.flatten(outputs) if keras.backend.is_float_dtype(each.dtype)]
    model = keras.Model(inputs, sum(squares[1:], start=squares[0]), name=f"trained_{backbone.name}")
    model.compile(optimizer=keras.optimizers.AdamW(1e-3), loss=mean_output)
    return model


def mean_output(target: Any, output: Any) -> Any:
    """Return the output, as a loss that ignores the target."""
    return output


def _vary_constants(model: Any) -> None:
    """Add noise to the weights that are constant at first, such as the scales and offsets of norms, so that all have gradients.

    The mean square of a normalized output is constant if its scale is. Weights on both sides of a matrix of zeros have no
    gradient.
    """
    rng = np.random.default_rng(0)
    for weight in model.trainable_variables:
        values = np.asarray(weight.value)
        if values.size and (values == values.flat[0]).all():
            weight.assign(values + rng.normal(0, _NOISE, values.shape))


def _mean_square(output: Any) -> Any:
    """Return the mean of squares, [B], or one number of an output that has no batch dimension."""
    import keras
    from keras import ops

    squares = ops.square(ops.cast(output, "float32"))
    # Keras Hub declares another rank than they have for some outputs; Flatten reads it when it runs.
    return ops.mean(squares) if output.shape[0] is not None else ops.mean(keras.layers.Flatten()(squares), axis=-1)


def _configuration(name: str) -> Configuration:
    if name not in CONFIGURATIONS:
        raise ValueError(f"{name!r} is no backbone with a configuration; there are {', '.join(BACKBONES)}.")
    return CONFIGURATIONS[name]
