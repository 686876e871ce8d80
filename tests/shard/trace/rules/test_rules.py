"""Each rule predicts what XLA does with its primitive: equal results, and collectives only for partial results."""

import json

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from tests.shard.trace.rules import examples_shape, partitioner
from tests.shard.trace.rules.examples import EXAMPLES, drawn
from tests.shard.trace.rules.sharded import Equation, assert_hold, assert_labels_every_dimension_once, equations_of, rule

from penstock._jaxlib_faults import GATHERED_TRANSFORM
from penstock.shard.trace.rules import RULES, find_rule


def layouts(one: Equation) -> list[dict[int, int]]:
    """Return shards by factor: each factor alone, and one pair of factors on a mesh of 2 × 4."""
    alone, fours = one.factors(2), one.factors(4)
    pairs = [{a: 2, b: 4} for a in alone for b in fours if a != b]
    return [{factor: 2} for factor in alone] + pairs[-1:]


# The simplest example has the most factors to shard. Primitives that move elements have a second one, as it moves none.
@pytest.mark.parametrize(
    ("name", "count"),
    [
        *(pytest.param(name, 2 if hasattr(examples_shape, name) else 1, id=name) for name in EXAMPLES),
        *(pytest.param(name, 4, id=f"{name}-more", marks=pytest.mark.slow) for name in EXAMPLES),
    ],
)
def test_sharded_factors_need_only_the_collectives_that_the_rule_predicts(name, count):
    primitives, strategy = EXAMPLES[name]
    cases = []
    for example in drawn(strategy, count):
        equations = equations_of(primitives, example)
        assert {one.equation.primitive.name for one in equations} == set(primitives)
        for one in equations:
            assert_labels_every_dimension_once(one)
            cases += [(one, shards) for shards in layouts(one)]
    assert_hold(cases)


def test_every_rule_has_an_example():
    newer = set() if hasattr(lax, "stack_p") else {"stack", "unstack"}  # which JAX 0.10.0 does not have
    assert set(RULES) - newer <= {primitive for primitives, _ in EXAMPLES.values() for primitive in primitives}


def shaped(*shapes):
    return [np.empty(shape) for shape in shapes]


def test_a_primitive_without_rule_is_elementwise_if_shapes_agree():
    rule = find_rule("of_another_library", {}, shaped((4, 8), (), (4, 8)), shaped((4, 8)))
    assert rule.operands == ((0, 1), (), (0, 1))
    assert rule.results == ((0, 1),)


@pytest.mark.parametrize(
    ("operands", "results"),
    [
        ([(4, 8)], [(4,)]),
        ([(4, 8), (4, 1)], [(4, 8)]),
        ([(4, 8)], [(4, 8), (4,)]),
        ([(4, 8)], [()]),
        ([(4, 8)], []),
    ],
)
def test_a_primitive_without_rule_is_replicated_if_shapes_differ(operands, results):
    rule = find_rule("of_another_library", {}, shaped(*operands), shaped(*results))
    assert rule.sizes == ()
    assert {factor for dims in (*rule.operands, *rule.results) for factor in dims} <= {None}


TOP = ("largest", "largest_along_another_dimension")
ALSO_SHARDED = {"patches", "pooling", "gradient_of_pooling", "factorisation", "band", *TOP}
"""Examples in which a compiler also shards what rules replicate: positions of windows that do not overlap; on TPUs, columns of
right-hand sides; on GPUs from jaxlib 0.12 on, the batch of `top_k`, but not in programs that were exported."""


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_rules_shard_what_the_partitioner_shards(name):
    table = json.loads(partitioner.TABLE.read_text())
    mesh = jax.make_mesh((2,), ("two",), (AxisType.Auto,), devices=jax.devices()[:2])
    for row, one in partitioner.rows(name).items():
        in_table = table[row]
        if name == "transform" and GATHERED_TRANSFORM.present:
            in_table = dict.fromkeys(in_table, "")
        assert partitioner.in_compiler(one, mesh) == in_table["cpu"].split(), row
        for compiler, dims in in_table.items():
            sharded, in_rule = set(dims.split()), set(partitioner.in_rule(one, rule(one.equation, compiler)))
            assert in_rule <= sharded, (row, compiler)
            assert in_rule == sharded or name in ALSO_SHARDED, (row, compiler)
