"""What each mesh axis is used for, in the words of the field."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

from penstock.shard.apply.sharding_constraints import Spec
from penstock.shard.present.leaf_table import count_layers, parameters_of
from penstock.shard.record import LeafLayout, PlanRecord

_SOME = 0.05  # a share that is worth a word
_KINDS = 3  # of collectives


def describe_axis(plan: PlanRecord, axis: str) -> list[str]:
    """What a mesh axis is used for: ["batch", "ZeRO-3", "3 all-gathers and 2 reduce-scatters a layer"].

    - *batch*, *tensor parallel*: computing that the axis shards along the batch, or along another dimension while it shards
      parameters in use (Megatron, arXiv:1909.08053); *idle*: what all devices along it compute alike. Where there are several,
      each has its share of the computing.
    - *ZeRO-3* (FSDP): it shards parameters where they are stored, and they are gathered for use. *ZeRO-1*: it shards the
      optimizer's leaves, and not the parameters that they belong to (arXiv:1910.02054). With the share, if that is not all.
    - the collectives that take most of what is sent along it.
    """
    if plan.mesh_shape[axis] == 1:
        return ["one device, shards nothing"]
    work = plan.axis_work[axis]
    return [*_computing(plan, axis, work), *_storing(plan, axis), *_sending(plan, axis)]


def _computing(plan: PlanRecord, axis: str, work: dict[str, float]) -> list[str]:
    used = any(leaf.used is not None and _has(leaf.used, axis) for leaf in _matrices(plan.inputs, "parameters", "other"))
    names = {"batch": "batch", "tensor": "tensor parallel" if used else "other dimensions of activations", "idle": "idle"}
    said = {names[kind]: share for kind, share in work.items() if share >= _SOME}
    if set(said) == {"idle"}:
        return ["idle: all devices along it compute the same"]
    return list(said) if len(said) == 1 else [f"{name} {share:.0%}" for name, share in said.items()]


def _storing(plan: PlanRecord, axis: str) -> list[str]:
    said = []
    parameters = _matrices(plan.inputs, "parameters", "other")
    gathered = _share(parameters, lambda leaf: _has(leaf.stored, axis) and leaf.used is not None and not _has(leaf.used, axis))
    if gathered >= _SOME:
        said.append(f"ZeRO-3{_of(gathered, 'parameters')}")
    belongs = parameters_of(plan.inputs)
    optimizer = [leaf for leaf in _matrices(plan.inputs, "optimizer") if leaf.path in belongs]
    apart = _share(optimizer, lambda leaf: _has(leaf.stored, axis) and not _has(belongs[leaf.path].stored, axis))
    if apart >= _SOME:
        said.append(f"ZeRO-1{_of(apart, 'optimizer')}")
    return said


def _sending(plan: PlanRecord, axis: str) -> list[str]:
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
    """How often there are collectives: in a layer, of which not all need be, or in a step.

    Args:
      counts: in a step, by kind.
      repeated: how many layers there are, and what they are called.

    >>> how_often({"all-reduce": 8, "all-gather": 2, "all-to-all": 1}, (2, "block"))
    ['4 all-reduces and 1 all-gather a block', '1 all-to-all a step']
    >>> how_often({"all-reduce": 11}, (2, "layer"))
    ['about 6 all-reduces a layer']
    """
    number, name = repeated or (1, "step")
    inside = {kind: count for kind, count in counts.items() if repeated and count >= number}
    about = "about " if any(count % number for count in inside.values()) else ""
    said = []
    if inside:
        said.append(f"{about}{_counted({kind: round(count / number) for kind, count in inside.items()})} a {name}")
    if outside := {kind: count for kind, count in counts.items() if kind not in inside}:
        said.append(f"{_counted(outside)} a step")
    return said


def _counted(counts: Mapping[str, int]) -> str:
    words = [f"{count} {kind if count == 1 else kind + 's'}" for kind, count in counts.items()]
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _matrices(leaves: Iterable[LeafLayout], *roles: str) -> list[LeafLayout]:
    """Leaves of some roles; biases and scales, which are small, only if there are no others."""
    some = [leaf for leaf in leaves if leaf.role in roles]
    return [leaf for leaf in some if len(leaf.shape) > 1] or some


def _has(spec: Spec, axis: str) -> bool:
    return any(axis in entry for entry in spec)


def _share(leaves: list[LeafLayout], wanted: Callable[[LeafLayout], bool]) -> float:
    """Of the elements."""
    total = sum(math.prod(leaf.shape) for leaf in leaves)
    return sum(math.prod(leaf.shape) for leaf in leaves if wanted(leaf)) / total if total else 0.0


def _of(share: float, what: str) -> str:
    return "" if share > 1 - _SOME else f" for {share:.0%} of the {what}"
