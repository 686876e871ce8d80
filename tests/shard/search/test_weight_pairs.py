"""Weights that Megatron shards in pairs, and the two sides of the dimensions that they connect."""

import jax
import jax.numpy as jnp
from hypothesis import given
from hypothesis import strategies as st
from tests.shard.search.programs import array, model_of, training

from penstock.shard.search.baselines import WeightPairs, find_weight_pairs, sides

D, ROWS, TOKENS, WORDS = 64, 32, 16, 512


def found(loss, params, batch):
    """Return the pairs of a training step and the sides of each set, as names of dimensions of the parameters: "up.1".

    A component has the name of the first dimension of the parameters that is in it.
    """
    model = model_of((training(loss), (params, batch)))
    pairs = find_weight_pairs(model, model.inputs[-1:])
    names = {}
    for name, node in zip(sorted(params), model.inputs, strict=False):
        for dim in range(len(params[name].shape)):
            names.setdefault(pairs.component[node, dim], f"{name}.{dim}")
    return (
        {tuple(names[each] for each in pair) for pair in pairs.weights},
        [{frozenset(names[each] for each in side) for side in both} for both in sides(pairs)],
    )


def embedded(layers):
    """Return the loss of some layers on a residual stream, [B, T, D]."""
    return lambda params, tokens: (layers(params, params["table"][tokens]) ** 2).mean()


TABLE, BATCH = {"table": array(WORDS, D)}, array(ROWS, TOKENS, dtype="int32")


def test_heads_are_paired_and_the_width_of_a_head_is_not():
    def layers(w, x):
        q, k, v = (jnp.einsum("btd,dhk->bthk", x, w[name]) for name in "qkv")
        p = jax.nn.softmax(jnp.einsum("bqhk,bshk->bhqs", q, k))
        return x + jnp.einsum("bqhk,hkd->bqd", jnp.einsum("bhqs,bshk->bqhk", p, v), w["out"])

    params = TABLE | {name: array(D, 8, 8) for name in "qkv"} | {"out": array(8, 8, D)}
    pairs, both = found(embedded(layers), params, BATCH)
    assert pairs == {("k.0", "k.1"), ("k.1", "k.0")}
    assert both == [{frozenset({"k.0"}), frozenset({"k.1"})}]


def test_the_experts_of_a_mixture_are_paired_with_the_residual_stream():
    def layers(w, x):
        gates = jax.nn.softmax(x @ w["router"])
        hidden = jax.nn.relu(jnp.einsum("btd,edh->ebth", x, w["up"]))
        return x + jnp.einsum("bte,ebtd->btd", gates, jnp.einsum("ebth,ehd->ebtd", hidden, w["down"]))

    params = TABLE | {"router": array(D, 8), "up": array(8, D, 128), "down": array(8, 128, D)}
    experts, hidden, width = (f"down.{dim}" for dim in range(3))
    pairs, both = found(embedded(layers), params, BATCH)
    assert (width, experts) in pairs
    # One side shards the experts alone: expert parallelism.
    assert both == [{frozenset({experts}), frozenset({hidden, width})}]


def test_a_chain_of_three_layers_is_sharded_by_column_by_row_and_by_column():
    def layers(w, x):
        return jnp.tanh(jnp.tanh(x @ w["a"]) @ w["b"]) @ w["c"]

    params = TABLE | {"a": array(D, 128), "b": array(128, 256), "c": array(256, 32)}
    _, both = found(embedded(layers), params, BATCH)
    assert both == [{frozenset({"a.1", "c.1"}), frozenset({"a.0", "b.1"})}]


def test_two_weights_that_read_the_same_values_are_no_pair():
    def layers(w, x):
        return (jnp.tanh(x @ w["a"]) ** 2).sum() + (jnp.tanh(x @ w["b"]) ** 2).sum()

    assert found(embedded(layers), TABLE | {"a": array(D, 128), "b": array(D, 256)}, BATCH) == (set(), [])


def test_a_weight_alone_is_no_pair():
    assert found(embedded(lambda w, x: x @ w["a"]), TABLE | {"a": array(D, 128)}, BATCH) == (set(), [])


@given(st.lists(st.booleans(), min_size=2, max_size=8), st.data())
def test_each_weight_leads_from_one_side_to_the_other(of_first, data):
    ends = [(a, b) for a in range(len(of_first)) for b in range(len(of_first)) if of_first[a] != of_first[b]]
    weights = tuple(data.draw(st.lists(st.sampled_from(ends), max_size=12))) if ends else ()
    both = list(sides(WeightPairs({}, weights)))
    each_component = [component for pair in both for side in pair for component in side]
    assert sorted(each_component) == sorted({end for weight in weights for end in weight})
    for weight in weights:
        (pair,) = (pair for pair in both if set(weight) <= pair[0] | pair[1])
        assert len(set(weight) & pair[0]) == len(set(weight) & pair[1]) == 1


def test_the_last_weight_of_a_cycle_of_odd_length_is_disregarded():
    (both,) = sides(WeightPairs({}, ((0, 1), (1, 2), (2, 0))))
    assert both == ({0}, {1, 2})
