"""The training that is broken: `python -m penstock_bench.faults.training FOLDER` trains, or continues, and writes its result.

Its state has, beside parameters and a PRNG key, the numbers of the records of each step. So it shows which records it has seen,
in which order, and how often.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import penstock as ps
from penstock._atomic_write import replace
from penstock._heartbeat import is_launched

RECORDS, BATCH, INPUTS, HIDDEN = 1000, 16, 64, 1024
STEPS = 80
RESULT = "result.json"


def init() -> dict[str, Any]:
    """Return the initial state: parameters and momenta of two layers (2 MB), a key, losses, and a table of record numbers."""
    keys = jax.random.split(jax.random.key(1))
    w = {
        "a": jax.random.normal(keys[0], (INPUTS, HIDDEN)) / INPUTS**0.5,
        "b": jax.random.normal(keys[1], (HIDDEN, INPUTS)) / HIDDEN**0.5,
    }
    return {
        "w": w,
        "momentum": jax.tree.map(jnp.zeros_like, w),
        "key": jax.random.key(2),
        "step": 0,
        "losses": jnp.zeros(STEPS),
        "seen": jnp.full((STEPS, BATCH), -1),
    }


def step(state: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
    """Train an autoencoder with momentum, with noise on its inputs."""
    key, noise = jax.random.split(state["key"])
    x = batch["x"] + 0.1 * jax.random.normal(noise, batch["x"].shape)

    def loss(w: Any) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ w["a"]) @ w["b"] - batch["x"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(state["w"])
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state["momentum"], gradients)
    new = {
        "w": jax.tree.map(lambda w, m: w - 0.1 * m, state["w"], momentum),
        "momentum": momentum,
        "key": key,
        "step": state["step"] + 1,
        "losses": state["losses"].at[state["step"]].set(value),
        "seen": state["seen"].at[state["step"]].set(batch["id"]),
    }
    return new, {"loss": value}


def evaluate(state: Any, batch: Any) -> dict[str, Any]:
    """Return the loss without noise."""
    return {"loss": jnp.mean((jnp.tanh(batch["x"] @ state["w"]["a"]) @ state["w"]["b"] - batch["x"]) ** 2)}


def loader() -> ps.Loader:
    """Return the training data: 1,000 records, shuffled, which do not fill whole batches."""
    x = np.random.default_rng(0).normal(size=(RECORDS, INPUTS)).astype(np.float32)
    return ps.Loader({"x": x, "id": np.arange(RECORDS, dtype=np.int32)}, BATCH, shuffle=True, seed=7, transform=_slowly)


def ideal() -> np.ndarray:
    """Return the record numbers of each step [STEPS, BATCH], as they have to be."""
    data = loader()
    return np.stack([data[number]["id"] for number in range(STEPS)])


def _slowly(batch: Any) -> Any:
    """Take 5 ms for a batch, so that a kill can come during a read."""
    time.sleep(0.005)
    return dict(batch)


def main() -> int:
    """Train to the end, and write the result: digests of all parameters, the parameters themselves, and the records."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--grace", type=float, default=30.0)
    args = parser.parse_args()
    if not is_launched():
        jax.config.update("jax_num_cpu_devices", args.devices)
    processes = ps.distributed()
    mesh = jax.make_mesh((args.devices,), ("data",), axis_types=(AxisType.Auto,))
    validation = ps.Loader({"x": np.random.default_rng(1).normal(size=(32, INPUTS)).astype(np.float32)}, 16, epochs=1)
    with ps.feed(loader(), to=NamedSharding(mesh, PartitionSpec("data"))) as feed:
        state = ps.fit(
            step,
            init,
            feed,
            steps=STEPS,
            checkpoint=args.folder,
            save_every=6,
            evaluate=ps.Evaluation(evaluate, validation, every=25),
            log=[_tell],
            log_every=5,
            grace=args.grace,
        )
    host = _on_host(state)
    if processes.index == 0:
        _write(args.folder, host)
    return 0


def _tell(point: ps.Point) -> None:
    """Print which part of the run has begun, for whoever breaks it."""
    print(point.kind, point.step, flush=True)


def _on_host(state: Any) -> dict[str, np.ndarray]:
    """Return the arrays by name. The state is replicated, so that each process has all of it."""
    arrays = {**state["w"], **{f"momentum {name}": m for name, m in state["momentum"].items()}}
    arrays |= {"key": jax.random.key_data(state["key"])} | {name: state[name] for name in ("losses", "seen", "step")}
    return {name: np.asarray(array) for name, array in arrays.items()}


def _write(folder: Path, host: dict[str, np.ndarray]) -> None:
    np.savez(folder / "result.npz", **host)  # type: ignore[arg-type]  # mypy takes an array for allow_pickle
    digests = {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in host.items()}
    replace(folder / RESULT, json.dumps({"digests": digests}))


if __name__ == "__main__":
    sys.exit(main())
