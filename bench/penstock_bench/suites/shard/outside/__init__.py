"""Train steps of packages that others wrote, as their users would write them: cases that the planner was not developed on.

Models, losses and optimizers are the packages' own, and sizes are from small published configurations where there is one. The
steps need the extra `outside` of penstock-bench, and each needs only a few of its packages (`needs`).
"""

from __future__ import annotations

import dataclasses
import importlib

import jax

from penstock_bench.suites.shard.zoo.model import Model as Model

_TRANSFORMERS = ("transformers", "flax", "optax")

# The module, the function in it, and the packages to import for it.
_MAKERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "bert": ("bert:bert", _TRANSFORMERS),
    "big-bird": ("big_bird:big_bird", _TRANSFORMERS),
    "gpt2-muon": ("gpt2:muon", _TRANSFORMERS),
    "gpt2-adafactor": ("gpt2:adafactor", _TRANSFORMERS),
    "gpt2-schedule-free": ("gpt2:schedule_free", _TRANSFORMERS),
    "llama": ("llama:llama", _TRANSFORMERS),
    "mistral": ("mistral:mistral", _TRANSFORMERS),
    "t5": ("t5:t5", _TRANSFORMERS),
    "bart": ("bart:bart", _TRANSFORMERS),
    "whisper": ("whisper:whisper", _TRANSFORMERS),
    "wav2vec2": ("wav2vec2:wav2vec2", _TRANSFORMERS),
    "clip": ("clip:clip", _TRANSFORMERS),
    "vit-tiny": ("vit:vit", _TRANSFORMERS),
    "regnet": ("regnet:regnet", _TRANSFORMERS),
    "brax-ppo": ("brax_ppo:ppo", ("brax", "optax")),
    "jraph-graph-net": ("jraph_graph_net:graph_net", ("jraph", "flax", "optax")),
    "haiku-lstm": ("haiku_lstm:lstm", ("haiku", "optax")),
    "haiku-resnet": ("haiku_resnet:resnet", ("haiku", "optax")),
    "e3nn-force-field": ("e3nn_force_field:force_field", ("e3nn_jax", "flax", "optax")),
    "diffrax-neural-ode": ("diffrax_neural_ode:neural_ode", ("diffrax", "equinox", "optax")),
    "numpyro-vae": ("numpyro_vae:vae", ("numpyro", "flax", "optax")),
    "equinox-bert": ("equinox_bert:bert", ("equinox", "optax")),
    "equinox-gru": ("equinox_gru:gru", ("equinox", "optax")),
}

OUTSIDE = tuple(_MAKERS)


def load(name: str) -> Model:
    """Return a model of `OUTSIDE`, by its name; nothing of its size is allocated.

    Raises:
      ValueError: there is no model of this name.
      ImportError: a package of `needs(name)` is not installed.
    """
    module, function = _maker(name)[0].split(":")
    model: Model = getattr(importlib.import_module(f"{__name__}.{module}"), function)()
    # Without jit, initialisers take several times as long.
    return dataclasses.replace(model, init=jax.jit(model.init))


def needs(name: str) -> tuple[str, ...]:
    """Return the names of the packages that the step imports, besides JAX and NumPy.

    >>> needs("haiku-lstm")
    ('haiku', 'optax')
    """
    return _maker(name)[1]


def _maker(name: str) -> tuple[str, tuple[str, ...]]:
    if name not in _MAKERS:
        raise ValueError(f"{name!r} is no step of other packages; there are {', '.join(OUTSIDE)}.")
    return _MAKERS[name]
