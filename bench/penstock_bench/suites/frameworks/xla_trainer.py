"""Train in PyTorch/XLA: the same model as PyTorch's, traced lazily and compiled by XLA."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

os.environ["PJRT_DEVICE"] = "CPU"

import numpy as np
import torch
import torch_xla
import torch_xla.distributed.parallel_loader as parallel_loader
import torch_xla.runtime
from torch import Tensor, nn

from penstock_bench.activity import cores
from penstock_bench.step_clock import StepClock
from penstock_bench.suites.frameworks.experiment import Experiment, Size
from penstock_bench.suites.frameworks.torch_data import data_loader
from penstock_bench.suites.frameworks.torch_trainer import Placed, make_optimizer, to_torch
from penstock_bench.suites.frameworks.torch_vit import ViT, canonical, load
from penstock_bench.suites.frameworks.trainer import check_device, compile_cache
from penstock_bench.suites.frameworks.weights import HostBatch, Weights, initial


class XlaTrainer:
    """The `Trainer` of PyTorch/XLA."""

    warm_up = 1

    def __init__(self, experiment: Experiment, size: Size):
        self._experiment, self._size = experiment, size
        device_type = torch_xla.runtime.device_type().lower()
        check_device("torch_xla", on_gpu=device_type != "cpu")
        if cache := compile_cache("torch_xla"):
            torch_xla.runtime.initialize_cache(cache)
        # This is `torch_xla.backends.set_mat_mul_precision` without its warning against calling it twice.
        torch_xla._XLAC._xla_set_mat_mul_precision("highest")
        torch.set_num_threads(min(torch.get_num_threads(), cores()))
        self._device = torch_xla.device()
        model = ViT(size.geometry, fused=False)
        load(model, initial(size.geometry))
        self._model = model.to(self._device)
        self._optimizer = make_optimizer(experiment.optimizer, self._model, fused=False)  # XLA fuses
        self._zero_grad_and_sync()
        self.details = {
            "device": f"{device_type}: {device_type}",
            "versions": {"torch": torch.__version__, "torch_xla": torch_xla.__version__},
            "compile cache": "on" if cache else "off",
            "threads": torch.get_num_threads(),
        }

    def _zero_grad_and_sync(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        torch_xla.sync(wait=True)

    def _forward(self, images: Tensor) -> Tensor:
        with torch.autocast("xla", torch.bfloat16, enabled=self._experiment.precision == "bf16"):
            return self._model(images)

    def place(self, batch: HostBatch) -> Placed:
        images, labels = to_torch(batch)
        placed = images.to(self._device), labels.to(self._device)
        torch_xla.sync(wait=True)
        return placed

    def logits(self, batch: Placed) -> np.ndarray:
        with torch.no_grad():
            return self._forward(batch[0]).cpu().numpy()

    def loss(self, batch: Placed) -> float:
        return self._step(batch).item()

    def train(self, batches: Iterator[Placed], clock: StepClock) -> None:
        clock.begin()
        for batch in batches:
            # No step stays in flight: torch_xla always waits until all queued steps have ended. With another step queued, the
            # loss of the previous step arrived only when that other step had ended, too.
            self.loss(batch)
            clock.ended()
            if not clock.more():
                break
        clock.finish()

    def _step(self, batch: Placed) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self._forward(images), labels)
        self._optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss)
        self._optimizer.step()
        torch_xla.sync()  # compiles the operations traced so far to one program, and queues it
        return loss.detach()

    def weights(self) -> Weights:
        return canonical(self._model)

    @contextlib.contextmanager
    def loader(self) -> Iterator[Iterator[Placed]]:
        with data_loader(self._experiment, self._size, pin_memory=False) as batches:
            # Prefetch as many batches as JAX's feed. The default is 16, most of which would be loaded during the warm-up.
            uploaded = parallel_loader.MpDeviceLoader(batches, self._device, loader_prefetch_size=2, device_prefetch_size=1)
            iterator = iter(uploaded)
            try:
                yield (tuple(batch) for batch in iterator)
            finally:
                iterator._loader.close()  # otherwise its threads go on loading a million records

    def wait(self, batch: Placed) -> None:
        torch_xla.sync(wait=True)
