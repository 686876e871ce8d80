"""The planner follows the programs that are nested in equations. A canary: a new JAX may have calls of a new form."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas, sparse
from jax.experimental.ode import odeint

from penstock._versions import JAX
from penstock.shard.apply.sharding_constraints import ShardingConstraints, insert_constraints
from penstock.shard.trace.calls import nested_jaxprs
from penstock.shard.trace.step import trace

ELEMENTWISE = {"reduce", "reduce_window", "scatter", "scatter-add", "scatter-mul", "scatter-min", "scatter-max", "scatter-sub"}
"""Primitives whose jaxpr combines two elements."""
ONE_DEVICE = {"shard_map", "pallas_call", "custom_partitioning"}
"""Primitives whose jaxpr is a program of one device, or has a partitioning of its own."""


def layer(x, w):
    return x + jnp.tanh(x @ w), None


def block(x, ws):
    return lax.scan(layer, x, ws)[0], None


def blocks_of(policy):
    inner = jax.checkpoint(layer, policy=policy) if policy else layer

    def block(x, ws):
        return lax.scan(inner, x, ws)[0], None

    return lambda x: lax.scan(jax.checkpoint(block), x, jnp.ones((2, 3, 4, 4)) / 8)[0].sum()


def solve(method):
    return lambda x: method(lambda v: 2 * v + jnp.tanh(x).mean() * v, x[:, 0], maxiter=3)[0].sum()


def root(x):
    return lax.custom_root(lambda y: y * y - x, x, lambda f, y: y - f(y) / (2 * y), lambda g, y: y / g(jnp.ones_like(y))).sum()


@jax.custom_vjp
def doubled(x):
    return 2 * lax.fori_loop(0, 3, lambda i, y: jnp.sin(y), x)


doubled.defvjp(lambda x: (doubled(x), x), lambda x, g: (g * x,))


@jax.custom_batching.sequential_vmap
def one_by_one(x):
    return jnp.tanh(x)


def linear(x):
    return jax.custom_derivatives.linear_call(lambda r, x: x * r, lambda r, x: x * r, jnp.float32(2), x).sum()


def kernel(x):
    def double(read, write):
        write[...] = 2 * read[...]

    return pallas.pallas_call(double, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x).sum()


STEPS = {
    "checkpointed blocks": jax.grad(blocks_of(None)),
    "checkpointed blocks of checkpointed layers": jax.grad(blocks_of(jax.checkpoint_policies.nothing_saveable)),
    "checkpointed blocks of layers with a policy": jax.grad(blocks_of(jax.checkpoint_policies.dots_saveable)),
    "checkpoint of a scan": jax.grad(jax.checkpoint(lambda x: lax.scan(layer, x, jnp.ones((3, 4, 4)) / 8)[0].sum())),
    "checkpoint of a loop": jax.checkpoint(lambda x: lax.while_loop(lambda c: c.sum() < 9, lambda c: c + 1, x).sum()),
    "checkpoint of branches": jax.grad(jax.checkpoint(lambda x: lax.switch(x.shape[0] % 2, [jnp.sin, jnp.cos], x).sum())),
    "checkpoint of names": jax.grad(
        jax.checkpoint(
            lambda x: jnp.sin(checkpoint_name(jnp.sin(x), "a")).sum(), policy=jax.checkpoint_policies.save_only_these_names("a")
        )
    ),
    "checkpoint of a custom derivative": jax.grad(jax.checkpoint(lambda x: doubled(jnp.sin(x)).sum())),
    "custom derivative": jax.value_and_grad(lambda x: doubled(x).sum()),
    "conjugate gradients": solve(jax.scipy.sparse.linalg.cg),
    "gradient of conjugate gradients": jax.grad(solve(jax.scipy.sparse.linalg.cg)),
    "BiCGSTAB": solve(jax.scipy.sparse.linalg.bicgstab),
    "GMRES": solve(jax.scipy.sparse.linalg.gmres),
    "linear solve": lambda x: jnp.linalg.solve(jnp.eye(8) + x @ x.T, x).sum(),
    "gradient of a linear solve": jax.grad(lambda x: jnp.linalg.solve(jnp.eye(8) + x @ x.T, x).sum()),
    "matrix exponential": lambda x: jax.scipy.linalg.expm(x.T @ x / 64).sum(),
    "root": root,
    "gradient of a root": jax.grad(root),
    "ODE": lambda x: odeint(lambda y, t: -y, x, jnp.linspace(0.0, 1.0, 3)).sum(),
    "gradient of an ODE": jax.grad(lambda x: odeint(lambda y, t: -y, x, jnp.linspace(0.0, 1.0, 3)).sum()),
    "search": lambda x: jnp.searchsorted(jnp.sort(x[:, 0]), x).sum(),
    "indices": lambda x: jnp.nonzero(x, size=8)[0].sum(),
    "exponents": lambda x: (jnp.ldexp(*jnp.frexp(x))).sum(),
    "custom batching": lambda x: jax.vmap(one_by_one)(x).sum(),
    "custom batching without a batch": lambda x: one_by_one(x).sum(),
    "linear call": linear,
    "nested jit": jax.jit(lambda x: jax.jit(jnp.sin)(x).sum()),
    "map in batches": lambda x: lax.map(jnp.sin, x, batch_size=4).sum(),
    "associative scan": lambda x: lax.associative_scan(jnp.add, x).sum(),
    "sparse product": lambda x: (sparse.BCOO.fromdense(jnp.eye(8), nse=8) @ x).sum(),
    "reduction by a function": lambda x: lax.reduce(x, 1.0, lambda a, b: a * b + a, (1,)).sum(),
    "scatter": lambda x: x.at[0].add(1).sum(),
    "gradient of gamma": jax.grad(lambda x: jax.scipy.special.gammainc(x, x).sum()),
    "gradient of eigenvectors": jax.grad(lambda x: jnp.linalg.eigh(x @ x.T)[1].sum()),
    "least squares": lambda x: jnp.linalg.lstsq(x, x)[0].sum(),
    "kernel": kernel,
}
MESH = jax.sharding.AbstractMesh((8,), ("x",))
X = (np.random.default_rng(0).uniform(0.5, 1, (8, 4))).astype(np.float32)


def carriers(jaxpr):
    """Return the names of the primitives that carry a jaxpr, or a function that would be one."""
    names = set()
    for equation in jaxpr.eqns:
        inner = list(nested_jaxprs(equation))
        if inner or any(hasattr(value, "expand") for value in equation.params.values()):
            names.add(equation.primitive.name)
        names |= {name for each in inner for name in carriers(each)}
    return names


@pytest.mark.parametrize("name", STEPS)
def test_every_program_that_a_step_calls_is_followed_and_evaluated(name):
    traced = trace(STEPS[name], (jax.ShapeDtypeStruct(X.shape, X.dtype),))
    opaque = {op.primitive for op in traced.program.ops} & carriers(traced.closed.jaxpr) - ELEMENTWISE - ONE_DEVICE
    assert not opaque, f"JAX {jax.__version__}, last seen in {JAX.tested[-1]}"
    run = insert_constraints(traced.closed, ShardingConstraints(), MESH)
    for result, expected in zip(jax.jit(run)(X), jax.tree.leaves(jax.jit(STEPS[name])(X)), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-5)
