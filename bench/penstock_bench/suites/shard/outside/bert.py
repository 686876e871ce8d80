"""BERT (Devlin et al. 2019, arXiv:1810.04805) of transformers, which finds masked tokens again.

The size is from google/bert_uncased_L-4_H-256_A-4 (Turc et al. 2019, arXiv:1908.08962), whose vocabulary does not divide.
"""

from __future__ import annotations

from functools import partial

from transformers import BertConfig, FlaxBertForMaskedLM

from penstock_bench.suites.shard.outside.batches import masked_text
from penstock_bench.suites.shard.outside.training_transformers import token_loss, transformers_model
from penstock_bench.suites.shard.zoo.model import Layout, Model

_BATCH, _LENGTH, _MASK = 16, 128, 103
_CONFIG = BertConfig(
    vocab_size=30522,
    hidden_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    intermediate_size=1024,
    max_position_embeddings=512,
)

LAYOUT: Layout = (
    ("self/(query|key|value)/kernel$", (None, "model")),
    ("self/(query|key|value)/bias$", ("model",)),
    ("attention/output/dense/kernel$", ("model", None)),
    ("intermediate/dense/kernel$", (None, "model")),
    ("intermediate/dense/bias$", ("model",)),
    (r"layer/\d+/output/dense/kernel$", ("model", None)),
)


def bert() -> Model:
    model = FlaxBertForMaskedLM(_CONFIG, _do_init=False)
    batch = partial(masked_text, batch=_BATCH, length=_LENGTH, vocabulary=_CONFIG.vocab_size, mask=_MASK)
    return transformers_model("bert", model, token_loss(model), batch, LAYOUT)
