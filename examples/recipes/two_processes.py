"""Train in two processes, on a batch that is sharded, partly replicated and replicated: the result is the same.

pip install penstock && python two_processes.py
"""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import penstock as ps

x = np.random.default_rng(0).normal(size=(1_000, 4)).astype(np.float32)
DATA = {"x": x, "y": x @ np.array([1.0, -2.0, 3.0, 0.5], np.float32), "id": np.arange(1_000, dtype=np.int32)}


@jax.jit
def step(weights: jax.Array, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    gradient = jax.grad(lambda w: ((batch["x"] @ w - batch["y"]) ** 2).mean())(weights)
    return weights - 0.2 * gradient, batch["id"].sum()


def work() -> None:
    """Train in one of the processes, which has two devices."""
    index = ps.distributed().index  # finds the other processes, here started by `penstock launch`
    mesh = jax.make_mesh((2, 2), ("node", "gpu"), axis_types=(AxisType.Auto, AxisType.Auto))
    loader = ps.Loader(DATA, batch_size=64, shuffle=True, seed=7)  # 64 rows over all processes
    whole = ps.Loader(DATA, batch_size=64, shuffle=True, seed=7, process=(0, 1))  # as one process sees it
    for spec in (P(("node", "gpu")), P("gpu"), P()):
        weights = jnp.zeros(4)
        with ps.feed(loader, to=NamedSharding(mesh, spec)) as batches:
            for number, batch in zip(range(30), batches, strict=False):
                weights, total = step(weights, batch)
                assert int(total) == whole[number]["id"].sum()
        rows = {int(row) for shard in batch["id"].addressable_shards for row in np.asarray(shard.data)}
        print(f"process {index}, {spec}: {len(rows)} of {len(batch['id'])} rows, weights {np.asarray(weights).round(2)}")
        np.testing.assert_allclose(weights, [1, -2, 3, 0.5], atol=0.01)


if __name__ == "__main__" and sys.argv[1:] == ["work"]:
    work()
elif __name__ == "__main__":
    launch = [sys.executable, "-m", "penstock", "launch", "-n", "2", "--devices-per-process", "2"]
    subprocess.run([*launch, __file__, "work"], check=True)
