"""Sources over arrays: in memory, memory-mapped, h5py, zarr."""

import pickle

import h5py
import jax.numpy as jnp
import numpy as np
import pytest
from tests.extras import require

import penstock as ps
from penstock.data import ArraySource, as_source

INDICES = np.array([7, 0, 7, 3, 4, 5])


@pytest.fixture
def values():
    return np.random.default_rng(0).integers(0, 255, (20, 3, 2), np.uint8)


def as_memmap(values, folder):
    np.save(folder / "x.npy", values)
    return np.load(folder / "x.npy", mmap_mode="r")


def as_h5py(values, folder):
    file = h5py.File(folder / "x.h5", "w")
    file.create_dataset("group/x", data=values, chunks=(4, 3, 2), compression="gzip")
    file.flush()
    return file["group/x"]


def as_zarr(values, folder):
    array = require("zarr").create_array(str(folder / "x.zarr"), shape=values.shape, chunks=(4, 3, 2), dtype=values.dtype)
    array[:] = values
    return array


KINDS = [
    lambda values, folder: values,
    lambda values, folder: np.asfortranarray(values),
    as_memmap,
    as_h5py,
    as_zarr,
    lambda values, folder: require("torch").from_numpy(values),
    lambda values, folder: jnp.asarray(values),
]


@pytest.mark.parametrize("kind", KINDS, ids=["numpy", "not contiguous", "memmap", "h5py", "zarr", "torch", "jax"])
def test_every_kind_of_array_gives_its_rows_in_the_order_asked_for(kind, values, tmp_path):
    source = as_source({"x": kind(values, tmp_path)})
    assert len(source) == 20
    for indices in (INDICES, np.arange(3, 9), np.array([19])):
        read = source.read(indices)["x"]
        assert isinstance(read, np.ndarray)
        assert read.dtype == np.uint8
        assert np.array_equal(read, values[indices])


def test_rows_are_the_readers_own(values):
    """A transform may work in place, shuffled or not."""
    before = values.copy()
    as_source({"x": values}).read(np.arange(5))["x"][:] = 0
    assert np.array_equal(values, before)


@pytest.mark.parametrize("cut", [lambda x: x, lambda x: x[5:15]], ids=["whole", "view"])
def test_a_memmap_is_sent_to_another_process_by_its_path(values, tmp_path, cut):
    source = ArraySource({"x": cut(as_memmap(np.repeat(values, 1000, axis=0), tmp_path))})
    pickled = pickle.dumps(source)
    assert len(pickled) < 2000
    indices = np.array([9, 0, 4])
    assert np.array_equal(pickle.loads(pickled).read(indices)["x"], source.read(indices)["x"])


def test_an_h5py_dataset_is_opened_again_in_another_process(values, tmp_path):
    as_h5py(values, tmp_path).file.close()
    source = ArraySource({"x": h5py.File(tmp_path / "x.h5", "r")["group/x"]})
    assert np.array_equal(pickle.loads(pickle.dumps(source)).read(INDICES)["x"], values[INDICES])


def test_structure_of_the_arrays_is_that_of_the_batch(values):
    batch = as_source(({"a": values}, (values[:, 0], values[:, 0, 0]))).read(INDICES)
    assert batch[0]["a"].shape == (6, 3, 2)
    assert batch[1][1].shape == (6,)
    assert as_source(values).read(INDICES).shape == (6, 3, 2)


def test_unequal_lengths_are_listed_with_their_names():
    with pytest.raises(ValueError, match=r"'image' has 10.*'label' has 9"):
        as_source({"image": np.zeros((10, 2)), "label": np.zeros(9)})


@pytest.mark.parametrize("data", [{"x": np.zeros((0, 3))}, np.zeros(0), []], ids=["dict", "array", "list"])
def test_no_records_is_an_error(data):
    with pytest.raises(ValueError, match=r"no records.*length 0"):
        as_source(data)


def objects(*values):
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def test_object_arrays_without_a_function_are_refused_with_a_way_out():
    for ragged in ({"x": objects(np.arange(2), np.arange(3))}, {"y": np.ones(2), "x": objects("a", "b")}):
        with pytest.raises(TypeError, match=r"'x' has dtype object, first element (ndarray|str).*pad_to.*per_record"):
            ps.Loader(ragged, 1)


def length(record):
    return {"n": np.int32(len(record["x"]))}


@pytest.mark.parametrize(
    "column",
    [
        objects("a", "bc", "def", ""),
        objects(b"a", b"bc", b"def", b""),
        objects([1], [1, 2], [1, 2, 3], []),
        objects(*[np.arange(n) for n in (1, 2, 3, 0)]),
        np.array(["a", "bc", "def", ""], np.dtypes.StringDType()),
    ],
    ids=["str", "bytes", "list", "ndarray", "StringDType"],
)
def test_objects_are_records_for_a_function(column):
    data = {"x": column, "y": np.arange(4)}
    loader = ps.Loader(data, 4, transform=ps.per_record(length))
    assert loader[0]["n"].tolist() == [1, 2, 3, 0]
    assert [record["y"] for record in pickle.loads(pickle.dumps(as_source(data))).read(np.array([3, 1]))] == [3, 1]
    both = ps.Loader(ps.mix([data, data], [0.5, 0.5]), 4, transform=ps.per_record(length))
    assert both[0]["n"].tolist() == [1, 1, 2, 2]
    assert ps.Loader(column, 4, transform=ps.per_record(lambda x: {"n": np.int32(len(x))}))[0]["n"].tolist() == [1, 2, 3, 0]


