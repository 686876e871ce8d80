"""Run a training in a worker of Ray (`work`): join the other workers, call the function, report metrics to Ray, and leave.

Ray runs the function on a thread that is not the main one. Signals do not arrive there, and Ray ends a worker by SIGKILL, so
nothing here relies on an orderly end. The checkpoints of `ps.fit` are complete or do not count.

*Preemption.* Ray tells each worker when its node, or another worker's, will be taken away. A thread reads that once a second, and
requests a stop. All processes of the run then agree on the step at which they save and end. They end without an error, and
process 0 returns an `Outcome` that is `stopped`, at which `run` starts the next group of workers, without waiting until the node
is gone.

*Metrics.* `ray.train.report` would have to be called equally often by every worker, and each call waits until the controller has
taken the one before, two seconds or longer. Loggers are called in process 0 only, and must not wait. So the logger of `report`
uses two ways that need no other process: the gauges of `ray.util.metrics`, which Ray exports to its dashboard and to Prometheus,
and the value that the worker of process 0 returns at its end.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from penstock._stopping import Stopped, Stopping
from penstock.data.tree import leaf_name
from penstock.ray._versions import require_ray
from penstock.train.distributed import Place, join
from penstock.train.metrics import Logger, Point, numbers

_LOOK = 1.0  # seconds between two looks for a preemption
_RESERVE = 1.0  # seconds that a preempted worker leaves to Ray


@dataclass(frozen=True)
class Job:
    """The work of all workers. See `penstock.ray.run`."""

    train: Callable[..., Any]
    config: Mapping[str, Any]
    folder: str  # the working directory of the driver, to which relative paths belong
    batch_size: int | None
    devices: int  # of each worker
    timeout: float


@dataclass(frozen=True)
class Outcome:
    """The result of process 0: a `Result`, and whether the training was stopped before its end, and has to continue."""

    value: Any
    metrics: dict[str, float]
    workers: int
    stopped: bool = False


def work(job: Job) -> Outcome | None:
    """Join, train and leave, in one worker. Return the outcome in process 0, and None in the others."""
    from ray import train

    _hide_info_messages()
    context = train.get_context()
    rank, count = context.get_world_rank(), usable(context.get_world_size(), job.batch_size, job.devices)
    address = _address(rank)  # a collective of all workers
    if rank >= count:
        return None  # with this worker, the batch would not divide
    if os.path.isdir(job.folder):
        os.chdir(job.folder)  # Ray has moved to a folder of its own
    join(Place(address, count, rank, "Ray"), address, job.timeout)
    with Stopping.without_signals("its workers start again") as stopping:
        threading.Thread(target=_watch_for_preemption, args=(stopping,), name="penstock-preemption", daemon=True).start()
        value, stopped = None, False
        try:
            value = job.train(**job.config)
        except Stopped:
            stopped = True
        except Exception as error:
            # Ray gives the driver the error without its traceback.
            error.add_note(f"penstock: in process {rank} of {count} on {socket.gethostname()}:\n{traceback.format_exc()}")
            raise
    outcome = Outcome(_picklable(value), dict(last_values), count, stopped) if rank == 0 else None
    # Not after an error: the others may wait in a collective, and would not come.
    jax.distributed.shutdown()
    return outcome


def _hide_info_messages() -> None:
    """Hide messages of JAX and Orbax below a warning, which Ray would show: it sets the level of the root logger to INFO."""
    for name in ("absl", "jax"):
        logger = logging.getLogger(name)
        if logger.level <= logging.INFO:
            logger.setLevel(logging.WARNING)


def usable(workers: int, batch_size: int | None, devices: int) -> int:
    """Return the largest number of workers, up to a given one, over whose devices a batch divides; 0 if there is none.

    >>> usable(3, 8, 1), usable(3, None, 1), usable(3, 8, 4), usable(3, 7, 2)
    (2, 3, 2, 0)
    """
    if batch_size is None:
        return workers
    return next((count for count in range(workers, 0, -1) if batch_size % (count * devices) == 0), 0)


def _address(rank: int) -> str:
    """Return a free address of process 0, in all workers."""
    import ray.util
    from ray.train.collective import broadcast_from_rank_zero

    address = None
    if rank == 0:
        host = ray.util.get_node_ip_address()
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as free:
            free.bind((host, 0))
            port = free.getsockname()[1]
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return str(broadcast_from_rank_zero(address))


def _watch_for_preemption(stopping: Stopping) -> None:
    """Request a stop once Ray has told this worker of a preemption.

    `ray.train.get_preemption_info` would be a collective, which another thread must not run beside the collectives of the user.
    So this reads Ray's message to this worker, as that function does in process 0.
    """
    from ray.train.v2._internal.execution.context import get_train_context

    while (info := get_train_context().preemption_context.preemption_info) is None:
        if stopping.wait(_LOOK):
            return
    if info.deadline_ms:
        stopping.grace = max(_RESERVE, info.deadline_ms / 1e3 - time.time() - _RESERVE)
    stopping.request("preemption")


def _picklable(value: Any) -> Any:
    """Return a value with NumPy arrays in place of JAX's, which would start devices where they are unpickled."""

    def local(path: Any, leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        if not leaf.is_fully_addressable and not leaf.is_fully_replicated:
            name = repr(leaf_name(path)) if path else "an array"
            raise TypeError(
                f"the function returned {name} of shape {list(leaf.shape)}, of which process 0 has only a part: return numbers "
                "or replicated arrays, and read the rest from the checkpoint"
            )
        return np.asarray(leaf if leaf.is_fully_addressable else leaf.addressable_data(0))

    return jax.tree_util.tree_map_with_path(local, value)


# The metrics.
last_values: dict[str, float] = {}
"""The last value of each metric in this process."""


def report() -> Logger:
    """Return a logger for `ps.fit(log=[...])` that gives the metrics to Ray.

    Each metric, such as "loss", becomes a gauge "penstock_loss" of Ray, which its dashboard and Prometheus show (as
    "ray_penstock_loss"). "penstock_step" is the number of steps. The last values are `Result.metrics` of `penstock.ray.run`. No
    worker waits for another one or for Ray. Outside of `penstock.ray.run` it may be used too, where Ray runs.

    Raises:
      UnsupportedVersionError: Ray is not installed, or too old.
    """
    require_ray()
    return _Report()


class _Report:
    def __init__(self) -> None:
        self._gauges: dict[str, Any] = {}

    def __call__(self, point: Point) -> None:
        if point.kind not in ("train", "evaluation"):
            return
        for name, value in {"step": float(point.step), **numbers(point)}.items():
            last_values[name] = value
            self._gauge(name).set(value)

    def _gauge(self, name: str) -> Any:
        from ray.util.metrics import Gauge

        if name not in self._gauges:
            self._gauges[name] = Gauge(f"penstock_{re.sub(r'[^a-zA-Z0-9_]', '_', name)}", f"{name} of ps.fit")
        return self._gauges[name]
