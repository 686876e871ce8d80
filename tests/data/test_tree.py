"""The leaves of a batch become arrays, whatever library made them, or are refused by name with a remedy."""

import ml_dtypes
import numpy as np
import pytest
import scipy.sparse
from tests.extras import require

import penstock as ps
from penstock.data.tree import is_numeric, to_arrays, to_numpy


def first(batch):
    """Return the leaf "x" of the one batch of a feed."""
    with ps.feed([{"x": batch}]) as feed:
        return np.asarray(next(feed)["x"])


@pytest.mark.parametrize(
    ("numbers", "dtype"),
    [
        ([3, 1, 2], np.int64),
        ([0.5, 1, 2], np.float64),
        ([[True, False], [False, True]], np.bool_),
        ([[[1], [2]], [[3], [4]], [[5], [6]]], np.int64),
        ([np.float32(1), np.float32(2)], np.float32),
        ([1j, 2], np.complex128),
    ],
)
def test_a_list_of_numbers_is_one_array(numbers, dtype):
    batch = to_arrays({"x": numbers, "y": np.ones(2)})
    assert batch["x"].dtype == dtype
    assert batch["x"].tolist() == numbers
    assert first(numbers).shape == np.shape(numbers)


def test_lists_of_arrays_and_empty_lists_stay_containers():
    x, y = np.ones(2), np.zeros(3)
    for batch in ([x, y], {"x": [x, y], "none": [], "empty": [None, None]}, ([x], y), [[x], [y, y]]):
        assert to_arrays(batch) is batch
    copy = to_arrays({"x": [x, y]}, copy=True)
    assert isinstance(copy["x"], list)
    assert copy["x"][0] is not x


@pytest.mark.parametrize(
    ("leaf", "error", "message"),
    [
        ([[1, 2], [3]], ValueError, r"leaf 'x' of a batch is a list of lists of different lengths: .*ps\.pad_to"),
        ([[[1]], [[2, 3]]], ValueError, r"leaf 'x' of a batch is a list of lists of different lengths"),
        ([1.5, None, 2.0], TypeError, r"leaf 'x' of a batch is a list of numbers with None,.*drop its row"),
        ([[1, 2], [None, 3]], TypeError, r"leaf 'x/1' of a batch is a list of numbers with None,"),
        ([7, 2**64, 3], TypeError, r"leaf 'x' of a batch is a list of numbers with 18446744073709551616,"),
        (-(2**70), TypeError, r"leaf 'x' of a batch is the number -1180591620717411303424,"),
        (np.ma.masked_array([1, 2], mask=[0, 1]), TypeError, r"leaf 'x' of a batch is a masked array.*\.filled"),
        (object(), TypeError, r"leaf 'x' of a batch is object, which is neither an array nor a pytree"),
    ],
)
def test_what_makes_no_array_is_named(leaf, error, message):
    with pytest.raises(error, match=message), ps.feed([{"x": leaf}]) as feed:
        next(feed)
    with pytest.raises(error, match=message), ps.feed(ps.Steps(lambda step: {"x": leaf})) as feed:
        next(feed)


@pytest.mark.parametrize("make", [lambda x: x.tolist(), lambda x: [[i, i] for i in x.tolist()]])
def test_functions_of_a_loader_and_a_stream_may_return_lists_of_numbers(make):
    def transform(batch):
        return {"x": make(batch["x"])}

    wanted = np.array(make(np.arange(4)))
    assert np.array_equal(ps.Loader({"x": np.arange(8)}, 4, transform=transform)[0]["x"], wanted)
    stream = ps.stream([{"x": i} for i in range(8)], 4, epochs=1, transform=transform)
    assert np.array_equal(next(iter(stream))["x"], wanted)


def test_batches_of_hugging_face_are_one_array_a_column():
    rows = require("datasets").Dataset.from_dict({"x": [0.5, 1.0, 2.0, 3.0], "ids": [[1, 2], [3, 4], [5, 6], [7, 8]]})
    for batches in (rows.iter(2), rows.to_iterable_dataset().batch(2)):
        with ps.feed(batches) as feed:
            assert {name: leaf.shape for name, leaf in next(feed).items()} == {"x": (2,), "ids": (2, 2)}


@pytest.mark.parametrize("dtype", [">f4", ">i2", ">u8", ">c8", ">f2"])
def test_foreign_byte_order_becomes_native(dtype, tmp_path):
    values = np.arange(8).astype(dtype)
    np.save(tmp_path / "x.npy", values)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    for data in (values, mapped, values[::-1][::-1]):
        batch = ps.Loader({"x": data}, 4)[1]["x"]
        assert batch.dtype == np.dtype(dtype).newbyteorder("=")
        assert batch.tolist() == [4, 5, 6, 7]
        mixed = ps.Loader(ps.mix([{"x": data}, {"x": data}], [0.5, 0.5]), 4)[0]["x"]
        assert sorted(mixed.real.tolist()) == [0, 0, 1, 1]
    assert ps.Loader(ps.windows(values, 2), 2)[0].tolist() == [[0, 1], [2, 3]]
    assert first(values).tolist() == [*range(8)]
    seen = []
    ps.Loader({"x": values}, 4, transform=lambda b: seen.append(b["x"].dtype.isnative) or b)[0]
    ps.Loader({"x": values}, 4, transform=ps.per_record(lambda r: seen.append(r["x"].dtype.isnative) or r))[0]
    assert seen == [True] * 5
    assert ps.Loader({"x": np.arange(4)}, 4, transform=lambda b: {"x": b["x"].astype(dtype)})[0]["x"].dtype.isnative


