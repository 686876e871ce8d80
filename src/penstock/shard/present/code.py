"""Write a plan as the source of a module in plain JAX: the mesh, the layouts by path, and the sharding constraints by line.

The printed module evaluates the step's jaxpr as `apply/sharding_constraints.py` does. It finds the operations to constrain by
their form, and where operations of one form differ, by their numbers in the order of evaluation. So edits that only move lines
change nothing; comments name the lines. The functions of the printed module are the sections of `plain_jax.py`.
"""

from __future__ import annotations

import inspect
import math
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from penstock._jax import LOWER_JAXPR
from penstock.shard.apply.sharding_constraints import Spec
from penstock.shard.mesh.shapes import describe_mesh
from penstock.shard.present import plain_jax
from penstock.shard.present.code_rows import COLUMNS, CodeRow, find_rows, quoted, write_layout, write_row
from penstock.shard.record import PlanRecord
from penstock.shard.trace.modules import drop_static, has_equinox_module, has_variables
from penstock.shard.trace.rewriting import AS_WRITTEN
from penstock.shard.trace.step import TracedStep

_MOST_LINES = 4
"""The most lines of the user's code that a comment names."""
_SECTION = re.compile(r"^# ([^\n]+)\.\n\n\n", re.MULTILINE)
"""The comment that begins a section of `plain_jax.py`."""

_ABOUT = """\
Run a training step with a sharding plan, in plain JAX.

The arguments of the step are arrays, or jax.ShapeDtypeStruct where they are only described:

    train = jit_step(step, *args, donate_argnums=0)
    results = train(*jax.device_put(args, in_shardings(make_mesh(), *args)))

The mesh has automatic axes. Where jax.set_mesh has a mesh with Explicit axes, write these lines inside of

    with jax.set_mesh(make_mesh()):
"""
_MODULES = """
For an Equinox module, pass its arrays: arrays, static = eqx.partition(module, eqx.is_array), and eqx.combine them in the step.
"""
_BY_HAND = """\
# The layouts of operations of the step, in the order of evaluation. To write one of them into the step by hand:
#     value = jax.lax.with_sharding_constraint(value, NamedSharding(mesh, P(...)))
# In a step for a mesh with Explicit axes:
#     value = jax.sharding.reshard(value, P(...))
"""
_LOWER = f'''\
def lower(closed):
    """Return a jaxpr with the operations that its high-level primitives stand for, as JAX lowers it before it compiles."""
    from {LOWER_JAXPR[0]} import {LOWER_JAXPR[1]}  # JAX 0.12 has no public name for it

    return {LOWER_JAXPR[1]}(closed) if getattr(closed, "is_high", False) else closed
'''


def plan_code(plan: PlanRecord, traced: TracedStep, devices: Sequence[Any] | None) -> str:
    """Return a plan as Python source that needs only JAX.

    Args:
      traced: the step of the plan.
      devices: the devices of the mesh, in order; None takes those that are present where the source runs.

    Raises:
      ValueError: arguments of the step are Flax NNX objects, or the plan changes the step.
    """
    args = jax.tree_util.tree_unflatten(traced.tree, range(traced.tree.num_leaves))
    if has_variables(args):
        raise ValueError(
            "the step takes Flax NNX objects, which jax.jit does not update, so its plan has no code: plan a step that takes the "
            "state of nnx.split, calls nnx.merge inside, and returns the new state"
        )
    if plan.rewriting != AS_WRITTEN:
        raise ValueError(
            "this plan changes the step, with remat or microbatches, and the code would have only its layouts: use plan.jit"
        )
    results = jax.tree_util.tree_unflatten(traced.out_tree, range(traced.out_tree.num_leaves))
    start, keywords = plan.sharding_constraints.at_start, traced.form.keywords
    rows, not_entered = find_rows(traced, plan.sharding_constraints)
    _, *parts = _SECTION.split(inspect.getsource(plain_jax))
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    stored = [leaf.stored for leaf in plan.inputs]
    imports = _imports(bool(rows), bool(start or keywords), devices is not None)
    blocks = {
        f"{_header(plan, has_equinox_module(args))}\n\n{imports}": True,
        _make_mesh(plan.mesh_shape, devices): True,
        _tables("ARGUMENTS", [_table(arg, stored) for arg in args]): True,
        f"RESULTS = {_dict(_table(results, [leaf.stored for leaf in plan.outputs]))}": True,
        f"KEYWORDS = {quoted(keywords)}": bool(keywords),
        _tables("AT_START", [_table(arg, start) for arg in args] if start else []): bool(start),
        sections["Rows of sharding constraints"]: bool(rows),
        _constraints(rows, not_entered): bool(rows),
        _jit(bool(keywords), bool(rows), traced.high, bool(start)): True,
        sections["Shardings by path"]: True,
        sections["Arguments by keyword"]: bool(keywords),
        sections["Layouts from the start of the step"]: bool(start),
        sections["Sharding constraints inside of the step"]: bool(rows),
        _LOWER: bool(rows) and traced.high,
    }
    return "\n\n\n".join(block.strip() for block, needed in blocks.items() if needed) + "\n"


def _header(plan: PlanRecord, has_modules: bool) -> str:
    """Return the docstring of the printed module, and a comment that describes the plan."""
    about = f"The plan is for {plan.device_count} × {plan.hardware}, mesh {describe_mesh(plan.mesh_shape)}."
    return f'"""{_ABOUT}{_MODULES if has_modules else ""}"""\n\n{_comment(about)}'


