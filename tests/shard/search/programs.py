"""Problems small enough to know the best of all plans: steps as people write them, random programs, and random graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from tests.shard.search.exhaustive import all_layouts

from penstock.shard.graph.decisions import Edge, Graph, Node, Traffic, Work, fold_layers
from penstock.shard.graph.live_ranges import LiveRanges
from penstock.shard.graph.step_model import StepModel, build_step_model
from penstock.shard.mesh.compiler_models import CPU
from penstock.shard.mesh.hardware import Hardware, find_hardware
from penstock.shard.mesh.resharding import MeshLinks
from penstock.shard.search.costs import Assignment, CostModel, build_costs
from penstock.shard.search.exact import Bound
from penstock.shard.search.solver import Candidate, MeshSearch, choose
from penstock.shard.trace.step import trace

ONE_AXIS = {"data": 8}
MESHES = ({"data": 2, "model": 2}, {"data": 2, "model": 4}, {"data": 2, "fsdp": 2, "model": 2})
SLOW_LINKS = Hardware("slow links", {"float32": 1e14}, 1 << 34, 1e12, 2e9, 1e-6, "")
FAST_LINKS = Hardware("fast links", {"float32": 1e13}, 1 << 34, 2e11, 2e11, 1e-7, "")
HARDWARE = (find_hardware("tpu-v5e"), find_hardware("h100"), SLOW_LINKS, FAST_LINKS)

Step = tuple[Callable[..., Any], tuple[Any, ...]]


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """Return an abstract array."""
    return jax.ShapeDtypeStruct(shape, dtype)


def training(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step of gradient descent of a loss of (params, batch)."""

    def step(params: Any, batch: Any) -> tuple[Any, Any]:
        value, gradients = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    return step


def one_layer(width: int = 1024, hidden: int = 2048, rows: int = 4096) -> Step:
    return training(lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)), (array(width, hidden), array(rows, width))


def two_layers(width: int = 512, hidden: int = 2048, rows: int = 4096) -> Step:
    def loss(w: Any, x: Any) -> Any:
        return jnp.mean((jax.nn.relu(x @ w[0]) @ w[1]) ** 2)

    return training(loss), ((array(width, hidden), array(hidden, width)), array(rows, width))


def forward(width: int = 1024, rows: int = 512) -> Step:
    def step(w: Any, x: Any) -> Any:
        return jax.nn.relu(x @ w[0]) @ w[1]

    return step, ((array(width, 4 * width), array(4 * width, width)), array(rows, width))


def attention(rows: int = 64, tokens: int = 512, heads: int = 8, width: int = 64) -> Step:
    def step(q: Any, k: Any, v: Any) -> Any:
        weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v)

    one = array(rows, tokens, heads, width)
    return step, (one, one, one)


def self_attention(tokens: int = 1024, width: int = 512) -> Step:
    def step(w: Any, x: Any) -> Any:
        q, k, v = (x @ each for each in w)
        return jax.nn.softmax(q @ k.T) @ v

    return step, ((array(width, width),) * 3, array(tokens, width))


def embedding(words: int = 32768, width: int = 512, rows: int = 4096) -> Step:
    def step(table: Any, ids: Any) -> Any:
        hidden = table[ids]
        return jax.nn.log_softmax(hidden @ table.T)

    return step, (array(words, width), array(rows, dtype=jnp.int32))


def residual(width: int = 1024, rows: int = 2048) -> Step:
    def step(w: Any, x: Any) -> Any:
        for up, down in w:
            scaled = x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)
            x = x + jax.nn.relu(scaled @ up) @ down
        return x

    return step, (((array(width, 2 * width), array(2 * width, width)),) * 2, array(rows, width))


def elementwise(rows: int = 4096, width: int = 1024) -> Step:
    def step(scale: Any, x: Any) -> Any:
        y = jnp.tanh(x * scale) + 1
        return (y - y.mean(axis=0)) * scale, jnp.sum(y, axis=1)

    return step, (array(width), array(rows, width))


