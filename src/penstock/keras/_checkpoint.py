"""`Checkpoint`: a folder and the data of a `fit` of Keras go in; the `fit` is saved, and continues where it was."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import Any, Literal

import keras

from penstock._arguments import at_least, check_path, check_seconds
from penstock._feed.device_feed import Feed
from penstock.data.loader import Loader
from penstock.data.steps import Steps
from penstock.keras import _model_state
from penstock.keras._checkpoint_run import CheckpointRun, Settings, read_arrays
from penstock.keras._data_adapter import PenstockDataAdapter
from penstock.keras._hooks import install_fit
from penstock.keras._replace_iterator import enable_for_data
from penstock.train.checkpoint import CheckpointError, Checkpoints, require_orbax


class Checkpoint(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """A callback that saves a `fit`, also in the middle of an epoch, and continues it there when the same script runs again.

    Saved are all variables of the model, its seed generators, the optimizer and the metrics, the state of the callbacks, the
    history, and the position in the data. A run that was killed at any moment, and started again, ends with the weights, the logs
    and the history of one that was not, bit for bit: each record is trained as often, and in the same order. On another number of
    devices the arrays are sharded anew.

    The state of Keras's own callbacks is saved. A callback of yours is asked for its state if it has `get_state()`, which returns
    numbers, texts and arrays in lists and dicts, and `set_state(state)`, which may be called twice. Another one begins anew.

    SIGTERM and SIGINT save after the next batch, or at the end of a validation, and end the process with status 0. A run that
    was ended by `stop_training`, as by `EarlyStopping`, stays ended. One that is at its last epoch trains nothing more; with more
    `epochs` it goes on.

    Args:
      directory: the run folder, new or of this run.
      data: the data of `fit`: a Loader or Steps, or a `ps.feed` whose batches have a position. `pk.data(...)` of one of them too.
      save_freq: number of batches between two checkpoints, or "epoch". There is one at the end of training too.
      keep: number of newest checkpoints to keep, >= 1.
      best: "min NAME" or "max NAME" of a metric in the logs of an epoch, such as "min val_loss". An epoch that improves it is
        saved, and the best checkpoint is kept too, for `load`.
      grace: seconds between a signal and the moment when the process will be killed.

    Raises:
      TypeError, ValueError: an argument does not fit; from `fit`, if the data differs from that of the run.
      OtherStateError: from `fit`: the checkpoint is of another model. Its message lists what differs.
      OtherRunError: from `fit`: the folder is that of another run.
      CheckpointError: from `fit`: a checkpoint could not be written.
      Stopped: from `fit`: a signal came (a SystemExit with status 0).

    Examples:
      >>> import os, tempfile; os.environ["KERAS_BACKEND"] = "jax"
      >>> import keras, numpy as np, penstock as ps, penstock.keras as pk
      >>> loader = ps.Loader((np.ones((64, 4), "f"), np.ones(64, "f")), batch_size=16, shuffle=True)
      >>> model = keras.Sequential([keras.layers.Dense(1)])
      >>> model.compile("sgd", "mse")
      >>> checkpoint = pk.Checkpoint(tempfile.mkdtemp(), loader, save_freq=3)
      >>> history = model.fit(pk.data(loader), epochs=2, callbacks=[checkpoint], verbose=0)
      >>> model.fit(pk.data(loader), epochs=3, callbacks=[checkpoint], verbose=0).epoch  # continues with the third epoch
      [0, 1, 2]
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        data: Any,
        save_freq: int | Literal["epoch"] = "epoch",
        *,
        keep: int = 3,
        best: str | None = None,
        grace: float = 30.0,
    ):
        super().__init__()
        enable_for_data()
        require_orbax()
        install_fit(_fit)
        batches = data.batches if isinstance(data, PenstockDataAdapter) else data
        if not isinstance(batches, (Loader, Steps, Feed)):
            raise TypeError(
                f"pk.Checkpoint(directory, data) got a {type(batches).__name__}, whose position cannot be saved: "
                "give a ps.Loader, ps.Steps, or ps.feed(...) of batches with a state, the same that fit gets in pk.data(...)"
            )
        if save_freq != "epoch":
            at_least(1, "save_freq", save_freq)
        check_seconds("grace", grace)
        self.settings = Settings(check_path("directory", directory), batches, save_freq, at_least(1, "keep", keep), best, grace)
        self._goal = self.settings.goal  # raises ValueError for another text
        self._runs = False

    def load(self, model: Any, which: Literal["latest", "best"] = "best") -> Mapping[str, Any]:
        """Give a model, and its optimizer if it has one, the variables of a checkpoint.

        Args:
          model: a model like the one that was trained. It is built.
          which: "latest", or "best" of a run with `best=`.

        Returns:
          The record that was saved beside the arrays, such as "epoch" and "metric".

        Raises:
          ValueError: `which` is neither.
          CheckpointError: there is no such checkpoint.
          OtherStateError: the model is another one.
        """
        if which not in ("latest", "best"):
            raise ValueError(f"which={which!r}: choose from latest, best")
        with contextlib.closing(Checkpoints(self.settings.directory / "checkpoints", goal=self._goal)) as found:
            checkpoint = found.best() if which == "best" else found.latest()
        if checkpoint is None:
            raise CheckpointError(f"there is no {which} checkpoint in {self.settings.directory}")
        groups = ["model"]
        if getattr(model, "optimizer", None) is not None:
            model.optimizer.build(model.trainable_variables)
            groups.append("optimizer")
        _model_state.assign(model, read_arrays(checkpoint, model, groups), groups)
        return checkpoint.record

    def on_train_begin(self, logs: Any = None) -> None:
        """Raise RuntimeError if something else than Keras's own `fit` calls it."""
        if not self._runs:
            raise RuntimeError(
                "pk.Checkpoint saves the fit of Keras, and this model has a fit of its own that does not call that one"
            )


def _fit(fit: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Run Keras's `fit`, and save it if there is a `Checkpoint` among its callbacks."""
    given = arguments["callbacks"]
    callbacks = given.callbacks if isinstance(given, keras.callbacks.CallbackList) else keras.tree.flatten(given)
    found = [callback for callback in callbacks if isinstance(callback, Checkpoint)]
    if not found:
        return fit(**arguments)
    if len(found) > 1:
        raise ValueError(f"fit has {len(found)} callbacks pk.Checkpoint, and can continue from one only")
    (checkpoint,) = found
    checkpoint._runs = True
    try:
        return CheckpointRun(checkpoint.settings, arguments, callbacks).fit(fit)
    finally:
        checkpoint._runs = False