def _imports(rows: bool, wrapped: bool, devices: bool) -> str:
    """Return the imports of the printed module."""
    lines = {
        "import functools": rows or wrapped,
        "import re": True,
        "from collections import Counter": rows,
        f"from collections.abc import {'Callable, Mapping, Sequence' if rows or wrapped else 'Mapping'}": True,
        f"from typing import Any{', NamedTuple' if rows else ''}": True,
        "\nimport jax": True,
        "import numpy as np": devices,
        "from jax.extend.core import Literal": rows,
        f"from jax.sharding import AxisType, {'Mesh, ' if devices else ''}NamedSharding": True,
        "from jax.sharding import PartitionSpec as P": True,
    }
    return "\n".join(line for line, needed in lines.items() if needed)


def _make_mesh(shape: Mapping[str, int], devices: Sequence[Any] | None) -> str:
    """Return the function that makes the mesh. It names the devices by their ids if they were given to the plan."""
    names, sizes = tuple(shape), tuple(shape.values())
    types = f"axis_types=(AxisType.Auto,) * {len(names)}"
    if devices is None:
        body = f"return jax.make_mesh({sizes}, {quoted(names)}, {types}, devices=jax.devices()[:{math.prod(sizes)}])"
    else:
        body = (
            "by_id = {device.id: device for device in jax.devices()}\n"
            f"    devices = [by_id[number] for number in {[device.id for device in devices]}]\n"
            f"    return Mesh(np.array(devices).reshape({sizes}), {quoted(names)}, {types})"
        )
    return f'def make_mesh():\n    """Return the mesh of the plan."""\n    {body}'


def _jit(keywords: bool, rows: bool, high: bool, start: bool) -> str:
    """Return the functions that make the shardings and the jitted step."""
    steps = {
        "step = by_position(step, len(ARGUMENTS) - len(KEYWORDS), KEYWORDS)": keywords,
        "out_shardings = shard_like(jax.eval_shape(step, *args), RESULTS, mesh)": True,
        f"step = constrained(step, CONSTRAINTS, mesh{', lower' if high else ''})": rows,
        "step = starting_in(step, AT_START, mesh)": start,
    }
    lines = "\n".join(f"    {line}" for line, needed in steps.items() if needed)
    return f'''\
def in_shardings(mesh, *args):
    """Return a tree of shardings for each argument of the step."""
    return tuple(shard_like(arg, table, mesh) for arg, table in zip(args, ARGUMENTS, strict=True))


def jit_step(step, *args, mesh=None, donate_argnums=()):
    """Return the jitted step, for arguments of the structure of `args`{", those by keyword last" if keywords else ""}."""
    mesh = make_mesh() if mesh is None else mesh
{lines}
    return jax.jit(
        step,
        in_shardings=in_shardings(mesh, *args),
        out_shardings=out_shardings,
        donate_argnums=donate_argnums,
        keep_unused=True,  # otherwise jax.jit drops arguments that the step does not read
    )'''


# The layouts by path.


def _table(numbered: Any, specs: Sequence[Spec | None]) -> dict[str, Spec]:
    """Return path → layout for the leaves of a tree that have a layout.

    Paths that differ only in digits have one row if all of them have one layout.

    Args:
      numbered: the tree, whose leaves are their numbers among `specs`.
    """
    leaves = jax.tree_util.tree_flatten_with_path(drop_static(numbered))[0]
    found = {jax.tree_util.keystr(path): specs[number] for path, number in leaves}
    alike: dict[str, list[Spec | None]] = {}
    for path, spec in found.items():
        alike.setdefault(_pattern(path), []).append(spec)

    def name(path: str) -> str:
        pattern = _pattern(path)
        shared = pattern not in found and len(alike[pattern]) > 1 and len(set(alike[pattern])) == 1
        return pattern if shared else path

    return {name(path): spec for path, spec in found.items() if spec is not None}


def _pattern(path: str) -> str:
    return re.sub(r"\d+", "*", path)


def _tables(name: str, tables: Sequence[Mapping[str, Spec]]) -> str:
    """Return the assignment of a list of tables."""
    text = "".join(f"    {textwrap.indent(_dict(table), '    ').strip()},\n" for table in tables)
    return f"{name} = [\n{text}]"


def _dict(table: Mapping[str, Spec]) -> str:
    rows = "".join(f"    {quoted(path)}: {write_layout(spec)},\n" for path, spec in table.items())
    return f"{{\n{rows}}}" if rows else "{}"


# The sharding constraints by line.


def _constraints(rows: Sequence[CodeRow], not_entered: Sequence[str]) -> str:
    """Return the assignment of the rows, each under a comment with its lines."""
    lines, before = [], ""
    for row in rows:
        more = len(row.lines) - _MOST_LINES
        named = [*row.lines[:_MOST_LINES], *([f"and {more} more lines"] if more > 0 else [])]
        comment = "\n".join(f"    {_comment(line)}" for line in named)
        lines += [comment] if comment and comment != before else []
        lines.append(write_row(row))
        before = comment
    left = "".join(f"{_comment(f'The layouts inside of this operation are left out: {line}')}\n" for line in not_entered)
    return f"{_BY_HAND}{left}CONSTRAINTS = [\n" + "\n".join(lines) + "\n]"


def _comment(text: str) -> str:
    """Return text from user code as one line of a comment."""
    printable = "".join(each if each.isprintable() else "?" for each in text)
    return textwrap.shorten(f"# {printable}", COLUMNS, placeholder=" …")
