"""A plan in words, on one screen."""

from __future__ import annotations

import math
from collections import Counter

from penstock.shard.cost import Cost
from penstock.shard.meshes import describe
from penstock.shard.planned import LeafLayout, Plan
from penstock.shard.text import layout_of, seconds_of, size_of

_LEAVES = 12


def report(plan: Plan) -> str:
    """The mesh and what each axis does, memory and time beside the baselines', and the largest leaves."""
    cost = plan.cost
    lines = [
        f"Plan for {math.prod(plan.mesh_shape.values())} × {plan.hardware}, mesh {describe(plan.mesh_shape)}, "
        f"memory limit {size_of(plan.limit)} a device",
        "",
        *(
            f"  {name} ({size}): {'; '.join(axis_roles(plan, name)) or 'idle: every device along it does the same'}"
            for name, size in plan.mesh_shape.items()
        ),
        "",
        f"  {'a step, predicted':<30}{'time':>10}{'compute':>10}{'comm.':>10}{'sent':>10}{'memory':>10}{'arguments':>11}",
        _row("this plan", cost, plan.limit),
        *(_row(name, each, plan.limit) for name, each in plan.baselines.items()),
        "",
        "  memory a device: "
        + ", ".join(
            f"{size_of(size)} {name}"
            for name, size in (
                ("parameters", cost.memory.parameters),
                ("optimizer", cost.memory.optimizer),
                ("batch", cost.memory.batch),
                ("other", cost.memory.other),
                ("activations", cost.memory.activations),
            )
            if size
        ),
        "  collectives: "
        + (
            "; ".join(
                f"{each.count:.0f} {each.kind}s over {' and '.join(each.axes)}, {size_of(each.wire)}"
                for each in cost.collectives[:6]
            )
            or "none"
        ),
        "",
        "  the largest leaves",
        *_leaves(plan),
    ]
    return "\n".join(line.rstrip() for line in lines)


def _row(name: str, cost: Cost, limit: int) -> str:
    over = " over the limit" if cost.memory.total > limit else ""
    return (
        f"  {name:<30}{seconds_of(cost.seconds):>10}{seconds_of(cost.compute):>10}{seconds_of(cost.communication):>10}"
        f"{size_of(cost.wire):>10}{size_of(cost.memory.total):>10}{size_of(cost.memory.arguments):>11}{over}"
    )


def _leaves(plan: Plan) -> list[str]:
    """The largest leaves; those alike but for a number in their path, and laid out alike, in one line."""
    alike: dict[tuple, list[LeafLayout]] = {}
    for leaf in plan.inputs:
        key = (_without_numbers(leaf.path), leaf.shape, leaf.dtype, leaf.stored, leaf.used, leaf.role)
        alike.setdefault(key, []).append(leaf)
    largest = sorted(alike.values(), key=lambda leaves: -len(leaves) * math.prod(leaves[0].shape))
    rows = []
    for leaves in largest[:_LEAVES]:
        leaf = leaves[0]
        many = f" ×{len(leaves)}" if len(leaves) > 1 else ""
        use = "" if leaf.used is None or leaf.used == leaf.stored or leaf.role == "batch" else f", used {layout_of(leaf.used)}"
        rows.append(f"    {leaf.path}{many}  {leaf.dtype}{list(leaf.shape)}  {layout_of(leaf.stored)}{use}")
    if len(largest) > _LEAVES:
        rest = sum(len(leaves) for leaves in largest[_LEAVES:])
        rows.append(f"    and {rest} smaller ones")
    return rows


def _without_numbers(path: str) -> str:
    return "/".join("#" if part.isdigit() else part.rstrip("0123456789") or part for part in path.split("/"))


def axis_roles(plan: Plan, axis: str) -> list[str]:
    """What a mesh axis is used for, in the words of the field."""
    leaves = [leaf for leaf in plan.inputs if math.prod(leaf.shape) > 1]
    said = []
    batch = [leaf for leaf in leaves if leaf.role == "batch"]
    if any(leaf.stored and axis in leaf.stored[0] for leaf in batch):
        said.append("batch")
    if any(axis in entry for leaf in batch for entry in leaf.stored[1:]):
        said.append("sequence or positions of the batch")
    parameters = [leaf for leaf in leaves if leaf.role in ("parameters", "other") and len(leaf.shape) > 1]
    gathered = _share(
        [leaf for leaf in parameters if _has(leaf.stored, axis) and leaf.used is not None and not _has(leaf.used, axis)],
        parameters,
    )
    sharded = _share([leaf for leaf in parameters if leaf.used is not None and _has(leaf.used, axis)], parameters)
    optimizer = [leaf for leaf in leaves if leaf.role == "optimizer"]
    stored = _share([leaf for leaf in optimizer if _has(leaf.stored, axis)], optimizer)
    if sharded:
        said.append(f"tensor parallel ({sharded:.0%} of the parameters are used in parts)")
    if gathered > 0.05:
        said.append(f"ZeRO-3 ({gathered:.0%} of the parameters are stored in parts and gathered for use)")
    elif stored > 0.05 and stored > sharded + 0.05:
        said.append(f"ZeRO-1 ({stored:.0%} of the optimizer state is stored in parts)")
    counts: Counter[str] = Counter()
    for each in plan.cost.collectives:
        if axis in each.axes:
            counts[each.kind] += round(each.count)
    if said and counts:
        said.append(", ".join(f"{count} {kind}{'s' if count > 1 else ''}" for kind, count in counts.most_common(3)) + " a step")
    return said


def _has(spec: tuple[tuple[str, ...], ...], axis: str) -> bool:
    return any(axis in entry for entry in spec)


def _share(some: list[LeafLayout], all_of_them: list[LeafLayout]) -> float:
    total = sum(math.prod(leaf.shape) for leaf in all_of_them)
    return sum(math.prod(leaf.shape) for leaf in some) / total if total else 0.0
