"""T5 (Raffel et al. 2020, arXiv:1910.10683) of transformers: relative positions, an encoder and a decoder.

The size is from google/t5-efficient-tiny (Tay et al. 2022, arXiv:2109.10686).
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import jax.numpy as jnp
from jax import Array
from transformers import FlaxT5ForConditionalGeneration, T5Config
from transformers.models.t5 import modeling_flax_t5

from penstock_bench.suites.shard.outside.batches import text_pairs
from penstock_bench.suites.shard.outside.training_transformers import token_loss, transformers_model
from penstock_bench.suites.shard.zoo.model import Layout, Model

_BATCH, _SOURCE, _TARGET = 16, 128, 64
_CONFIG = T5Config(vocab_size=32128, d_model=256, d_kv=64, d_ff=1024, num_layers=4, num_heads=4, decoder_start_token_id=0)

_LAYOUT: Layout = (
    ("Attention/(q|k|v)/kernel$", (None, "model")),
    ("Attention/o/kernel$", ("model", None)),
    ("wi/kernel$", (None, "model")),
    ("wo/kernel$", ("model", None)),
    ("shared/embedding$", ("model", None)),
)


def _clip(x: Array, a_max: int) -> Array:
    """Return the smaller of each element and a number."""
    return jnp.minimum(x, a_max)


def t5() -> Model:
    # Its positions call jnp.clip by the name of an argument that newer releases of JAX do not have.
    modeling_flax_t5.jnp = SimpleNamespace(**{**vars(jnp), "clip": _clip})
    model = FlaxT5ForConditionalGeneration(_CONFIG, _do_init=False)
    batch = partial(text_pairs, batch=_BATCH, source=_SOURCE, target=_TARGET, vocabulary=_CONFIG.vocab_size, start=0)
    return transformers_model("t5", model, token_loss(model), batch, _LAYOUT)