def test_big_endian_hdf5_is_read(tmp_path):
    h5py = require("h5py")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = np.arange(8, dtype=">i4")
    with h5py.File(tmp_path / "x.h5") as file, ps.feed(ps.Loader(file, 4, shuffle=True, epochs=1)) as feed:
        assert sorted(int(i) for batch in feed for i in batch["x"]) == [*range(8)]


@pytest.mark.parametrize("dtype", [np.longdouble, np.clongdouble])
def test_long_double_is_named_with_the_cast(dtype):
    assert not is_numeric(dtype)
    loader = ps.Loader({"x": np.arange(4).astype(dtype)}, 2)
    with pytest.raises(TypeError, match=r"leaf 'x' is .*, and no device holds .*: cast it to float64 or complex128"):
        next(ps.feed(loader))


def sparse_and_ragged():
    """Yield a library, and a function that makes a container whose rows make no array, and a part of the remedy."""
    for form in ("csr", "csc", "coo", "lil", "dok", "bsr", "dia"):
        yield "scipy.sparse", (lambda sparse, form=form: sparse.random(6, 4, 0.5, format=form)), r"matrix\.toarray\(\)"
    yield "scipy.sparse", lambda sparse: sparse.csr_array(np.eye(6)), r"matrix\.toarray\(\)"
    yield "torch", lambda torch: torch.eye(6).to_sparse(), r"tensor\.to_dense\(\)"
    yield "torch", lambda torch: torch.eye(6).to_sparse_csr(), r"tensor\.to_dense\(\)"
    yield "torch", lambda torch: torch.quantize_per_tensor(torch.ones(6), 0.1, 0, torch.qint8), r"tensor\.dequantize\(\)"
    yield "torch", lambda torch: torch.ones(6, device="meta"), "makes no array"
    for layout in ("strided", "jagged"):
        yield "torch", (lambda torch, layout=layout: nested(torch, layout)), r"to_padded_tensor.*unbind"
    yield "tensorflow", lambda tf: tf.ragged.constant([[1, 2], [3]]), r"tensor\.to_tensor\(\)"
    yield "tensorflow", lambda tf: tf.sparse.from_dense(tf.eye(6)), r"tf\.sparse\.to_dense"


def nested(torch, layout):
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=getattr(torch, layout))


@pytest.mark.filterwarnings("ignore")  # of torch, about its own prototypes
@pytest.mark.parametrize(("library", "make", "remedy"), list(sparse_and_ragged()))
def test_sparse_and_ragged_containers_are_named_with_their_dense_form(library, make, remedy):
    leaf = make(scipy.sparse if library == "scipy.sparse" else require(library))  # JAX requires SciPy
    kind = type(leaf).__name__
    with pytest.raises(TypeError, match=f"leaf 'x' of a batch is a {kind}, .*{remedy}"):
        first(leaf)
    with pytest.raises(TypeError, match=f"leaf 'x' is a {kind}, .*{remedy}"):
        ps.Loader({"x": leaf}, 2)
    with pytest.raises(TypeError, match=f"leaf 'batch' is a {kind}, .*{remedy}"):
        ps.Loader(leaf, 2)
    with pytest.raises(TypeError, match=f"'x' of one record makes no array: a {kind}, .*{remedy}"):
        ps.Loader([{"x": leaf}] * 2, 2)[0]


@pytest.mark.parametrize("kind", ["BCOO", "BCSR"])
def test_sparse_arrays_of_jax_are_fed_as_batches_and_refused_as_records(kind):
    from jax.experimental import sparse

    array = getattr(sparse, kind).fromdense(np.eye(4, dtype=np.float32))
    loader = ps.Loader({"x": np.arange(8)}, 4, epochs=1, transform=lambda batch: {**batch, "a": array})
    for batches in ([{"a": array}], ({"a": array} for _ in range(1)), ps.Steps(lambda step: {"a": array}, length=1), loader):
        with ps.feed(batches) as feed:
            assert np.array_equal(next(feed)["a"].todense(), np.eye(4))
    for make in (lambda: ps.Loader({"a": array}, 2), lambda: ps.Loader([{"a": array}] * 4, 2)[0]):
        with pytest.raises(TypeError, match=rf"leaf 'a' .*a {kind}, .*array\.todense\(\)"):
            make()
    with pytest.raises(TypeError, match=rf"leaf 'batch' is a {kind}"):
        ps.Loader(array, 2)


def test_tensors_of_tensorflow_are_arrays():
    tf = require("tensorflow")
    for tensor in (tf.eye(4), tf.cast(tf.eye(4), tf.bfloat16), tf.Variable(tf.eye(4))):
        assert np.array_equal(first(tensor).astype(np.float32), np.eye(4))
        assert np.array_equal(ps.Loader({"x": tensor}, 2)[0]["x"].astype(np.float32), np.eye(4)[:2])
    assert to_numpy(tf.cast(tf.eye(2), tf.bfloat16)).dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("library", ["pandas", "polars", "pyarrow"])
def test_a_table_as_a_batch_is_refused(library):
    module = require(library)
    table = module.table({"x": [1, 2]}) if library == "pyarrow" else module.DataFrame({"x": [1, 2]})
    message = r"a batch is a (DataFrame|Table), whose columns .*ps\.Loader\(table"
    with pytest.raises(TypeError, match=message), ps.feed([table]) as feed:
        next(feed)
