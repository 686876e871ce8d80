"""A callback that saves a `fit` of Keras while it runs, and continues it where it was: `Checkpoint`.

There are two kinds of places at which a `fit` is saved, and from which it continues:

- *In an epoch*, between two executions of the train function. The epoch iterator calls `before_execution` when all callbacks
  have had the last batch, and the next batch has come but no callback has been told of it. So there always is a next batch.
  Keras begins such an epoch again, and resets its metrics: all variables and callbacks get their saved state when all callbacks
  have had `on_epoch_begin`.
- *Between two epochs*, when all callbacks have had `on_epoch_end`. They get their state after `on_train_begin`.

Variables get their values before `on_train_begin` too, so that no callback sees others. `fit` is given the epoch to begin with as
`initial_epoch`; the epoch iterator begins at the saved batch.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

import jax
import keras

from penstock._arguments import at_least, check_path, check_seconds
from penstock._stopping import Stopped, Stopping
from penstock.data.loader import Loader
from penstock.data.steps import Steps
from penstock.errors import CheckpointError
from penstock.feed.device_feed import Feed, check_state
from penstock.keras import variables
from penstock.keras.callback_state import CallbackStates, continued_files, named, placed, sharding_on_host
from penstock.keras.data_adapter import PenstockDataAdapter
from penstock.keras.hooks import install_fit
from penstock.keras.replace_iterator import enable_for_data
from penstock.keras.session import Position, expect
from penstock.train.agreement import Agreement
from penstock.train.checkpoint import Checkpoint as Saved
from penstock.train.checkpoint import Checkpoints, require_orbax, restore
from penstock.train.run_folder import RunFolder, continuing
from penstock.train.schedule import Goal

_OF_CALLBACKS = "callbacks/"


class Checkpoint(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
    """A callback that saves a `fit`, also in the middle of an epoch, and continues it there when the same script runs again.

    It saves all variables of the model, its seed generators, the optimizer and the metrics. It also saves the state of the
    callbacks, the history, and the position in the data. A run that was killed at any moment, and started again, ends with the
    weights, the logs and the history of one that was not, bit for bit: each record is trained as often, and in the same order.
    On another number of devices the arrays are sharded anew.

    The state of Keras's own callbacks is saved. Your callback can have a state too, with `get_state()` and `set_state(state)`. A
    state is made of numbers, texts and arrays in lists and dicts, and may be set twice. Other callbacks begin anew.

    SIGTERM and SIGINT save after the next batch, or at the end of a validation, and end the process with status 0. A run that
    was ended by `stop_training`, as by `EarlyStopping`, stays ended. One that is at its last epoch trains nothing more; with more
    `epochs` it continues.

    Args:
      directory: the run folder, new or of this run.
      data: the data of `fit`: a Loader, Steps, or a `ps.feed` whose batches have a position; or `pk.data(...)` of one of them.
      save_freq: number of batches between two checkpoints, or "epoch". There is one at the end of training too.
      keep: number of newest checkpoints to keep, >= 1.
      best: "min NAME" or "max NAME" of a metric in the logs of an epoch, such as "min val_loss". An epoch that improves it is
        saved, and the best checkpoint is kept too, for `load`.
      grace: seconds between a signal and the moment when the process will be killed.

    Raises:
      TypeError, ValueError: an argument does not fit; from `fit`, if the run had other data.
      OtherStateError: from `fit`: the checkpoint is of another model. Its message lists what differs.
      OtherRunError: from `fit`: the folder belongs to another run.
      CheckpointError: from `fit`: a checkpoint could not be written, or none of the run can be used.
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
          CheckpointError: there is no such checkpoint, or none can be used.
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
        variables.assign(model, read_arrays(checkpoint, model, groups), groups)
        return checkpoint.record

    def on_train_begin(self, logs: Any = None) -> None:
        """Raise RuntimeError if anything but Keras's own `fit` calls it."""
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


@dataclass(frozen=True)
class Settings:
    """The arguments of a `Checkpoint`. `batches` is the Loader, Steps or Feed from which `fit` gets its data."""

    directory: Path
    batches: Any
    save_freq: int | Literal["epoch"]
    keep: int
    best: str | None
    grace: float

    @property
    def goal(self) -> Goal | None:
        """Return the metric of the best checkpoint, and its direction."""
        return Goal.parse(self.best, "best") if self.best is not None else None


