"""Make the train step of a Flax model of transformers, as the examples in its repository do.

They keep the key of the dropout in the train state, and compute losses from one-hot labels (`run_mlm_flax.py`, `run_clm_flax.py`
and `run_summarization_flax.py` of transformers 4.46).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import optax
from flax.training.train_state import TrainState
from jax import Array

from penstock_bench.suites.shard.zoo.model import Layout, Model, PyTree
from penstock_bench.suites.shard.zoo.training import SEED, adamw
from penstock_bench.suites.shard.zoo.training_linen import create

Loss = Callable[[PyTree, PyTree, Array], Array]  # parameters, batch, key → []


class DropoutState(TrainState):  # type: ignore[no-untyped-call]  # Flax's own, without annotations
    """A train state with the raw key of the next step's dropout, uint32 [2]."""

    dropout_rng: Array


def transformers_model(
    name: str,
    model: Any,
    loss: Loss,
    batch: Callable[[int], PyTree],
    megatron: Layout = (),
    optimizer: optax.GradientTransformation | None = None,
) -> Model:
    """Make a train step of a model.

    Args:
      model: a `FlaxPreTrainedModel` made with `_do_init=False`, which has no weights yet.
      loss: a function of its parameters.
      name, batch, megatron: as in `Model`.
      optimizer: None takes AdamW.
    """
    optimizer = optimizer or adamw()

    def init() -> DropoutState:
        params = model.init_weights(jax.random.PRNGKey(SEED), model.input_shape)
        key = jax.random.PRNGKey(SEED + 1)
        return create(DropoutState, model.module, optimizer, {"params": params, "dropout_rng": key})

    def step(state: Any, batch: PyTree) -> tuple[DropoutState, Array]:
        key, next_key = jax.random.split(state.dropout_rng)
        value, gradients = jax.value_and_grad(loss)(state.params, batch, key)
        return state.apply_gradients(grads=gradients, dropout_rng=next_key), value

    return Model(name, "Linen", init, batch, step, megatron)


def logits_of(model: Any, params: PyTree, batch: PyTree, key: Array, **rngs: Array) -> Array:
    """Return the logits of the batch without its labels, while training."""
    inputs = {name: leaf for name, leaf in batch.items() if name != "labels"}
    return model(**inputs, params=params, dropout_rng=key, train=True, **rngs)[0]


def token_loss(model: Any) -> Loss:
    """Return the loss of labels at the same positions as the logits, as for masked tokens or a decoder that was given them."""

    def loss(params: PyTree, batch: PyTree, key: Array) -> Array:
        return labelled_cross_entropy(logits_of(model, params, batch, key), batch["labels"])

    return loss


def next_token_loss(model: Any) -> Loss:
    """Return the loss of a causal model, whose labels are its own tokens."""

    def loss(params: PyTree, batch: PyTree, key: Array) -> Array:
        logits = logits_of(model, params, batch, key)
        return labelled_cross_entropy(logits[:, :-1], batch["labels"][:, 1:])

    return loss


def labelled_cross_entropy(logits: Array, labels: Array) -> Array:
    """Return the mean over the labels that are not -100: logits [B, T, V], labels [B, T] → []."""
    labelled = (labels != -100).astype(logits.dtype)
    losses = optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, logits.shape[-1])) * labelled
    return losses.sum() / labelled.sum()
