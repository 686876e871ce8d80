"""Train in JAX: the model in Flax NNX, the optimizer in Optax, one jitted step, penstock's loader and feed."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array

from penstock_bench.step_clock import StepClock
from penstock_bench.suites.frameworks import jax_setup
from penstock_bench.suites.frameworks.experiment import ADAMW_EPSILON, BETAS, LEARNING_RATE, WEIGHT_DECAY, Experiment, Size
from penstock_bench.suites.frameworks.flax_vit import ViT, canonical, load
from penstock_bench.suites.frameworks.weights import HostBatch, Weights, initial


class FlaxTrainer(jax_setup.Batches):
    """The `Trainer` of JAX."""

    def __init__(self, experiment: Experiment, size: Size):
        super().__init__(experiment, size)
        jax_setup.configure(experiment.precision)
        dtype = jnp.bfloat16 if experiment.precision == "bf16" else jnp.float32
        with_dtype = partial(ViT, size.geometry, dtype, experiment.attention == "fused")
        model = nnx.eval_shape(lambda: with_dtype(rngs=nnx.Rngs(0)))
        self._graph, abstract = nnx.split(model)
        self._params = load(abstract, initial(size.geometry))
        self._optimizer = _make_optimizer(experiment.optimizer)
        self._state = self._optimizer.init(self._params)
        # The state is donated, so that a step can reuse its memory for the result.
        self._step = jax.jit(self._train_step, donate_argnums=(0, 1))
        self._logits = jax.jit(self._forward)
        self.details = jax_setup.details({"flax": flax.__version__, "optax": optax.__version__})

    def _forward(self, params: nnx.State, images: Any) -> Array:
        return nnx.merge(self._graph, params)(images)

    def _train_step(self, params: nnx.State, state: Any, batch: HostBatch) -> tuple[nnx.State, Any, Array]:
        def loss_of(params: nnx.State) -> Array:
            logits = self._forward(params, batch.images)
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels).mean()

        loss, gradients = jax.value_and_grad(loss_of)(params)
        updates, state = self._optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    def compiled(self, batch: HostBatch) -> jax.stages.Compiled:
        """Return the compiled step for batches like this one."""
        return self._step.lower(self._params, self._state, batch).compile()

    def logits(self, batch: HostBatch) -> np.ndarray:
        return np.asarray(self._logits(self._params, batch.images))

    def loss(self, batch: HostBatch) -> float:
        return float(self._queue(batch))

    def train(self, batches: Iterator[HostBatch], clock: StepClock) -> None:
        clock.begin()
        for batch in batches:
            # The step is one program, so its loss is ready when the step has ended. Waiting for the state is not possible: it is
            # donated to the next step by then.
            clock.queued(self._queue(batch).block_until_ready)
            if not clock.more():
                break
        clock.finish()

    def _queue(self, batch: HostBatch) -> Array:
        self._params, self._state, loss = self._step(self._params, self._state, batch)
        return loss

    def weights(self) -> Weights:
        return canonical(self._params, self._size.geometry)


def _make_optimizer(name: str) -> optax.GradientTransformation:
    if name == "sgd":
        return optax.sgd(LEARNING_RATE)
    b1, b2 = BETAS
    return optax.adamw(LEARNING_RATE, b1=b1, b2=b2, eps=ADAMW_EPSILON, weight_decay=WEIGHT_DECAY)