STEPS = (one_layer, two_layers, forward, attention, self_attention, embedding, residual, elementwise)
_NARROW: dict[Any, dict[str, int]] = {
    one_layer: {"width": 1022, "hidden": 2046},
    two_layers: {"width": 511, "hidden": 2046, "rows": 4094},
    attention: {"tokens": 510, "width": 30},
    self_attention: {"tokens": 1022, "width": 510},
}


def steps(mesh: dict[str, int]) -> dict[str, Step]:
    """Return the steps by name; on three axes, with dimensions of fewer factors, so that the best plan can be known."""
    return {make.__name__: make(**_NARROW.get(make, {})) if len(mesh) == 3 else make() for make in STEPS}


SIZES = (64, 254, 255, 512, 1024, 4096)


def random_step(seed: int, operations: int, among: Sequence[int] = SIZES, every: bool = False) -> Step:
    """Return a random program of matrices: products, transposes, elementwise operations, sums, softmax and sorting.

    Sizes are such that some dimensions divide into all devices, some into two, and some not at all.

    Args:
      seed: of the program.
      operations: how many.
      among: the sizes of dimensions.
      every: whether all results are returned, and not the last alone.
    """
    rng = np.random.default_rng(seed)
    sizes = [int(each) for each in rng.choice(among, size=3)]
    inputs = [array(*(int(rng.choice(sizes)) for _ in range(2))) for _ in range(2)]
    choices = [(str(rng.choice(_OPERATIONS)), rng.random(2)) for _ in range(operations)]

    def step(*arrays: Any) -> Any:
        values = list(arrays)
        for name, (one, other) in choices:
            x = values[-1 - int(one * min(2, len(values)))]
            fitting = {
                "product": [y for y in values if y.shape[0] == x.shape[1]],
                "add": [y for y in values if y.shape == x.shape],
            }.get(name, [x])
            y = fitting[int(other * len(fitting))] if fitting else x.T
            values.append(_apply(name if fitting else "product", x, y))
        return values[2:] if every else values[-1]

    return step, tuple(inputs)


_OPERATIONS = ("product", "product", "product", "add", "transpose", "tanh", "center", "softmax", "sort", "symmetric")


def _apply(name: str, x: Any, y: Any) -> Any:
    match name:
        case "product":
            return x @ y
        case "add":
            return x + y
        case "transpose":
            return x.T
        case "tanh":
            return jnp.tanh(x)
        case "center":
            return x - x.mean(axis=0)
        case "softmax":
            return jax.nn.softmax(x)
        case "sort":
            return jnp.sort(x, axis=1)
        case _:
            return x @ x.T


def model_of(step: Step) -> StepModel:
    """Return the model of a step."""
    return build_step_model(trace(*step), {}, CPU)


