"""Run a training function in workers of Ray (`run`).

*Failures.* When a worker dies, Ray ends all of them and starts a new group. The function is called anew in each, and `ps.fit`
continues from its last checkpoint. Errors of the types in `_FINAL` would come again, so they end the run at once. If a
worker died at the same time, it may be their cause, and the run starts again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock._arguments import at_least
from penstock.errors import DistributedError, NonfiniteError
from penstock.ray._versions import require_ray
from penstock.ray._worker import Job, Outcome, usable, work

_FINAL = (TypeError, ValueError, LookupError, NameError, AttributeError, ImportError, AssertionError, NonfiniteError)
_SILENCE = 15.0  # seconds after which a run logs what it waits for
_log = logging.getLogger("penstock")


@dataclass(frozen=True)
class Result:
    """The result of `penstock.ray.run`.

    Attributes:
      value: the result of the function in process 0. Arrays of JAX are NumPy arrays, and PRNG keys their data.
      metrics: the last value of each metric, and "step", if `penstock.ray.report()` was among the loggers.
      workers: number of workers that finished the training.
    """

    value: Any
    metrics: Mapping[str, float] = field(default_factory=dict)
    workers: int = 1


def run(
    train: Callable[..., Any],
    config: Mapping[str, Any] | None = None,
    *,
    workers: int | tuple[int, int],
    resources: Mapping[str, float] | None = None,
    devices: int | None = None,
    batch_size: int | None = None,
    failures: int = 3,
    storage: str | os.PathLike[str] | None = None,
    scaling: Mapping[str, Any] | None = None,
    timeout: float = 300.0,
) -> Result:
    """Run a training function in workers of a Ray cluster, which start again after failures.

    The function is the one that a script would call. It may call `ps.distributed()`, which returns its place: the processes
    have joined before. After a failure, it is called again in new workers. To continue, it calls `ps.fit(...,
    checkpoint=folder)` with a folder that all workers see. The result is the same bit for bit with as many workers as before.
    With fewer or more, each step has the same records. It uses Ray Train, and calls `ray.init()` if Ray is not connected.

    Args:
      train: the function. It is called in each worker, and pickled, so what it refers to has to be picklable.
      config: its arguments, by name.
      workers: number of workers; or (least, most). The run then continues with as many as the cluster has, also after a node was
        lost or has come.
      resources: of each worker, such as {"GPU": 1}; None for {"CPU": 1}.
      devices: number of virtual devices of each worker, where it has only CPUs; None for JAX's default, one.
      batch_size: records of the global batch, if it is sharded over all devices. Then only so many workers train that it
        divides over their devices, and the others stay idle. None leaves it to `train`.
      failures: number of failures after which the run ends, with Ray's error. Preemptions do not count.
      storage: folder or URL for Ray's records of the run; None for Ray's default, `~/ray_results`.
      scaling: more arguments of `ray.train.ScalingConfig`, such as {"placement_strategy": "SPREAD"}; for TPUs,
        {"topology": "4x4", "accelerator_type": "TPU-V6E"}.
      timeout: seconds to wait for the resources, and for the processes to join.

    Returns:
      A `Result`.

    Raises:
      UnsupportedVersionError: Ray is not installed, or too old.
      ValueError: an argument makes no sense, or `batch_size` divides over no number of workers that is allowed.
      DistributedError: the cluster does not have the resources.
      TypeError, ValueError, NonfiniteError and other errors of `train` that would come again: at once.
      ray.train.WorkerGroupError: it failed too often.

    Examples:
      >>> def train(folder):
      ...     return ps.fit(step, init, loader, steps=1000, checkpoint=folder)
      >>> result = pr.run(train, {"folder": "/shared/run"}, workers=4)  # doctest: +SKIP
    """
    require_ray()
    least, most = _check_workers(workers)
    resources = {"CPU": 1.0} if resources is None else dict(resources)
    if not resources or not all(isinstance(amount, (int, float)) and amount > 0 for amount in resources.values()):
        raise ValueError(f'resources={resources!r}: needs amounts > 0, such as {{"CPU": 1}} or {{"GPU": 1}}')
    if devices is not None:
        at_least(1, "devices", devices)
    if not callable(train):
        raise TypeError(f"train={train!r} is not a function")
    each = devices or max(1, int(resources.get("GPU", 1)))
    if batch_size is not None:
        _check_batch_size(at_least(1, "batch_size", batch_size), workers, least, most, each)
    at_least(0, "failures", failures)
    job = Job(train, dict(config or {}), os.getcwd(), batch_size, each, timeout)

    import ray

    if not ray.is_initialized():
        ray.init()
    if "TPU" not in resources:  # Ray reserves slices by itself
        _wait_for_room(resources, workers, least, timeout)
    if least < most:
        # An elastic group tries again with fewer workers if some do not start, and Ray's default is a minute.
        os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "15")
    with _restored_interrupt_handler():
        while (outcome := _run(job, workers, resources, devices, failures, storage, scaling)).stopped:
            _log.warning("penstock: the training was saved before a node is taken away; its workers start again")
    return Result(outcome.value, outcome.metrics, outcome.workers)


def _check_workers(workers: Any) -> tuple[int, int]:
    if isinstance(workers, tuple) and len(workers) == 2 and all(isinstance(number, int) for number in workers):
        if not 1 <= workers[0] <= workers[1]:
            raise ValueError(f"workers={workers}: needs 1 <= least <= most")
        return workers
    if isinstance(workers, tuple):
        raise ValueError(f"workers={workers!r}: needs a number of workers, or (least, most)")
    return (at_least(1, "workers", workers),) * 2


def _check_batch_size(batch_size: int, workers: Any, least: int, most: int, devices: int) -> None:
    """Raise ValueError if the batch divides over no number of workers that is allowed."""
    if usable(most, batch_size, devices) < least:
        multiple = least * devices
        nearest = max(1, batch_size // multiple) * multiple
        each = f" with {devices} devices each" if devices > 1 else ""
        raise ValueError(
            f"batch_size={batch_size} does not divide over workers={workers}{each}: use a multiple of {multiple}, such as "
            f"{nearest}, or another number of workers"
        )


def _run(
    job: Job,
    workers: int | tuple[int, int],
    resources: Mapping[str, float],
    devices: int | None,
    failures: int,
    storage: str | os.PathLike[str] | None,
    scaling: Mapping[str, Any] | None,
) -> Outcome:
    """Let Ray Train run the job once, with restarts."""
    from ray.train.v2.api.config import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.api.exceptions import ControllerError
    from ray.train.v2.jax import JaxConfig, JaxTrainer

    uses_tpu = "TPU" in resources
    trainer = JaxTrainer(
        lambda: work(job),
        # Without TPUs, the workers join by themselves: Ray would give every worker of a node its first GPUs, and not join CPUs.
        jax_config=JaxConfig(use_tpu=uses_tpu),
        scaling_config=ScalingConfig(
            num_workers=workers,
            resources_per_worker=dict(resources),
            use_gpu="GPU" in resources,
            use_tpu=uses_tpu,
            **(scaling or {}),
        ),
        run_config=RunConfig(
            storage_path=None if storage is None else os.fspath(storage),
            failure_config=FailureConfig(max_failures=failures),
            callbacks=[_end_after_final_errors()],
            worker_runtime_env={"env_vars": {} if devices is None else {"JAX_NUM_CPU_DEVICES": str(devices)}},
        ),
    )
    try:
        result: Any = trainer.fit()
    except ControllerError as error:
        if isinstance(error.controller_failure, _FinalError):
            raise error.controller_failure.error from None
        raise
    assert isinstance(result.return_value, Outcome)
    return result.return_value


class _FinalError(Exception):
    """An error of a worker that would come again. Ray's controller ends the run for it."""

    def __init__(self, error: BaseException):
        super().__init__(f"{type(error).__name__}: {error}")
        self.error = error

    def __reduce__(self) -> Any:
        return (_FinalError, (self.error,))


