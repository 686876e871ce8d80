"""What a step function does with its arguments: its jaxpr, the paths of its leaves, and which of them are state."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core


@dataclass(frozen=True)
class Leaf:
    """An array among the arguments or results.

    Attributes:
      path: "state/params/w", or of a single argument's own leaves "params/w"; see `paths_of`.
      shape, dtype: of it.
    """

    path: str
    shape: tuple[int, ...]
    dtype: Any


@dataclass(frozen=True)
class Traced:
    """A step function, looked at.

    Attributes:
      closed: its jaxpr.
      inputs: leaves of all arguments, in order.
      outputs: leaves of what it returns.
      tree: of the tuple of arguments.
      out_tree: of what it returns.
      argument: of each input leaf, the number of its argument.
      state: of each output that replaces an input, the place of that input.
    """

    closed: core.ClosedJaxpr
    inputs: tuple[Leaf, ...]
    outputs: tuple[Leaf, ...]
    tree: Any
    out_tree: Any
    argument: tuple[int, ...]
    state: dict[int, int]

    def fingerprint(self) -> str:
        """Of the arguments' structure, shapes and dtypes, and of the program: 16 hexadecimal digits."""
        described = [str(self.tree), *(f"{leaf.path}{leaf.shape}{leaf.dtype}" for leaf in self.inputs), _text(self.closed)]
        return hashlib.sha256("\n".join(described).encode()).hexdigest()[:16]


def trace(step: Callable, args: tuple) -> Traced:
    """Trace a step with abstract arguments.

    Args:
      step: any function that jax.jit takes.
      args: its positional arguments: pytrees of arrays, or of anything with a shape and a dtype. Nothing is allocated.

    Raises:
      whatever the step raises while it is traced, as it is.
      TypeError: an argument holds a leaf that is no array.
      ValueError: the step has side effects.
    """
    abstract = tuple(jax.tree_util.tree_map_with_path(_abstract, arg) for arg in args)
    closed, out = jax.make_jaxpr(step, return_shape=True)(*abstract)
    if closed.effects:
        effects = ", ".join(sorted(str(effect) for effect in closed.effects))
        raise ValueError(f"the step has side effects ({effects}), which a plan cannot keep in order; take them out of the step")
    flat, tree = jax.tree_util.tree_flatten(abstract)
    argument = tuple(number for number, arg in enumerate(abstract) for _ in jax.tree_util.tree_leaves(arg))
    inputs = tuple(Leaf(path, tuple(each.shape), each.dtype) for path, each in zip(_argument_paths(abstract), flat, strict=True))
    out_flat, out_tree = jax.tree_util.tree_flatten(out)
    outputs = tuple(Leaf(path, tuple(each.shape), each.dtype) for path, each in zip(paths_of(out), out_flat, strict=True))
    return Traced(closed, inputs, outputs, tree, out_tree, argument, _state(abstract, out))


def paths_of(tree: Any) -> list[str]:
    """The path of each leaf: keys, attributes and places, joined by "/"."""
    return ["/".join(_name(key) for key in path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]


def _argument_paths(args: tuple) -> list[str]:
    """With more than one argument of state or batch the first part of a path is the number of the argument."""
    return [path for number, arg in enumerate(args) for path in (_join(str(number), each) for each in paths_of(arg))]


def _join(first: str, rest: str) -> str:
    return f"{first}/{rest}" if rest else first


def _name(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return re.sub(r"^[.\[]|\]$", "", str(key))


def _abstract(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
    if isinstance(leaf, (bool, int, float, complex)):
        leaf = jax.eval_shape(lambda: jax.numpy.asarray(leaf))
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        where = "/".join(_name(key) for key in path)
        raise TypeError(f"the argument has a leaf at {where!r} that is no array: {type(leaf).__name__}; close over it instead")
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=getattr(leaf, "weak_type", False))


def _state(args: tuple, out: Any) -> dict[int, int]:
    """Which outputs replace which inputs: whole results, or an argument's whole part, of the same structure and shapes.

    A step returns its state first, (state, metrics), or alone, or in parts (params, optimizer, metrics). Each part is looked for among
    the arguments, in order; one argument is replaced once.
    """
    offsets, total = [], 0
    for arg in args:
        offsets.append(total)
        total += len(jax.tree_util.tree_leaves(arg))
    parts = [(0, out)]
    found: dict[int, int] = {}
    taken: set[int] = set()
    while parts:
        offset, part = parts.pop(0)
        for number, arg in enumerate(args):
            if number not in taken and _same(arg, part):
                taken.add(number)
                for leaf in range(len(jax.tree_util.tree_leaves(part))):
                    found[offset + leaf] = offsets[number] + leaf
                break
        else:
            if type(part) in (tuple, list) or (isinstance(part, tuple) and offset == 0):
                for child in part:
                    parts.append((offset, child))
                    offset += len(jax.tree_util.tree_leaves(child))
            elif isinstance(part, dict):
                for key in sorted(part):
                    parts.append((offset, part[key]))
                    offset += len(jax.tree_util.tree_leaves(part[key]))
    return found


def _same(arg: Any, part: Any) -> bool:
    """The same structure, shapes and dtypes, of at least one array."""
    flat, tree = jax.tree_util.tree_flatten(arg)
    other, other_tree = jax.tree_util.tree_flatten(part)
    return (
        bool(flat)
        and tree == other_tree
        and all(a.shape == b.shape and a.dtype == b.dtype for a, b in zip(flat, other, strict=True))
    )


def _text(closed: core.ClosedJaxpr) -> str:
    """The program, without what differs from trace to trace (addresses of functions)."""
    return re.sub(r"0x[0-9a-f]+", "", str(closed))
