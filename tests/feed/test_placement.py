"""Batches are placed on their devices, and batches that cannot be placed get a clear error."""

import contextlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import penstock as ps

BATCH = {"image": np.arange(64, dtype=np.uint8).reshape(16, 4), "label": np.arange(16, dtype=np.int32)}


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))


def fed(to, n=3, **options):
    with ps.feed([BATCH] * n, to=to, **options) as feed:
        return list(feed)


def assert_same(batch):
    for name, wanted in BATCH.items():
        assert batch[name].dtype == wanted.dtype
        assert np.array_equal(batch[name], wanted)


def test_nowhere_in_particular_is_the_default_device():
    for batch in fed(None):
        assert_same(batch)
        assert batch["image"].devices() == {jax.devices()[0]}
        assert not batch["image"].committed


def test_the_default_device_of_the_callers_thread_is_respected():
    with jax.default_device(jax.devices()[3]):
        batches = fed(None)
    assert all(batch["image"].devices() == {jax.devices()[3]} for batch in batches)


@pytest.mark.parametrize("transform", [None, lambda b: {**b, "image": b["image"] * 1}])
def test_a_device(transform):
    for batch in fed(jax.devices()[5], transform=transform):
        assert_same(batch)
        assert batch["image"].devices() == {jax.devices()[5]}
        assert batch["image"].committed


@pytest.mark.parametrize(
    ("spec", "transform"),
    [(P("data"), None), (P(("data", "model")), None), (P(), None), (P("model"), lambda b: {**b, "image": b["image"] * 1})],
)
def test_a_sharding(mesh, spec, transform):
    sharding = NamedSharding(mesh, spec)
    for batch in fed(sharding, transform=transform):
        assert_same(batch)
        for name, wanted in BATCH.items():
            assert batch[name].sharding.is_equivalent_to(sharding, wanted.ndim)


def test_a_pytree_of_shardings_and_devices(mesh):
    to = {"image": NamedSharding(mesh, P("data", "model")), "label": NamedSharding(mesh, P())}
    for batch in fed(to):
        assert_same(batch)
        assert batch["image"].sharding == to["image"]
        assert batch["label"].sharding == to["label"]
    for batch in fed({"image": jax.devices()[1], "label": jax.devices()[2]}):
        assert_same(batch)
        assert batch["label"].devices() == {jax.devices()[2]}


def test_a_prefix_of_the_batch(mesh):
    nested = [({"a": BATCH["image"], "b": BATCH["label"]}, BATCH["label"])] * 2
    to = (NamedSharding(mesh, P("data")), NamedSharding(mesh, P()))
    with ps.feed(nested, to=to) as feed:
        for batch in feed:
            assert batch[0]["b"].sharding.spec == P("data")
            assert batch[1].sharding.spec == P()


def test_a_sharding_over_one_device_stays_what_it_is():
    one = jax.make_mesh((1,), ("data",), devices=jax.devices()[2:3], axis_types=(AxisType.Auto,))
    for batch in fed(NamedSharding(one, P("data"))):
        assert batch["image"].sharding == NamedSharding(one, P("data"))
    for batch in fed(SingleDeviceSharding(jax.devices()[2])):
        assert batch["image"].sharding == SingleDeviceSharding(jax.devices()[2])


def test_arrays_of_jax_are_moved(mesh):
    batches = [{"x": jnp.arange(8) + i, "y": np.arange(8)} for i in range(3)]
    with ps.feed(batches, to=NamedSharding(mesh, P("data")), transform=lambda b: {"z": b["x"] + b["y"]}) as feed:
        got = list(feed)
    assert [batch["z"][0].item() for batch in got] == [0, 1, 2]
    assert len(got[0]["z"].devices()) == 8


@pytest.mark.parametrize("dtype", [np.bool_, np.int8, np.float16, ml_dtypes.bfloat16, np.complex64])
def test_dtypes_are_kept(dtype):
    batches = [np.ones(4, dtype)] * 3
    assert [x.dtype for x in ps.feed(batches)] == [dtype] * 3


def test_64_bits_are_kept_where_the_caller_has_enabled_them():
    with jax.enable_x64(True):
        assert [x.dtype for x in ps.feed([np.ones(4)] * 3)] == [np.float64] * 3
    assert [x.dtype for x in ps.feed([np.ones(4)] * 3)] == [np.float32] * 3


def test_a_transfer_guard_against_implicit_transfers_does_not_stop_a_feed():
    jax.config.update("jax_transfer_guard_host_to_device", "disallow")
    try:
        with ps.feed([BATCH] * 20, transform=lambda b: {"s": b["image"].sum()}) as feed:
            assert len(list(feed)) == 20
    finally:
        jax.config.update("jax_transfer_guard_host_to_device", None)


@pytest.mark.filterwarnings("ignore:batch 1")
def test_shapes_that_never_repeat_compile_nothing():
    with ps.feed([np.zeros(n + 1) for n in range(40)]) as feed:
        before = feed._placement._identity._cache_size()
        assert len(list(feed)) == 40
        assert feed._placement._identity._cache_size() == before


