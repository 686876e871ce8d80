"""The training loop: call the jitted step on each batch of the feed, and log, evaluate and save when it is due.

The loop waits for the devices only where a number is needed: it fetches the metrics of an interval when the next one ends, and
the metrics of an evaluation at its end. It also waits before a step for the step eight before. So few steps are in flight: a stop
does not have to wait for many, and with several CPU devices fewer than 32 programs are. XLA lets the caller of a further one wait
after it has started on some devices only, and a collective in it then waits for ever (JAX 0.10).
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import jax

from penstock._heartbeat import beat
from penstock._stopping import Stopped, Stopping
from penstock.data.tree import Batch
from penstock.errors import CheckpointError, NonfiniteError
from penstock.feed import Feed
from penstock.feed.device_feed import interrupt
from penstock.train.agreement import Agreement, decide
from penstock.train.checkpoint import Checkpoints
from penstock.train.goodput import Meter
from penstock.train.metrics import Intervals, Logger, Nonfinite, Point, Totals, read
from penstock.train.schedule import EarlyStop, Goal, Progress, Schedule
from penstock.train.state import named_leaves

_IN_FLIGHT = 8  # steps


@dataclass(frozen=True)
class Functions:
    """The jitted functions of a training. Without an evaluation, its three are None."""

    train: Callable[[Any, Totals, Batch], tuple[Any, Totals]]  # donates the state
    zero: Totals  # of no steps, on the devices
    evaluate: Callable[[Any, Totals, Batch], Totals] | None
    zero_evaluation: Totals | None  # of no batches, on the devices
    open_evaluation: Callable[[], contextlib.AbstractContextManager[Iterator[Batch]]] | None
    count_nonfinite: Callable[[Any], Any]  # from a state to the number of values of each leaf that are not finite


@dataclass(frozen=True)
class Run:
    """The settings of a training, its feed and its outputs. See `fit`."""

    schedule: Schedule
    feed: Feed  # its next batch is the batch of the first step
    checkpoints: Checkpoints | None  # None to save nothing
    meter: Meter
    loggers: list[Logger]
    stopping: Stopping
    nonfinite: Nonfinite
    best: Goal | None
    stop: EarlyStop | None
    plan: str | None  # as JSON, for checkpoints
    origin: str | None  # the folder of the checkpoint from which a run of another folder began
    trace_folder: Path  # gets the profile


class Loop:
    """The loop of a run, from some step on.

    Args:
      state: the state after `step` steps. It is donated.
      unlogged: the metrics that were not logged yet when the run was saved; None for a new run.

    Attributes:
      step: number of steps that were dispatched.
      feed_ended: whether the training has ended because the feed had no more batches.
    """

    def __init__(
        self, run: Run, functions: Functions, state: Any, step: int, progress: Progress, unlogged: Mapping[str, Any] | None
    ):
        self._run, self.state, self.step, self.progress = run, state, step, progress
        self._functions, self._clock = functions, run.meter.clock
        measured = run.feed, run.meter, run.loggers, run.nonfinite
        self.intervals = Intervals(functions.zero, step, run.schedule.steps, *measured, self._last_good, unlogged)
        self._in_flight: deque[Any] = deque()
        # The step of the last checkpoint of this run folder, complete or being written. The state may be from another folder.
        self._saved: int | None = run.checkpoints.complete if run.checkpoints else None
        self.feed_ended = False
        self._called: set[Callable] = set()
        self._counts = functions.count_nonfinite(state) if run.checkpoints and run.nonfinite != "ignore" else None

    def train(self, first: Batch | None) -> Any:
        """Train to the end, and return the state. `first` is the batch of the first step, if the feed has given it already.

        Raises:
          Stopped: a signal came. The run is saved.
          NonfiniteError: a metric is not finite.
          CheckpointError: a checkpoint could not be written.
        """
        run = self._run
        run.stopping.last_line = self._last_line
        run.stopping.loops += 1
        run.meter.begin_loop()
        with Agreement(run.stopping) as self._agreement, contextlib.ExitStack() as self._trace:
            try:
                self._train(first)
            except (NonfiniteError, CheckpointError):
                raise
            except Exception:
                self._save_after_error()
                raise
            finally:
                run.stopping.loops -= 1
        return self.state

    def _train(self, first: Batch | None) -> None:
        run, schedule = self._run, self._run.schedule
        if 0 < self.step != self.progress.evaluated and schedule.is_due(schedule.evaluate, self.step):
            self._evaluate_restored()  # it was left out by a stop
        while not self.progress.stopped and (schedule.steps is None or self.step < schedule.steps):
            if self._agreement.must_stop():
                self._end_by_signal()
            self._profile()
            try:
                batch = self._next(first)
            except StopIteration:
                self.feed_ended = True
                break
            first = None
            self._step(batch)
            if schedule.is_due(schedule.log, self.step):
                self._end_interval()
            improved = self._evaluate() if schedule.is_due(schedule.evaluate, self.step) else False
            if run.checkpoints:
                run.checkpoints.check()
                if self.step != schedule.steps and (improved or schedule.is_due(schedule.save, self.step)):
                    self._save()
        self._finish()

    def _next(self, first: Batch | None) -> Batch:
        """Return the next batch. Raise StopIteration at the end of the feed, and Stopped after a signal."""
        if first is not None:
            return first
        single = jax.process_count() == 1  # several processes have to reach the same step first
        listener = (lambda: interrupt(self._run.feed)) if single else (lambda: None)
        try:
            with self._run.stopping.telling(listener):
                return next(self._run.feed)
        except Exception:
            if single and self._run.stopping.requested:
                self._end_by_signal()
            raise

    def _step(self, batch: Batch) -> None:
        self._run.stopping.has_steps_to_save = self._run.checkpoints is not None and bool(self._called)
        self.state, self.intervals.totals = self._call(self._functions.train, self.state, self.intervals.totals, batch)
        self._run.stopping.has_steps_to_save = self._run.checkpoints is not None
        self.step += 1
        beat(self.step)
        self._limit_in_flight(self.intervals.totals)

    def _call(self, function: Callable, *args: Any) -> Any:
        """Call a jitted function. Its first call compiles it."""
        if function in self._called:
            return function(*args)
        with self._clock.time("compile"):
            result = function(*args)
        self._called.add(function)
        return result

    def _limit_in_flight(self, totals: Totals) -> None:
        """Wait until few enough steps are in flight."""
        self._in_flight.append(totals.steps)
        if len(self._in_flight) > _IN_FLIGHT:
            self._in_flight.popleft().block_until_ready()

    def _end_interval(self) -> None:
        running = sum(not steps.is_ready() for steps in self._in_flight)
        self.intervals.end(self.step, self.step - running)

    def _evaluate(self) -> bool:
        """Evaluate the state, log the result, and return whether the checkpoint of this step would be the best one."""
        run, functions = self._run, self._functions
        assert functions.evaluate is not None
        assert functions.open_evaluation is not None
        assert functions.zero_evaluation is not None
        self._end_interval()
        self.intervals.flush()
        compile_before = self._clock.get("compile", 0.0)
        with self._clock.time("evaluation"):
            totals = functions.zero_evaluation
            with functions.open_evaluation() as batches:
                for batch in batches:
                    if self._agreement.must_stop():
                        self._end_by_signal()
                    totals = self._call(functions.evaluate, self.state, totals, batch)
                    self._limit_in_flight(totals)
            result = read(totals)
            if not result.steps:
                raise ValueError(
                    f"the evaluation after step {self.step:,} had no batch: its function has to open new ones each time"
                )
            metrics = {f"val_{name}": value for name, value in result.metrics.items()}
        self._clock["evaluation"] -= self._clock.get("compile", 0.0) - compile_before
        improved = self.progress.add(self.step, metrics, run.best, run.stop)
        self.intervals.log(Point("evaluation", self.step, run.schedule.steps, metrics))
        return improved

    def _evaluate_restored(self) -> None:
        """Evaluate a state that may be saved already, and add the result to its checkpoint, so that no restart repeats it."""
        saved = self._saved == self.step
        improved = self._evaluate()
        if self._run.checkpoints and saved:
            self._run.checkpoints.amend(self.step, self._results() | {"unlogged": self.intervals.unlogged()()})
        elif improved:
            self._save()

    def _results(self) -> dict[str, Any]:
        """Return the parts of a checkpoint's record that evaluations change."""
        return {"progress": asdict(self.progress), "metric": self.progress.metric(self.step, self._run.best)}

    def _save(self) -> None:
        """Begin to save the state, the position in the data and the progress."""
        run = self._run
        if run.checkpoints is None or self._saved == self.step:
            return
        with self._clock.time("save"):
            record = {"feed": run.feed.state(), "origin": run.origin, **self._results()}
            run.checkpoints.save(self.step, named_leaves(self.state), record, plan=run.plan, late=self._late_record())
            self._saved = self.step

    def _late_record(self) -> Callable[[], dict[str, Any]]:
        """Return a function that returns the parts of the record that the devices have yet to compute. A thread calls it.

        It raises NonfiniteError if a leaf of the state has more values that are not finite than when the run began.
        """
        before, counts = self._counts, None if self._counts is None else self._functions.count_nonfinite(self.state)
        step, unlogged = self.step, self.intervals.unlogged()

        def fetch() -> dict[str, Any]:
            record = {"unlogged": unlogged()}
            was, now = jax.device_get((before, counts))
            bad = {name: int(now[name]) for name in now or () if now[name] > was[name]}
            if bad:
                listed = ", ".join(f"{name} ({count:,} values)" for name, count in list(bad.items())[:5])
                good, checkpoint = self._last_good()
                raise NonfiniteError(
                    f"the state is not finite after {step:,} steps, in {len(bad):,} leaves: {listed}; {good}", step, checkpoint
                )
            return record

        return fetch

    def _end_by_signal(self) -> NoReturn:
        """Save, unless the state is saved already, and end the run."""
        run = self._run
        if run.checkpoints is None:
            raise KeyboardInterrupt
        if self.step:
            self._save()
        with self._clock.time("save"):
            run.checkpoints.wait()
        run.stopping.answered = True
        self.intervals.flush()  # after the save: a logger may be slow
        raise Stopped(run.checkpoints.complete)

    def _save_after_error(self) -> None:
        """Save after an error of the input, if the last step is complete. The caller has to see that error, and no other."""
        good = not any(leaf.is_deleted() for leaf in jax.tree.leaves(self.state))
        if good and self.step and jax.process_count() == 1 and self._run.checkpoints:
            with contextlib.suppress(Exception):
                self._save()
                self._run.checkpoints.wait()

    def _finish(self) -> None:
        """Evaluate and save the last state, and wait for the devices and the save."""
        run = self._run
        self._end_interval()
        self.intervals.flush()
        if self._functions.evaluate and self.step and self.progress.evaluated != self.step:
            self._evaluate_restored()
        if run.checkpoints and self.step:
            self._save()
            with self._clock.time("save"):
                run.checkpoints.wait()
        jax.block_until_ready(self.state)
        if run.checkpoints and decide(lambda: run.stopping.requested is not None):
            self._end_by_signal()  # the signal came after the last step
        run.stopping.has_steps_to_save = False

    def _profile(self) -> None:
        """Begin and end the trace."""
        if self._run.schedule.profile is None:
            return
        begin, end = self._run.schedule.profile
        if self.step == begin:
            jax.block_until_ready(self.state)
            self._trace.enter_context(jax.profiler.trace(str(self._run.trace_folder), create_perfetto_trace=True))
        if self.step == end + 1:
            jax.block_until_ready(self.state)
            self._trace.close()

    def _last_good(self) -> tuple[str, int | None]:
        """Return words for the last good checkpoint, and its step."""
        if self._run.checkpoints is None or self._run.checkpoints.complete is None:
            return "there is no checkpoint before it", None
        step = self._run.checkpoints.complete
        return f"the last good checkpoint is of step {step:,} in {self._run.checkpoints.folder}", step

    def _last_line(self) -> str:
        """Return the line to print if the process ends before the loop does. It neither waits nor uses a device."""
        step = self._run.checkpoints.complete if self._run.checkpoints else None
        kept = "nothing was saved yet" if step is None else f"the checkpoint of step {step:,} is kept"
        return f"{kept}; {self._run.stopping.how_to_continue()}"
