"""Find out which process this is, of how many, and where the others are: arguments and environment in, a `Place` out.

The first source that knows decides: the arguments of `ps.distributed`, `penstock launch`, and the clusters that JAX knows, in
JAX's order (Open MPI, SLURM, TPU pods, Kubernetes). Arguments that are given partly are completed from the next source.
"""

from __future__ import annotations

import multiprocessing
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock import _heartbeat
from penstock._jax import clusters


class DistributedError(RuntimeError):
    """An error: the processes of this run could not join.

    The message says which process this is, of how many, where it looked for the others, which of them did not come as far as
    that is known, and what to do.
    """


COORDINATOR, COUNT, INDEX = "PENSTOCK_COORDINATOR", "PENSTOCK_PROCESS_COUNT", "PENSTOCK_PROCESS_INDEX"
"""The environment variables by which `penstock launch` tells each process its place."""
_SLURM = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
"""The variables that JAX needs all of. `srun` sets them; `salloc`, `sbatch` and a hook of ssh set some."""
_NAMES = {"slurm": "SLURM", "ompi": "Open MPI", "gcetpu": "TPU pod", "gketpu": "TPU pod", "tpu": "TPU pod", "": "Kubernetes"}


@dataclass(frozen=True)
class Place:
    """The place of this process in a run.

    Attributes:
      coordinator: the address of process 0; None if this process is alone.
      count: number of processes.
      index: of this process.
      how: who said so, for people.
      bind: the address at which process 0 listens; None for JAX's default.
      in_cluster: whether JAX may take the devices of this process from the cluster.
    """

    coordinator: str | None
    count: int
    index: int
    how: str
    bind: str | None = None
    in_cluster: bool = False


def find_place(coordinator: str | None, count: int | None, index: int | None, timeout: float) -> Place:
    """Return the place of this process.

    Args:
      coordinator, count, index: what the caller knows.
      timeout: seconds for the name of the coordinator to become known, on clusters that start slowly.

    Raises:
      ValueError: an argument is missing that nobody else knows.
      DistributedError: there is a cluster, but it does not tell all that is needed.
    """
    coordinator = coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS") or None
    given: dict[str, Any] = {"coordinator": coordinator, "count": count, "index": index}
    some = any(value is not None for value in given.values())
    if count == 1 or (not some and multiprocessing.parent_process() is not None):
        return Place(None, 1, 0, "count=1 was given" if count == 1 else "a worker process, which joins no others")
    known, how, in_cluster = _around(timeout, complete=None not in given.values())
    if not some and not known:
        return Place(None, 1, 0, how)
    found: dict[str, Any] = {name: known.get(name) if value is None else value for name, value in given.items()}
    if found["count"] == 1:
        return Place(None, 1, 0, how)
    missing = [name for name, value in found.items() if value is None]
    if missing:
        raise ValueError(
            f"ps.distributed needs {' and '.join(f'{name}=' for name in missing)} too, as no cluster was found that says it "
            f"({how}): give coordinator='host:port' of process 0, the count of processes, and the index of this one"
        )
    bind = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS") or (known.get("bind") if coordinator is None else None)
    how = how if not some else "arguments" if None not in given.values() else f"arguments and {how}"
    return Place(found["coordinator"], int(found["count"]), int(found["index"]), how, bind, in_cluster)


def _around(timeout: float, complete: bool) -> tuple[dict[str, Any], str, bool]:
    """Return what the environment knows, who that is, and whether it is a cluster of JAX.

    Args:
      timeout: see `find_place`.
      complete: whether nothing has to be known, so that a cluster is not asked for it.
    """
    if _heartbeat.is_launched() and COORDINATOR in os.environ:
        address = os.environ[COORDINATOR]
        place = {"coordinator": address, "count": int(os.environ[COUNT]), "index": int(os.environ[INDEX]), "bind": address}
        return place, "penstock launch", False
    for cluster in clusters():
        name = _NAMES.get(cluster.name, cluster.name)
        if name == "Kubernetes" and not _has_index_in_kubernetes():
            continue
        try:
            if not cluster.is_env_present():
                continue
            return ({} if complete else _ask(cluster, timeout)), name, True
        except Exception as error:  # of the clients of HTTP and Kubernetes, too
            raise DistributedError(
                f"this process runs under {name}, and JAX could not find out its place there: {error}. Give coordinator=, "
                "count= and index= to ps.distributed, or count=1 to train alone"
            ) from error
    return {}, _alone(), False


def _ask(cluster: Any, timeout: float) -> dict[str, Any]:
    count = cluster.get_process_count()
    if count == 1:
        return {"count": 1}
    port = os.environ.get("JAX_COORDINATOR_PORT")
    coordinator = cluster.get_coordinator_address(timeout_secs=max(1, int(timeout)), override_coordinator_port=port)
    return {"coordinator": coordinator, "count": count, "index": cluster.get_process_id()}


def _has_index_in_kubernetes() -> bool:
    """Return whether this is a pod of an indexed Job, which is the only kind that JAX can join.

    Raises:
      DistributedError: it is, and the package is missing by which JAX asks Kubernetes for the others.
    """
    if "KUBERNETES_SERVICE_HOST" not in os.environ or "JOB_COMPLETION_INDEX" not in os.environ:
        return False
    try:
        import kubernetes  # noqa: F401 - is it installed?
    except ImportError:
        raise DistributedError(
            "this is a pod of an indexed Job, and JAX finds the others by the package kubernetes, which is not installed: "
            'pip install "jax[k8s]", or call ps.distributed(count=1) to train alone'
        ) from None
    return True


def _alone() -> str:
    """Return why this process is alone, and warn if its job has more of them."""
    if any(name in os.environ for name in _SLURM):
        return _outside_of_srun(os.environ)
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return "a pod without JOB_COMPLETION_INDEX, which the pods of a Job with completionMode: Indexed have"
    return "no cluster was found"


def _outside_of_srun(environment: Mapping[str, str]) -> str:
    """Return what the variables of SLURM say, and warn if the job is meant to have several processes."""
    present = [name for name in _SLURM if name in environment]
    missing = [name for name in _SLURM if name not in environment]
    what = f"a SLURM job without srun: {', '.join(present)} set, {', '.join(missing)} not"
    tasks = environment.get("SLURM_NTASKS", "1")
    nodes = environment.get("SLURM_JOB_NUM_NODES", environment.get("SLURM_NNODES", "1"))
    if (tasks, nodes) != ("1", "1"):
        warnings.warn(
            f"this process trains alone, on its own devices, although its SLURM job has {tasks} tasks on {nodes} nodes. It was "
            f"not started by srun: {', '.join(present)} set, as by salloc and sbatch, and {', '.join(missing)} missing, which "
            "srun sets. Start it with `srun python train.py`; ps.distributed(count=1) says that it is meant to be alone",
            RuntimeWarning,
            stacklevel=6,
        )
    return what
