"""Ask a feed where the time of a step goes, change what it names, and ask again.

pip install penstock && python where_time_goes.py
"""

import time

import jax
import jax.numpy as jnp
import numpy as np

import penstock as ps

IMAGES = np.random.default_rng(0).integers(0, 256, (2_000, 64, 64, 3), np.uint8)


class Storage:
    """Records behind a network: each read takes 50 ms."""

    def __len__(self) -> int:
        return len(IMAGES)

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        time.sleep(0.05)
        return {"image": IMAGES[indices]}


def to_float(batch: dict) -> dict:
    """Cast and scale, with NumPy in a Loader and with JAX in a feed."""
    return {"image": batch["image"].astype("float32") / 255}


@jax.jit
def step(weights: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
    pixels = batch["image"].reshape(len(batch["image"]), -1)
    return weights - 0.01 * jax.grad(lambda w: jnp.square(pixels @ w - 1).mean())(weights)


def train(name: str, feed: ps.Feed) -> float:
    """Train for 40 steps, print the statistics, and return the seconds."""
    weights, begin = jnp.zeros((64 * 64 * 3, 256)), time.perf_counter()
    with feed as batches:
        for _, batch in zip(range(40), batches, strict=False):
            weights = step(weights, batch)
    jax.block_until_ready(weights)
    seconds = time.perf_counter() - begin
    print(f"{name}: {seconds:.2f} s\n  {feed.stats()}")
    return seconds


before = train("as written", ps.feed(ps.Loader(Storage(), 64, shuffle=True, transform=to_float)))
# The verdict names `read`, which only waits: eight reads at a time. A cast on the device sends it a quarter of the bytes.
after = train("8 workers, cast on the device", ps.feed(ps.Loader(Storage(), 64, shuffle=True, workers=8), transform=to_float))
assert after < before
