"""Plan Llama 7B on 64 TPU v5e chips, on a machine without any of them.

Nothing is allocated: the step is traced on shapes, with 81 GB of state among them. The plan is printed, and drawn on a page:

    python examples/plan_llama.py --html plan.html

The TPU compiler (pip install libtpu) needs no TPU either. With it, the prediction can be compared with the compiler's figures:

    cd examples && penstock plan plan_llama:job --mesh data=8,model=8 --hardware tpu-v5e --verify v5e:8x8
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

import penstock as ps

# Llama 7B (Touvron et al. 2023, arXiv:2302.13971, table 2) with sequences of 4,096 tokens, as in Llama 2. It was trained with 4
# Mi tokens in a step. This step has a 16th of them: the gradients of 16 such steps would be accumulated.
WIDTH, HIDDEN, HEADS, VOCABULARY = 4096, 11008, 32, 32_000
BATCH, LENGTH = 64, 4096

# As usual, parameters and AdamW's moments are float32, which takes 12 bytes for each parameter. The layers compute in bfloat16.
OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4, b2=0.95, weight_decay=0.1))


def init(layers: int) -> dict[str, Any]:
    """Initialize the state. The parameters of all layers are stacked, [layers, ...], for `jax.lax.scan`."""

    def matrix(*shape: int) -> Array:
        return 0.02 * jax.random.normal(jax.random.key(0), shape)

    params = {
        "embedding": matrix(VOCABULARY, WIDTH),
        "layers": {
            "attention_norm": jnp.ones((layers, WIDTH)),
            **{name: matrix(layers, WIDTH, WIDTH) for name in ("wq", "wk", "wv", "wo")},
            "mlp_norm": jnp.ones((layers, WIDTH)),
            **{name: matrix(layers, WIDTH, HIDDEN) for name in ("w_gate", "w_up")},
            "w_down": matrix(layers, HIDDEN, WIDTH),
        },
        "norm": jnp.ones(WIDTH),
        "head": matrix(WIDTH, VOCABULARY),
    }
    return {"params": params, "optimizer": OPTIMIZER.init(params)}


def step(state: dict[str, Any], batch: dict[str, Array]) -> tuple[dict[str, Any], Array]:
    """Run one step of AdamW on tokens and targets [B, T]. It is written for one device, without any sharding."""
    loss, gradients = jax.value_and_grad(_loss)(state["params"], batch)
    updates, optimizer = OPTIMIZER.update(gradients, state["optimizer"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "optimizer": optimizer}, loss


def _loss(params: Any, batch: dict[str, Array]) -> Array:
    """Compute the mean cross-entropy over all tokens, in nats."""
    x = _half(params["embedding"])[batch["tokens"]]
    # The inputs of the layers are kept for the backward pass, which computes all other values again.
    x, _ = jax.lax.scan(jax.checkpoint(_layer), x, params["layers"])
    logits = (_rms_norm(x, _half(params["norm"])) @ _half(params["head"])).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def _layer(x: Array, layer: dict[str, Array]) -> tuple[Array, None]:
    """Apply one layer: [B, T, D] → [B, T, D]."""
    # Cast here: a cast before the scan would keep the bfloat16 copies of all layers at once.
    layer = _half(layer)
    normed = _rms_norm(x, layer["attention_norm"])
    query, key, value = ((normed @ layer[name]).reshape(*x.shape[:2], HEADS, -1) for name in ("wq", "wk", "wv"))
    mixed = jax.nn.dot_product_attention(_rotate(query), _rotate(key), value, is_causal=True)
    x = x + mixed.reshape(x.shape) @ layer["wo"]
    normed = _rms_norm(x, layer["mlp_norm"])
    return x + (jax.nn.silu(normed @ layer["w_gate"]) * (normed @ layer["w_up"])) @ layer["w_down"], None


def _half(params: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)


def _rms_norm(x: Array, scale: Array) -> Array:
    """Normalize [..., D] by its root mean square, computed in float32, and multiply it by a scale [D]."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-5)).astype(x.dtype) * scale


def _rotate(x: Array) -> Array:
    """Rotate by rotary position embeddings (Su et al. 2021, arXiv:2104.09864): [B, T, heads, D / heads] → the same."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None, None] * 10_000.0 ** (-jnp.arange(half) / half)  # [T, 1, half]
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def job(layers: int = 32) -> tuple[Any, ...]:
    """Return the step and the shapes of its arguments, for `penstock plan plan_llama:job`."""
    tokens = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
    return step, jax.eval_shape(partial(init, layers)), {"tokens": tokens, "targets": tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--html", type=Path, default=Path(gettempdir()) / "penstock-llama-7b.html", help="default: %(default)s")
    args = parser.parse_args()
    plan = ps.plan(*job(), mesh={"data": 8, "model": 8}, hardware="tpu-v5e", memory="16GiB")
    print(plan)
    plan.html(args.html)
    print(f"\ndrawn in {args.html}")


if __name__ == "__main__":
    main()
