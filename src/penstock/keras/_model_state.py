"""The state of a Keras model by name: a model goes in, also in the middle of an epoch; its arrays come out, and go back in.

Names are paths of variables such as "model/dense/kernel". Keras numbers the layers of a process ("dense_3"), so that a model that
is made a second time has other paths; these numbers are left out, and variables that then have the same name are counted.

In the middle of an epoch the values are not in the variables: Keras's trainer passes them from step to step, and donates them. It
leaves those after the last step in `_jax_state`, until `_jax_state_synced` says that the variables have them again.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

_NUMBER = re.compile(r"_\d+(?=[_/]|$)")
_GROUPS = {
    "trainable_variables": "model",
    "non_trainable_variables": "model",
    "optimizer_variables": "optimizer",
    "metrics_variables": "metrics",
}
"""The groups of variables of Keras's trainer, in the order of its state, and their names in a checkpoint."""


ALL = ("model", "optimizer", "metrics")


def values(model: Any, of: Sequence[str] = ALL) -> dict[str, Any]:
    """Return the values of variables by name: of the model with its seed generators, its optimizer and its metrics.

    Args:
      model: a model that is built and compiled. Its last step may still run.
      of: the names of the groups.
    """
    state = getattr(model, "_jax_state", None)
    if not state or model._jax_state_synced:
        return {name: variable.value for name, _, variable in _named(model, of)}
    return {name: state[group][number] for (name, (group, number), _) in _named(model, of)}


def abstract(model: Any, of: Sequence[str] = ALL) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shape, the dtype and the sharding of each variable by name, between two steps."""
    found = values(model, of)
    return {name: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=value.sharding) for name, value in found.items()}


def assign(model: Any, arrays: Mapping[str, Any], of: Sequence[str] = ALL) -> None:
    """Give the variables of a model their values, by name, between two steps."""
    for name, _, variable in _named(model, of):
        variable.assign(arrays[name])


def _named(model: Any, of: Sequence[str]) -> Iterator[tuple[str, tuple[str, int], Any]]:
    """Yield each variable with its name, and its place in the state of the trainer: group and number."""
    seen: Counter[str] = Counter()
    for group, prefix in _GROUPS.items():
        if prefix not in of:
            continue
        for number, variable in enumerate(model.optimizer.variables if prefix == "optimizer" else getattr(model, group)):
            name = f"{prefix}/{_NUMBER.sub('', variable.path)}"
            seen[name] += 1
            yield (name if seen[name] == 1 else f"{name} ({seen[name]})"), (group, number), variable
