"""A Loader reads the rows that the devices of each process need, whatever the sharding."""

import pytest
from tests.feed.process_group import run

ALL_SHARDINGS = """
from penstock.data.order.rows import device_rows

AXES = [None, "node", "gpu", ("node", "gpu"), ("gpu", "node")]

def names(axes):
    return {axes} if isinstance(axes, str) else set(axes or ())

def specs():
    yield P()
    for first in AXES:
        yield P(first)
        for second in AXES:
            if not names(first) & names(second):
                yield P(first, second)

def noisy(batch, rng):
    return {**batch, "noise": rng.random((len(batch["x"]), 8))}

x = np.arange(60 * 8, dtype=np.int32).reshape(60, 8)
orders = [None, [0, 4, 1, 5, 2, 6, 3, 7], [7, 0, 6, 1, 5, 2, 4, 3]]
options = dict(batch_size=16, shuffle=True, seed=5, epochs=1)
checked = wrong = 0
for order, remainder in [(None, "drop"), (orders[1], "pad"), (orders[2], "pad")]:
    mesh = mesh_of((2, 4), ("node", "gpu"), order)
    whole = ps.Loader({"x": x}, **options, remainder=remainder, process=(0, 1))
    for spec in specs():
        loader = ps.Loader({"x": x}, **options, remainder=remainder)
        to = {"x": NamedSharding(mesh, spec)}
        if remainder == "pad":
            to["mask"] = NamedSharding(mesh, P(*spec[:1]))
        with ps.feed(loader, to=to) as feed:
            for step, batch in enumerate(feed):
                for name in to:
                    checked += 1
                    wrong += wrong_elements(batch[name], whole[step][name])
        assert step == len(whole) - 1
assert wrong == 0, wrong
assert checked > 300
print("checked", checked)
"""


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 4])
def test_every_sharding_of_a_mesh_has_the_rows_of_one_process(count):
    assert all("checked" in out for out in run(ALL_SHARDINGS, count))


OTHER_CASES = """
x = np.arange(64 * 4, dtype=np.int32).reshape(64, 4)
mesh = mesh_of((2, 4), ("node", "gpu"))
here = dict(shuffle=True, seed=1, epochs=1)

# Leaves with different shardings: each process reads the rows of all of them.
to = {"a": NamedSharding(mesh, P("node")), "b": NamedSharding(mesh, P()), "c": NamedSharding(mesh, P(("node", "gpu")))}
data = {"a": x, "b": x + 1, "c": x[:, 0]}
whole = ps.Loader(data, 16, **here, process=(0, 1))
with ps.feed(ps.Loader(data, 16, **here), to=to) as feed:
    assert sum(wrong_elements(batch[k], whole[s][k]) for s, batch in enumerate(feed) for k in to) == 0

# Replicated rows that a transform made with random numbers are the same everywhere.
def noise(batch, rng):
    return {"x": batch["x"] + rng.integers(0, 1000, batch["x"].shape, dtype=np.int32)}

from jax.experimental import multihost_utils
for spec in (P(), P("gpu"), P("node"), P(None, "node")):
    with ps.feed(ps.Loader({"x": x}, 8, **here, transform=noise), to=NamedSharding(mesh, spec)) as feed:
        for batch in feed:
            total = jax.jit(lambda a: a.sum(), out_shardings=NamedSharding(mesh, P()))(batch["x"])
            sums = multihost_utils.process_allgather(np.asarray(total.addressable_data(0)))
            assert len(set(sums.ravel().tolist())) == 1, sums
            for index in {str(s.index) for s in batch["x"].addressable_shards}:
                same = [np.asarray(s.data) for s in batch["x"].addressable_shards if str(s.index) == index]
                assert all((one == same[0]).all() for one in same)

# A batch that the processes cannot divide is fine where it is replicated.
with ps.feed(ps.Loader({"x": x}, 7, **here), to=NamedSharding(mesh, P())) as feed:
    whole = ps.Loader({"x": x}, 7, **here, process=(0, 1))
    assert sum(wrong_elements(batch["x"], whole[s]["x"]) for s, batch in enumerate(feed)) == 0
# A shorter last batch.
with ps.feed(ps.Loader({"x": x[:60]}, 8, remainder="keep", **here), to=NamedSharding(mesh, P("node"))) as feed:
    whole = ps.Loader({"x": x[:60]}, 8, remainder="keep", **here, process=(0, 1))
    assert sum(wrong_elements(batch["x"], whole[s]["x"]) for s, batch in enumerate(feed)) == 0

# A transform on the device, worker threads, and worker processes.
for workers in (None, 2):
    loader = ps.Loader({"x": x}, 16, **here, workers=workers)
    whole = ps.Loader({"x": x}, 16, **here, process=(0, 1))
    with ps.feed(loader, to=NamedSharding(mesh, P("gpu")), transform=lambda b: {"x": b["x"] * 2}) as feed:
        assert sum(wrong_elements(batch["x"], 2 * whole[s]["x"]) for s, batch in enumerate(feed)) == 0

# Layouts that a plan chose.
def step(state, batch):
    def loss(w):
        return ((batch["x"].astype("float32") @ w) ** 2).mean()
    value, gradient = jax.value_and_grad(loss)(state)
    return state - 0.1 * gradient, value

abstract = jax.ShapeDtypeStruct((4, 32), "float32"), {"x": jax.ShapeDtypeStruct((16, 4), "int32")}
for axes in ({"node": 2, "gpu": 4}, {"node": 8}, {"node": 4, "gpu": 2}):
    plan = ps.plan(step, *abstract, mesh=axes)
    with ps.feed(ps.Loader({"x": x}, 16, **here), to=plan) as feed:
        whole = ps.Loader({"x": x}, 16, **here, process=(0, 1))
        assert sum(wrong_elements(batch["x"], whole[s]["x"]) for s, batch in enumerate(feed)) == 0
print("all right")
"""


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_pytrees_transforms_remainders_and_plans(count):
    assert all("all right" in out for out in run(OTHER_CASES, count))


