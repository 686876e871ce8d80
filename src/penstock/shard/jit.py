"""Jit a step so that it follows a plan: with the shardings of its arguments and results, and the sharding constraints inside."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from penstock._jax import checkpoints
from penstock.errors import ExplicitAxesError, OtherStepError
from penstock.shard.apply.sharding_constraints import insert_constraints
from penstock.shard.mesh.explicit_axes import automatic_axes, refuse_explicit, to_automatic, to_explicit
from penstock.shard.record import PlanRecord, named_shardings
from penstock.shard.trace.fingerprint import describe_arguments, describe_difference
from penstock.shard.trace.modules import has_equinox_module, has_variables, unmark_static, write_back
from penstock.shard.trace.step import CallForm, TracedStep, argument_leaves, read_call, trace_form

_LOGGER = logging.getLogger("penstock.shard")


class ResultForm(NamedTuple):
    """The form of the flat results of a program: the result of the step, then the new values of its arguments.

    Attributes:
      tree: the structure of the result.
      written: index of an argument that holds Flax NNX objects to which the step writes → the numbers of its new leaves.
    """

    tree: Any
    written: dict[int, tuple[int, ...]]


class PlannedStep:
    """A jitted step that follows a plan, with the signature of the step.

    Args:
      traced: the step that the plan was made for. It is None for a plan from a file, which lacks the structure of the
        arguments: they are then constrained inside of the jitted function.
      step: the step, which is traced again at each call with new shapes.
    """

    def __init__(self, plan: PlanRecord, traced: TracedStep | None, step: Callable, mesh: Any, **settings: Any):
        functools.update_wrapper(self, step, ("__module__", "__name__", "__qualname__", "__doc__"), ())
        self._plan, self._traced, self._step, self._mesh, self._settings = plan, traced, step, mesh, settings
        self._jitted: dict[tuple[CallForm, Any], tuple[Any, list[ResultForm]]] = {}
        self._plain = traced is not None and _has_only_containers(traced.tree)
        self._explicit = False  # whether arguments were on a mesh with explicit axes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step, give Flax NNX objects among its arguments their new values, and return the result of the step.

        Raises:
          TypeError: a leaf of the arguments is not an array.
          ValueError: the plan was made for another step or other arguments.
        """
        jitted, forms, given, values = self._read(args, kwargs)
        with automatic_axes(self._mesh) as surrounding:
            try:
                if surrounding is None and not self._explicit:
                    try:
                        results = jitted(*given)
                    except ExplicitAxesError:
                        self._explicit = True
                if surrounding is not None or self._explicit:
                    results = jitted(*to_automatic(given))
            except Exception as error:
                refuse_other_arguments(self._plan, self._step, args, kwargs, error)
                raise
        if surrounding is not None:
            results = to_explicit(results, surrounding)
        if not forms:
            return results
        tree, written = forms[-1]
        for index, numbers in written.items():
            new = [results[number] for number in numbers]
            write_back(values[index], jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(values[index]), new))
        return unmark_static(jax.tree_util.tree_unflatten(tree, results[: tree.num_leaves]))

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Lower the step, as the result of `jax.jit`.

        The compiled program takes all arguments by position, keyword arguments last. If some are Flax NNX objects or Equinox
        modules, or have other functions in their structure than the planned ones, it works on leaves. It then takes each leaf as
        an argument, and returns a list of leaves. The leaves of Flax NNX objects to which the step writes come last, and the
        objects do not change.
        """
        jitted, _, given, _ = self._read(args, kwargs)
        with automatic_axes(self._mesh):
            try:
                return jitted.lower(*to_automatic(given))
            except Exception as error:
                refuse_other_arguments(self._plan, self._step, args, kwargs, error)
                raise

    def _read(self, args: tuple, kwargs: Mapping[str, Any]) -> tuple[Any, list[ResultForm], tuple, tuple]:
        """Return the two results of `_jit_form` for a call, the arguments of the jitted program, and the step's."""
        form, values = (_POSITIONAL, args) if self._plain and not kwargs else read_call(self._step, args, kwargs)
        structure, given = None, values
        if not self._plain:
            leaves, found = jax.tree_util.tree_flatten(values)
            if _has_objects(values) or (self._traced is not None and found != self._traced.tree):
                given, structure = tuple(leaves), found
        key = (form, structure)
        if key not in self._jitted:
            self._jitted[key] = _jit_form(self._plan, self._traced, self._step, self._mesh, form, structure, self._settings)
        return *self._jitted[key], given, values


_POSITIONAL = CallForm()


def _has_objects(tree: Any) -> bool:
    """Return whether a tree has Flax NNX objects or Equinox modules."""
    return has_variables(tree) or has_equinox_module(tree)


def _has_only_containers(structure: Any) -> bool:
    """Return whether all nodes of a tree are tuples, lists and dicts, so that its structure contains no functions."""
    node = structure.node_data()
    plain = node is None or node[0] in (dict, list, type(None)) or issubclass(node[0], tuple)
    return plain and all(map(_has_only_containers, structure.children()))


