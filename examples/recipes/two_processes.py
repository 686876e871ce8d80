"""Train in two processes, on a batch that is sharded, partly replicated and replicated: the result is the same.

pip install penstock && python two_processes.py
"""

import socket
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


def work(index: int, address: str) -> None:
    """Train in one of the processes, which has two devices."""
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, num_processes=2, process_id=index)  # without arguments on TPUs and under SLURM
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


if __name__ == "__main__" and len(sys.argv) == 3:
    work(int(sys.argv[1]), sys.argv[2])
elif __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    processes = [subprocess.Popen([sys.executable, __file__, str(index), address]) for index in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
