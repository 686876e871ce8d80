"""Typed PRNG keys are leaves of a batch like others: placed, sharded, counted, compared, restored and used by a step."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tests.feed.process_group import run

import penstock as ps

KEY = jax.random.key(3)


def keys(step, n=8, impl=None):
    return jax.random.split(jax.random.fold_in(jax.random.key(0, impl=impl), step), n)


def numbers(batch):
    return np.asarray(jax.random.key_data(batch["key"])).tolist()


def per_record(record):
    return {**record, "key": jax.random.fold_in(KEY, int(record["x"]))}


MAKERS = {
    "steps": lambda: ps.Steps(lambda step: {"x": np.ones(8), "key": keys(step)}, length=5),
    "generator": lambda: ({"x": np.ones(8), "key": keys(step)} for step in range(5)),
    "list": lambda: [{"x": np.ones(8), "key": keys(step)} for step in range(5)],
    "rbg": lambda: [{"x": np.ones(8), "key": keys(step, impl="rbg")} for step in range(5)],
    "one key": lambda: [{"x": np.ones(8), "key": keys(step)[0]} for step in range(5)],
    "loader": lambda: ps.Loader({"x": np.ones(40)}, 8, epochs=1, transform=lambda batch: {**batch, "key": keys(0)}),
    "records": lambda: ps.Loader({"x": np.arange(40)}, 8, epochs=1, transform=ps.per_record(per_record)),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_keys_are_fed(kind):
    with ps.feed(MAKERS[kind]()) as feed:
        batches = list(feed)
    assert len(batches) == 5
    assert all(jnp.issubdtype(batch["key"].dtype, jax.dtypes.prng_key) for batch in batches)
    assert [numbers(batch) for batch in batches] == [numbers(batch) for batch in MAKERS[kind]()]
    assert feed.stats().bytes == sum(batch["x"].size * 8 + batch["key"].nbytes for batch in batches)
    jax.random.split(batches[0]["key"].reshape(-1)[0])


def test_workers_send_keys():
    with ps.feed(ps.Loader({"x": np.arange(16)}, 8, epochs=1, workers="process:1", transform=ps.per_record(per_record))) as feed:
        assert numbers(next(feed)) == [np.asarray(jax.random.key_data(jax.random.fold_in(KEY, i))).tolist() for i in range(8)]


def test_the_transform_makes_keys():
    with ps.feed(ps.Loader({"x": np.ones(8)}, 4, epochs=1), transform=lambda batch: {**batch, "key": jax.random.key(1)}) as feed:
        assert [numbers(batch) for batch in feed] == [np.asarray(jax.random.key_data(jax.random.key(1))).tolist()] * 2


def test_keys_are_sharded_and_checked():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))
    to = {"x": NamedSharding(mesh, P("data")), "key": NamedSharding(mesh, P("data"))}
    for transform in (None, lambda batch: {**batch, "noise": jax.vmap(jax.random.normal)(batch["key"])}):
        with ps.feed(MAKERS["list"](), to=to, transform=transform) as feed:
            batch = next(feed)
        assert batch["key"].sharding.is_equivalent_to(to["key"], 1)
        assert numbers(batch) == numbers({"key": keys(0)})
    feed = ps.feed([{"key": keys(0, 6)}], to=to["key"])
    with pytest.raises(ValueError, match=r"leaf 'key' of shape \(6,\) does not divide"), feed:
        next(feed)


def test_strict_compares_keys():
    changing = [{"key": keys(0)}, {"key": keys(0, 4)}]
    with ps.feed(changing, strict=True) as feed:
        next(feed)
        with pytest.raises(ValueError, match=r"leaf 'key' was key<fry>\[8\] and is key<fry>\[4\]"):
            next(feed)


def test_a_feed_of_keys_is_restored():
    with ps.feed(MAKERS["steps"]()) as feed:
        next(feed), next(feed)
        state = feed.state()
    with ps.feed(MAKERS["steps"]()) as feed:
        feed.restore(state)
        assert numbers(next(feed)) == numbers({"key": keys(2)})


def test_fit_takes_batches_with_keys():
    def step(state, batch):
        noise = jax.vmap(lambda key: jax.random.normal(key, ()))(batch["key"])
        return state + noise.sum() + batch["x"].sum(), {"noise": noise.mean()}

    wanted = sum(float(jax.vmap(lambda key: jax.random.normal(key, ()))(keys(i)).sum()) + 8 for i in range(5))
    got = ps.fit(step, jnp.zeros(()), MAKERS["steps"](), steps=5, log=[])
    assert float(got) == pytest.approx(wanted, rel=1e-5)


def test_keys_as_records_of_arrays_are_refused_with_a_remedy():
    with pytest.raises(TypeError, match=r"leaf 'key' holds PRNG keys.*key_data\(key\).*wrap_key_data"):
        ps.Loader({"key": keys(0)}, 4)


PROCESSES = """
mesh = mesh_of((2, 4), ("node", "gpu"))
whole = jax.random.split(jax.random.key(0), 16)

def same(array, wanted):
    return wrong_elements(jax.random.key_data(array), np.asarray(jax.random.key_data(wanted))) == 0

# Each process brings its rows, as an iterable or by the rows that its devices need.
mine = whole[8 * index : 8 * index + 8]
with ps.feed([{"key": mine}], to=NamedSharding(mesh, P("node"))) as feed:
    key = next(feed)["key"]
assert same(key, whole) and key.dtype == whole.dtype

loader = ps.Loader({"i": np.arange(16)}, 16, epochs=1, transform=lambda batch: {"key": whole[batch["i"]]})
def noisy(batch):
    return {**batch, "noise": jax.vmap(jax.random.normal)(batch["key"])}

with ps.feed(loader, to=NamedSharding(mesh, P(("node", "gpu"))), transform=noisy) as feed:
    assert same(next(feed)["key"], whole)

# Replicated keys are compared.
with ps.feed([{"key": whole}], to=NamedSharding(mesh, P()), replicated="check") as feed:
    assert same(next(feed)["key"], whole)
try:
    with ps.feed([{"key": jax.random.split(jax.random.key(index), 4)}], to=NamedSharding(mesh, P()), replicated="check") as feed:
        next(feed)
except ValueError as error:
    assert "leaf 'key' of batch 0 differs" in str(error), error
    print("told")
"""


def test_keys_of_several_processes_are_one_global_array():
    assert all("told" in out for out in run(PROCESSES, 2))
