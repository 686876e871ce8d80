"""GPT-2 (Radford et al. 2019) of transformers, with optimizers of optax that keep other states than Adam's.

The size is nanoGPT's small one (6 layers, 6 heads, width 384), with a vocabulary of 8,192 and half of the tokens.
"""

from __future__ import annotations

from functools import partial

import jax
import optax
from optax import contrib
from transformers import FlaxGPT2LMHeadModel, GPT2Config

from penstock_bench.suites.shard.outside.batches import causal_text
from penstock_bench.suites.shard.outside.training_transformers import next_token_loss, transformers_model
from penstock_bench.suites.shard.zoo.model import Layout, Model, PyTree

_BATCH, _LENGTH = 16, 128
_CONFIG = GPT2Config(vocab_size=8192, n_positions=_LENGTH, n_embd=384, n_layer=6, n_head=6, bos_token_id=0, eos_token_id=0)

# Kernels are [out, in] (`FlaxConv1D`). Six heads cannot be shared by four or eight devices: attention is left replicated.
_LAYOUT: Layout = (
    ("c_fc/kernel$", ("model", None)),
    ("c_fc/bias$", ("model",)),
    ("mlp/c_proj/kernel$", (None, "model")),
    ("wte/embedding$", ("model", None)),
)
# Adafactor keeps the sums along the smaller dimension of a matrix in `v_col`, which follow the larger one: the one that is split.
_LAYOUT_OF_SUMS: Layout = (
    *(("^params/.*" + pattern, spec) for pattern, spec in _LAYOUT),
    ("/v_col/.*(c_fc/kernel|mlp/c_proj/kernel|wte/embedding)$", ("model",)),
    ("/v/.*c_fc/bias$", ("model",)),
)


def muon() -> Model:
    """Make the step with Muon (Jordan 2024), whose Newton–Schulz iterations multiply the momentum of each hidden matrix."""
    return _gpt2("gpt2-muon", contrib.muon(1e-2, adam_learning_rate=1e-3, muon_weight_dimension_numbers=_hidden_matrices))


def adafactor() -> Model:
    """Make the step with Adafactor (Shazeer and Stern 2018, arXiv:1804.04235), which keeps sums of rows and of columns."""
    return _gpt2("gpt2-adafactor", optax.adafactor(1e-3), _LAYOUT_OF_SUMS)


def schedule_free() -> Model:
    """Make the step with schedule-free AdamW (Defazio et al. 2024, arXiv:2405.15682), which keeps a second copy of parameters."""
    return _gpt2("gpt2-schedule-free", contrib.schedule_free_adamw(1e-3, warmup_steps=2))


def _gpt2(name: str, optimizer: optax.GradientTransformation, layout: Layout = _LAYOUT) -> Model:
    model = FlaxGPT2LMHeadModel(_CONFIG, _do_init=False)
    batch = partial(causal_text, batch=_BATCH, length=_LENGTH, vocabulary=_CONFIG.vocab_size)
    return transformers_model(name, model, next_token_loss(model), batch, layout, optimizer)


def _hidden_matrices(params: PyTree) -> PyTree:
    """Return the matrices that Muon is for; Adam takes embeddings and all other leaves."""

    def dimensions(path: tuple, leaf: jax.Array) -> contrib.MuonDimensionNumbers | None:
        hidden = leaf.ndim == 2 and "embedding" not in jax.tree_util.keystr(path)
        return contrib.MuonDimensionNumbers() if hidden else None

    return jax.tree_util.tree_map_with_path(dimensions, params)
