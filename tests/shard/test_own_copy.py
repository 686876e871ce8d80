"""Arrays that are put on devices share no memory with the caller's."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

import penstock as ps
from penstock.shard.arguments import put_copy

MESH = Mesh(np.array(jax.devices()[:8]), ("data",))
PLACES = {
    "one": SingleDeviceSharding(jax.devices()[0]),
    "replicated": NamedSharding(MESH, PartitionSpec()),
    "sharded": NamedSharding(MESH, PartitionSpec("data")),
}


def aligned_ones(rows=64):
    memory = np.empty(rows * 64 * 4 + 64, np.uint8)
    start = -memory.ctypes.data % 64
    ones = memory[start : start + rows * 64 * 4].view(np.float32).reshape(rows, 64)
    ones[:] = 1
    return ones


@pytest.mark.parametrize("to", PLACES)
@pytest.mark.parametrize("source", ["numpy", *PLACES])
def test_a_step_that_donates_leaves_the_callers_array_alone(source, to):
    given = aligned_ones() if source == "numpy" else jax.device_put(np.ones((64, 64), np.float32), PLACES[source])
    put = put_copy({"x": given}, PLACES[to])["x"]
    assert put.sharding.is_equivalent_to(PLACES[to], 2)
    jax.block_until_ready(jax.jit(lambda x: x + 1, donate_argnums=0)(put))
    assert float(np.asarray(given).sum()) == 64 * 64


@pytest.mark.parametrize("to", PLACES)
def test_writing_to_the_callers_array_changes_nothing(to):
    given = aligned_ones(rows=1 << 17)  # 32 MB, so that a copy that still runs would be noticed
    put = put_copy(given, PLACES[to])
    given[:] = 7
    assert float(put.sum()) == given.size


@pytest.mark.parametrize("to", ["one", "replicated"])
def test_a_key_outlives_a_step_that_donates_its_copy(to):
    key = jax.random.key(0)
    jax.block_until_ready(jax.jit(lambda k: k, donate_argnums=0)(put_copy(key, PLACES[to])))
    assert jax.random.key_data(key).shape == (2,)


def test_keys_and_numbers_can_be_put():
    tree = {"key": jax.random.key(0), "step": 3, "empty": np.zeros((0, 4), np.float32)}
    put = put_copy(tree, PLACES["replicated"])
    assert int(put["step"]) == 3
    assert jax.random.key_data(put["key"]).tolist() == jax.random.key_data(tree["key"]).tolist()


def test_a_plan_puts_state_of_its_own():
    def step(state, batch):
        return state + batch["x"].sum(0), batch["x"].sum()

    state, batch = jax.device_put(np.zeros(64, np.float32), jax.devices()[0]), {"x": np.ones((8, 64), np.float32)}
    plan = ps.plan(step, state, batch, mesh={"data": 8}, hardware="tpu-v5e", check=False)
    run = plan.jit(step, donate_argnums=0)
    run(plan.put(state), plan.put(batch))
    run(plan.put(state), plan.put(batch))
    assert float(state.sum()) == 0
