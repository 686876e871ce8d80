"""Name the kind of parallelism that each mesh axis is used for, and count the layers of a model.

`describe_axis` defines the kinds. Layers are found in the parameters: in the loops that take slices of them, and in their paths.
"""

from __future__ import annotations

import itertools
import math
import operator
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from penstock.shard.record import LeafLayout, PlanRecord, shards

_SOME = 0.05  # the least share that is mentioned
_SOME_UPDATES = 0.5  # the least share of updates of the state that is mentioned, as they follow from how the state is stored
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
    """
    if plan.mesh_shape[axis] == 1:
        return ["one device, shards nothing"]
    return [*_compute(plan, axis), *_storage(plan, axis), *_collectives(plan, axis)]


def _compute(plan: PlanRecord, axis: str) -> list[str]:
    """Describe the part of the compute that an axis shards."""
    if plan.left_to_compiler:
        rows = any(leaf.role == "batch" and shards(leaf.used, axis) for leaf in plan.inputs)
        return ["batch"] if rows else ["used as the compiler chooses"]
    work = plan.axis_work[axis]
    used = any(shards(leaf.used, axis) for leaf in _matrices(plan.inputs, "parameters", "other"))
    tensor = "tensor parallel" if used else "other dimensions of activations"
    names = {"batch": "batch", "tensor": tensor, "state": "updates and casts of the state", "idle": "idle"}
    shares = {names[kind]: share for kind, share in work.items() if share >= (_SOME_UPDATES if kind == "state" else _SOME)}
    if set(shares) == {"idle"}:
        return ["idle: all devices along it compute the same"]
    return list(shares) if len(shares) == 1 else [f"{name} {share:.0%}" for name, share in shares.items()]


def _storage(plan: PlanRecord, axis: str) -> list[str]:
    """Describe the leaves that an axis shards only in storage."""
    words = []
    parameters = _matrices(plan.inputs, "parameters", "other")
    gathered = _share(parameters, lambda leaf: leaf.is_gathered_along(axis))
    if gathered >= _SOME:
        words.append(f"ZeRO-3{_unless_all(gathered, 'parameters')}")
    owner = parameters_of(plan.inputs)
    optimizer = [leaf for leaf in _matrices(plan.inputs, "optimizer") if leaf.path in owner]
    only_optimizer = _share(optimizer, lambda leaf: shards(leaf.stored, axis) and not shards(owner[leaf.path].stored, axis))
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

    `counts` has the number of each kind in a step. `repeated` is the number of layers and the name of one; None without layers.

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


def _share(leaves: list[LeafLayout], wanted: Callable[[LeafLayout], bool]) -> float:
    """Return the share of the elements in leaves for which a condition holds."""
    total = sum(math.prod(leaf.shape) for leaf in leaves)
    return sum(math.prod(leaf.shape) for leaf in leaves if wanted(leaf)) / total if total else 0.0


def _unless_all(share: float, name: str) -> str:
    """Return a share in words; nothing if it is (almost) all."""
    return "" if share > 1 - _SOME else f" for {share:.0%} of the {name}"


def parameters_of(leaves: Sequence[LeafLayout]) -> dict[str, LeafLayout]:
    """Return the parameter that each optimizer leaf belongs to, by the path of the optimizer leaf.

    It is the parameter of the same shape whose path has the longest common end. A leaf without such a parameter is left out.
    """
    named: dict[tuple[str, tuple[int, ...]], list[LeafLayout]] = defaultdict(list)
    for leaf in leaves:
        if leaf.role == "parameters":
            named[leaf.path.rpartition("/")[2], leaf.shape].append(leaf)
    found = {}
    for leaf in leaves:
        backwards = leaf.path.split("/")[::-1]
        candidates = named.get((backwards[0], leaf.shape), ())
        if leaf.role == "optimizer" and candidates:
            found[leaf.path] = max(candidates, key=lambda each: len(_common_start(each.path.split("/")[::-1], backwards)))
    return found


def _common_start(*paths: Sequence[str]) -> list[str]:
    """Return the parts that all paths begin with."""
    return [parts[0] for parts in itertools.takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))]


def count_layers(plan: PlanRecord) -> tuple[int, str] | None:
    """Return the number of repeated layers of a model, and the word for one of them: (32, "layer").

    Layers are the slices that loops take of stacked parameters, or they are numbered in the paths of the parameters. Numbered
    layers have leaves of the same names and shapes. Both have at least one matrix. The result is None if there are no such
    layers, or if they are not all equal or not all of one kind: a count "a layer" would be ambiguous.
    """
    stacked = [leaf for leaf in plan.inputs if leaf.role == "parameters" and leaf.slices > 1 and _is_stack_of_matrices(leaf)]
    numbered = _numbered_layers([leaf for leaf in plan.inputs if leaf.role == "parameters" and leaf.slices == 1])
    counts = {leaf.slices for leaf in stacked}
    if not stacked and len(numbered) == 1:
        ((family, members),) = numbered.items()
        equal = len({tuple(sorted(leaves)) for leaves in members.values()}) == 1
        return (len(members), _layer_name(family)) if equal else None
    if len(counts) == 1 and not numbered:
        return counts.pop(), _layer_name("/".join(_common_start(*(leaf.path.split("/")[:-1] for leaf in stacked))))
    return None


def _is_stack_of_matrices(leaf: LeafLayout) -> bool:
    """Return whether the slices that loops take of a leaf have two dimensions or more; loops take them along the first."""
    sizes = itertools.accumulate(leaf.shape, operator.mul)
    return sum(size > leaf.slices for size in sizes) > 1


def _numbered_layers(leaves: Iterable[LeafLayout]) -> dict[str, dict[str, list[tuple[str, tuple[int, ...]]]]]:
    """Return the leaves, as names and shapes, of each number of each kind of layers that paths number, if it has matrices."""
    parts: dict[str, dict[str, list[tuple[str, tuple[int, ...]]]]] = defaultdict(lambda: defaultdict(list))
    for leaf in leaves:
        # "params/layers/3/mlp/w": the text before the first number, the number, and the rest.
        if match := re.match(r"((?:[^/]*/)*?[^/]*?)(\d+)(?:/(.*))?$", leaf.path):
            family, number, rest = match.groups(default="")
            parts[family][number].append((rest, leaf.shape))
    return {
        family: members
        for family, members in parts.items()
        if len(members) > 1 and any(len(shape) > 1 for leaves in members.values() for _, shape in leaves)
    }


def _layer_name(path: str) -> str:
    """Return the word for one of the layers at a path.

    >>> _layer_name("state/params/blocks/"), _layer_name("state/params/encoder")
    ('block', 'layer')
    """
    name = path.strip("/").rpartition("/")[2].rstrip("_-").removesuffix("s")
    return name if name in ("block", "stage", "cell") else "layer"
