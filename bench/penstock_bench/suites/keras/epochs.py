"""Switch between the two variants, Keras alone and with penstock's threaded epochs, and check which of them was used."""

from __future__ import annotations

from statistics import fmean
from typing import Any, Literal

from penstock_bench.model import VerificationError
from penstock_bench.suites.keras.task import Job

Epochs = Literal["default", "threaded"]


def begin(epochs: Epochs) -> Any:
    """Turn the variant on as a user does; return the `ThreadedEpochs`, or None for Keras alone."""
    if epochs == "default":
        return None
    import penstock.keras

    return penstock.keras.enable_threaded_epochs()


def waited(threaded: Any, job: Job, step: float) -> dict[str, float]:
    """Return the share of the timed epoch that the training thread waited for its input; `step` is the seconds of a step."""
    name = "share of waiting for input"
    if threaded is not None:
        return {name: threaded.stats()[-1].wait_share}
    return {} if job.batches is None else {name: fmean(took for _, took in job.batches.made) / step}


def check_iterator(epochs: Epochs) -> None:
    """Check that Keras uses the epoch iterator of the variant.

    Raises:
      VerificationError: Keras uses another epoch iterator.
    """
    from keras.src.backend.jax import trainer

    owner: str = trainer.JAXEpochIterator.__module__
    if owner.partition(".")[0] != {"default": "keras", "threaded": "penstock"}[epochs]:
        raise VerificationError(f"Keras's epochs were to be {epochs}, but {owner} makes their iterator")


_LOOKED_AT = 2  # batches that the main thread may make beforehand, to see their shapes


def check_threads(epochs: Epochs, job: Job) -> None:
    """Check that the batches of the last epoch were made on the variant's thread.

    Raises:
      VerificationError: batches were made on another thread.
    """
    if job.batches is None:
        return
    elsewhere = sum(not on_main for on_main, _ in job.batches.made)
    here = len(job.batches.made) - elsewhere
    if (here > _LOOKED_AT or not elsewhere) if epochs == "threaded" else (elsewhere or not here):
        raise VerificationError(
            f"epochs were to be {epochs}, but {here} batches were made on the main thread and {elsewhere} on others"
        )