def test_the_description_of_arrays_has_the_dtypes_of_their_library():
    torch = require("torch")
    data = {"x": torch.zeros(4, 2), "y": np.zeros(4, ">i2")}
    assert as_source(data).describe() == "x: torch.float32[N,2], y: >i2[N]"
    assert as_source({"t": objects("a", "b")}).describe() == "t: object[N]"


def test_ragged_objects_are_padded():
    loader = ps.Loader({"x": objects([1], np.array([2, 3]))}, 2, collate=ps.pad_to([3]))
    assert loader[0]["x"].tolist() == [[1, 0, 0], [2, 3, 0]]


def test_a_function_may_change_the_lists_of_its_record():
    def add_end(record):
        record["x"].append(0)
        return {"n": np.int32(len(record["x"]))}

    column = objects([1], [1, 2])
    loader = ps.Loader({"x": column}, 2, transform=ps.per_record(add_end))
    assert loader[0]["n"].tolist() == loader[1]["n"].tolist() == [2, 3]
    assert column.tolist() == [[1], [1, 2]]


def test_a_file_that_was_closed_is_named(values, tmp_path):
    as_h5py(values, tmp_path).file.close()
    with h5py.File(tmp_path / "x.h5") as file:
        array = file["group/x"]
        loaders = [
            ps.Loader({"x": array}, 2),
            ps.Loader({"x": array, "t": objects(*"abcdefghijklmnopqrst")}, 2, transform=ps.per_record(length)),
            ps.Loader(file, 2),
        ]
        unnamed = [ps.Loader(ps.windows(array, 2), 2), ps.Loader(array, 2)]
    np.savez(tmp_path / "x.npz", x=values)
    with np.load(tmp_path / "x.npz") as archive:
        pass
    for loader, name in zip(loaders, ["x", "x", "group/x"], strict=True):
        with pytest.raises(ValueError, match=rf"leaf '{name}' lies in a file that is closed: keep it open.*with"):
            loader[0]
    for make in (
        *[lambda loader=loader: loader[0] for loader in unnamed],
        *[lambda x=x: as_source(x) for x in (file, array, archive)],
    ):
        with pytest.raises(ValueError, match="the data lie in a file that is closed: keep it open"):
            make()
    with pytest.raises(ValueError, match="leaf 'q' lies in a file that is closed"):
        as_source({"q": array})


def test_what_is_no_array_is_named():
    with pytest.raises(TypeError, match=r"'y/0' is int, not an array"):
        as_source({"x": np.zeros(2), "y": [1, 2]})
    with pytest.raises(ValueError, match=r"'y' is a scalar"):
        as_source({"x": np.zeros(2), "y": np.float32(1)})


@pytest.mark.parametrize("data", [iter([1]), 3, ArraySource])
def test_what_cannot_be_read_at_random_is_refused(data):
    with pytest.raises(TypeError, match=r"ps\.feed|did you mean"):
        as_source(data)


def test_a_file_of_arrays_is_a_dict_of_them(values, tmp_path):
    with h5py.File(tmp_path / "all.h5", "w") as file:
        file["x"], file["y"] = values, values[:, 0, 0]
    assert np.array_equal(as_source(h5py.File(tmp_path / "all.h5")).read(INDICES)["y"], values[INDICES, 0, 0])


def test_a_nested_file_of_arrays_is_a_nested_dict(values, tmp_path):
    with h5py.File(tmp_path / "all.h5", "w") as file:
        file["x"], file["g/y"] = values, values[:, 0, 0]
        file.create_group("empty")
    batch = as_source(h5py.File(tmp_path / "all.h5")).read(INDICES)
    assert sorted(batch) == ["g", "x"]
    assert np.array_equal(batch["g"]["y"], values[INDICES, 0, 0])


def test_a_group_of_zarr_is_a_nested_dict(values, tmp_path):
    group = require("zarr").open_group(str(tmp_path / "all.zarr"), mode="w")
    group.create_array("x", data=values)
    group.create_group("g").create_array("y", data=values)
    batch = as_source(group).read(INDICES)
    assert np.array_equal(batch["x"], values[INDICES])
    assert np.array_equal(batch["g"]["y"], values[INDICES])


def test_changes_of_a_copy_on_write_memmap_reach_another_process(values, tmp_path):
    as_memmap(values, tmp_path)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="c")
    mapped[:] += 1
    source = ArraySource({"x": mapped})
    assert np.array_equal(pickle.loads(pickle.dumps(source)).read(INDICES)["x"], values[INDICES] + 1)


def test_an_h5py_file_open_for_writing_cannot_be_sent_to_another_process(values, tmp_path):
    with pytest.raises(ValueError, match=r"source does not pickle.*x\.h5.*open for writing.*'r'\)"):
        ps.Loader({"x": as_h5py(values, tmp_path)}, 2, workers="process:1")


def test_masked_arrays_are_refused_with_a_way_out():
    masked = np.ma.masked_array(np.arange(4), mask=[0, 1, 0, 0])
    with pytest.raises(TypeError, match=r"'x' is a masked array.*x\.filled"):
        as_source({"x": masked})
    with pytest.raises(TypeError, match=r"'x'.*masked array.*filled"):
        ps.Loader([{"x": masked}] * 2, 2)[0]
