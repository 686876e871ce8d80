"""Treat the leaves of Equinox modules that are not arrays as static, as `equinox.filter_jit` does.

An `equinox.Module` is a pytree, and functions, flags and numbers may be among its leaves. `mark_static` puts each of them into a
node without leaves, so that it is a part of the tree's structure, and JAX sees arrays alone. `unmark_static` takes it out again.

Equinox is never imported here: without it, no argument is a module of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from penstock.shard.trace.modules import is_variable


@jax.tree_util.register_pytree_node_class
@dataclass(frozen=True)
class StaticLeaf:
    """A node of a pytree that has a value in the structure, and no leaves.

    Attributes:
      value: any object that can be hashed.
    """

    value: Any

    def tree_flatten(self) -> tuple[tuple[()], Any]:
        """Return no children, and the value as auxiliary data."""
        return (), self.value

    @classmethod
    def tree_unflatten(cls, value: Any, _: Any) -> StaticLeaf:
        """Return the node that `tree_flatten` took apart."""
        return cls(value)


def has_equinox_module(tree: Any) -> bool:
    """Return whether a tree is an `equinox.Module` or contains one.

    Args:
      tree: a pytree.
    """
    return "equinox" in sys.modules and any(map(_is_module, jax.tree_util.tree_leaves(tree, is_leaf=_is_module)))


def mark_static(tree: Any) -> Any:
    """Return a tree in whose Equinox modules each leaf that is not an array is a `StaticLeaf`.

    Args:
      tree: a pytree. A leaf is an array if it has a shape and a dtype. Leaves outside of Equinox modules stay as they are.
    """

    def mark(leaf: Any) -> Any:
        return leaf if hasattr(leaf, "shape") and hasattr(leaf, "dtype") else StaticLeaf(leaf)

    if not has_equinox_module(tree):
        return tree
    return _map_nodes(lambda node: jax.tree_util.tree_map(mark, node) if _is_module(node) else node, tree, _is_module)


def unmark_static(tree: Any) -> Any:
    """Return a tree that has the value of each `StaticLeaf` in its place.

    Args:
      tree: a result of `mark_static`, or a tree of its structure.
    """
    return _replace_static(tree, lambda leaf: leaf.value)


def drop_static(tree: Any) -> Any:
    """Return a tree with None in the place of each `StaticLeaf`, as that of `equinox.filter`.

    Args:
      tree: a tree of the structure of a result of `mark_static`.
    """
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
