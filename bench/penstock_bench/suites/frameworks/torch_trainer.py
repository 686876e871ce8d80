"""Train in PyTorch on a CPU or one CUDA GPU, eager or compiled."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator

import numpy as np

from penstock_bench.activity import cores
from penstock_bench.model import VerificationError
from penstock_bench.step_clock import StepClock
from penstock_bench.suites.frameworks import heap
from penstock_bench.suites.frameworks.experiment import ADAMW_EPSILON, BETAS, LEARNING_RATE, WEIGHT_DECAY, Experiment, Size
from penstock_bench.suites.frameworks.trainer import check_device, compile_cache
from penstock_bench.suites.frameworks.weights import HostBatch, Weights, initial

if cache := compile_cache("inductor"):  # set before the import, which reads it
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", cache)

import torch
from torch import Tensor, nn

from penstock_bench.suites.frameworks.torch_data import data_loader
from penstock_bench.suites.frameworks.torch_vit import ViT, canonical, load

Placed = tuple[Tensor, Tensor]


def make_optimizer(name: str, model: nn.Module, fused: bool) -> torch.optim.Optimizer:
    """Return the optimizer. With `fused=True`, one kernel updates all parameters, which is PyTorch's fastest option."""
    if name == "sgd":
        return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, fused=fused)
    return torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=BETAS, eps=ADAMW_EPSILON, weight_decay=WEIGHT_DECAY, fused=fused
    )


def to_torch(batch: HostBatch) -> Placed:
    """Convert a batch: channels first, labels int64."""
    images = np.ascontiguousarray(batch.images.transpose(0, 3, 1, 2))
    return torch.from_numpy(images), torch.from_numpy(batch.labels.astype(np.int64))


class TorchTrainer:
    """The `Trainer` of PyTorch."""

    def __init__(self, experiment: Experiment, size: Size, compiled: bool):
        self._experiment, self._size = experiment, size
        self._cuda = torch.cuda.is_available()
        check_device("PyTorch", self._cuda)
        _set_precision(experiment.precision, self._cuda)
        torch.set_num_threads(min(torch.get_num_threads(), cores()))  # its own choice is one for each physical core
        self._device = torch.device("cuda" if self._cuda else "cpu")
        self._model = ViT(size.geometry, experiment.attention == "fused")
        load(self._model, initial(size.geometry))
        self._model.to(self._device)
        self._optimizer = make_optimizer(experiment.optimizer, self._model, fused=True)
        # The backward pass is compiled with the loss; the optimizer is one fused kernel.
        self._compute = _compile(self._forward) if compiled else self._forward
        grows = not self._cuda and _largest_block(experiment, size) > heap.LARGEST_KEPT
        if grows:
            heap.grow()
        self.warm_up = 3 if grows else 2
        self.details = {
            "device": f"gpu: {torch.cuda.get_device_name()}" if self._cuda else "cpu: cpu",
            "versions": {"torch": torch.__version__},
            "compile cache": "on" if compiled else "off",  # inductor's is always on
            "threads": torch.get_num_threads(),
        }

    def _forward(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss and the logits. One function computes both, so the compared program is the timed one."""
        # No autocast context for float32: within one, PyTorch does not cache the compiled backward pass for the next process.
        bf16 = self._experiment.precision == "bf16"
        with torch.autocast(self._device.type, torch.bfloat16) if bf16 else contextlib.nullcontext():
            logits = self._model(images)
        return nn.functional.cross_entropy(logits, labels), logits.detach()

    def place(self, batch: HostBatch) -> Placed:
        images, labels = to_torch(batch)
        return images.to(self._device), labels.to(self._device)

    def logits(self, batch: Placed) -> np.ndarray:
        _, logits = self._compute(*batch)
        return logits.cpu().numpy()

    def loss(self, batch: Placed) -> float:
        return self._step(batch).item()

    def train(self, batches: Iterator[Placed], clock: StepClock) -> None:
        clock.begin()
        for batch in batches:
            self._step(batch)
            self._tell(clock)
            if not clock.more():
                break
        clock.finish()

    def _step(self, batch: Placed) -> Tensor:
        loss, _ = self._compute(*batch)
        self._optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        self._optimizer.step()
        return loss.detach()

    def _tell(self, clock: StepClock) -> None:
        """Report a step to the clock. On a CPU, it has ended already; on CUDA, it ends with an event that is queued after it."""
        if not self._cuda:
            clock.ended()
            return
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        clock.queued(event.synchronize)

    def weights(self) -> Weights:
        return canonical(self._model)

    @contextlib.contextmanager
    def loader(self) -> Iterator[Iterator[Placed]]:
        with data_loader(self._experiment, self._size, pin_memory=self._cuda) as batches:
            iterator = iter(batches)
            try:
                yield (tuple(part.to(self._device, non_blocking=True) for part in batch) for batch in iterator)
            finally:
                if self._experiment.loader_workers:
                    # Before the files are deleted. A worker that is stopped within a batch may abort, which torch reports.
                    with contextlib.suppress(RuntimeError):
                        iterator._shutdown_workers()  # type: ignore[attr-defined]

    def wait(self, batch: Placed) -> None:
        if self._cuda:
            torch.cuda.synchronize()


def _largest_block(experiment: Experiment, size: Size) -> int:
    """Return the bytes of the largest activation, the hidden layer of an MLP.

    Blocks larger than `heap.LARGEST_KEPT` make the heap grow for several steps. Measured in ViT-small at batch 32: the first five
    steps take 1.8, 1.4, 1.2, 1.1 and 1.1 times as long as the later ones. They have 715, 337, 109, 92 and 49 thousand page
    faults. If the heap is large from the start, there are 720 and 120 thousand, and none from the third step on. The fourth step
    takes as long as all later ones. If glibc keeps all blocks, there are no page faults after the second step in any heap.
    """
    return experiment.batch * size.geometry.tokens * 4 * size.geometry.width * 4


def _set_precision(precision: str, cuda: bool) -> None:
    if precision == "tf32" and not cuda:
        raise VerificationError("tf32 is of CUDA GPUs, and PyTorch has none here")
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = precision == "tf32"  # convolutions have their own switch, which is on by default


def _compile(function: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    # The compiler imports deprecated modules when it is first called. The filter stays: setting it in each step would be timed.
    warnings.simplefilter("ignore")
    return torch.compile(function, backend="inductor", dynamic=False)
