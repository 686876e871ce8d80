"""Define tasks, sizes and jobs, which the two variants share.

A *task* is a model with its input. Its *geometry* is the size of the model: "small" for a CPU with two cores, or "full" as
published. A *job* is the compiled model and the input, made from a task in a worker process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

Geometry = Literal["small", "full"]


@dataclass(frozen=True)
class Size:
    """The size of a job, and the number of its steps.

    Attributes:
      geometry: "small" or "full".
      batch: records in a batch.
      steps: steps in an epoch; a block ends earlier if they take longer than it should.
      warm_up: steps of the first epoch, which compiles and gives the evidence.
      skip: steps at the start of each block that are not timed, while threaded epochs fill their buffer.
    """

    geometry: Geometry
    batch: int
    steps: int
    warm_up: int
    skip: int


@dataclass(frozen=True)
class Job:
    """A compiled model, and the input of `fit` or `predict` for one epoch.

    Attributes:
      model: the compiled Keras model.
      inputs: keyword arguments of `fit` or `predict`, such as `x`.
      batches: the `Batches` if the input is made batch by batch; it records the thread that made each batch. None otherwise.
    """

    model: Any
    inputs: Mapping[str, Any]
    batches: Any = None


MakeJob = partial[Job]  # from a Size


@dataclass(frozen=True)
class Task:
    """A model with its input, and the target for threaded epochs.

    Attributes:
      name: the name of the workload.
      title: a description; "{batch}" is replaced by that field of the size.
      method: the method of the model that is timed.
      batch, steps: of the small size.
      make: makes the job. It imports Keras, so it runs in worker processes only.
      bound: the target for the time of a step with threaded epochs, as a multiple of the time without them.
      each_step: whether there is a callback after each step that gets the loss as a number, so that Keras waits for the step.
      sleeps: whether its input sleeps, as if it waited for storage.
      full: whether the task also has the geometry "full".
    """

    name: str
    title: str
    method: Literal["fit", "predict"]
    batch: int
    steps: int
    make: MakeJob
    bound: float = 1.01
    each_step: bool = False
    sleeps: bool = False
    full: bool = True
