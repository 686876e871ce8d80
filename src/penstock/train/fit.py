"""Train a state by a step function and a feed, in a run folder from which the run continues.

`fit` checks its arguments, restores the latest checkpoint or places the initial state, and compiles the step. `Loop` trains.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import jax

from penstock._arguments import at_least, check_path, check_seconds
from penstock._stopping import Stopped, Stopping
from penstock.data.tree import Batch, leaves_with_names
from penstock.errors import CheckpointError
from penstock.feed import Feed
from penstock.feed import feed as make_feed
from penstock.feed.device_feed import has_begun, has_no_end, reopened, repeatable
from penstock.shard import Plan
from penstock.shard.serialization import to_json
from penstock.train import log as loggers
from penstock.train.agreement import decide
from penstock.train.checkpoint import Checkpoint, Checkpoints, read, restore
from penstock.train.goodput import Meter
from penstock.train.loop import Functions, Loop, Run
from penstock.train.metrics import (
    Logger,
    Nonfinite,
    Point,
    check_evaluation,
    check_step,
    count_nonfinite,
    evaluation_program,
    name_of,
    training_program,
    zero,
)
from penstock.train.run_folder import RunFolder, check_config, continuing
from penstock.train.schedule import EarlyStop, Evaluation, Goal, Progress, Schedule
from penstock.train.state import (
    abstract,
    check_devices_of_state,
    check_range,
    check_same_leaves,
    check_state,
    describe_leaves,
    named_leaves,
    place,
    replicated_over,
    shardings_of_state,
    strong,
)

State = Any  # a pytree of arrays
_SAVE_EVERY = 1000  # steps
_LOGGER = logging.getLogger("penstock.train")


def fit(
    step: Callable[[State, Batch], tuple[State, Mapping[str, Any]]],
    state: State | Callable[[], State],
    feed: Any,
    *,
    steps: int | None,
    plan: Plan | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    save_every: int | None = None,
    keep: int = 3,
    best: str | None = None,
    restore: str | os.PathLike[str] | None = "latest",
    evaluate: Evaluation | None = None,
    stop: EarlyStop | None = None,
    log: Sequence[Logger] | None = None,
    log_every: int = 10,
    nonfinite: Nonfinite = "stop",
    profile: tuple[int, int] | None = None,
    grace: float = 30.0,
    config: Mapping[str, Any] | None = None,
) -> State:
    """Train, and lose nothing: not a step to a crash, not a record to a restart, not a moment of the devices to the host.

    With `checkpoint=`, the run is saved while it trains. Started again with the same arguments, it continues where it was, bit
    for bit and with the next record, also on another number of devices or processes. SIGTERM and SIGINT save and end the process
    with status 0.

    Args:
      step: a function (state, batch) → (state, metrics), plain or jitted. It returns a state like the one it is given. Metrics
        are a dict from names to scalars, of which the mean over the steps is logged, or to `ps.Mean`s.
      state: the initial state, a pytree of arrays and PRNG keys, which is copied. Or a function without arguments that makes it:
        there is then no second copy in memory, and it is only traced if a checkpoint is restored.
      feed: a `Feed`, or anything that `ps.feed` takes. To continue exactly, it has to have a state, as a Loader has, and to be
        new.
      steps: number of steps of the run, with those before a restart; None trains to the end of the feed, which needs to have
        one, or `stop`.
      plan: the plan of the step. It gives the shardings of the state, and of batches that are not a `Feed` yet.
      checkpoint: the run folder, new or of this run; None saves nothing, and then signals do what they always do.
      save_every: number of steps between two checkpoints; None saves about ten times, and at least every 1,000 steps.
      keep: number of newest checkpoints to keep, >= 1.
      best: "min NAME" or "max NAME" of a metric of the evaluation, such as "min val_loss". Each improvement is saved, and the
        best checkpoint is kept too.
      restore: "latest" continues from the newest good checkpoint of the run folder, if there is one. The folder of a checkpoint
        or of another run starts a new run from there, and continues it when it is called again. "best" is the folder of the best
        checkpoint of this run. None starts anew. `fit` refuses a run folder that has newer checkpoints, or another run.
      evaluate: what to evaluate on a second feed, and how often.
      stop: ends the training early.
      log: loggers, see `ps.log`; None for a progress bar, and metrics.jsonl in the run folder.
      log_every: number of steps of which the metrics are averaged and logged. They are fetched one interval later.
      nonfinite: what happens if a metric is NaN or infinite. "stop" raises `NonfiniteError`. "skip" gives such a step, or one
        that would make the state so, no effect, and counts it. "ignore" goes on.
      profile: the first and the last step, counted from 0, of a trace for Perfetto and xprof, in the folder `profile`.
      grace: seconds between a signal and the moment when the process will be killed.
      config: settings that a run must have in common with the checkpoints in its folder, such as {"seed": 0}: numbers, texts, and
        lists and dicts of them, which are compared.

    Returns:
      The state after the last step.

    Raises:
      Stopped: a signal came (a SystemExit with status 0).
      TypeError, ValueError: before training, if the arguments do not fit each other. `OtherStateError`: the checkpoint is of
        another model. `OtherRunError`: the folder belongs to another run. `StepError`: the step returns something else.
      NonfiniteError: a metric was not finite.
      CheckpointError: a checkpoint could not be written, the one that was named cannot be used, or none of the run can.

    Examples:
      >>> def step(state, batch):
      ...     error = state["w"] * batch["x"] - batch["y"]
      ...     return {"w": state["w"] - 0.1 * (error * batch["x"]).mean()}, {"loss": (error**2).mean()}
      >>> x = np.linspace(-1, 1, 64, dtype=np.float32)
      >>> loader = ps.Loader({"x": x, "y": 3 * x}, batch_size=16, shuffle=True)
      >>> state = ps.fit(step, {"w": 0.0}, loader, steps=200, log=[])
      >>> round(float(state["w"]), 2)
      3.0
    """
    if not callable(step):
        raise TypeError(f"step={step!r} is not a function (state, batch) → (state, metrics)")
    if nonfinite not in get_args(Nonfinite):
        raise ValueError(f"nonfinite={nonfinite!r}: choose from {', '.join(get_args(Nonfinite))}")
    if evaluate is not None and not isinstance(evaluate, Evaluation):
        raise TypeError(f"evaluate= is a {type(evaluate).__name__}, and not a ps.Evaluation(step, batches, every=...)")
    check_seconds("grace", grace)
    if steps is None and stop is None and has_no_end(feed):
        raise ValueError(
            "steps=None trains to the end of the feed, and this one has no end: give steps=, or a Loader with epochs=1. To train "
            "until a signal comes, give a number that is not reached, such as steps=10**12"
        )
    schedule = _schedule(steps, checkpoint is not None, save_every, log_every, evaluate, profile)
    goal = Goal.parse(best, "best") if best is not None else None
    if stop is not None and not isinstance(stop, EarlyStop):
        raise TypeError(f"stop={stop!r} is not a ps.EarlyStop, such as ps.EarlyStop('min val_loss', patience=3)")
    check_config(config)
    for name, value in (("best", best), ("stop", stop)):
        if value is not None and evaluate is None:
            raise ValueError(f"{name}={value!r} needs evaluate=ps.Evaluation(...), whose metrics it watches")
    at_least(1, "keep", keep)
    if log is not None:
        _check_loggers(log)
    if plan is not None and not isinstance(plan, Plan):
        raise TypeError(f"plan={plan!r} is not a result of ps.plan")
    with contextlib.ExitStack() as stack:
        stopping, folder, checkpoints = Stopping(grace), None, None
        if checkpoint is not None:
            stopping = stack.enter_context(stopping)
            folder = stack.enter_context(RunFolder(checkpoint, config))
            checkpoints = Checkpoints(folder.checkpoints, keep=keep, goal=goal)
            stack.callback(checkpoints.close)
        meter = Meter(folder.path / "goodput.json" if folder and jax.process_index() == 0 else None)
        with meter.clock.time("restore"):
            found = _find_checkpoint(checkpoints, restore)
        if found:
            stopping.last_line = lambda: f"the checkpoint of step {found.step:,} is kept; {stopping.how_to_continue()}"
        if not isinstance(feed, Feed):
            feed = stack.enter_context(make_feed(feed, to=plan))
        trace = (folder.path if folder else Path.cwd()) / "profile"
        if log is None:
            log = [loggers.progress(), *([loggers.jsonl(folder.path / "metrics.jsonl")] if folder else [])]
        origin = str(found.path) if found else None
        if found and folder and found.path.parent == folder.checkpoints:
            origin = found.record.get("origin")
        as_json = to_json(plan) if plan else None
        run = Run(schedule, feed, checkpoints, meter, list(log), stopping, nonfinite, goal, stop, as_json, origin, trace)
        return _train(step, state, plan, evaluate, found, run)


def _check_loggers(log: Any) -> None:
    if not isinstance(log, Sequence) or not all(callable(logger) for logger in log):
        raise TypeError(f"log={log!r} is not a list of loggers, which are functions of a ps.Point: log=[ps.log.progress()]")
    for name in ("jsonl", "progress", "tensorboard", "wandb"):
        if getattr(loggers, name) in log:
            raise TypeError(f"log= has the function ps.log.{name} itself: call it, and put the logger that it returns there")


def _schedule(
    steps: int | None, saves: bool, save_every: int | None, log_every: int, evaluate: Evaluation | None, profile: Any
) -> Schedule:
    """Return the schedule, after a check of the arguments of `fit` that it is made of."""
    if save_every is not None and not saves:
        raise ValueError(f"save_every={save_every} needs checkpoint=, the folder to save to")
    if steps is not None:
        at_least(1, "steps", steps)
    if profile is not None and not (
        isinstance(profile, tuple)
        and len(profile) == 2
        and all(isinstance(n, int) and not isinstance(n, bool) for n in profile)
        and 0 <= profile[0] <= profile[1]
    ):
        raise ValueError(f"profile={profile!r}: needs (first step, last step), counted from 0")
    if save_every is None:
        save_every = max(1, min(_SAVE_EVERY, (steps or 10 * _SAVE_EVERY) // 10))
    return Schedule(
        steps,
        at_least(1, "log_every", log_every),
        evaluate.every if evaluate else None,
        at_least(1, "save_every", save_every) if saves else None,
        profile,
    )


def _find_checkpoint(checkpoints: Checkpoints | None, restore: str | os.PathLike[str] | None) -> Checkpoint | None:
    """Return the checkpoint from which a run continues; None if it starts anew. See `restore` of `fit`."""
    if restore is None:
        if checkpoints and (steps := checkpoints.steps()):
            raise ValueError(
                f"restore=None, but {checkpoints.folder} has checkpoints up to step {steps[-1]:,}: continue from them with "
                "restore='latest', or name a new folder for a run that starts anew"
            )
        return None
    if not isinstance(restore, (str, os.PathLike)):
        raise TypeError(f"restore={restore!r}: needs 'latest', 'best', the folder of a checkpoint, or None")
    own = checkpoints.latest() if checkpoints else None
    if restore == "latest":
        return own
    named = _named_checkpoint(checkpoints, restore, own)
    if own is None or named is own:
        return named
    step, newest = named.path.resolve(), own.path.resolve()
    if step.parent != newest.parent:
        raise ValueError(
            f"restore={str(restore)!r}: the run in {newest.parents[1]} did not begin from there, and is at step {own.step:,}: "
            "continue it with restore='latest', or name a new folder with checkpoint="
        )
    if step != newest:
        raise ValueError(
            f"restore={str(restore)!r}: {step.name} is older than {newest.name} in the same run folder, from which a restart "
            f"would continue: name {step} with restore= and a new folder with checkpoint=, or remove the newer ones"
        )
    return own


def _named_checkpoint(checkpoints: Checkpoints | None, restore: str | os.PathLike[str], own: Checkpoint | None) -> Checkpoint:
    """Return the best checkpoint of the run; or that in a folder, or the latest one of a run folder. `own` if it began there."""
    if restore == "best":
        if checkpoints and (best := checkpoints.best()):
            return best
        raise ValueError("restore='best' needs best=, and checkpoint= with a run folder that has a checkpoint with its metric")
    path = Path(decide(lambda: str(check_path("restore", restore).resolve())))
    origin = own and own.record.get("origin")
    if own and origin and path in (Path(origin), *Path(origin).parents[:2]):
        return own  # the run was started from the named one, and has come further
    folder = path if path.name == "checkpoints" else path / "checkpoints"
    exists, is_run = decide(lambda: (path.exists(), folder.is_dir()))
    if not exists:
        raise CheckpointError(
            f"restore={str(restore)!r}: checkpoint {path} cannot be used: there is no such folder. Give 'latest', 'best', None, "
            "or the folder of a checkpoint"
        )
    if not is_run:
        return read(path)
    with contextlib.closing(Checkpoints(folder)) as found:
        if latest := found.latest():
            return latest
    raise CheckpointError(f"restore={str(restore)!r}: no save to {folder} has ended")


def _train(
    step: Callable, state: Any, plan: Plan | None, evaluate: Evaluation | None, found: Checkpoint | None, run: Run
) -> State:
    """Place or restore the state, train, and log the begin and the end."""
    begun = _start(step, state, plan, evaluate, found, run)
    run.meter.begin(begun.step)
    first_process = jax.process_index() == 0
    loggers_here = run.loggers if first_process else []
    loop, text = None, ""
    try:
        with run.meter.clock.time("log"):
            for logger in loggers_here:
                logger(Point("begin", begun.step, run.schedule.steps))
        if begun.functions is None:
            if not begun.progress.stopped:
                _warn_of_early_end(begun.step, run.schedule.steps)
            text = f"nothing left to train: the feed has ended at step {begun.step:,}"
            return begun.state
        loop = Loop(run, begun.functions, begun.state, begun.step, begun.progress, begun.unlogged)
        trained = loop.train(begun.first)
        if loop.feed_ended:
            _warn_of_early_end(loop.step, run.schedule.steps)
        if loop.step > begun.step:
            text = f"input: {_verdict(run)}"
        elif begun.first is None:
            text = f"nothing left to train: the feed has ended at step {loop.step:,}"
        else:
            text = f"nothing left to train: the run is at step {loop.step:,}"
        return trained
    except Stopped as stopped:
        if first_process:
            kept = "nothing was saved yet" if stopped.step is None else f"saved at step {stopped.step:,}"
            print(f"penstock: {run.stopping.requested}: {kept}; {run.stopping.how_to_continue()}", file=sys.stderr, flush=True)
        raise
    finally:
        step_reached = loop.step if loop else begun.step
        run.meter.reached(step_reached, run.feed.stats().starved, write=True)
        goodput = run.meter.result()
        with contextlib.ExitStack() as ending:  # each logger ends, also if another one raises
            for logger in reversed(loggers_here):
                ending.callback(logger, Point("end", step_reached, run.schedule.steps, text=text, goodput=goodput))


def _warn_of_early_end(step: int, steps: int | None) -> None:
    """Say in process 0 that the feed has ended before the run."""
    if steps is not None and step < steps and jax.process_index() == 0:
        _LOGGER.warning(
            f"the feed ended after {step:,} of {steps:,} steps: let it repeat (a Loader with epochs=None), or give steps=None to "
            "train to its end"
        )


def _verdict(run: Run) -> str:
    """Return the verdict of the feed, for the time of the loop without evaluations, saves and loggers."""
    stats, seconds = run.feed.stats(), run.meter.loop
    return replace(stats, seconds=seconds, starved=min(stats.starved, seconds)).verdict


@dataclass(frozen=True)
class _Start:
    """The point from which a training starts or continues."""

    functions: Functions | None  # None if the feed of a continued run has no batch at all
    state: Any  # after `step` steps, on its devices
    step: int
    progress: Progress
    first: Batch | None  # the next batch; None if the feed has no more for a continued run
    unlogged: Mapping[str, Any] | None  # the metrics that were not logged yet when the run was saved; None for a new run


def _start(
    step: Callable, state: Any, plan: Plan | None, evaluate: Evaluation | None, found: Checkpoint | None, run: Run
) -> _Start:
    """Check the step against the state and the first batch, and restore the state or place it."""
    makes = callable(state) and jax.tree_util.all_leaves([state])  # a module that can be called is a tree
    with run.meter.clock.time("init"):
        traced = _traced(state) if makes else None
        if traced is None:  # a tree, or a function that cannot be traced, because it reads a file or converts arrays to NumPy
            state, makes = state() if makes else state, False
            check_state(state)
            traced = jax.eval_shape(lambda tree: tree, state)
    # `place` makes strong types of weak ones, which Python numbers have, so the step has to be checked with strong ones.
    like = abstract(traced)
    begin, progress = 0, Progress()
    if found:
        check_same_leaves(found.leaves, describe_leaves(named_leaves(like)), f"checkpoint {found.path}")
        if not has_begun(run.feed) or run.feed.state() != found.record["feed"]:
            with continuing(found.path):
                run.feed.restore(found.record["feed"])
        begin, progress = found.step, Progress(**found.record["progress"])
        progress.stopped = run.stop is not None and progress.stop_since >= run.stop.patience  # the patience may be another
    elif run.checkpoints and has_begun(run.feed):
        raise ValueError(
            "the feed has given batches before, and a restart of this run could not move it to the position of a checkpoint: "
            "give fit a feed of its own, and look at a batch with loader[0] or another feed"
        )
    again = repeatable(run.feed) if found else None
    with run.meter.clock.time("input"):
        first = next(run.feed, None)
    if first is None and found is None:
        raise ValueError("the feed has no batch to train on")
    if plan is not None:
        _check_same_plan(plan)
    batch = first
    if first is None and again is not None:  # the last evaluation and metrics may be due still, which need a batch to look at
        with reopened(run.feed, again) as feed:
            batch = next(feed, None)
    functions, shardings = None, None
    if batch is not None:
        _check_devices(batch)
        if run.checkpoints:
            run.feed.state()  # raises if the feed has no state, without which no run could continue
        new, metrics = check_step(step, like, abstract(batch))
        if plan is None and not makes:
            check_devices_of_state(state, batch)
        shardings = shardings_of_state(like if makes else state, batch, plan)
        functions = _functions(step, new, shardings, batch, metrics, plan, evaluate, run)
    with run.meter.clock.time("restore" if found else "init"):
        if found:
            arrays = restore(found, named_leaves(like if shardings is None else abstract(like, shardings)))
            placed = jax.tree.unflatten(jax.tree.structure(like), list(arrays.values()))
        elif makes and plan:
            placed = plan.init(lambda: jax.tree.map(strong, _made(state)))
        else:
            # Functions in the tree, such as an optimizer's, are other objects each time `state` is called.
            given = jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(_made(state))) if makes else state
            placed = place(given, shardings, like)
    return _Start(functions, placed, begin, progress, first, found.record["unlogged"] if found else None)


def _traced(make: Callable[[], Any]) -> Any:
    """Return the abstract state that a function makes; None if it cannot be traced."""
    try:
        return jax.eval_shape(make)
    except Exception:  # libraries raise all kinds for a tracer; an error of the function itself comes again when it is called
        return None


def _made(make: Callable[[], Any]) -> Any:
    """Return the state that a function makes. It may be called under `jax.jit`, which would wrap numbers that are too large."""
    state = make()
    check_range(state)
    return state


def _functions(
    step: Callable,
    state: Any,
    shardings: Any,
    batch: Batch,
    metrics: Any,
    plan: Plan | None,
    evaluate: Evaluation | None,
    run: Run,
) -> Functions:
    """Return the jitted programs of a run, for an abstract state and abstract metrics. Nothing is compiled yet."""
    everywhere = replicated_over(batch)
    # A plain function keeps the shardings of the state. One that was jitted, or follows a plan, decides by itself.
    decides = plan is not None or hasattr(step, "lower")
    program = training_program(plan.jit(step) if plan else step, run.nonfinite, name_of(step))
    train = jax.jit(program, donate_argnums=0, out_shardings=(None if decides else shardings, everywhere))
    evaluation = zero_evaluation = open_evaluation = None
    if evaluate:
        open_evaluation = _opening(evaluate, run.feed)
        with run.meter.clock.time("evaluation"), open_evaluation() as batches:
            one = next(batches, None)
        if one is None:
            raise ValueError("the feed of the evaluation has no batch")
        evaluated = check_evaluation(evaluate.step, state, abstract(one))
        _check_goals(evaluated, run)
        if both := sorted({f"val_{name}" for name in evaluated} & set(metrics)):
            raise ValueError(
                f"the step and the evaluation both have a metric {both[0]!r}, as evaluate= puts val_ before: rename one"
            )
        evaluation = jax.jit(evaluation_program(evaluate.step), out_shardings=everywhere)
        zero_evaluation = jax.device_put(zero(evaluated), everywhere)
    return Functions(
        train, jax.device_put(zero(metrics), everywhere), evaluation, zero_evaluation, open_evaluation, jax.jit(count_nonfinite)
    )


def _opening(evaluate: Evaluation, training: Feed) -> Callable[[], contextlib.AbstractContextManager[Iterator[Batch]]]:
    """Return a function that opens the batches of an evaluation, each time from the first one."""
    given = evaluate.batches
    if isinstance(given, Feed) or not callable(given):
        _check_ends(given)

    @contextlib.contextmanager
    def open_evaluation() -> Iterator[Iterator[Batch]]:
        if isinstance(given, Feed):
            batches = reopened(given)
        elif callable(given):
            batches = given()
            if not hasattr(batches, "__iter__"):
                raise TypeError(f"the function of an Evaluation returned {batches!r}: it has to open a feed, or other batches")
            _check_ends(batches)
        else:
            batches = reopened(training, given)
        with batches if hasattr(batches, "__exit__") else contextlib.nullcontext():
            yield iter(batches)

    return open_evaluation


def _check_ends(batches: Any) -> None:
    if has_no_end(batches):
        raise ValueError("the batches of the evaluation never end: give the Loader epochs=1, or Steps a length")


def _check_devices(batch: Batch) -> None:
    """Raise ValueError if there are several processes, and the batches of each one are on its own devices only."""
    if jax.process_count() > 1 and all(leaf.sharding.is_fully_addressable for _, leaf in leaves_with_names(batch)):
        raise ValueError(
            f"the batches of process {jax.process_index()} are on devices of this process only, so that each of the "
            f"{jax.process_count()} processes would train by itself: give plan=, or feed=ps.feed(batches, to=sharding) with a "
            "sharding over the devices of all"
        )


def _check_same_plan(plan: Plan) -> None:
    """Raise ValueError in each process whose plan has other layouts than process 0's plan."""
    layouts = repr((plan.mesh_shape, plan.inputs, plan.outputs, plan.sharding_constraints))
    own = hashlib.sha256(layouts.encode()).hexdigest()
    if own != decide(lambda: own):
        raise ValueError(
            f"process {jax.process_index()} has another plan than process 0, and all have to run the same program: plan in one "
            "process, plan.save(path), and ps.Plan.load(path) in all"
        )


def _check_goals(metrics: Any, run: Run) -> None:
    """Raise ValueError if a goal names a metric that the evaluation does not have."""
    names = [f"val_{name}" for name in metrics]
    stop = Goal.parse(run.stop.goal, "stop") if run.stop else None
    for argument, goal in (("best", run.best), ("stop", stop)):
        if goal and goal.metric not in names:
            raise ValueError(f"{argument}: the evaluation has no metric {goal.metric!r}; it has {', '.join(names) or 'none'}")
