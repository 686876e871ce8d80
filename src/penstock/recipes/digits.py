"""The recipe `penstock train digits`: train a small Vision Transformer on handwritten digits.

Command line options go in; a run folder with metrics.jsonl and training.png comes out.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import penstock as ps
from penstock._doctor.jaxlib_faults import warn_of_known_faults
from penstock.data.tree import Batch
from penstock.recipes import images
from penstock.recipes.interrupt import ctrl_c_at_checks

if TYPE_CHECKING:
    from penstock.recipes.classifier import Classifier, State, Totals
    from penstock.recipes.log import Log

DESCRIPTION = """\
Train a small Vision Transformer on the 1,797 handwritten digits (8x8 pixels) that scikit-learn carries, on all
devices that JAX finds. It reaches 98 % and more on the 360 images held out for validation, in half a minute on two CPU
cores. The same flags on the same machine give the same numbers.

The run folder gets metrics.jsonl, a line of JSON for every log point (step, loss, accuracy, val_accuracy,
steps_per_second, input_wait), and training.png, which shows what was learnt and where the time of a step went.
Ctrl-C keeps what was measured so far; a second one ends at once."""

_STEPS, _BATCH_SIZE, _SEED = 1000, 64, 0
_LARGEST_SEED = 2**32 - 1  # JAX keeps 32 bits of a seed
_NEEDS = ("flax", "optax", "sklearn", "matplotlib")


class CannotStartError(ValueError):
    """An error before a run begins: one line with the reason and the remedy."""


@dataclass(frozen=True)
class Result:
    """The result of a training.

    Attributes:
      val_accuracy: share of the validation images that were classified correctly, 0 to 1.
      seconds: wall-clock time of `train`, including compilation.
      verdict: the verdict of the feed in one sentence.
      out: the run folder.
    """

    val_accuracy: float
    seconds: float
    verdict: str
    out: Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `penstock train digits` to its parser."""
    parser.add_argument("--steps", type=int, default=_STEPS, metavar="N", help="training steps (default: %(default)s)")
    parser.add_argument(
        "--batch-size",
        type=int,
        default=_BATCH_SIZE,
        metavar="N",
        help=f"images of a step: at most {images.TRAINING_IMAGES}, a multiple of the number of devices (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=_SEED,
        metavar="N",
        help="of parameters, order and augmentation, 0 to 2^32 - 1 (default: %(default)s)",
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="run folder, new or empty (default: runs/digits-<date-time>)")
    parser.add_argument("--quiet", action="store_true", help="no progress bar, only the result")


def run(args: argparse.Namespace) -> int:
    """Train with the given arguments and print the result.

    Returns:
      The exit status: 0, or 2 if the arguments cannot be used.
    """
    try:
        result = train(args.steps, args.batch_size, args.seed, args.out, args.quiet)
    except CannotStartError as error:
        print(f"penstock train digits: error: {error}", file=sys.stderr)
        return 2
    accuracy = f"{result.val_accuracy:.2%}".replace("%", " %")
    print(f"validation accuracy {accuracy} at step {args.steps:,}; {result.seconds:.1f} s in all")
    print(f"input: {result.verdict}")
    print(f"files: {result.out / 'metrics.jsonl'}, {result.out / 'training.png'}")
    return 0


def train(
    steps: int = _STEPS, batch_size: int = _BATCH_SIZE, seed: int = _SEED, out: str | Path | None = None, quiet: bool = False
) -> Result:
    """Train the Vision Transformer and write `metrics.jsonl` and `training.png` to the run folder.

    Args:
      steps: number of training steps, >= 1.
      batch_size: images in a step over all devices; a multiple of the number of devices.
      seed: seed of parameters, order and augmentation, 0 to 2**32 - 1. The split into training and validation images does not
        depend on it.
      out: run folder, new or empty; None makes `runs/digits-<date-time>`.
      quiet: whether to show no progress bar.

    Returns:
      A `Result`.

    Raises:
      CannotStartError: an argument cannot be used, or a library is not installed.
      KeyboardInterrupt: Ctrl-C was pressed. The measurements so far are in the run folder.
    """
    begun = time.perf_counter()
    _check(steps, batch_size, seed)
    folder = _new_folder(out)
    warn_of_known_faults()
    from penstock.recipes.log import Log

    with ctrl_c_at_checks() as check, Log(folder / "metrics.jsonl", steps, quiet) as log:
        try:
            verdict = _train(steps, batch_size, seed, log, check)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(_interrupted(log, folder)) from None
        finally:
            _draw(log, folder / "training.png", f"Digits: {steps:,} × {batch_size} images, seed {seed}")
    return Result(log.points[-1].val_accuracy or 0.0, time.perf_counter() - begun, verdict, folder)


