"""Name the kind of parallelism that each mesh axis is used for.

In: a `PlanRecord`. Out: "batch", "tensor parallel" (Megatron, arXiv:1909.08053), "ZeRO-1" or "ZeRO-3" (arXiv:1910.02054), and the
collectives that send the most bytes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

from penstock.shard.apply.sharding_constraints import Spec
from penstock.shard.present.leaf_table import count_layers, parameters_of
from penstock.shard.record import LeafLayout, PlanRecord

_SOME = 0.05  # the least share that is mentioned
_MOST = 0.5  # the least share of updates of the state that is mentioned, as they follow from how the state is stored
_KINDS = 3  # the most kinds of collectives that are mentioned


def describe_axis(plan: PlanRecord, axis: str) -> list[str]:
    """Describe what a mesh axis is used for: ["batch", "ZeRO-3", "3 all-gathers and 2 reduce-scatters a layer"].

    - *batch*: the axis shards compute along the batch. *tensor parallel*: it shards compute along another dimension, and
      parameters at their use (Megatron, arXiv:1909.08053). *updates and casts of the state*: most of the compute that it shards
      are these, which follow the stored state. *idle*: all devices along it compute the same. If there are several, each has its
      share of the compute. In a plan that is left to the compiler, an axis that does not shard the batch is *used as the
      compiler chooses*.
    - *ZeRO-3* (FSDP): the axis shards stored parameters, which are gathered for use. *ZeRO-1*: it shards optimizer leaves, and
      not the parameters that they belong to (arXiv:1910.02054). The share of the leaves follows, unless it is all of them.
    - The collectives that send the most bytes along it.

    Args:
      plan: the plan.
      axis: the name of a mesh axis.
    """
    if plan.mesh_shape[axis] == 1:
        return ["one device, shards nothing"]
    return [*_compute(plan, axis), *_storage(plan, axis), *_collectives(plan, axis)]


def _compute(plan: PlanRecord, axis: str) -> list[str]:
    """Describe the part of the compute that an axis shards."""
    if plan.left_to_compiler:
        rows = any(leaf.role == "batch" and leaf.used is not None and _has(leaf.used, axis) for leaf in plan.inputs)
        return ["batch"] if rows else ["used as the compiler chooses"]
    work = plan.axis_work[axis]
    used = any(leaf.used is not None and _has(leaf.used, axis) for leaf in _matrices(plan.inputs, "parameters", "other"))
    names = {
        "batch": "batch",
        "tensor": "tensor parallel" if used else "other dimensions of activations",
        "state": "updates and casts of the state",
        "idle": "idle",
    }
    least = {"state": _MOST}
    shares = {names[kind]: share for kind, share in work.items() if share >= least.get(kind, _SOME)}
    if set(shares) == {"idle"}:
        return ["idle: all devices along it compute the same"]
    return list(shares) if len(shares) == 1 else [f"{name} {share:.0%}" for name, share in shares.items()]


def _storage(plan: PlanRecord, axis: str) -> list[str]:
    """Describe the leaves that an axis shards only in storage."""
    words = []
    parameters = _matrices(plan.inputs, "parameters", "other")
    gathered = _share(parameters, lambda leaf: _has(leaf.stored, axis) and leaf.used is not None and not _has(leaf.used, axis))
    if gathered >= _SOME:
        words.append(f"ZeRO-3{_unless_all(gathered, 'parameters')}")
    owner = parameters_of(plan.inputs)
    optimizer = [leaf for leaf in _matrices(plan.inputs, "optimizer") if leaf.path in owner]
    only_optimizer = _share(optimizer, lambda leaf: _has(leaf.stored, axis) and not _has(owner[leaf.path].stored, axis))
    if only_optimizer >= _SOME:
        words.append(f"ZeRO-1{_unless_all(only_optimizer, 'optimizer')}")
    return words


def _collectives(plan: PlanRecord, axis: str) -> list[str]:
    """Describe the collectives that send the most bytes along an axis."""
    counts: dict[str, float] = defaultdict(float)
    sent: dict[str, float] = defaultdict(float)
    for each in plan.cost.collectives:
        if axis in each.axes:
            counts[each.kind] += each.count
            sent[each.kind] += each.bytes_on_wire
    total = sum(sent.values())
    kinds = sorted((kind for kind in sent if sent[kind] >= _SOME * total), key=lambda kind: -sent[kind])[:_KINDS]
    return how_often({kind: round(counts[kind]) for kind in kinds}, count_layers(plan))


def how_often(counts: Mapping[str, int], repeated: tuple[int, str] | None) -> list[str]:
    """Say how often collectives run: in a layer if there are at least as many as layers, else in a step.

    Args:
      counts: kind of collective → number in a step.
      repeated: the number of layers, and the name of one; None if there are no repeated layers.

    >>> how_often({"all-reduce": 8, "all-gather": 2, "all-to-all": 1}, (2, "block"))
    ['4 all-reduces and 1 all-gather a block', '1 all-to-all a step']
    >>> how_often({"all-reduce": 11}, (2, "layer"))
    ['about 6 all-reduces a layer']
    """
    number, name = repeated or (1, "step")
    inside = {kind: count for kind, count in counts.items() if repeated and count >= number}
    about = "about " if any(count % number for count in inside.values()) else ""
    words = []
    if inside:
        words.append(f"{about}{_enumerate({kind: round(count / number) for kind, count in inside.items()})} a {name}")
    if outside := {kind: count for kind, count in counts.items() if kind not in inside}:
        words.append(f"{_enumerate(outside)} a step")
    return words


def _enumerate(counts: Mapping[str, int]) -> str:
    """Return numbers of collectives in words: "4 all-reduces and 1 all-gather"."""
    words = [f"{count} {kind if count == 1 else kind + 's'}" for kind, count in counts.items()]
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _matrices(leaves: Iterable[LeafLayout], *roles: str) -> list[LeafLayout]:
    """Return the leaves of some roles, without biases and scales, which are small; with them if there are no others."""
    of_roles = [leaf for leaf in leaves if leaf.role in roles]
    return [leaf for leaf in of_roles if len(leaf.shape) > 1] or of_roles


def _has(spec: Spec, axis: str) -> bool:
    """Return whether a mesh axis shards a dimension of a layout."""
    return any(axis in entry for entry in spec)


def _share(leaves: list[LeafLayout], wanted: Callable[[LeafLayout], bool]) -> float:
    """Return the share of the elements in leaves for which a condition holds."""
    total = sum(math.prod(leaf.shape) for leaf in leaves)
    return sum(math.prod(leaf.shape) for leaf in leaves if wanted(leaf)) / total if total else 0.0


def _unless_all(share: float, name: str) -> str:
    """Return a share in words; nothing if it is (almost) all."""
    return "" if share > 1 - _SOME else f" for {share:.0%} of the {name}"