class CheckpointRun:
    """One `fit` that is saved: the `Saver` of its epoch iterator.

    Args:
      arguments: the arguments of `fit`, with the model as "self".
      callbacks: the callbacks among them, as a list.

    Attributes:
      iterator: the epoch iterator of the `fit`, once there is one.
    """

    checkpoints: Checkpoints
    iterator: Any = None

    def __init__(self, settings: Settings, arguments: Mapping[str, Any], callbacks: Sequence[Any]):
        named(callbacks)  # raises TypeError for half a protocol
        for callback in callbacks:
            if isinstance(callback, keras.callbacks.BackupAndRestore):
                raise ValueError("pk.Checkpoint does what BackupAndRestore does: leave that one out of the callbacks")
        self._settings, self._arguments, self._given = settings, arguments, callbacks
        self.model = arguments["self"]
        self._epochs = min(arguments["epochs"], keras.config.max_epochs() or arguments["epochs"])
        self._goal = settings.goal
        self._epoch = arguments["initial_epoch"]
        self._base = 0  # batches trained before
        self._saved = 0  # the number of trained batches of the last checkpoint
        self._best: float | None = None
        self._resumes_in_epoch = False
        self._arrays: dict[str, Any] = {}  # of the checkpoint, until they are in their places

    def fit(self, fit: Callable[..., Any]) -> Any:
        """Run the `fit` of Keras, from where the run is."""
        with contextlib.ExitStack() as stack:
            self._stopping = stack.enter_context(Stopping(self._settings.grace))
            self._stopping.last_line = self._last_line
            folder = stack.enter_context(RunFolder(self._settings.directory, self._config()))
            self.checkpoints = Checkpoints(folder.checkpoints, keep=self._settings.keep, goal=self._goal)
            stack.callback(self.checkpoints.close)
            self._agreement = stack.enter_context(Agreement(self._stopping))
            self._found = self.checkpoints.latest()
            self._read_record()
            stack.callback(self._end)
            self._stopping.loops += 1
            self._callbacks = CheckpointedCallbacks(self, self._given, self._arguments["verbose"], self._epochs)
            expect(self)
            try:
                return fit(**{**self._arguments, "callbacks": self._callbacks, "initial_epoch": self._epoch})
            except Stopped as stopped:
                self._say(f"{self._stopping.requested}: {self._kept(stopped.step)}; {self._stopping.how_to_continue()}")
                raise

    def _config(self) -> dict[str, Any]:
        """Return the settings that fix how batches and steps of an epoch are counted, and must stay the same."""
        return {
            "kind": "model.fit of Keras",
            "steps_per_epoch": self._arguments["steps_per_epoch"],
            "steps_per_execution": self.model.steps_per_execution,
        }

    def _read_record(self) -> None:
        """Read from the checkpoint the part that is needed before `fit` begins, such as the position of a Feed."""
        if self._found is None:
            return
        record = self._found.record
        self._base = self._saved = self._found.step
        self._best = record["best"] if record["goal"] == self._settings.best else None  # it may have been another one
        self._epoch = self._epochs if record["stopped"] else record["epoch"]
        self._resumes_in_epoch = record["in_epoch"] and self._epoch < self._epochs
        batches = self._settings.batches
        with continuing(self._found.path):
            if not isinstance(batches, Feed):
                check_state(record["position"]["feed"], PenstockDataAdapter(batches, None).state(0)["of"])
            elif batches.state() != record["position"]["feed"]:  # a second `fit` may have the feed of the first one
                batches.restore(record["position"]["feed"])

    def attach(self, iterator: Any) -> Position | None:
        """Note the epoch iterator of the `fit`, and return the position where it begins; see `Saver`."""
        data = getattr(iterator.data_adapter, "batches", None)
        if data is not self._settings.batches:
            wanted, found = type(self._settings.batches).__name__, type(self._arguments["x"]).__name__
            if data is not None:
                found = f"another {type(data).__name__}"
            raise TypeError(
                f"pk.Checkpoint was given a {wanted}, whose position it saves, and fit was given {found}: give both the same "
                "object, model.fit(pk.data(loader), callbacks=[pk.Checkpoint(directory, loader)])"
            )
        self.iterator = iterator
        return None if self._found is None else Position(**self._found.record["position"])

    @contextlib.contextmanager
    def beginning(self, callbacks: Sequence[Any]) -> Iterator[None]:
        """Surround `on_train_begin` of the callbacks."""
        states: Mapping[str, Any] = {}
        if self._found is not None:
            states = self._found.record["callbacks"]
            self._arrays = read_arrays(self._found, self.model)
            variables.assign(self.model, self._arrays)
            if self._arguments["verbose"] != 0:
                self._say(self._where_it_continues(self._found))
        with continued_files(callbacks, states):
            yield
        self._states = CallbackStates(callbacks)
        self._states.set(states, self._of_callbacks())
        if not self._resumes_in_epoch:
            self._arrays = {}

    def after_epoch_begin(self, epoch: int) -> None:
        """Continue in the middle of the epoch, if it was saved there. All callbacks have had `on_epoch_begin`."""
        if self._found is not None and epoch != self._epoch:
            raise ValueError(
                f"fit begins with epoch {epoch}, and {self._found.path} with epoch {self._epoch}: leave out other callbacks "
                "that set it"
            )
        self._epoch = epoch
        if not self._resumes_in_epoch:
            return
        assert self._found is not None
        self._resumes_in_epoch = False
        if any(array.is_deleted() for array in self._arrays.values()):  # by an `evaluate` in a callback, which donates them
            self._arrays = read_arrays(self._found, self.model)
        variables.assign(self.model, self._arrays)
        self._states.set(self._found.record["callbacks"], self._of_callbacks())
        self._arrays = {}

    @contextlib.contextmanager
    def awaiting(self, position: Position) -> Iterator[None]:
        """Surround the wait for a batch: a signal or an error saves the state after the last trained one; see `Saver`."""
        single = jax.process_count() == 1  # several processes have to reach the same step first
        trained = self._trained  # a batch with an error is counted as taken
        try:
            with self._stopping.telling(self.iterator.interrupt if single else lambda: None):
                yield
        except Exception:
            # Without a length, nothing says that there is a next batch, as an epoch that continues here needs.
            if single and self.iterator.num_batches is not None:
                with contextlib.suppress(Exception):
                    self._save(position, trained, in_epoch=True)
                    self.checkpoints.wait()
            if single and self._stopping.requested:
                self._end_by_signal()
            raise

    def before_execution(self, position: Position) -> None:
        """Save if it is time to, and end if a signal came; see `Saver`."""
        self.checkpoints.check()
        self._stopping.has_steps_to_save = self.iterator.trained > 0
        stops = self._agreement.must_stop()
        if stops or self._is_due():
            self._save(position, self._trained, in_epoch=True)
        if stops:
            self._end_by_signal()

    def after_epoch_end(self, epoch: int, logs: Mapping[str, Any]) -> None:
        """Save between two epochs if it is time to, and end if a signal came. All callbacks have been told of the end."""
        self.checkpoints.check()
        metric, improved = self._metric(logs), False
        if self._goal is not None and metric is not None and not math.isnan(metric):
            improved = self._best is None or self._goal.better(metric, self._best)
            self._best = metric if improved else self._best
        stops, last = self._agreement.must_stop(), self.model.stop_training or epoch + 1 >= self._epochs
        self._epoch = epoch + 1
        if stops or last or improved or self._settings.save_freq == "epoch" or self._is_due():
            self._save(self.iterator.position(None), self._trained, in_epoch=False, metric=metric)
        if stops:
            self._end_by_signal()
        if last:
            self._stopping.has_steps_to_save = False

    @property
    def _trained(self) -> int:
        """Return the number of batches that were trained, with those before a restart."""
        return self._base + (self.iterator.trained if self.iterator is not None else 0)

    def _is_due(self) -> bool:
        every = self._settings.save_freq
        return every != "epoch" and self._trained // every > self._saved // every

    def _save(self, position: Position, trained: int, *, in_epoch: bool, metric: float | None = None) -> None:
        """Begin to save the states of the model and of the callbacks, and the position."""
        if trained == self._saved:
            return
        self._callbacks.flush()
        states, arrays = self._states.get()
        record = {
            "epoch": self._epoch,
            "in_epoch": in_epoch,
            "stopped": not in_epoch and bool(self.model.stop_training),
            "position": position._asdict(),
            "callbacks": states,
            "goal": self._settings.best,
            "best": self._best,
            "metric": metric,
        }
        record = json.loads(json.dumps(record))  # callbacks may change what they have returned
        of_callbacks = {_OF_CALLBACKS + name: placed(array) for name, array in arrays.items()}
        self.checkpoints.save(trained, variables.values(self.model) | of_callbacks, record)
        self._saved = trained

    def _of_callbacks(self) -> dict[str, Any]:
        return {name.removeprefix(_OF_CALLBACKS): array for name, array in self._arrays.items() if name.startswith(_OF_CALLBACKS)}

    def _metric(self, logs: Mapping[str, Any]) -> float | None:
        """Return the metric of the best checkpoint; None without `best`, or in an epoch without validation."""
        if self._goal is None:
            return None
        if self._goal.metric in logs:
            return float(logs[self._goal.metric])
        if self._goal.metric.startswith("val_") and self._arguments["validation_freq"] != 1:
            return None  # there are epochs without a validation
        raise ValueError(f"best={self._settings.best!r}: the logs of an epoch have {', '.join(logs) or 'nothing'}")

    def _end_by_signal(self) -> NoReturn:
        self.checkpoints.wait()
        self._stopping.answered = True
        raise Stopped(self.checkpoints.complete)

    def _end(self) -> None:
        """Drop all references to the `fit`, however it has ended."""
        expect(None)
        self.iterator = None
        self._arrays = {}
        self._stopping.has_steps_to_save = False
        self._stopping.loops -= 1

    def _where_it_continues(self, found: Saved) -> str:
        if self._epoch >= self._epochs:
            return f"nothing left to train: {self._settings.directory} is at the end of epoch {found.record['epoch']}"
        batch = f", batch {found.record['position']['step'] + 1:,}" if self._resumes_in_epoch else ""
        return f"continuing at epoch {self._epoch + 1}{batch} from {found.path}"

    def _kept(self, step: int | None) -> str:
        return "nothing was saved yet" if step is None else f"saved after {step:,} batches"

    def _last_line(self) -> str:
        """Return the line to print if the process ends before Keras could. This neither waits nor uses a device."""
        return f"{self._kept(self.checkpoints.complete)}; {self._stopping.how_to_continue()}"

    def _say(self, line: str) -> None:
        if jax.process_index() == 0:
            print(f"penstock: {line}", file=sys.stderr, flush=True)


