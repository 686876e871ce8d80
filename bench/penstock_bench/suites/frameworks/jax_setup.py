"""Set up the parts that the JAX and the Keras variants share: the device, JAX's settings, the loader."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jaxlib.version
import numpy as np

import penstock as ps
from penstock_bench.model import VerificationError
from penstock_bench.suites.frameworks import jpeg
from penstock_bench.suites.frameworks.experiment import Experiment, Size
from penstock_bench.suites.frameworks.random_images import RandomImages
from penstock_bench.suites.frameworks.trainer import check_device, compile_cache
from penstock_bench.suites.frameworks.weights import HostBatch

_MATMUL_PRECISION = {"fp32": "highest", "tf32": "tensorfloat32", "bf16": "highest"}


def configure(precision: str) -> None:
    """Set JAX's options for the precision of an experiment."""
    device = jax.devices()[0]
    check_device("JAX", on_gpu=device.platform != "cpu")
    if precision == "tf32" and device.platform != "gpu":
        raise VerificationError("tf32 is of CUDA GPUs, and JAX has none here")
    _update("jax_default_matmul_precision", _MATMUL_PRECISION[precision])
    if cache := compile_cache("jax"):
        _update("jax_compilation_cache_dir", cache)
        _update("jax_persistent_cache_min_compile_time_secs", 0)
        _update("jax_persistent_cache_min_entry_size_bytes", -1)


def details(versions: dict[str, str]) -> dict[str, Any]:
    """Return a trainer's device, the versions of JAX and these libraries, and the compile cache."""
    device = jax.devices()[0]
    return {
        "device": f"{device.platform}: {device.device_kind}",
        "versions": {"jax": jax.__version__, "jaxlib": jaxlib.version.__version__, **versions},
        "compile cache": "on" if compile_cache("jax") else "off",
    }


def _update(option: str, value: Any) -> None:
    jax.config.update(option, value)  # JAX's own, without annotations


class Batches:
    """The part of a `Trainer` that handles batches, for trainers that use JAX."""

    warm_up = 1

    def __init__(self, experiment: Experiment, size: Size):
        self._experiment, self._size = experiment, size

    def place(self, batch: HostBatch) -> HostBatch:
        placed: HostBatch = jax.device_put(batch)
        self.wait(placed)
        return placed

    def wait(self, batch: HostBatch) -> None:
        jax.block_until_ready(batch)  # JAX's own, without annotations

    def loader(self) -> contextlib.AbstractContextManager[Iterator[HostBatch]]:
        return _feed(self._experiment, self._size)


@contextlib.contextmanager
def _feed(experiment: Experiment, size: Size) -> Iterator[ps.Feed]:
    """Return a feed of `HostBatch`es on the device."""
    geometry = size.geometry
    with contextlib.ExitStack() as stack:
        if experiment.data == "jpeg":
            paths = stack.enter_context(jpeg.folder(size.files))
            records = jpeg.JpegRecords(paths, geometry.classes)
            decode = ps.per_record(partial(_decoded, image=geometry.image))
            batches = ps.Loader(records, experiment.batch, transform=decode, workers=experiment.loader_workers)
        else:
            batches = ps.Loader(RandomImages(geometry.image, geometry.classes), experiment.batch)
        yield stack.enter_context(ps.feed(batches))


def _decoded(record: tuple[Any, np.ndarray], image: int) -> HostBatch:
    path, label = record
    return HostBatch(jpeg.decode(str(path), image), label)