def random_problem(seed: int, mesh: dict[str, int], nodes: int = 4) -> CostModel:
    """Return a random graph of decisions, of which no program is known: a chain of arrays with some shortcuts.

    Args:
      seed: of the graph.
      mesh: sizes of the mesh axes.
      nodes: how many decisions.
    """
    rng = np.random.default_rng(seed)
    sizes = [tuple(int(each) for each in rng.choice([1, 6, 64, 96], size=rng.integers(1, 4))) for _ in range(nodes)]
    stored = tuple((node, int(rng.integers(1, 100)) << 20) for node in range(max(1, nodes // 3)))
    made = tuple(
        Node("leaf" if at < len(stored) else "op", size, () if at < len(stored) else (_random_work(rng, len(size)),), None, at)
        for at, size in enumerate(sizes)
    )
    ends = [(int(rng.integers(0, at)), at) for at in range(1, nodes)]
    ends += [(a, b) for a, b in rng.integers(0, nodes, (nodes // 2, 2)).tolist() if a != b]
    edges = tuple(_random_edge(rng, made, a, b, value) for value, (a, b) in enumerate(ends))
    edges = tuple(_joined(edge, len(ends)) for edge in edges) if seed % 2 else edges
    graph = Graph(made, edges, {}, {}, {}, ())
    start = rng.integers(0, nodes, nodes)
    live = LiveRanges(
        np.arange(nodes),
        np.arange(nodes),
        rng.integers(0, 100, nodes) << 20,
        start,
        np.minimum(start + rng.integers(0, 3, nodes), nodes - 1),
        np.full(nodes, -1),
        np.zeros(nodes, int),
        nodes,
    )
    near, far = sorted(10 ** rng.uniform(9.5, 11.5, 2), reverse=True)
    latency, domain = rng.choice([0, 1e-5]), int(rng.choice([0, list(mesh.values())[-1]]))
    turned = bool(rng.integers(2))
    links = MeshLinks(tuple(mesh), tuple(mesh.values()), near, latency, domain, far, 2 * latency, last_is_major=turned)
    return CostModel(graph, fold_layers(graph), links, SLOW_LINKS, live, stored, CPU)


def two_alike(seed: int, mesh: dict[str, int]) -> CostModel:
    """Return two equal decisions that send equal arrays to each other, transposed, so that they are one class."""
    rng = np.random.default_rng(seed)
    work, size = (_random_work(rng, 2),), int(rng.integers(1, 100)) << 20
    nodes = tuple(Node("op", (64, 96), work, None, 0) for _ in range(2))
    edges = tuple(Edge(a, 1 - a, (0, 1), (1, 0), (), size, 1.0, a, "operand") for a in range(2))
    graph = Graph(nodes, edges, {}, {}, {}, ())
    at, none = np.arange(2), np.full(2, -1)
    live = LiveRanges(at, at, np.full(2, float(size)), at, np.ones(2, int), none, np.zeros(2, int), 2)
    links = MeshLinks(tuple(mesh), tuple(mesh.values()), 1e10, 1e-6)
    return CostModel(graph, fold_layers(graph), links, SLOW_LINKS, live, (), CPU)


def _random_work(rng: np.random.Generator, rank: int) -> Work:
    traffic = Traffic(
        float(rng.integers(1, 1000) << 20),
        tuple(int(each) for each in rng.permutation(rank)[: rng.integers(0, rank + 1)]),
    )
    return Work("float32", float(10 ** rng.uniform(9, 12)), (traffic,), 1.0)


def _random_edge(rng: np.random.Generator, nodes: Sequence[Node], a: int, b: int, value: int) -> Edge:
    rank = int(rng.integers(1, min(len(nodes[a].sizes), len(nodes[b].sizes)) + 1))
    source, target = (tuple(int(each) for each in rng.permutation(len(nodes[end].sizes))[:rank]) for end in (a, b))
    partial = tuple(dim for dim in range(len(nodes[a].sizes)) if dim not in source and rng.random() < 0.5)
    kind = "result" if partial else "operand"
    return Edge(a, b, source, target, partial, int(rng.integers(1, 100)) << 20, float(rng.integers(1, 4)), value, kind)


def _joined(edge: Edge, values: int) -> Edge:
    """Return an edge that is summed with all partial results that go to the same node."""
    return replace(edge, summed_as=values + edge.b, bytes=edge.b << 20, count=1.0) if edge.kind == "result" else edge


@st.composite
def problems(draw, meshes=(ONE_AXIS, *MESHES)):
    """Problems of random programs and of random graphs, and a generator for what else is random."""
    seed, mesh = draw(st.integers(0, 2**16)), draw(st.sampled_from(meshes))
    if draw(st.booleans()):
        return random_problem(seed, mesh), np.random.default_rng(seed)
    return build_costs(model_of(random_step(seed, 3)), mesh, HARDWARE[seed % 4]), np.random.default_rng(seed)


def anything(costs, rng):
    """Any assignment that gives nodes of a class the same layout."""
    classes = [all_layouts(costs.graph.nodes[first], costs.links) for first in costs.folded.first]
    chosen = [layouts[rng.integers(len(layouts))] for layouts in classes]
    return [chosen[number] for number in costs.folded.of_node]


def solve(costs: CostModel, limit: float = float("inf"), baselines: Sequence[Assignment] = ()) -> tuple[Candidate, Bound]:
    """Return the plan that is found within a limit, and what is proved of all."""
    search = MeshSearch([costs], baselines)
    bound = search.bound(limit)
    found = list(search.found.values())
    return found[choose(found, limit)], bound
