"""Turn records into epochs of device batches, with each library, as its users would write it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import penstock as ps
from penstock_bench.suites.feed.batch import Batch
from penstock_bench.suites.feed.throughput import Epoch

BATCH = 128


class Records(NamedTuple):
    """Images, uint8 [N, 28, 28, 1], and their labels, int32 [N]."""

    images: np.ndarray
    labels: np.ndarray


class _Source:
    """A data source with random access to single records, as Grain requires."""

    def __init__(self, records: Records):
        self._images, self._labels = records

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: Any) -> dict[str, Any]:
        return {"image": self._images[index], "label": self._labels[index]}


def _grain(records: Records, seed: int, threads: int | None = None) -> Any:
    import grain

    read_options = None if threads is None else grain.ReadOptions(num_threads=threads)
    return (
        grain.MapDataset.source(_Source(records))
        .seed(seed)
        .shuffle()
        .map(lambda r: {"image": r["image"].astype(np.float32) / 255.0, "label": r["label"]})
        .batch(batch_size=BATCH, drop_remainder=True)
        .to_iter_dataset(read_options)
    )


def grain_a(records: Records, device: jax.Device, seed: int) -> Epoch:
    def epoch(number: int) -> Iterator[Batch]:
        for batch in _grain(records, seed + number):
            yield jax.device_put(batch, device)

    return epoch


def grain_b(records: Records, device: jax.Device, seed: int) -> Epoch:
    import grain

    def epoch(number: int) -> Iterator[Batch]:
        ds = grain.experimental.ThreadPrefetchIterDataset(_grain(records, seed + number), prefetch_buffer_size=4)
        return iter(ds.map(lambda batch: jax.device_put(batch, device)))

    return epoch


def grain_c(records: Records, device: jax.Device, seed: int, threads: int | None = None) -> Epoch:
    import grain

    def epoch(number: int) -> Iterator[Batch]:
        ds = _grain(records, seed + number, threads)
        return iter(grain.experimental.device_put(ds=ds, device=device, cpu_buffer_size=4, device_buffer_size=2))

    return epoch


def torch(records: Records, device: jax.Device, seed: int, workers: int) -> Epoch:
    from penstock_bench.suites.feed.torch_image_loader import data_loader

    loader = data_loader(records.images, records.labels, BATCH, seed, workers)
    return epochs_of_torch(loader, device)


def epochs_of_torch(loader: Any, device: jax.Device) -> Epoch:
    """Return a function that yields the batches of one pass over a `DataLoader`, on the device."""

    def epoch(number: int) -> Iterator[Batch]:
        for images, labels in loader:  # each pass is shuffled anew
            yield jax.device_put({"image": images.numpy(), "label": labels.numpy()}, device)

    return epoch


def tf_data(records: Records, device: jax.Device, seed: int) -> Epoch:
    import tensorflow as tf

    tf.config.set_visible_devices([], "GPU")  # it only makes host batches; the accelerator is JAX's

    def scale(record: Any) -> Any:
        return {"image": tf.cast(record["image"], tf.float32) / 255.0, "label": record["label"]}

    ds = (
        tf.data.Dataset.from_tensor_slices({"image": records.images, "label": records.labels})
        .shuffle(len(records.labels), seed=seed)
        .map(scale, num_parallel_calls=tf.data.AUTOTUNE)
        .batch(BATCH, drop_remainder=True)
        .prefetch(tf.data.AUTOTUNE)
    )

    def epoch(number: int) -> Iterator[Batch]:
        for batch in ds.as_numpy_iterator():  # each pass is shuffled anew
            yield jax.device_put(batch, device)

    return epoch


def numpy_loop(records: Records, device: jax.Device, seed: int) -> Epoch:
    def epoch(number: int) -> Iterator[Batch]:
        order = np.random.default_rng(seed + number).permutation(len(records.labels))
        for start in range(0, len(order) - BATCH + 1, BATCH):
            indices = order[start : start + BATCH]
            images = records.images[indices].astype(np.float32) / 255.0
            yield jax.device_put({"image": images, "label": records.labels[indices]}, device)

    return epoch


def scale_on_device(batch: Batch) -> Batch:
    """Scale a batch of uint8 images; the transform of a feed."""
    return {"image": batch["image"].astype(jnp.float32) / 255.0, "label": batch["label"]}


def _scale_on_host(batch: Batch) -> Batch:
    return {"image": batch["image"].astype(np.float32) / 255.0, "label": batch["label"]}


def penstock(records: Records, device: jax.Device, seed: int) -> Epoch:
    def epoch(number: int) -> Iterator[Batch]:
        data = {"image": records.images, "label": records.labels}
        loader = ps.Loader(data, BATCH, shuffle=True, seed=seed + number, epochs=1)
        with ps.feed(loader, to=device, host_buffer=4, device_buffer=2, transform=scale_on_device) as batches:
            yield from batches

    return epoch


def penstock_host(records: Records, device: jax.Device, seed: int) -> Epoch:
    def epoch(number: int) -> Iterator[Batch]:
        data = {"image": records.images, "label": records.labels}
        loader = ps.Loader(data, BATCH, shuffle=True, seed=seed + number, epochs=1, transform=_scale_on_host)
        with ps.feed(loader, to=device, host_buffer=4, device_buffer=2) as batches:
            yield from batches

    return epoch
