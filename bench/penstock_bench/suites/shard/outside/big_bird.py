"""BigBird (Zaheer et al. 2020, arXiv:2007.14062) of transformers: attention to some blocks, part of them chosen at random.

The published sizes are too large for a CPU: this is one of BERT's small sizes, with a vocabulary of its own.
"""

from __future__ import annotations

from functools import partial

import jax
from jax import Array
from transformers import BigBirdConfig, FlaxBigBirdForMaskedLM

from penstock_bench.suites.shard.outside.batches import masked_text
from penstock_bench.suites.shard.outside.bert import LAYOUT
from penstock_bench.suites.shard.outside.training_transformers import labelled_cross_entropy, logits_of, transformers_model
from penstock_bench.suites.shard.zoo.model import Layout, Model, PyTree

_BATCH, _LENGTH, _MASK = 8, 512, 67
_CONFIG = BigBirdConfig(
    vocab_size=8192,
    hidden_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=1024,
    max_position_embeddings=_LENGTH,
    block_size=32,
    num_random_blocks=2,
)

_LAYOUT: Layout = (*LAYOUT, ("word_embeddings/embedding$", ("model", None)))


def big_bird() -> Model:
    # The blocks of its attention need more tokens than the one of the default shape.
    model = FlaxBigBirdForMaskedLM(_CONFIG, input_shape=(1, _LENGTH), _do_init=False)

    def loss(params: PyTree, batch: PyTree, key: Array) -> Array:
        dropout, indices = jax.random.split(key)
        return labelled_cross_entropy(logits_of(model, params, batch, dropout, indices_rng=indices), batch["labels"])

    batch = partial(masked_text, batch=_BATCH, length=_LENGTH, vocabulary=_CONFIG.vocab_size, mask=_MASK)
    return transformers_model("big-bird", model, loss, batch, _LAYOUT)
