"""A small training step, jitted for devices that may be absent."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from penstock.shard.hlo.analysis import measure

MESH = {"data": 2, "model": 4}


AUTO = (AxisType.Auto,) * 2


def here():
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=AUTO)


def elsewhere(sizes=MESH):
    return AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=AUTO)


def train(mesh, donate=(0,)):
    """Return a jitted step with a loop, an unused argument and donated parameters, and its abstract arguments."""

    def step(parameters, unused, batch):
        def loss(parameters):
            hidden, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w["a"]) @ w["b"] + h, None), batch["x"], parameters)
            return jnp.mean(hidden**2)

        value, gradients = jax.value_and_grad(loss)(parameters)
        return jax.tree.map(lambda p, g: p - 0.1 * g, parameters, gradients), value

    def array(shape, *layout):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*layout)))

    parameters = {"a": array((3, 64, 128), None, "data", "model"), "b": array((3, 128, 64), None, "model", "data")}
    out = (jax.tree.map(lambda leaf: leaf.sharding, parameters), NamedSharding(mesh, P()))
    jitted = jax.jit(step, donate_argnums=donate, out_shardings=out)
    return jitted, parameters, array((50,)), {"x": array((32, 64), "data")}


def directly(**options):
    jitted, *arguments = train(here(), **options)
    return measure(jitted.lower(*arguments).compile(), MESH)


PARAMETERS = 2 * 3 * 64 * 128 * 4 // 8  # bytes on a device
