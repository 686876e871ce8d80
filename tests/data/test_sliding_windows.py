"""Windows of long arrays: their rows, storage, processes and errors."""

import math
import pickle

import h5py
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.extras import require

import penstock as ps

T = 1000
TOKENS = np.random.default_rng(0).integers(0, 50_000, T, np.uint16)


def memmap(x, folder):
    x.tofile(folder / "x.bin")
    return np.memmap(folder / "x.bin", x.dtype, "r", shape=x.shape)


def hdf5(x, folder):
    with h5py.File(folder / "x.h5", "w") as file:
        file.create_dataset("x", data=x, chunks=(64, *x.shape[1:]))
    return h5py.File(folder / "x.h5", "r")["x"]


def zarr_array(x, folder):
    array = require("zarr").create_array(str(folder / "x.zarr"), shape=x.shape, chunks=(64, *x.shape[1:]), dtype=x.dtype)
    array[:] = x
    return array


KINDS = {
    "numpy": lambda x, folder: x,
    "backwards": lambda x, folder: x[::-1].copy()[::-1],
    "transposed": lambda x, folder: np.asfortranarray(x),
    "memmap": memmap,
    "h5py": hdf5,
    "zarr": zarr_array,
    "torch": lambda x, folder: require("torch").from_numpy(x.astype(np.int32)),
    "jax": lambda x, folder: jnp.asarray(x),
}


def expected(x, length, stride, indices):
    return np.stack([x[i * stride : i * stride + length] for i in indices])


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(("length", "stride", "rest"), [(17, 16, ()), (8, 1, (3, 2))], ids=["flat", "rows of arrays"])
def test_a_record_is_consecutive_rows(kind, length, stride, rest, tmp_path):
    x = np.repeat(TOKENS, int(np.prod(rest, dtype=int))).reshape(T, *rest)
    source = ps.windows(kind(x, tmp_path), length, stride=stride)
    assert len(source) == (T - length) // stride + 1
    indices = np.array([len(source) - 1, 0, len(source) // 2, 0, len(source) // 2 + 1]) % len(source)
    for each in (source, pickle.loads(pickle.dumps(source))):
        got = each.read(indices)
        assert isinstance(got, np.ndarray)
        assert got.flags.writeable
        assert np.array_equal(got, expected(x, length, stride, indices))
        assert each.read(np.empty(0, np.int64)).shape == (0, length, *rest)


@given(
    rows=st.integers(1, 60),
    length=st.integers(1, 60),
    stride=st.integers(1, 60),
    rest=st.sampled_from([(), (3, 2)]),
    storage=st.sampled_from([np.asarray, np.asfortranarray, lambda x: x[::-1].copy()[::-1]]),
)
def test_windows_of_any_length_and_stride_hold_their_rows(rows, length, stride, rest, storage):
    rows = max(rows, length)
    x = storage(np.arange(rows * math.prod(rest)).reshape(rows, *rest))
    source = ps.windows(x, length, stride=stride)
    assert np.array_equal(source.read(np.arange(len(source))), expected(x, length, stride, range(len(source))))
    assert len(source) * stride + length > len(x)  # no further window fits
    if stride == length and not rest:
        assert source.read(np.arange(len(source))).ravel().tolist() == list(range(len(x) // length * length))


def test_a_batch_has_the_structure_of_the_arrays(tmp_path):
    arrays = {"tokens": memmap(TOKENS, tmp_path), "weights": (TOKENS / 2, TOKENS[:, None])}
    batch = ps.windows(arrays, 10).read(np.array([2]))
    assert np.array_equal(batch["tokens"][0], TOKENS[20:30])
    assert np.array_equal(batch["weights"][0][0], TOKENS[20:30] / 2)
    assert batch["weights"][1].shape == (1, 10, 1)


def test_arrays_of_a_file_are_read(tmp_path):
    np.savez(tmp_path / "x.npz", tokens=TOKENS)
    assert np.array_equal(ps.windows(np.load(tmp_path / "x.npz"), 10).read(np.array([1]))["tokens"][0], TOKENS[10:20])


def test_rows_are_the_readers_own():
    before = TOKENS.copy()
    ps.windows(TOKENS, 10).read(np.arange(3))[:] = 0
    assert np.array_equal(before, TOKENS)


@pytest.mark.slow
def test_batches_are_the_same_from_processes(tmp_path):
    source = ps.windows({"x": hdf5(TOKENS, tmp_path), "y": memmap(TOKENS, tmp_path)}, 33, stride=8)
    options = {"batch_size": 8, "shuffle": True, "epochs": 1}
    one, two = ps.Loader(source, **options), ps.Loader(source, **options, workers="process:1")
    assert all(np.array_equal(a[name], b[name]) for a, b in zip(one, two, strict=True) for name in "xy")


def test_memory_is_sent_once_and_a_memmap_by_path(tmp_path):
    for array, most in ((TOKENS, TOKENS.nbytes), (memmap(TOKENS, tmp_path), 0)):
        buffers = []
        pickled = pickle.dumps(ps.windows(array, 256, stride=1), protocol=5, buffer_callback=buffers.append)
        assert len(pickled) < 2000
        assert sum(buffer.raw().nbytes for buffer in buffers) == most


def test_the_state_of_a_feed_is_refused_for_other_windows():
    def loader(length, stride):
        return ps.Loader(ps.windows(TOKENS[:99], length, stride=stride), 2)

    with ps.feed(loader(10, 10)) as feed:
        state = feed.state()
    with ps.feed(loader(10, 10)) as feed:
        feed.restore(state)
    with ps.feed(loader(11, 10)) as feed, pytest.raises(ValueError, match="windows of 10 rows, stride 10"):
        feed.restore(state)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((TOKENS, 0), {}, r"length=0: needs an integer >= 1"),
        ((TOKENS, 2.5), {}, r"length=2\.5"),
        ((TOKENS, 1001), {}, r"length=1,001 is more than the 1,000 rows of batch: uint16\[N\]"),
        ((TOKENS, 10), {"stride": 0}, r"stride=0: needs an integer >= 1"),
        (({"x": TOKENS, "y": TOKENS[1:]}, 10), {}, r"'x' has 1,000, 'y' has 999"),
        ((np.float32(1), 10), {}, r"'batch' is a scalar"),
        ((np.zeros(0), 1), {}, r"no records"),
    ],
)
def test_bad_values_are_named(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        ps.windows(*arguments, **options)


def test_what_holds_no_arrays_is_refused_with_a_way_out():
    with pytest.raises(TypeError, match=r"got list.*np\.asarray.*ps\.pack"):
        ps.windows([1, 2, 3], 2)
    with pytest.raises(TypeError, match=r"'batch' has dtype object"):
        ps.windows(np.array([[1], [1, 2]], dtype=object), 1)
