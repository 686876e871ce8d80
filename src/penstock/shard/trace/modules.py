"""Prepare the modules among the arguments of a step: mutable ones of Flax NNX, and Equinox ones with leaves that are not arrays.

JAX sees an NNX module as a pytree. A step that changes one changes a copy, and the new values would be lost. So the leaves that
differ after the step are results of it, and replace the old leaves. Two places of the arguments may hold the same `nnx.Variable`,
as tied weights do, or the same `nnx.Rngs`. `take_shared_out` leaves it in the first place only, and `put_shared_back` undoes
this.

An `equinox.Module` is a pytree whose leaves may be functions, flags and numbers. `mark_static` makes each of these a part of the
tree's structure, as `equinox.filter_jit` does, so that JAX sees arrays alone. `unmark_static` undoes this.

Neither library is imported here: without it, no argument is a module of it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax

Shared = tuple[tuple[int, int], ...]
"""Pairs of places that hold one variable: (the place where it is left out, the place where it stays)."""


# Flax NNX


def is_variable(node: Any) -> bool:
    """Return whether an object is an `nnx.Variable`, a node with an array that may be replaced."""
    nnx = sys.modules.get("flax.nnx")
    return nnx is not None and isinstance(node, nnx.Variable)


def has_variables(tree: Any) -> bool:
    """Return whether a tree contains an `nnx.Variable`."""
    return "flax.nnx" in sys.modules and any(map(is_variable, jax.tree_util.tree_leaves(tree, is_leaf=is_variable)))


def refuse_mutable_arrays(name: str, tree: Any) -> None:
    """Raise a `ValueError` if variables are mutable arrays of JAX, which a program does not return."""
    for node in jax.tree_util.tree_leaves(tree, is_leaf=is_variable) if has_variables(tree) else ():
        mode = next((mode for mode in ("hijax", "ref") if is_variable(node) and getattr(node, mode, False)), None)
        if mode is not None:
            raise ValueError(
                f"the Flax NNX object {name!r} has variables with {mode}=True, which are mutable arrays of JAX. A plan needs "
                f"variables that hold arrays: pass nnx.vars_as({name}, hijax=False, ref=False)"
            )


def take_shared_out(tree: Any) -> tuple[Any, Shared]:
    """Return a tree that has each `nnx.Variable` once, as the same object, and the places where others were."""
    nodes, structure = jax.tree_util.tree_flatten(tree, is_leaf=_is_place)
    first: dict[int, int] = {}
    for place, node in enumerate(nodes):
        if is_variable(node):
            first.setdefault(id(node), place)
    shared = tuple((place, first[id(node)]) for place, node in enumerate(nodes) if first.get(id(node), place) != place)
    if not shared:
        return tree, ()
    for place, _ in shared:
        nodes[place] = None
    return jax.tree_util.tree_unflatten(structure, nodes), shared


def put_shared_back(tree: Any, shared: Shared) -> Any:
    """Return a tree in which shared variables are in all their places."""
    if not shared:
        return tree
    nodes, structure = jax.tree_util.tree_flatten(tree, is_leaf=_is_place)
    for place, other in shared:
        nodes[place] = nodes[other]
    return jax.tree_util.tree_unflatten(structure, nodes)


def _is_place(node: Any) -> bool:
    """Return whether a node is a variable, or None, which stands where a variable was left out."""
    return node is None or is_variable(node)


def written_arguments(before: tuple, after: tuple, names: tuple[str, ...]) -> tuple[int, ...]:
    """Return the indices of the arguments that hold modules to which a step has written.

    Args:
      before: for each argument, its structure and leaves before the step; None if it has no variables.

    Raises:
      ValueError: the step has added or removed parts of a module, or replaced an array that is not in a variable.
    """
    written = []
    for index, (old, tree) in enumerate(zip(before, after, strict=True)):
        if old is None:
            continue
        leaves, structure = jax.tree_util.tree_flatten(tree)
        if structure != old[1]:
            raise ValueError(
                f"the step changes the structure of the Flax NNX object {names[index]!r}: it adds or removes variables, as "
                "Module.sow does, or changes an attribute that is not an array. A plan is for arguments that keep their "
                "structure: create all variables before, and pass what changes as an array"
            )
        changed = [number for number, (one, other) in enumerate(zip(old[0], leaves, strict=True)) if one is not other]
        variables = filter(is_variable, jax.tree_util.tree_leaves(tree, is_leaf=is_variable))
        inside = {id(leaf) for variable in variables for leaf in jax.tree_util.tree_leaves(variable)}
        if any(id(leaves[number]) not in inside for number in changed):
            raise ValueError(
                f"the step writes to an array of the Flax NNX object {names[index]!r} that is not in an nnx.Variable, so that it "
                "cannot be replaced: make it one, self.count = nnx.Variable(...)"
            )
        if changed:
            written.append(index)
    return tuple(written)


def write_back(tree: Any, new: Any) -> None:
    """Write the values of a tree to the variables of another of the same structure."""
    pairs = zip(*(jax.tree_util.tree_leaves(each, is_leaf=is_variable) for each in (tree, new)), strict=True)
    for variable, value in pairs:
        if is_variable(variable):
            variable.update_from_state(value)


def explain_closure(error: Exception, step: Callable) -> str | None:
    """Return what to do about an error that Flax raises if a step changes or differentiates a module from outside of it.

    The advice has the names of the modules; it is None if the error is another one.
    """
    if type(error).__name__ != "TraceContextError" and "from different trace level" not in str(error):
        return None
    names = sorted({name for name, value in _captured(step) if has_variables(value)})
    which = f"{' and '.join(map(repr, names))}, which it closes over" if names else "a Flax NNX object that it closes over"
    return (
        f"the step changes or differentiates {which}. The plan, and JAX, see only arguments and results, so the step would not "
        f"train: make it an argument, as ps.plan(step, {', '.join(names) or 'model'}, ...), or split it with nnx.split, take the "
        "state as an argument, nnx.merge in the step, and return the new state"
    )


def _captured(step: Callable, seen: tuple[Callable, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of a function's closure, its bound arguments, and the globals that it names.

    `seen` are the functions that close over it.
    """
    while True:
        if isinstance(step, functools.partial):
            with contextlib.suppress(TypeError, ValueError):  # a function without a signature
                yield from inspect.signature(step.func).bind_partial(*step.args, **step.keywords).arguments.items()
            step = step.func
        elif inspect.ismethod(step):
            yield "self", step.__self__
            yield from ((f"self.{name}", value) for name, value in getattr(step.__self__, "__dict__", {}).items())
            step = step.__func__
        elif hasattr(step, "__wrapped__"):
            step = step.__wrapped__
        else:
            break
    if not inspect.isfunction(step):
        return
    for name, cell in zip(step.__code__.co_freevars, step.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # a variable that has no value yet
            continue
        yield name, value
        if (inspect.isfunction(value) or hasattr(value, "__wrapped__")) and not any(value is each for each in (step, *seen)):
            yield from _captured(value, (*seen, step))
    codes = [step.__code__]
    while codes:
        code = codes.pop()
        yield from ((name, step.__globals__[name]) for name in code.co_names if name in step.__globals__)
        codes += [constant for constant in code.co_consts if inspect.iscode(constant)]


# Equinox


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class StaticLeaf:
    """A node of a pytree that has a hashable value in the structure, and no leaves."""

    value: Any

    def tree_flatten(self) -> tuple[tuple[()], Any]:
        """Return no children, and the value as auxiliary data."""
        return (), self.value

    @classmethod
    def tree_unflatten(cls, value: Any, _: Any) -> StaticLeaf:
        """Return the node that `tree_flatten` took apart."""
        return cls(value)


def has_equinox_module(tree: Any) -> bool:
    """Return whether a tree is an `equinox.Module` or contains one."""
    return "equinox" in sys.modules and any(map(_is_module, jax.tree_util.tree_leaves(tree, is_leaf=_is_module)))


def mark_static(tree: Any) -> Any:
    """Return a tree in whose Equinox modules each leaf without a shape and a dtype is a `StaticLeaf`."""

    def mark(leaf: Any) -> Any:
        return leaf if hasattr(leaf, "shape") and hasattr(leaf, "dtype") else StaticLeaf(leaf)

    if not has_equinox_module(tree):
        return tree
    return _map_nodes(lambda node: jax.tree_util.tree_map(mark, node) if _is_module(node) else node, tree, _is_module)


def unmark_static(tree: Any) -> Any:
    """Return a tree that has the value of each `StaticLeaf` in its place."""
    return _replace_static(tree, lambda leaf: leaf.value)


def drop_static(tree: Any) -> Any:
    """Return a tree with None in the place of each `StaticLeaf`, as `equinox.filter` does."""
    return _replace_static(tree, lambda leaf: None)


def _replace_static(tree: Any, replace: Callable[[StaticLeaf], Any]) -> Any:
    if not has_equinox_module(tree):
        return tree
    return _map_nodes(lambda node: replace(node) if _is_static(node) else node, tree, _is_static)


def _map_nodes(function: Callable[[Any], Any], tree: Any, is_node: Callable[[Any], bool]) -> Any:
    """Apply a function to nodes and to the leaves outside of them. An `nnx.Variable` stays the same object."""
    return jax.tree_util.tree_map(function, tree, is_leaf=lambda node: is_node(node) or is_variable(node))


def _is_static(node: Any) -> bool:
    return isinstance(node, StaticLeaf)


def _is_module(node: Any) -> bool:
    equinox = sys.modules.get("equinox")
    return equinox is not None and isinstance(node, equinox.Module)
