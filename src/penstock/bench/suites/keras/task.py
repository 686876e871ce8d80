"""Define what is run and for how long: all that the two variants have in common.

Words: a *task* is a model with its input; its *geometry* is how large the model is, "small" for a CPU of two cores and "full"
as it was published; a *job* is what a worker process makes of a task.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

Geometry = Literal["small", "full"]


@dataclass(frozen=True)
class Size:
    """The size of a job, and how many steps it has.

    Attributes:
      batch: records in a batch.
      steps: in the epoch that is timed.
      warm_up: steps before it, the first of which compiles.
    """

    geometry: Geometry
    batch: int
    steps: int
    warm_up: int


@dataclass(frozen=True)
class Job:
    """A compiled model and what `fit` or `predict` gets, which is an epoch of the size's steps.

    Attributes:
      inputs: arguments by name, `x` among them.
      batches: where the input is made batch by batch, what makes them, which knows the thread that did.
    """

    model: Any
    inputs: Mapping[str, Any]
    batches: Any = None


MakeJob = partial[Job]  # from a Size


@dataclass(frozen=True)
class Task:
    """A model with its input, and what threaded epochs should reach for it.

    Attributes:
      title: what is done; "{batch}" stands for that field of the size.
      batch, steps: of the small size.
      make: imports Keras, so it runs in worker processes only.
      bound: what threaded epochs are to reach, as a multiple of the time that a step takes without them.
      each_step: the user has a callback that Keras calls after each step, with the loss as a number: it waits for the step.
      full: there is a geometry that is larger than "small".
    """

    name: str
    title: str
    method: Literal["fit", "predict"]
    batch: int
    steps: int
    make: MakeJob
    bound: float = 1.01
    each_step: bool = False
    full: bool = True
