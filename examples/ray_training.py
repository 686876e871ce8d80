"""Train on a Ray cluster, kill a worker in the middle, and get the parameters of a run that was not broken, bit for bit.

It needs: pip install "penstock[train,ray]"
Without a cluster (RAY_ADDRESS), it starts Ray on this machine.
"""

import os
import signal
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import ray
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import penstock as ps
import penstock.ray as pr

STEPS, KILLED_AT = 200, 130


def train(folder: str, source: pr.RaySource, kill: bool) -> np.ndarray:
    """Fit a small network, in each worker. This is what a script would do, without a word about Ray."""
    processes = ps.distributed()
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    loader = ps.Loader(source, batch_size=64, shuffle=True, seed=1)
    print(f"{processes}: continues from {sorted(path.name for path in Path(folder).glob('checkpoints/step-*'))}")

    def init() -> dict[str, jax.Array]:
        keys = jax.random.split(jax.random.key(0))
        return {"a": jax.random.normal(keys[0], (2, 64)), "b": jax.random.normal(keys[1], (64, 1)) / 8}

    def step(state, batch):
        def loss(weights):
            return jnp.mean((jnp.tanh(batch["x"] @ weights["a"]) @ weights["b"] - batch["y"]) ** 2)

        value, gradients = jax.value_and_grad(loss)(state)
        return jax.tree.map(lambda w, g: w - 0.05 * g, state, gradients), {"loss": value}

    def accident(point: ps.Point) -> None:
        """Kill this process, and not only its thread, the first time that it comes this far."""
        if kill and point.step >= KILLED_AT and not (mark := Path(folder, "killed")).exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    with ps.feed(loader, to=NamedSharding(mesh, PartitionSpec("data"))) as batches:
        state = ps.fit(step, init, batches, steps=STEPS, checkpoint=folder, save_every=50, log=[pr.report(), accident])
    return state["b"]


def main() -> None:
    """Train twice, and compare."""
    if "RAY_ADDRESS" not in os.environ:
        ray.init("local", num_cpus=2, include_dashboard=False)
    x = np.random.default_rng(0).uniform(-1, 1, (4096, 2)).astype(np.float32)
    dataset = ray.data.from_numpy(x).map_batches(lambda batch: {"x": batch["data"], "y": np.sin(3 * batch["data"][:, :1])})
    source = pr.source(dataset)
    print(source.describe())
    with tempfile.TemporaryDirectory() as folder:
        results = {
            kill: pr.run(
                train, {"folder": f"{folder}/{kill}", "source": source, "kill": kill}, workers=2, batch_size=64, storage=folder
            )
            for kill in (False, True)
        }
        assert Path(folder, "True", "killed").exists()
    same = np.array_equal(results[False].value, results[True].value)
    for kill, result in results.items():
        print(f"{'killed and continued' if kill else 'not broken'}: loss {result.metrics['loss']:.6f} after {STEPS} steps")
    print("equal bit for bit" if same else "different")
    assert same
    ray.shutdown()


if __name__ == "__main__":
    main()