def _train(steps: int, batch_size: int, seed: int, log: Log, check: Callable[[], None]) -> str:
    from penstock.recipes import loop
    from penstock.recipes.classifier import compile_classifier

    # Auto: the compiler chooses the shardings between inputs and outputs.
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    sharded = NamedSharding(mesh, PartitionSpec("data"))
    data = images.load()
    training = ps.Loader(data.training, batch_size, shuffle=True, seed=seed, transform=images.shift)
    validation = ps.Loader(data.validation, _validation_batch_size(mesh.size), epochs=1, remainder="pad")
    check()
    classifier = compile_classifier(mesh, _abstract(training[0], sharded), _abstract(validation[0], sharded), steps, seed)
    check()
    # The loop starts all steps of a log interval in one go, so their batches should be ready.
    with ps.feed(training, to=sharded, transform=images.scale, device_buffer=loop.LOG_EVERY) as batches:
        loop.run(classifier, batches, lambda state: _validate(classifier, state, validation, sharded), steps, log, check)
        return batches.stats().verdict


def _validate(classifier: Classifier, state: State, loader: ps.Loader, sharding: NamedSharding) -> Totals:
    totals = classifier.zero
    with ps.feed(loader, to=sharding, transform=images.scale) as batches:
        for batch in batches:
            totals = classifier.evaluate(state.parameters, totals, batch)
    return totals


def _validation_batch_size(devices: int) -> int:
    """Return about 128, a multiple of the number of devices. With a tiny `batch_size`, a validation would take very long."""
    return -(-128 // devices) * devices


def _abstract(batch: Batch, sharding: NamedSharding) -> Batch:
    """Return the shapes and dtypes of a batch after the transform of the feed."""
    leaves = jax.eval_shape(images.scale, batch)
    return {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding) for name, leaf in leaves.items()}


def _check(steps: int, batch_size: int, seed: int) -> None:
    if missing := [name for name in _NEEDS if find_spec(name) is None]:
        raise CannotStartError(f'{", ".join(missing)} not installed: pip install "penstock[train]"')
    for flag, value in (("--steps", steps), ("--batch-size", batch_size)):
        if value < 1:
            raise CannotStartError(f"{flag} {value}: needs an integer >= 1")
    if not 0 <= seed <= _LARGEST_SEED:
        raise CannotStartError(f"--seed {seed}: needs an integer from 0 to {_LARGEST_SEED}")
    if batch_size > images.TRAINING_IMAGES:
        raise CannotStartError(
            f"--batch-size {batch_size}: there are {images.TRAINING_IMAGES} training images; use at most as many"
        )
    try:
        devices = jax.device_count()
    except RuntimeError as error:  # its first line has the reason
        raise CannotStartError(f"JAX finds no device: {str(error).splitlines()[0]}") from error
    if batch_size % devices:
        nearest = max(1, batch_size // devices) * devices
        raise CannotStartError(
            f"--batch-size {batch_size}: does not divide over {devices} devices; use a multiple, such as {nearest}"
        )


def _new_folder(out: str | Path | None) -> Path:
    folder = _unused_folder() if out is None else Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        occupied = any(folder.iterdir())
        tempfile.TemporaryFile(dir=folder).close()  # fails now, and not at the first log point, if the folder is not writable
    except OSError as error:
        raise CannotStartError(f"--out {folder}: no folder to write to ({error.strerror}); name another one") from error
    if occupied:
        raise CannotStartError(f"--out {folder}: holds files already; name a folder that does not exist yet, or empty it")
    return folder


def _unused_folder() -> Path:
    name = f"digits-{datetime.now():%Y%m%d-%H%M%S}"
    names = itertools.chain([name], (f"{name}-{n}" for n in itertools.count(2)))
    return next(folder for folder in (Path("runs") / name for name in names) if not folder.exists())


def _draw(log: Log, path: Path, title: str) -> None:
    from penstock.recipes.plot import draw

    if log.points:
        draw(log.points, path, title)


def _interrupted(log: Log, folder: Path) -> str:
    if not log.points:
        return "interrupted before the first log point: nothing was measured"
    return f"interrupted; metrics.jsonl and training.png up to step {log.points[-1].step} are in {folder}"
