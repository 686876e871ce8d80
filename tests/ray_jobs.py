"""Training functions that the tests of `penstock.ray` run in workers, and a script that changes a cluster under a run.

python -m tests.ray_jobs FOLDER [gain] [lose|drain]
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from tests.train import models

import penstock as ps
import penstock.ray as pr


def fit(
    folder: str,
    data: Any = None,
    *,
    steps: int = 48,
    batch_size: int = models.BATCH,
    save_every: int = 8,
    kill: int | None = None,
    pause: float = 0.0,
) -> dict[str, Any]:
    """Train the model of `tests.train.models`, and note who trains.

    Args:
      folder: the run folder.
      data: the source; None for that of the models.
      steps, batch_size, save_every: of the training.
      kill: the process that is killed once, when the checkpoint of step 16 is complete.
      pause: seconds that each batch takes.
    """
    processes = ps.distributed()
    root = Path(folder)
    root.parent.mkdir(parents=True, exist_ok=True)
    with Path(f"{folder}.places").open("a") as places:
        places.write(f"{processes.index} of {processes.count} {processes.how} {os.getcwd()} {jax.device_count()}\n")
    if kill == processes.index and not Path(f"{folder}.killed").exists():
        threading.Thread(target=_kill_after, args=(root / "checkpoints/step-16/MANIFEST.json", Path(f"{folder}.killed"))).start()

    def wait(batch: Any) -> Any:
        time.sleep(pause)
        return {name: np.array(column) for name, column in batch.items()}

    def begin(point: ps.Point) -> None:
        if point.kind == "begin":
            with Path(f"{folder}.begun").open("a") as begun:
                begun.write(f"{point.step}\n")

    loader = ps.Loader(data or models.data(), batch_size, shuffle=True, seed=3, transform=wait)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    with ps.feed(loader, to=NamedSharding(mesh, PartitionSpec("data"))) as batches:
        log = [begin, pr.report(), ps.log.jsonl(f"{folder}.jsonl")]
        settings = {"steps": steps, "checkpoint": folder, "save_every": save_every, "log_every": 4, "log": log}
        return ps.fit(models.step, models.init, batches, **settings)


def _kill_after(manifest: Path, mark: Path) -> None:
    while not manifest.exists():
        time.sleep(0.01)
    mark.touch()
    os.kill(os.getpid(), signal.SIGKILL)


def fail(folder: str, error: type[Exception]) -> None:
    """Raise an error in process 1, while process 0 waits for it."""
    with Path(folder, "attempts").open("a") as attempts:
        attempts.write("attempt\n")
    if ps.distributed().index:
        raise error("no such thing")
    threading.Event().wait(120)


def where(folder: str) -> tuple[str, str, int]:
    """Return what process 0 sees, and leave a relative file."""
    Path(folder).mkdir(exist_ok=True)
    processes = ps.distributed()
    return str(processes).partition(",")[0], os.getcwd(), jax.device_count()


def sharded() -> dict[str, jax.Array]:
    """Return an array over two processes."""
    sharding = NamedSharding(jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,)), PartitionSpec("data"))
    return {"w": jax.make_array_from_callback((4,), sharding, lambda index: np.arange(4.0)[index])}


def _main(folder: str, *changes: str) -> None:
    """Run an elastic training on a cluster of two nodes, one of which is gained, lost or drained meanwhile."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    node = None if "gain" in changes else cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=True)
    results: list[pr.Result] = []
    config: dict[str, Any] = {"folder": f"{folder}/run", "steps": 300 if "gain" in changes else 48, "pause": 0.2}
    config["save_every"] = 1000 if "drain" in changes else 8

    def train() -> None:
        scaling = {"elastic_resize_monitor_interval_s": 2.0}
        results.append(pr.run(fit, config, workers=(1, 2), failures=1, storage=folder, scaling=scaling))

    running = threading.Thread(target=train)
    running.start()
    for attempts, change in enumerate(changes, 1):
        while not (_lines(f"{folder}/run.begun") == attempts and _has_come_on(folder, saves=change != "drain")):
            assert running.is_alive()
            time.sleep(0.05)
        if change == "gain":
            node = cluster.add_node(num_cpus=1)
        elif change == "lose":
            cluster.remove_node(node, allow_graceful=False)
        else:
            tool = Path(sys.executable).with_name("ray")
            why = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot", "--deadline-remaining-seconds", "100"]
            subprocess.run([tool, "drain-node", "--address", cluster.address, "--node-id", node.node_id, *why], check=True)
    running.join()
    print("workers", results[0].workers)
    np.savez(f"{folder}/result.npz", w=results[0].value["w"]["a"], seen=results[0].value["seen"])
    ray.shutdown()
    cluster.shutdown()


def _lines(path: str) -> int:
    return len(Path(path).read_text().splitlines()) if Path(path).exists() else 0


def _has_come_on(folder: str, *, saves: bool) -> bool:
    """Return whether the last attempt has saved a checkpoint; if it saves none, whether it has logged."""
    if not saves:
        return _lines(f"{folder}/run.jsonl") > 0
    begun = int(Path(f"{folder}/run.begun").read_text().split()[-1])
    saved = [int(path.parent.name[5:]) for path in Path(folder, "run/checkpoints").glob("step-*/MANIFEST.json")]
    return max(saved, default=0) > begun


if __name__ == "__main__":
    _main(*sys.argv[1:])
