"""Turn a folder of JPEG files into epochs of device batches, with each library, as its users would write it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jax

import penstock as ps
from penstock_bench.suites.feed.batch import Batch
from penstock_bench.suites.feed.image_pipelines import epochs_of_torch
from penstock_bench.suites.feed.throughput import Epoch

BATCH = 64
SIZE = 224
_WORKERS = 2


def torch(folder: Path, device: jax.Device, seed: int) -> Epoch:
    from penstock_bench.suites.feed.torch_jpeg_loader import data_loader

    loader = data_loader(folder, SIZE, BATCH, seed, _WORKERS)
    return epochs_of_torch(loader, device)


def tf_data(folder: Path, device: jax.Device, seed: int) -> Epoch:
    import tensorflow as tf

    tf.config.set_visible_devices([], "GPU")  # it only makes host batches; the accelerator is JAX's
    files = sorted(map(str, folder.glob("*/*.jpg")))
    labels = [int(Path(file).parent.name.removeprefix("class-")) for file in files]

    def decode(file: Any, label: Any) -> Any:
        image = tf.io.decode_jpeg(tf.io.read_file(file), channels=3)
        shape = tf.shape(image)
        side = tf.minimum(shape[0], shape[1])
        image = tf.image.resize_with_crop_or_pad(image, side, side)
        image = tf.image.resize(image, (SIZE, SIZE), antialias=True)
        return {"image": tf.cast(tf.round(image), tf.uint8), "label": tf.cast(label, tf.int32)}

    ds = (
        tf.data.Dataset.from_tensor_slices((files, labels))
        .shuffle(len(files), seed=seed)
        .map(decode, num_parallel_calls=tf.data.AUTOTUNE)
        .batch(BATCH, drop_remainder=True)
        .prefetch(tf.data.AUTOTUNE)
    )

    def epoch(number: int) -> Iterator[Batch]:
        for batch in ds.as_numpy_iterator():  # each pass is shuffled anew
            yield jax.device_put(batch, device)

    return epoch


def penstock(folder: Path, device: jax.Device, seed: int, decoder: Literal["auto", "pil"] = "auto") -> Epoch:
    source = ps.images(folder, SIZE, decoder=decoder)

    def epoch(number: int) -> Iterator[Batch]:
        loader = ps.Loader(source, BATCH, shuffle=True, seed=seed + number, epochs=1, workers=_WORKERS)
        with ps.feed(loader, to=device) as batches:
            yield from batches

    return epoch
