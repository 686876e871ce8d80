"""A training that breaks where a test says, and goes on from its checkpoints."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
from tests.keras.training import make_model, records

import penstock as ps
import penstock.keras as pk

EPOCHS = 3
VALIDATION = {"validation_data": records(16, seed=5), "epochs": 8}  # some callbacks end a training of these epochs early


class Broken(Exception):
    """Stands for a crash."""


class Watch(keras.callbacks.Callback):
    """A callback that breaks the training after a number of batches or epochs, and counts what it saw."""

    def __init__(self, after: int | None = None, after_epochs: int | None = None):
        super().__init__()
        self.after, self.after_epochs = after, after_epochs
        self.batches: list[int] = []
        self.epochs: list[int] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches.append(batch)
        if len(self.batches) == self.after:
            raise Broken

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.epochs.append(epoch)
        if len(self.epochs) == self.after_epochs:
            raise Broken


def loader(**options: Any) -> ps.Loader:
    """Return a Loader of 5 batches of 8 in an epoch."""
    return ps.Loader(records(), 8, **{"shuffle": True, "seed": 3, **options})


class Training:
    """A training that may be broken, and is then continued by objects that are all new.

    Args:
      folder: of the checkpoints; None for none.
      data: makes what `fit` and `Checkpoint` get.
      model: makes the model.
      callbacks: makes further callbacks.
      checkpoint: options of `Checkpoint`.
      options: of `fit`.
    """

    def __init__(self, folder, data=loader, model=make_model, callbacks=list, checkpoint=None, **options):
        self.folder, self.data, self.model, self.callbacks = folder, data, model, callbacks
        self.checkpoint = {"save_freq": 2, **(checkpoint or {})}
        self.options = {"epochs": EPOCHS, "verbose": 0, **options}
        self.watch = Watch()

    def run(self, folder=None, **breaks):
        """Return the history and all variables; None if the training was broken."""
        keras.utils.set_random_seed(7)
        self.trained, data, self.watch = self.model(), self.data(), Watch(**breaks)
        callbacks = [*self.callbacks(), self.watch]
        if folder is not None:
            callbacks.insert(0, pk.Checkpoint(folder, data, **self.checkpoint))
        try:
            history = self.trained.fit(pk.data(data), callbacks=callbacks, **self.options)
        except Broken:
            return None
        finally:
            if isinstance(data, ps.Feed):
                data.close()
        return (
            history.history,
            history.epoch,
            [np.asarray(v.value) for v in [*self.trained.variables, *self.trained.optimizer.variables]],
        )


def assert_same(one, other):
    assert one[0] == other[0]
    assert one[1] == other[1]
    for ours, theirs in zip(one[2], other[2], strict=True):
        np.testing.assert_array_equal(ours, theirs)


def assert_continues_exactly(training, breaks=(3, 6, 1), fresh=lambda: None):
    """Break a training after these numbers of batches, one after the other, and compare its end with that of an unbroken one."""
    unbroken = training.run()
    fresh()
    for after in breaks:
        assert training.run(training.folder, after=after) is None
    assert_same(training.run(training.folder), unbroken)
    assert training.watch.batches, "the last run has trained nothing"