def final_error(errors: Mapping[int, BaseException]) -> BaseException | None:
    """Return the error, of the errors by rank, that would come again; None if starting again may help."""
    from ray.exceptions import RayActorError
    from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError

    if any(isinstance(error, (RayActorError, WorkerHealthCheckFailedError)) for error in errors.values()):
        return None
    return next((error for _, error in sorted(errors.items()) if isinstance(error, _FINAL)), None)


def _end_after_final_errors() -> Any:
    """Return a callback of Ray Train that ends a run, without more attempts, after an error that would come again."""
    from ray.train import UserCallback

    class EndAfterFinalErrors(UserCallback):
        def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
            error = final_error(worker_exceptions)
            if error is not None:
                raise _FinalError(error)  # an error of a callback is one of the controller, which Ray does not try again

    return EndAfterFinalErrors()


def _wait_for_room(resources: Mapping[str, float], workers: Any, least: int, timeout: float) -> None:
    """Wait until the cluster has room for the workers, or raise DistributedError: Ray would wait for ever.

    An autoscaler sees the request, and adds nodes.
    """
    from ray.util.placement_group import placement_group, remove_placement_group

    group = placement_group([dict(resources)] * least)
    try:
        if group.wait(min(_SILENCE, timeout)):
            return
        _log.warning("penstock: waits for %d workers with %s each: %s", least, _amounts(resources), _room())
        if not group.wait(max(0.0, timeout - _SILENCE)):
            raise DistributedError(
                f"workers={workers}: {least} workers with {_amounts(resources)} each found no room in {timeout:g} s; {_room()}. "
                "Use fewer workers or resources, or add nodes. A Ray of your own, on this machine, takes any number of CPUs: "
                "ray.init(num_cpus=8)"
            )
    finally:
        remove_placement_group(group)


def _room() -> str:
    """Describe the resources of the cluster."""
    import ray

    everything, free = ray.cluster_resources(), ray.available_resources()
    units = {name: total for name, total in everything.items() if not name.startswith(("node:", "object_store", "memory"))}
    has = ", ".join(f"{total:g} {name} ({free.get(name, 0):g} free)" for name, total in sorted(units.items()))
    nodes = sum(bool(node["Alive"]) for node in ray.nodes())
    return f"the cluster has {has or 'no resources'} on {nodes} node{'s' if nodes > 1 else ''}"


def _amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items())


@contextlib.contextmanager
def _restored_interrupt_handler() -> Iterator[None]:
    """Put back the handler of Ctrl-C, which Ray Train replaces. It ends the workers; their last checkpoint stays."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
