"""Define what a framework does for this suite: one class each, all with the methods of `Trainer`."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from penstock.bench.model import VerificationError
from penstock.bench.step_clock import StepClock
from penstock.bench.suites.frameworks.experiment import Experiment, Size
from penstock.bench.suites.frameworks.weights import HostBatch, Weights


class Trainer(Protocol):
    """A model with the canonical initial weights, and its training step.

    Attributes:
      details: what a reader may want to know, under the same names in all: "device" as in "cpu: cpu" and "gpu: NVIDIA H200",
        "versions", "compile cache", and "threads" where they can be told.
      warm_up: steps before those that take as long as all later ones. PyTorch's heap grows in its second step still, and longer
        where it has large blocks; the programs of XLA get their memory as one block, and take as many page faults in each step.
      looks_ahead: batches that `train` has taken when its first step begins, beyond that step's own.
    """

    details: dict[str, Any]
    warm_up: int
    looks_ahead: int

    def place(self, batch: HostBatch) -> Any:
        """Return the batch on the device, in the layout that the framework likes; it is there when this returns."""

    def logits(self, batch: Any) -> Any:
        """Compute logits [B, classes] as NumPy has them, float32."""

    def loss(self, batch: Any) -> float:
        """Train a step on a placed batch, and wait for its loss."""

    def train(self, batches: Iterator[Any], clock: StepClock) -> None:
        """Train a step on each placed batch, telling the clock when one is queued, until it wants no more and all have ended."""

    def weights(self) -> Weights:
        """Return the current parameters in canonical layout."""

    def loader(self) -> AbstractContextManager[Iterator[Any]]:
        """Load batches of the data for ever, as a good user of the framework does; they are as `place` returns them."""

    def wait(self, batch: Any) -> None:
        """Wait until a batch of the loader is on the device."""


MakeTrainer = Callable[[Experiment, Size], Trainer]


_DRIVER = Path("/proc/driver/nvidia/gpus")  # has an entry for each


@functools.cache
def nvidia_gpu() -> bool:
    """Tell whether there is an NVIDIA GPU that programs may use, without starting a framework."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    if (smi := shutil.which("nvidia-smi")) is None:  # as in some containers
        return _DRIVER.is_dir() and any(_DRIVER.iterdir())
    try:
        listed = subprocess.run([smi, "-L"], check=False, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return False
    return listed.returncode == 0 and "GPU" in listed.stdout


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


def cores() -> int:
    """Count the CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def compile_cache(compiler: str) -> str | None:
    """Return a folder for what a compiler wants to keep between processes; None where nothing is to be kept."""
    base = os.environ.get("PENSTOCK_BENCH_CACHE")
    if not base:
        return None
    folder = Path(base) / compiler
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder)