def _jit_form(
    plan: PlanRecord, traced: TracedStep | None, step: Callable, mesh: Any, form: CallForm, structure: Any, settings: Mapping
) -> tuple[Any, list[ResultForm]]:
    """Return `jax.jit` of a step that follows a plan, as a function of a call's arguments in one form.

    If it takes leaves, it returns leaves, and after the first call the second result has their form as its last element.

    Args:
      plan, traced, step, mesh, settings: as in `PlannedStep`.
      form: the form of the call.
      structure: the structure of the arguments, if the function takes their leaves: the plan has another structure, or there are
        Flax NNX objects or Equinox modules. Such structures cannot be compared. They contain functions, such as an optimizer's in
        a TrainState of Flax, which differ each time it is made.
    """
    traced = traced if traced is not None and traced.form == form else None
    forms: list[ResultForm] = []

    def planned(*given: Any) -> Any:
        refuse_explicit(given)
        values = given if structure is None else jax.tree_util.tree_unflatten(structure, given)
        with checkpoints(plan.rewriting.checkpoints):
            called = trace_form(step, form, values, [leaf.weak for leaf in plan.inputs])
        check_step(plan, called)
        flat = jax.tree_util.tree_leaves(values)
        if traced is None:
            flat = list(map(jax.lax.with_sharding_constraint, flat, named_shardings(plan.inputs, mesh)))
        closed = called.rewritten(plan.rewriting)
        results = insert_constraints(closed, plan.sharding_constraints, mesh)(*flat)
        if traced is None:
            results = list(map(jax.lax.with_sharding_constraint, results, named_shardings(plan.outputs, mesh)))
        if structure is None:
            return jax.tree_util.tree_unflatten(called.out_tree, results)
        forms[:] = [_result_form(called)]
        return list(results)

    planned.__name__ = planned.__qualname__ = getattr(step, "__name__", "step")
    settings = {"keep_unused": True, **settings}  # otherwise jit drops unused arguments, which the plan counts
    if structure is not None:
        settings["donate_argnums"] = _leaf_numbers(structure, settings.get("donate_argnums", ()))
    if traced is not None:
        inputs, outputs = tuple(named_shardings(plan.inputs, mesh)), list(named_shardings(plan.outputs, mesh))
        settings["in_shardings"] = jax.tree_util.tree_unflatten(traced.tree, inputs) if structure is None else inputs
        settings["out_shardings"] = jax.tree_util.tree_unflatten(traced.out_tree, outputs) if structure is None else outputs
    return jax.jit(planned, **settings), forms


def _result_form(traced: TracedStep) -> ResultForm:
    """Return the form of the flat results of a step."""
    written, count = dict(traced.returned), traced.out_tree.num_leaves
    for index in traced.written:
        end = count + traced.tree.children()[index].num_leaves
        written[index] = tuple(range(count, end))
        count = end
    return ResultForm(traced.out_tree, written)


def _leaf_numbers(structure: Any, arguments: int | Sequence[int]) -> tuple[int, ...]:
    """Return the numbers of the leaves of arguments, given by their numbers; negative ones count from the end."""
    counts = [each.num_leaves for each in structure.children()]
    chosen = {range(len(counts))[each] for each in np.atleast_1d(np.asarray(arguments, int))}
    owners = np.repeat(np.arange(len(counts)), counts)
    return tuple(number for number, owner in enumerate(owners) if owner in chosen)


def refuse_other_arguments(plan: PlanRecord, step: Callable, args: tuple, kwargs: Mapping[str, Any], error: Exception) -> None:
    """Raise an error that says how the arguments of a failed call differ from the arguments of a plan, if they do.

    JAX and the step may refuse such arguments before the step is traced to its end, in words that do not mention the plan. This
    runs only after an error, so that calls that succeed do no more work.

    Raises:
      TypeError: a leaf of the arguments is not an array.
      OtherStepError: the plan is for other arguments; the message says what differs.
    """
    if isinstance(error, OtherStepError):
        return
    leaves = argument_leaves(step, *read_call(step, args, kwargs))
    if difference := describe_arguments(plan.inputs, leaves):
        raise OtherStepError(f"the plan is for other arguments: {difference}") from error


def check_step(plan: PlanRecord, traced: TracedStep) -> None:
    """Check that a plan was made for this step and these arguments.

    A step that differs only in numbers written in it, such as a learning rate, is accepted. This is logged by the logger
    "penstock.shard", at the level INFO.

    Raises:
      OtherStepError: the plan is for another step or other arguments; the message says what differs.
    """
    if traced.fingerprint() != plan.fingerprint:
        difference = describe_difference(plan.inputs, plan.outputs, traced.inputs, traced.outputs)
        raise OtherStepError(f"the plan is for another step: {difference}")
    if traced.numbers() != plan.numbers:
        _LOGGER.info(
            "the plan was made for a step with other numbers written in it, such as another learning rate; it fits this step too"
        )


def jit_flat(plan: PlanRecord, traced: TracedStep, mesh: Any) -> Any:
    """Return the step as a jitted function of its flat arguments, with the state donated, to be compiled and not run.

    It leaves out `jax.debug.print`, `jax.debug.callback` and `jax.pure_callback`: a program with callbacks cannot be exported.
    """
    closed = traced.rewritten(plan.rewriting)
    return jax.jit(
        insert_constraints(closed, plan.sharding_constraints, mesh, callbacks=False),
        in_shardings=named_shardings(plan.inputs, mesh),
        out_shardings=named_shardings(plan.outputs, mesh),
        donate_argnums=tuple(sorted(set(plan.state.values()))),
        keep_unused=True,
    )


def abstract_arguments(plan: PlanRecord, traced: TracedStep, mesh: Any) -> list[jax.ShapeDtypeStruct]:
    """Return the flat arguments of the step, with their shardings on a mesh."""
    return [
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        for leaf, sharding in zip(traced.inputs, named_shardings(plan.inputs, mesh), strict=True)
    ]
