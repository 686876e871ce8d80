"""Start or continue a training: a step, a state and a checkpoint go in; jitted functions and a placed state come out."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from penstock._feed import Feed
from penstock._feed.device_feed import has_begun, has_no_end, reopened, repeatable
from penstock.data.tree import Batch, leaves_with_names
from penstock.shard import Plan
from penstock.train.checkpoint import Checkpoint, restore
from penstock.train.leaves import check_same_leaves, describe_leaves, named_leaves
from penstock.train.loop import Functions, Run
from penstock.train.metrics import zero
from penstock.train.program import (
    check_evaluation,
    check_step,
    count_nonfinite,
    evaluation_program,
    name_of,
    training_program,
)
from penstock.train.progress import Progress
from penstock.train.run_folder import continuing
from penstock.train.schedule import Evaluation, Goal
from penstock.train.setup import (
    abstract,
    check_devices_of_state,
    check_state,
    place,
    replicated_over,
    shardings_of_state,
    strong,
)
from penstock.train.together import decide


@dataclass(frozen=True)
class Start:
    """Where a training starts.

    Attributes:
      functions: the jitted functions; None if a run that is continued has no more batches, and its feed none to look at.
      state: the state, on its devices.
      step: number of steps that it has had.
      progress: what is known of the run.
      first: the next batch; None if the feed has no more for a run that is continued.
      unlogged: the metrics that were not logged yet when the run was saved; None for a new run.
    """

    functions: Functions | None
    state: Any
    step: int
    progress: Progress
    first: Batch | None
    unlogged: Mapping[str, Any] | None


def start(
    step: Callable, state: Any, plan: Plan | None, evaluate: Evaluation | None, found: Checkpoint | None, run: Run
) -> Start:
    """Check the step against the state and the first batch, and restore the state or place it.

    Args:
      step, state, plan, evaluate: see `fit`.
      found: the checkpoint to continue from.
      run: the settings.

    Raises:
      TypeError, ValueError: they do not fit each other.
    """
    makes = callable(state) and jax.tree_util.all_leaves([state])  # a module that can be called is a tree
    traced = _traced(state) if makes else None
    if traced is None:  # a tree, or a function that cannot be traced, as one that reads a file or converts arrays to NumPy
        state, makes = state() if makes else state, False
        check_state(state)
        traced = jax.eval_shape(_same, state)
    # `place` makes strong types of weak ones, such as those of Python numbers, so the step has to be checked with strong ones.
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
    with run.meter.clock.time("restore"):
        if found:
            arrays = restore(found, named_leaves(like if shardings is None else abstract(like, shardings)))
            placed = jax.tree.unflatten(jax.tree.structure(like), list(arrays.values()))
        elif makes and plan:
            placed = plan.init(lambda: jax.tree.map(strong, state()))
        else:
            # Functions in the tree, as those of an optimizer that `state` makes, are others each time it is called.
            given = jax.tree.unflatten(jax.tree.structure(like), jax.tree.leaves(state())) if makes else state
            placed = place(given, shardings, like)
    return Start(functions, placed, begin, progress, first, found.record["unlogged"] if found else None)


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
    """Return the jitted programs of a run. Nothing is compiled yet.

    Args:
      state: the abstract state.
      shardings: its shardings.
      batch: the first batch.
      metrics: the abstract metrics of the step.
    """
    everywhere = replicated_over(batch)
    # A plain function keeps the shardings of the state. One that was jitted, or follows a plan, decides by itself.
    decides = plan is not None or hasattr(step, "lower")
    program = training_program(plan.jit(step) if plan else step, run.nonfinite, name_of(step))
    train = jax.jit(program, donate_argnums=0, out_shardings=(None if decides else shardings, everywhere))
    evaluation = zero_evaluation = open_evaluation = None
    if evaluate:
        open_evaluation = _opening(evaluate, run.feed)
        with open_evaluation() as batches:
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
    """Raise ValueError in each process whose plan has other layouts than that of process 0."""
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


def _traced(make: Callable[[], Any]) -> Any:
    """Return the abstract state that a function makes; None if it cannot be traced."""
    try:
        return jax.eval_shape(make)
    except TypeError:  # of JAX too, for a value that a tracer does not have, and for a leaf that is no array
        return None


def _same(state: Any) -> Any:
    return state
