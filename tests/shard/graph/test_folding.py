"""Repeated layers share their decisions."""

import jax
import jax.numpy as jnp
import pytest
from tests.shard.steps import STEPS

from penstock.shard.graph.decisions import Graph, fold_layers
from penstock.shard.graph.step_model import build_step_model
from penstock.shard.mesh.compiler_models import CPU
from penstock.shard.trace.step import trace


def graph(step, *args) -> Graph:
    return build_step_model(trace(step, args), {}, CPU).graph


def stack(layers):
    """Return the graph of a training step of equal residual blocks."""
    shape = jax.ShapeDtypeStruct
    params = [{"up": shape((16, 64), jnp.float32), "down": shape((64, 16), jnp.float32)} for _ in range(layers)]

    def step(params, batch):
        def loss(params):
            hidden = batch
            for layer in params:
                scaled = hidden * jax.lax.rsqrt(jnp.mean(hidden**2, axis=-1, keepdims=True) + 1e-6)
                hidden = hidden + jax.nn.relu(scaled @ layer["up"]) @ layer["down"]
            return jnp.mean(hidden**2)

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    return graph(step, params, shape((32, 16), jnp.float32))


def test_the_number_of_decisions_does_not_grow_with_the_number_of_equal_layers():
    counts = [len(fold_layers(stack(layers)).first) for layers in (10, 16)]
    assert counts[0] == counts[1]
    assert counts[1] < len(stack(16).nodes) / 2


@pytest.mark.parametrize("make", STEPS, ids=lambda make: make.__name__)
def test_only_nodes_of_the_same_kind_and_work_share_a_decision(make):
    step, state, batch = make()
    made = graph(step, *state, batch)
    folded = fold_layers(made)
    assert len(folded.of_node) == len(made.nodes)
    for number, node in enumerate(made.nodes):
        first = made.nodes[folded.first[folded.of_node[number]]]
        assert (first.kind, first.sizes, first.work, first.fixed) == (node.kind, node.sizes, node.work, node.fixed)
    assert sorted(edge for bundle in folded.bundles for edge in bundle.edges) == list(range(len(made.edges)))
    for bundle in folded.bundles:
        for number in bundle.edges:
            edge = made.edges[number]
            assert (folded.of_node[edge.a], folded.of_node[edge.b]) == (bundle.a, bundle.b)
            assert (edge.source, edge.target, edge.bytes) == (bundle.edge.source, bundle.edge.target, bundle.edge.bytes)


def test_an_empty_graph_folds():
    folded = fold_layers(Graph((), (), {}, {}, {}, ()))
    assert len(folded.of_node) == len(folded.first) == len(folded.bundles) == 0