def test_a_batch_that_does_not_divide_names_leaf_dimension_size_and_axis(mesh):
    batches = [{"x": np.zeros((6, 4))}]
    with pytest.raises(ValueError, match=r"'x' of shape \(6, 4\).*dimension 0 has size 6.*'data' \(size 4\).*multiple of 4"):
        next(ps.feed(batches, to=NamedSharding(mesh, P("data"))))
    with pytest.raises(ValueError, match=r"dimension 1 has size 4.*'data' \(size 4\) × 'model' \(size 2\).*multiple of 8"):
        next(ps.feed(batches, to=NamedSharding(mesh, P(None, ("data", "model")))))
    with pytest.raises(ValueError, match=r"'y' has 0 dimensions, too few"):
        next(ps.feed([{"y": np.float32(1)}], to=NamedSharding(mesh, P("data"))))


@pytest.mark.parametrize("transform", [None, lambda b: b])
def test_a_loader_that_does_not_divide_is_told_at_once(mesh, transform):
    to = NamedSharding(mesh, P(("data", "model")))
    with pytest.raises(ValueError, match=r"global batches of 12 records.*multiple of 8"):
        ps.feed(ps.Loader(BATCH, 12), to=to, transform=transform)
    with pytest.raises(ValueError, match=r"global batches of 12 .*for 'image'"):
        ps.feed(ps.Loader(BATCH, 12), to={"image": to, "label": NamedSharding(mesh, P())})
    with pytest.raises(ValueError, match=r"batches of 4 records.*remainder='drop' or 'pad'"):
        ps.feed(ps.Loader({"x": np.arange(20)}, 8, remainder="keep"), to=to)
    ps.feed(ps.Loader({"x": np.arange(20)}, 8, remainder="pad"), to=to)


def test_what_no_device_holds_is_named():
    for bad in (np.array(["a"]), np.array([b"a"]), np.array([{}]), np.array(["2020-01-01"], "datetime64[D]")):
        with pytest.raises(TypeError, match=r"leaf 'text' .*no device holds"):
            next(ps.feed([{"text": bad}]))


@pytest.mark.parametrize("to", ["cpu", {"x": 3}, {}, {"x": None}])
def test_what_is_no_place_is_refused(to):
    with pytest.raises(TypeError, match="to="):
        ps.feed([BATCH], to=to)


def test_a_place_of_another_structure_is_told(mesh):
    with pytest.raises(ValueError, match=r"`to` has the structure.*'images'.*not a prefix"):
        next(ps.feed([BATCH], to={"images": NamedSharding(mesh, P()), "label": NamedSharding(mesh, P())}))


SETTINGS = {
    "another default device": lambda: jax.default_device(jax.devices()[5]),
    "a mesh": lambda: jax.set_mesh(jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))),
    "another precision": lambda: jax.default_matmul_precision("float32"),
    "no jit": jax.disable_jit,
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize(
    "data", [lambda: ps.Loader(BATCH, 8), lambda: (BATCH for _ in iter(int, 1))], ids=["Loader", "generator"]
)
def test_all_batches_are_alike_whatever_the_consumer_entered(settings, data):
    with ps.feed(data(), transform=lambda b: {"x": b["image"] * 2}) as feed:
        first = next(feed)["x"]
        for k in range(60):
            with settings() if k % 3 else contextlib.nullcontext():
                batch = next(feed)["x"]
            assert isinstance(batch, jax.Array)
            assert batch.sharding == first.sharding
            assert batch.committed == first.committed


def test_a_trace_of_the_consumer_does_not_reach_the_batches():
    with ps.feed(ps.Loader(BATCH, 8)) as feed:
        jax.eval_shape(lambda: next(feed))
        for _ in range(5):
            assert np.asarray(next(feed)["image"]).shape == (8, 4)


@pytest.mark.parametrize("transform", [None, lambda b: b])
def test_with_jit_switched_off_batches_are_placed_all_the_same(mesh, transform):
    jax.config.update("jax_disable_jit", True)
    try:
        for batch in fed(NamedSharding(mesh, P("data")), transform=transform):
            assert_same(batch)
            assert len(batch["image"].devices()) == 8
    finally:
        jax.config.update("jax_disable_jit", False)


def test_batches_of_jax_and_of_numpy_may_alternate(mesh):
    to = NamedSharding(mesh, P("data"))
    on_a_device = jax.device_put(BATCH, jax.devices()[3])
    with ps.feed([BATCH, BATCH, on_a_device, BATCH], to=to, transform=lambda b: b) as feed:
        for batch in feed:
            assert_same(batch)
            assert batch["image"].sharding.is_equivalent_to(to, 2)


def test_a_transform_cannot_take_leaves_from_different_devices():
    to = {"image": jax.devices()[0], "label": jax.devices()[1]}
    assert fed(to)[0]["label"].devices() == {jax.devices()[1]}
    with pytest.raises(ValueError, match=r"on different devices.*leave out transform"):
        fed(to, transform=lambda b: b)