class CheckpointedCallbacks(keras.callbacks.CallbackList):  # type: ignore[misc]  # Keras has no types
    """The callbacks of a `fit` that is saved. It calls its `CheckpointRun` after them."""

    def __init__(self, run: CheckpointRun, callbacks: Sequence[Any], verbose: Any, epochs: int):
        super().__init__(list(callbacks), add_history=True, add_progbar=verbose != 0, verbose=verbose, epochs=epochs, steps=None)
        self._run = run

    def on_train_begin(self, logs: Any = None) -> None:
        # Keras makes its list of callbacks when the model is built; this one was made before.
        self.set_model(self._run.model)
        self.set_params({**self.params, "steps": self._run.iterator.num_batches})
        with self._run.beginning(self.callbacks):
            super().on_train_begin(logs)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_begin(epoch, logs)
        self._run.after_epoch_begin(epoch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_end(epoch, logs)
        self._run.after_epoch_end(epoch, logs or {})

    def on_train_end(self, logs: Any = None) -> None:
        super().on_train_end(logs)
        self._run.checkpoints.wait()

    def flush(self) -> None:
        """Wait until all callbacks have had the last batch: Keras may call them on another thread."""
        self._flush_futures()


def read_arrays(found: Saved, model: Any, of: Sequence[str] = variables.ALL) -> dict[str, Any]:
    """Return the arrays of a checkpoint by name: variables in the layouts of a model, and all others on the host.

    Args:
      model: a model like the one that was saved.
      of: groups of its variables, see `variables.values`.

    Raises:
      OtherStateError: the model is another one.
      CheckpointError: an array cannot be read.
    """
    like = variables.abstract(model, of)
    for name, leaf in found.leaves.items():
        if name.partition("/")[0] not in of:
            like[name] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding_on_host())
    return restore(found, like)
