"""Each rule predicts what XLA does with its primitive: equal results, and collectives only for partial results."""

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from jax import lax
from tests.shard.trace.rules import (
    examples_contract,
    examples_index,
    examples_linalg,
    examples_random,
    examples_reduce,
    examples_shape,
)
from tests.shard.trace.rules.examples import EXAMPLES
from tests.shard.trace.rules.sharded import Equation, assert_hold, assert_labels_every_dimension_once, equations_of

from penstock.shard.trace.rules import RULES, find_rule

MODULES = (examples_contract, examples_index, examples_linalg, examples_random, examples_reduce, examples_shape)


def layouts(one: Equation) -> list[dict[int, int]]:
    """Return shards by factor: each factor alone, and one pair of factors on a mesh of 2 × 4."""
    alone, fours = one.factors(2), one.factors(4)
    pairs = [{a: 2, b: 4} for a in alone for b in fours if a != b]
    return [{factor: 2} for factor in alone] + pairs[-1:]


def drawn(strategy, count):
    """Return examples of a strategy, the simplest first."""
    found = []

    @settings(
        max_examples=count, database=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    @given(strategy)
    def draw(example):
        found.append(example)

    draw()
    return found


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
