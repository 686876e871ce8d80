"""Define the protocol `Trainer`, which this suite implements once for each framework."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from penstock.run_command import nvidia_gpu
from penstock_bench.model import VerificationError
from penstock_bench.step_clock import StepClock
from penstock_bench.suites.frameworks.experiment import Experiment, Size
from penstock_bench.suites.frameworks.weights import HostBatch, Weights


class Trainer(Protocol):
    """A model with the canonical initial weights, and its training step.

    Attributes:
      details: facts for the report, with the same keys in all frameworks: "device", such as "cpu: cpu" or "gpu: NVIDIA H200",
        "versions", "compile cache", and "threads" if their number is known.
      warm_up: number of first steps that take longer than later ones. PyTorch's heap still grows in the second step, and longer
        with large blocks. A program of XLA gets its memory as one block, and has as many page faults in each step.
    """

    details: dict[str, Any]
    warm_up: int

    def place(self, batch: HostBatch) -> Any:
        """Put a batch on the device, in the layout that the framework prefers, and wait until it is there."""

    def logits(self, batch: Any) -> Any:
        """Compute logits [B, classes] as a NumPy array, float32."""

    def loss(self, batch: Any) -> float:
        """Train a step on a placed batch, and wait for its loss."""

    def train(self, batches: Iterator[Any], clock: StepClock) -> None:
        """Train a step on each placed batch until the clock says to stop, and wait for the last step.

        Report each step to the clock after it was queued.
        """

    def weights(self) -> Weights:
        """Return the current parameters in canonical layout."""

    def loader(self) -> AbstractContextManager[Iterator[Any]]:
        """Return a context with endless batches, loaded as the framework's documentation advises, and placed as by `place`."""

    def wait(self, batch: Any) -> None:
        """Wait until a batch of the loader is on the device."""


MakeTrainer = Callable[[Experiment, Size], Trainer]


def check_device(framework: str, on_gpu: bool) -> None:
    """Check that a framework uses the GPU if there is one: all variants must run on the same device."""
    if nvidia_gpu() and not on_gpu:
        raise VerificationError(
            f"this installation of {framework} does not use the machine's GPU: install one with CUDA, or hide the GPU from all "
            'with CUDA_VISIBLE_DEVICES=""'
        )
    if on_gpu and not nvidia_gpu():
        raise VerificationError(
            f"{framework} uses a GPU here that the suite does not know of, so that others may not: make nvidia-smi work, or hide "
            "the GPU from all"
        )


def compile_cache(compiler: str) -> str | None:
    """Return the folder of a compiler's cache between processes; None if there is no cache."""
    base = os.environ.get("PENSTOCK_BENCH_CACHE")
    if not base:
        return None
    folder = Path(base) / compiler
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder)
