"""Plan steps within the least memory that any of the planner's baselines needs, by a compiler: none of them may be refused.

    python bench/scripts/least_memory.py v5e:2x4

The steps are in no other suite, and no constant was fitted to them: implicit layers, an inner solver, tables and embeddings,
convolutions of one, two and three dimensions, an associative scan, and a graph network. Each is planned on 2 × 4 devices. Then
the compiler's figure for the smallest baseline is the limit, to the byte, and the step is planned again.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import penstock as ps

MESH = {"data": 2, "model": 4}
Case = tuple[Callable[[Any, Any], jax.Array], Any, Any, bool]
"""The loss of parameters and a batch, both as shapes, and whether Adam trains them; else gradient descent does."""


def array(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def integers(*shape: int) -> jax.ShapeDtypeStruct:
    return array(*shape, dtype="int32")


def repeat(count: int, body: Callable[[jax.Array], jax.Array], start: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, count, lambda _, x: body(x), start)


def equilibrium() -> Case:
    """Return a deep equilibrium layer, whose gradient is a fixed point too (`custom_vjp`)."""

    def layer(w: Any, x: jax.Array, z: jax.Array) -> jax.Array:
        return jnp.tanh(z @ w["z"] + x)

    @jax.custom_vjp
    def solve(w: Any, x: jax.Array) -> jax.Array:
        return repeat(12, lambda z: layer(w, x, z), jnp.zeros_like(x))

    def forward(w: Any, x: jax.Array) -> Any:
        z = solve(w, x)
        return z, (w, x, z)

    def backward(kept: Any, cotangent: jax.Array) -> Any:
        _, pull = jax.vjp(layer, *kept)
        return pull(repeat(12, lambda u: pull(u)[2] + cotangent, jnp.zeros_like(cotangent)))[:2]

    solve.defvjp(forward, backward)

    def loss(w: Any, batch: Any) -> jax.Array:
        return jnp.mean((solve(w, batch["x"] @ w["in"]) @ w["out"] - batch["y"]) ** 2)

    weights = {"z": array(1024, 1024), "in": array(512, 1024), "out": array(1024, 64)}
    return loss, weights, {"x": array(512, 512), "y": array(512, 64)}, True


def root() -> Case:
    """Return a layer that is the root of an equation (`jax.lax.custom_root`)."""

    def layer(w: jax.Array, x: jax.Array) -> jax.Array:
        def solve(f: Any, start: jax.Array) -> jax.Array:
            return repeat(10, lambda z: z - 0.5 * f(z), start)

        def tangent_solve(g: Any, y: jax.Array) -> jax.Array:
            return repeat(10, lambda u: u - 0.5 * (g(u) - y), y)

        found: jax.Array = jax.lax.custom_root(lambda z: z - jnp.tanh(z @ w) - x, x, solve, tangent_solve)
        return found

    weights = {"w": array(768, 768), "in": array(256, 768), "out": array(768, 32)}
    return lambda w, x: jnp.mean((layer(w["w"], x @ w["in"]) @ w["out"]) ** 2), weights, array(1024, 256), True


def ridge() -> Case:
    """Return features under a ridge regression, which conjugate gradients solve in the loss."""

    def loss(w: Any, batch: Any) -> jax.Array:
        h = jnp.tanh(batch["x"] @ w["w1"]) @ w["w2"]
        gram = h.T @ h / h.shape[0] + jnp.eye(h.shape[1])
        solved, _ = jax.scipy.sparse.linalg.cg(lambda v: gram @ v, h.T @ batch["y"], maxiter=8)
        return jnp.mean((h @ solved - batch["y"]) ** 2)

    return loss, {"w1": array(784, 2048), "w2": array(2048, 512)}, {"x": array(2048, 784), "y": array(2048, 10)}, True


def tables() -> Case:
    """Return a recommender, most of which is four tables."""

    def loss(w: Any, batch: Any) -> jax.Array:
        rows = [jnp.take(table, batch["ids"][:, number], axis=0) for number, table in enumerate(w["tables"])]
        x = jnp.concatenate([*rows, jax.nn.relu(batch["dense"] @ w["bottom"])], 1)
        return jnp.mean(jax.nn.softplus(jax.nn.relu(x @ w["top"]) @ w["out"]))

    sizes = (200_000, 60_000, 30_000, 8_000)
    weights = {
        "tables": [array(size, 64) for size in sizes],
        "bottom": array(13, 64),
        "top": array(320, 256),
        "out": array(256, 1),
    }
    return loss, weights, {"ids": integers(4096, 4), "dense": array(4096, 13)}, False


def bags() -> Case:
    """Return sums of embeddings."""

    def loss(w: Any, batch: Any) -> jax.Array:
        summed = jnp.take(w["table"], batch["ids"], axis=0).sum(1)
        return jnp.mean((jnp.tanh(summed @ w["w"]) @ w["out"] - batch["y"]) ** 2)

    weights = {"table": array(100_000, 96), "w": array(96, 512), "out": array(512, 8)}
    return loss, weights, {"ids": integers(1024, 20), "y": array(1024, 8)}, True


def skipgram() -> Case:
    """Return word vectors with negative samples."""

    def loss(w: Any, batch: Any) -> jax.Array:
        word, context, others = w["in"][batch["word"]], w["out"][batch["context"]], w["out"][batch["others"]]
        apart = jax.nn.log_sigmoid(-jnp.einsum("bd,bkd->bk", word, others)).sum(-1)
        return -jnp.mean(jax.nn.log_sigmoid((word * context).sum(-1)) + apart)

    batch = {"word": integers(8192), "context": integers(8192), "others": integers(8192, 5)}
    return loss, {"in": array(150_000, 128), "out": array(150_000, 128)}, batch, False


def wavenet() -> Case:
    """Return gated convolutions along time, with larger and larger dilations."""

    def dilated(x: jax.Array, kernel: jax.Array, dilation: int) -> jax.Array:
        numbers = ("NWC", "WIO", "NWC")
        return jax.lax.conv_general_dilated(x, kernel, (1,), "SAME", rhs_dilation=(dilation,), dimension_numbers=numbers)

    def loss(w: Any, batch: Any) -> jax.Array:
        x = batch["x"] @ w["in"]
        for number, (filters, gates, out) in enumerate(w["layers"]):
            x = x + (jnp.tanh(dilated(x, filters, 2**number)) * jax.nn.sigmoid(dilated(x, gates, 2**number))) @ out
        return jnp.mean((x @ w["out"] - batch["y"]) ** 2)

    layers = [(array(3, 128, 128), array(3, 128, 128), array(128, 128)) for _ in range(5)]
    weights = {"in": array(16, 128), "layers": layers, "out": array(128, 16)}
    return loss, weights, {"x": array(32, 1024, 16), "y": array(32, 1024, 16)}, True


def convnext() -> Case:
    """Return depthwise convolutions of images."""

    def convolve(x: jax.Array, kernel: jax.Array, strides: tuple[int, int], padding: str, groups: int = 1) -> jax.Array:
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, kernel, strides, padding, dimension_numbers=numbers, feature_group_count=groups)

    def loss(w: Any, batch: Any) -> jax.Array:
        x = convolve(batch["x"], w["stem"], (4, 4), "VALID")
        for depthwise, wide, narrow in w["blocks"]:
            x = x + jax.nn.gelu(convolve(x, depthwise, (1, 1), "SAME", 128) @ wide) @ narrow
        chances = jax.nn.log_softmax(x.mean((1, 2)) @ w["head"])
        return -jnp.mean(jnp.take_along_axis(chances, batch["y"][:, None], 1))

    blocks = [(array(7, 7, 1, 128), array(128, 512), array(512, 128)) for _ in range(3)]
    weights = {"stem": array(4, 4, 3, 128), "blocks": blocks, "head": array(128, 1000)}
    return loss, weights, {"x": array(64, 64, 64, 3), "y": integers(64)}, True


def mamba() -> Case:
    """Return selective state spaces, by associative scans."""

    def combine(left: Any, right: Any) -> Any:
        return left[0] * right[0], right[0] * left[1] + right[1]

    def loss(w: Any, tokens: jax.Array) -> jax.Array:
        x = w["embedding"][tokens]
        for layer in w["layers"]:
            h = x @ layer["in"]
            dt = jax.nn.softplus(h @ layer["dt"])
            decay = jnp.exp(-dt[..., None] * jnp.exp(layer["a"]))
            added = (dt * h)[..., None] * (h @ layer["b"])[:, :, None, :]
            states = jax.lax.associative_scan(combine, (decay, added), axis=1)[1]
            x = x + ((states * (h @ layer["c"])[:, :, None, :]).sum(-1) * jax.nn.silu(h)) @ layer["out"]
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(x @ w["embedding"].T), tokens[..., None], -1))

    shapes = {"in": (256, 512), "dt": (512, 512), "a": (512, 16), "b": (512, 16), "c": (512, 16), "out": (512, 256)}
    layers = [{name: array(*shape) for name, shape in shapes.items()} for _ in range(2)]
    return loss, {"embedding": array(8000, 256), "layers": layers}, integers(16, 256), True


def graph() -> Case:
    """Return a graph network, which adds messages by segment sums."""
    nodes, edges = 8192, 65536

    def loss(w: Any, batch: Any) -> jax.Array:
        x = batch["nodes"] @ w["in"]
        for message, update in w["layers"]:
            sent = jax.nn.relu(jnp.concatenate([x[batch["from"]], x[batch["to"]], batch["edges"]], -1) @ message)
            x = x + jax.nn.relu(jax.ops.segment_sum(sent, batch["to"], nodes) @ update)
        return jnp.mean((x @ w["out"]) ** 2)

    weights = {"in": array(64, 256), "layers": [(array(544, 256), array(256, 256))] * 3, "out": array(256, 8)}
    batch = {"nodes": array(nodes, 64), "edges": array(edges, 32), "from": integers(edges), "to": integers(edges)}
    return loss, weights, batch, True


def video() -> Case:
    """Return convolutions of videos."""

    def loss(w: Any, x: jax.Array) -> jax.Array:
        for kernel in w["kernels"]:
            numbers = ("NDHWC", "DHWIO", "NDHWC")
            x = jax.nn.relu(jax.lax.conv_general_dilated(x, kernel, (1, 2, 2), "SAME", dimension_numbers=numbers))
        return -jnp.mean(jax.nn.log_softmax(x.mean((1, 2, 3)) @ w["head"])[:, 0])

    kernels = [array(3, 3, 3, before, after) for before, after in ((3, 32), (32, 64), (64, 128))]
    return loss, {"kernels": kernels, "head": array(128, 400)}, array(16, 8, 64, 64, 3), True


CASES = (equilibrium, root, ridge, tables, bags, skipgram, wavenet, convnext, mamba, graph, video)


def build(case: Case) -> tuple[Callable[[Any, Any], Any], Any, Any]:
    """Return the training step of a case, its state and its batch."""
    loss, weights, batch, adam = case

    def step(state: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(state[0], batch)
        if not adam:
            return (jax.tree.map(lambda p, g: p - 1e-3 * g, state[0], gradients),), value
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state[1], gradients)
        second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, state[2], gradients)
        update = jax.tree.map(lambda p, m, v: p - 1e-3 * m / (jnp.sqrt(v) + 1e-8), state[0], first, second)
        return (update, first, second), value

    return step, (weights,) * (3 if adam else 1), batch


def measure(case: Case, topology: str) -> tuple[str, ...]:
    """Return the cells of a case: the limit and the baseline that needs it, what the plan needs, its gap, and the seconds."""
    step, state, batch = build(case)
    baselines = ps.plan(step, state, batch, mesh=MESH, check=topology).alternatives
    needed = {}
    for name, each in baselines.items():
        try:
            needed[name] = each.verify(topology).measured.memory
        except ps.CompileError as error:
            print(f"{name} has no figures: {error}")
    smallest = min(needed, key=lambda name: needed[name])
    limit = needed[smallest]
    begun = time.perf_counter()
    try:
        plan = ps.plan(step, state, batch, mesh=MESH, check=topology, memory=limit)
    except ps.PlanError as error:
        found = ("REFUSED", str(error).splitlines()[0][:60])
    else:
        assert plan.checked is not None
        found = (f"{plan.checked.memory / 2**20:.1f}", "–" if plan.gap is None else f"{plan.gap:.1%}")
    return f"{limit / 2**20:.1f}", smallest, *found, f"{time.perf_counter() - begun:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("topology", help="of 8 devices, such as v5e:2x4 or h100:8")
    parser.add_argument("--only", action="append", metavar="STEP", help="this step; may be given several times (default: all)")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    print("| step | limit, MiB | of | plan, MiB | proved gap | seconds |\n| --- | ---: | --- | ---: | ---: | ---: |")
    for case in CASES:
        if not args.only or case.__name__ in args.only:
            print(f"| {case.__name__} | {' | '.join(measure(case(), args.topology))} |", flush=True)


if __name__ == "__main__":
    main()