OWN_ROWS = """
mesh = mesh_of((2, 4), ("node", "gpu"))
mine = [{"x": np.full((8, 2), 100 * step + index)} for step in range(3)]
same = [{"x": np.full((8, 2), step)} for step in range(3)]

def refusal(batches, spec, **options):
    try:
        with ps.feed(batches, to=NamedSharding(mesh, spec), **options) as feed:
            list(feed)
    except ValueError as error:
        return str(error)
    return ""

assert "replicates rows over processes [0, 1]" in refusal(mine, P())
assert "ps.Loader" in refusal(same, P("gpu"))
assert "ps.Loader" in refusal(ps.Steps(lambda step: same[step], 3), P())
assert refusal(mine, P("node")) == ""
assert refusal(mine, P(("node", "gpu"))) == ""
assert refusal(same, P(), replicated="check") == ""
assert refusal(same, P("gpu"), replicated="check") == ""
told = refusal(mine, P(), replicated="check")
assert "leaf 'x' of batch 0 differs between processes" in told and "other values in int64[8,2]" in told, told
late = same[:2] + [{"x": np.full((8, 2), index)}]
assert "of batch 2 differs" in refusal(late, P(), replicated="check")
assert "choose from refuse, check" in refusal(same, P(), replicated="yes")

# A function from the step to the rows of this process, with a state.
steps = ps.Steps(lambda step: {"x": np.full((4, 2), 10 * step + index)}, length=5)
with ps.feed(steps, to=NamedSharding(mesh, P("node"))) as feed:
    next(feed)
    state = feed.state()
with ps.feed(steps, to=NamedSharding(mesh, P("node"))) as feed:
    feed.restore(state)
    got = [np.unique(np.asarray(batch["x"].addressable_shards[0].data)).tolist() for batch in feed]
assert got == [[10 * step + index] for step in range(1, 5)], got

told = ""
try:
    ps.feed(ps.Loader({"x": np.arange(8)}, 4, process=(0, 1)), to=NamedSharding(mesh, P("node")))
except ValueError as error:
    told = str(error)
assert "process=(0, 1), and this is process" in told, told
for loader in (ps.Loader({"x": np.arange(8)}, 7),):
    try:
        loader[0]
    except ValueError as error:
        told = str(error)
assert "2 processes" in told, told
print("all right")
"""


@pytest.mark.slow
def test_rows_that_each_process_brings_are_refused_or_compared_where_they_are_replicated():
    assert all("all right" in out for out in run(OWN_ROWS, 2))
