"""Several sources as one, and the gather from several arrays at once."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.data.concatenation import ConcatSource, gather_of

DTYPES = ["u1", "i2", "f4", "i8", "c16", "?", ">i4", "M8[s]"]


@settings(max_examples=40)
@given(
    counts=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    tail=st.sampled_from([(), (1,), (3,), (2, 5)]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_records_are_those_of_the_concatenated_arrays(counts, tail, dtype, seed):
    rng = np.random.default_rng(seed)
    arrays = [rng.integers(0, 100, (n, *tail)).astype(dtype) for n in counts]
    both = ps.concat([{"x": x, "n": np.arange(len(x))} for x in arrays])
    indices = rng.integers(0, sum(counts), 40)
    wanted = np.concatenate(arrays)[indices].tolist()
    for read in (ConcatSource(both.sources, copied).read for copied in (0, 100, 1 << 20)):
        got = read(indices)
        assert got["x"].dtype == arrays[0].dtype
        assert got["x"].tolist() == wanted
        got["x"][...] = 0  # the caller may write to it
        assert read(indices)["x"].tolist() == wanted


def test_memory_maps_strided_arrays_and_h5py_are_read_too(tmp_path):
    import h5py

    np.save(tmp_path / "a.npy", np.arange(10))
    mapped = np.load(tmp_path / "a.npy", mmap_mode="r")
    strided = np.arange(100, 140)[::2]
    columns = {"x": np.arange(80).reshape(20, 4)[:, ::2]}  # whose rows are not contiguous
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.arange(200, 205)
    with h5py.File(tmp_path / "a.h5", "r") as file:
        both = ps.concat([mapped, strided, file["x"]])
        assert both.read(np.array([34, 0, 11, 9, 29])).tolist() == [204, 0, 102, 9, 138]
    for sources, gathered in (([mapped, strided], True), ([columns, columns], False), ([mapped, [1, 2]], False)):
        assert (gather_of(list(map(ps.as_source, sources)), 0) is not None) is gathered
    assert ps.concat([columns, columns]).read(np.array([21, 3]))["x"].tolist() == [[4, 6], [12, 14]]


def test_windows_and_tables_are_gathered_too(tmp_path):
    import pyarrow as pa

    np.save(tmp_path / "a.npy", np.arange(100, dtype=np.int32))
    tokens = [np.load(tmp_path / "a.npy", mmap_mode="r"), np.arange(1000, 1080, dtype=np.int32)]
    both = ps.concat([ps.windows({"x": tokens[0]}, 5), ps.windows({"x": tokens[1]}, 5, stride=7)])
    table = pa.table({"x": pa.chunked_array([pa.array([[1, 2], [3, 4]]), pa.array([[5, 6]])])})
    tables = ps.concat([table, table, table.slice(1)])
    for source in (both, tables):
        indices = np.random.default_rng(0).integers(0, len(source), 50)
        gather = gather_of(source.sources, 0)
        assert gather is not None
        every = np.concatenate([each.read(np.arange(len(each)))["x"] for each in source.sources])
        assert gather.read(gather.places(indices))["x"].tolist() == every[indices].tolist()


def test_nothing_outside_of_the_arrays_is_read():
    both = ConcatSource([ps.as_source(np.arange(5)), ps.as_source(np.arange(7))], copied=0)
    assert both.read(np.array([4, 5, 11])).tolist() == [4, 0, 6]
    for wrong in (-1, 12, 2**40, -(2**62)):
        with pytest.raises(IndexError):
            both.read(np.array([0, wrong]))


def test_it_goes_to_other_processes_and_reads_the_same():
    both = ps.concat([{"x": np.arange(50)}, {"x": np.arange(50, 80)}])
    copy = pickle.loads(pickle.dumps(both))
    assert copy.read(np.array([70, 3]))["x"].tolist() == [70, 3]


def test_errors_name_the_source():
    class Broken:
        def __len__(self):
            return 5

        def read(self, indices):
            raise OSError("disk gone")

    with pytest.raises(OSError, match="disk gone") as caught:
        ps.concat([np.arange(5), Broken()])
    assert "first record of source 1" in str(caught.value.__notes__)

    class BrokenLater(Broken):
        def read(self, indices):
            return super().read(indices) if indices.max() else np.zeros(len(indices), np.int64)

    with pytest.raises(OSError, match="disk gone") as caught:
        ps.concat([np.arange(5), BrokenLater()]).read(np.array([1, 7]))
    assert "source 1 of the 2" in str(caught.value.__notes__)


A = {"x": np.zeros((4, 3), np.int32), "y": np.arange(4)}


@pytest.mark.parametrize("join", [ps.concat, ps.mix])
@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({**A, "x": A["x"].astype(np.float32)}, r"leaf 'x' of a record is int32\[3\] and float32\[3\]"),
        ({**A, "x": A["x"][:, :2]}, r"leaf 'x' of a record is int32\[3\] and int32\[2\]"),
        ({"x": A["x"]}, r"leaf 'y' of a record is int64\[\] and absent"),
        ({**A, "z": A["y"]}, r"leaf 'z' of a record is absent and int64\[\]"),
        ((A["x"], A["y"]), "leaf"),
    ],
)
def test_sources_that_differ_are_refused_when_they_are_put_together(join, other, words):
    with pytest.raises(ValueError, match=r"source 0 \(ArraySource\) and source 2 \(ArraySource\).*" + words) as caught:
        join([A, A, other])
    assert "astype" in str(caught.value)


def test_records_that_differ_are_refused_unless_a_function_makes_them_alike():
    ints, floats, short = [{"x": [1, 2]}] * 3, [{"x": [1.5, 2]}] * 3, [{"x": np.array([1])}] * 3
    both = ps.concat([ints, floats])
    with pytest.raises(ValueError, match=r"leaf 'x' of a record is int64\[2\] and float64\[2\]"):
        ps.Loader(both, 2)
    with pytest.raises(ValueError, match=r"int64\[2\] and int64\[1\]"):
        ps.Loader(ps.mix([ints, short]), 2)
    with pytest.raises(ValueError, match=r"int64\[\*\] and float64\[\*\]"):
        ps.Loader(both, 2, collate=ps.pad_to([4]))
    assert ps.Loader(ps.mix([ints, short, [{"x": []}]], [0.5, 0.5, 0]), 2, collate=ps.pad_to([4]))[0]["x"].shape == (2, 4)
    as_floats = ps.per_record(lambda record: {"x": np.array(record["x"], float)})
    assert [batch["x"].dtype for batch in ps.Loader(both, 3, transform=as_floats, epochs=1)] == [float, float]
    alike = ps.Loader(both, 3, collate=lambda records: np.array([record["x"] for record in records], float), epochs=1)
    assert [batch.dtype for batch in alike] == [float, float]


@pytest.mark.parametrize("sources", [np.zeros((3, 2)), {"a": A}, "abc", b"abc", {1, 2}, range(3), 7])
def test_sources_need_to_be_a_list(sources):
    for join, name in ((ps.concat, "concat"), (ps.mix, "mix")):
        with pytest.raises(TypeError, match=rf"{name} needs a list of sources, such as ps\.{name}\(\[a, b\]\); got"):
            join(sources)
    with pytest.raises(TypeError, match=r"got one array, float64\[3,2\]"):
        ps.mix(np.zeros((3, 2)))


def test_sources_may_come_from_a_generator_or_a_dict():
    named = {"a": np.arange(3), "b": np.arange(4)}
    assert len(ps.concat(named.values())) == len(ps.concat(x for x in named.values())) == 7
