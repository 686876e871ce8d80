"""Arrow tables, Parquet and IPC files, Hugging Face datasets."""

import contextlib
import errno
import os
import pickle
import resource

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from tests.extras import require

import penstock as ps
from penstock.data import RecordSource, as_source
from penstock.data.arrow import ArrowSource, ipc, parquet

INDICES = np.array([0, 29, 3, 3, 11, 12])
TOKENS = np.random.default_rng(0).integers(0, 1000, (30, 8), np.int32)


def table(chunks=1):
    return pa.concat_tables(
        pa.table(
            {
                "tokens": pa.FixedSizeListArray.from_arrays(pa.array(part.ravel()), 8),
                "label": pa.array(part[:, 0], pa.int64()),
                "flag": pa.array(part[:, 0] % 2 == 0),
                "half": pa.array(part[:, 0].astype(np.float16)),
            }
        )
        for part in np.array_split(TOKENS, chunks)
    )


@pytest.mark.parametrize("chunks", [1, 7])
def test_columns_of_one_size_are_gathered(chunks):
    batch = as_source(table(chunks)).read(INDICES)
    assert np.array_equal(batch["tokens"], TOKENS[INDICES])
    assert np.array_equal(batch["label"], TOKENS[INDICES, 0])
    assert np.array_equal(batch["flag"], TOKENS[INDICES, 0] % 2 == 0)
    assert batch["half"].dtype == np.float16


def test_fixed_size_columns_are_used_in_place():
    whole = table()
    source = ArrowSource(whole)
    memory = whole["tokens"].chunk(0).flatten().buffers()[1]
    view = source._columns["tokens"].blocks[0]
    assert memory.address <= view.ctypes.data < memory.address + memory.size


def test_lists_of_equal_length_need_no_padding():
    batch = as_source(pa.table({"x": [[1, 2], [3, 4], [5, 6]], "y": [[[1.0], [2.0]]] * 3})).read(np.array([2, 0]))
    assert batch["x"].tolist() == [[5, 6], [1, 2]]
    assert batch["y"].shape == (2, 2, 1)


def test_ragged_lists_are_padded_by_the_loader():
    data = pa.table({"tokens": [[1], [2, 3], [4, 5, 6], []], "label": [0, 1, 2, 3]})
    loader = ps.Loader(data, 4, collate=ps.pad_to([4, 8], mask="mask"))
    assert loader[0]["tokens"].tolist() == [[1, 0, 0, 0], [2, 3, 0, 0], [4, 5, 6, 0], [0, 0, 0, 0]]
    assert loader[0]["mask"].sum(axis=1).tolist() == [1, 2, 3, 0]


def test_strings_and_bytes_come_as_objects_for_a_record_function():
    data = pa.table({"text": ["a", "bb", "ccc"], "raw": [b"x", b"yy", b""]})
    loader = ps.Loader(data, 3, transform=ps.per_record(lambda r: {"n": len(r["text"]), "m": len(r["raw"])}))
    assert loader[0]["n"].tolist() == [1, 2, 3]
    assert loader[0]["m"].tolist() == [1, 2, 0]


def test_two_columns_of_one_name_are_refused():
    with pytest.raises(ValueError, match=r"2 columns share a name, \['x'\].*rename"):
        as_source(pa.table([[1], [2], [3]], names=["x", "y", "x"]))


@pytest.mark.parametrize("array", [pa.array([1, 2]), pa.chunked_array([[1], [2]])])
def test_an_array_without_a_name_is_told_to_become_a_table(array):
    with pytest.raises(TypeError, match=r"Array, a column without a name: give pa\.table\(\{'x': array\}\)"):
        as_source(array)


def test_a_record_batch_is_a_table():
    assert as_source(pa.record_batch({"x": [1, 2]})).read(np.array([1]))["x"].tolist() == [2]


def test_parquet_files_in_order_and_chosen_columns(tmp_path):
    pq.write_table(table().slice(0, 10), tmp_path / "a.parquet", row_group_size=3)
    pq.write_table(table().slice(10), tmp_path / "b.parquet")
    for source in (as_source([tmp_path / "a.parquet", tmp_path / "b.parquet"]), as_source(f"{tmp_path}/*.parquet")):
        assert np.array_equal(source.read(INDICES)["tokens"], TOKENS[INDICES])
    assert list(parquet(f"{tmp_path}/*.parquet", columns=["label"]).read(INDICES)) == ["label"]


def test_parquet_decoded_into_a_cache_is_mapped_and_found_again(tmp_path):
    pq.write_table(table(), tmp_path / "a.parquet", row_group_size=7)
    first = parquet(tmp_path / "a.parquet", cache=tmp_path / "cache")
    (made,) = os.listdir(tmp_path / "cache")
    at = os.stat(tmp_path / "cache" / made).st_mtime_ns
    again = parquet(tmp_path / "a.parquet", cache=tmp_path / "cache")
    assert os.stat(tmp_path / "cache" / made).st_mtime_ns == at
    for source in (first, again, pickle.loads(pickle.dumps(first))):
        assert np.array_equal(source.read(INDICES)["tokens"], TOKENS[INDICES])
    assert len(pickle.dumps(first)) < 1000
    pq.write_table(table().slice(1), tmp_path / "a.parquet")
    assert len(parquet(tmp_path / "a.parquet", cache=tmp_path / "cache")) == 29


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.parquet"):
        ps.Loader(tmp_path / "nowhere.parquet", 4)


@pytest.mark.parametrize(
    ("damage", "cache"), [(lambda b: b[: len(b) // 2], False), (lambda b: b"", True), (lambda b: b"not parquet at all", False)]
)
def test_a_damaged_parquet_file_is_named_with_its_size(tmp_path, damage, cache):
    path = tmp_path / "x.parquet"
    pq.write_table(table(), path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=r"x\.parquet.*bytes.*not a complete Parquet"):
        parquet(path, cache=tmp_path / "cache" if cache else None)
    assert not (tmp_path / "cache").exists() or not os.listdir(tmp_path / "cache")


def test_a_damaged_ipc_file_is_named(tmp_path):
    (tmp_path / "x.arrow").write_bytes(b"ARROW1 but no more")
    with pytest.raises(ValueError, match=r"x\.arrow.*not a complete Arrow"):
        ipc(tmp_path / "x.arrow")


def test_an_ipc_stream_cut_between_two_batches_is_named(tmp_path):
    whole = pa.BufferOutputStream()
    with pa.ipc.new_stream(whole, table().schema) as writer:
        writer.write_table(table(), max_chunksize=10)
        two_thirds = whole.tell()  # three batches
        writer.write_table(table(), max_chunksize=10)
    written = whole.getvalue().to_pybytes()
    (tmp_path / "whole.arrow").write_bytes(written)
    assert len(ipc(tmp_path / "whole.arrow")) == 60
    for end, rows in ((two_thirds, 30), (len(written) - 8, 60)):
        (tmp_path / "cut.arrow").write_bytes(written[:end])
        with pytest.raises(ValueError, match=rf"cut\.arrow.*not a complete Arrow IPC file: after {rows} rows it ends"):
            ipc(tmp_path / "cut.arrow")


def test_the_streams_that_hugging_face_datasets_writes_are_whole(tmp_path):
    hf().save_to_disk(str(tmp_path / "saved"), num_shards=2)
    hf().map(lambda record: record, cache_file_name=str(tmp_path / "mapped.arrow"), writer_batch_size=7)
    for files in (f"{tmp_path}/saved/*.arrow", tmp_path / "mapped.arrow"):
        assert np.array_equal(ipc(files).read(INDICES)["tokens"], TOKENS[INDICES])


@contextlib.contextmanager
def limited(kind, limit):
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


@pytest.mark.parametrize("cache", [False, True])
def test_an_error_of_the_system_is_not_taken_for_damage(tmp_path, cache):
    pq.write_table(table(), tmp_path / "x.parquet")
    spare = os.open(os.devnull, os.O_RDONLY)
    os.close(spare)  # the descriptor that is assigned next
    with limited(resource.RLIMIT_NOFILE, spare), pytest.raises(OSError, match=r"Too many open files") as caught:
        parquet(tmp_path / "x.parquet", cache=tmp_path if cache else None)
    assert caught.value.errno == errno.EMFILE


def test_a_cache_that_cannot_be_written_does_not_blame_the_parquet_file(tmp_path):
    pq.write_table(table(), tmp_path / "x.parquet")
    with limited(resource.RLIMIT_FSIZE, 1000), pytest.raises(OSError, match=r"File too large") as caught:
        parquet(tmp_path / "x.parquet", cache=tmp_path / "cache")
    assert caught.value.errno == errno.EFBIG
    assert not os.listdir(tmp_path / "cache")


@pytest.mark.parametrize("cache", [False, True])
def test_dictionary_columns_of_several_row_groups_are_read(tmp_path, cache):
    names, numbers = ["ant", "bee", None, "cow", "bee", "cow"], [7, 8, 7, 9, 9, 8]
    parts = [
        pa.table({"name": pa.array(names[at]).dictionary_encode(), "number": pa.array(numbers[at]).dictionary_encode()})
        for at in (slice(0, 3), slice(3, 6))  # each chunk has its own dictionary
    ]
    with pq.ParquetWriter(tmp_path / "d.parquet", parts[0].schema) as writer:
        for part in parts:
            writer.write_table(part)
    source = parquet(tmp_path / "d.parquet", cache=tmp_path / "cache" if cache else None)
    assert [record["name"] for record in source.read(np.arange(6))] == names
    assert [record["number"] for record in source.read(np.arange(6))] == numbers


@pytest.mark.parametrize("cache", [False, True])
def test_files_whose_columns_differ_are_named_with_what_differs(tmp_path, cache):
    pq.write_table(pa.table({"x": pa.array([1], pa.int64()), "y": [1]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"x": pa.array([1], pa.int32()), "y": [1]}), tmp_path / "b.parquet")
    pq.write_table(pa.table({"y": [1], "x": pa.array([1], pa.int64())}), tmp_path / "c.parquet")

    def read(*names, columns=None):
        return parquet([tmp_path / name for name in names], columns, cache=tmp_path / "cache" if cache else None)

    with pytest.raises(ValueError, match=r"a\.parquet' and .*b\.parquet' differ.*: \[x: int64\] and \[x: int32\]"):
        read("a.parquet", "b.parquet")
    with pytest.raises(ValueError, match=r"\[x: int64, y: int64\] and \[y: int64, x: int64\].*order"):
        read("a.parquet", "c.parquet")
    assert len(read("a.parquet", "b.parquet", columns=["y"])) == 2


def test_ipc_files_whose_columns_differ_are_named(tmp_path):
    for name, data in (("a", {"x": [1]}), ("b", {"x": [1.0]})):
        feather.write_feather(pa.table(data), str(tmp_path / f"{name}.feather"))
    with pytest.raises(ValueError, match=r"a\.feather' and .*b\.feather' differ.*: \[x: int64\] and \[x: double\]"):
        ipc(f"{tmp_path}/*.feather")


@pytest.mark.parametrize("cache", [False, True])
def test_a_parquet_file_without_row_groups_has_no_records(tmp_path, cache):
    with pq.ParquetWriter(tmp_path / "none.parquet", table().schema):
        pass
    with pytest.raises(ValueError, match=r"no records: a table of 0 rows with columns \['tokens', 'label'"):
        parquet(tmp_path / "none.parquet", cache=tmp_path / "cache" if cache else None)
    pq.write_table(table(), tmp_path / "some.parquet")
    both = parquet([tmp_path / "none.parquet", tmp_path / "some.parquet"], cache=tmp_path / "cache" if cache else None)
    assert np.array_equal(both.read(INDICES)["tokens"], TOKENS[INDICES])


def test_an_unknown_column_is_named(tmp_path):
    pq.write_table(table(), tmp_path / "x.parquet")
    with pytest.raises(ValueError, match=r"no column 'image'.*tokens"):
        parquet(tmp_path / "x.parquet", columns=["image"])


def test_an_unknown_ending_lists_the_known_ones(tmp_path):
    (tmp_path / "x.bin").touch()
    with pytest.raises(TypeError, match=r"x\.bin.*\.parquet"):
        as_source(tmp_path / "x.bin")


def test_pandas_columns_are_fields():
    frame = require("pandas").DataFrame({"x": [1.0, 2.0, 3.0], "y": [1, 2, 3]})
    assert as_source(frame).read(np.array([2, 0]))["y"].tolist() == [3, 1]


def hf(fixed_size=False):
    datasets = require("datasets")
    features = datasets.Features(tokens=datasets.List(datasets.Value("int32"), length=8), label=datasets.Value("int32"))
    columns = {"tokens": TOKENS.tolist(), "label": TOKENS[:, 0].tolist()}
    return datasets.Dataset.from_dict(columns, features=features if fixed_size else None)


@pytest.mark.parametrize("fixed_size", [False, True])
def test_a_hugging_face_dataset_is_read_from_its_table(fixed_size):
    source = as_source(hf(fixed_size))
    assert isinstance(source, ArrowSource)
    assert np.array_equal(source.read(INDICES)["tokens"], TOKENS[INDICES])


def test_a_saved_dataset_of_many_chunks_is_read(tmp_path):
    hf(fixed_size=True).save_to_disk(str(tmp_path / "ds"), num_shards=3)
    loaded = require("datasets").load_from_disk(str(tmp_path / "ds"))
    assert np.array_equal(as_source(loaded).read(INDICES)["tokens"], TOKENS[INDICES])


def test_selected_and_shuffled_datasets_keep_their_rows():
    chosen = hf().select([5, 1, 9])
    assert as_source(chosen).read(np.array([2, 0]))["label"].tolist() == TOKENS[[9, 5], 0].tolist()
    shuffled = hf().shuffle(seed=0)
    assert as_source(shuffled).read(INDICES)["label"].tolist() == [shuffled[int(i)]["label"] for i in INDICES]


def test_a_format_of_columns_is_respected():
    assert list(as_source(hf().with_format("numpy", columns=["label"])).read(INDICES)) == ["label"]


def test_features_that_need_decoding_are_left_to_the_library():
    source = as_source(hf().with_transform(lambda batch: {"twice": [2 * x for x in batch["label"]]}))
    assert isinstance(source, RecordSource)
    loader = ps.Loader(hf().with_transform(lambda batch: {"twice": [2 * x for x in batch["label"]]}), 4)
    assert loader[0]["twice"].tolist() == (2 * TOKENS[:4, 0]).tolist()


def test_another_process_does_not_read_a_replaced_ipc_file(tmp_path):
    def write(path, x):
        with pa.ipc.new_file(path, pa.schema({"x": pa.int64()})) as writer:
            writer.write_table(pa.table({"x": x}))

    path, new = str(tmp_path / "x.arrow"), str(tmp_path / "new.arrow")
    write(path, [1, 2, 3])
    source = ps.as_source(path)
    pickled = pickle.dumps(source)
    assert pickle.loads(pickled).read(np.array([1]))["x"].tolist() == [2]
    write(new, [4, 5, 6])
    os.replace(new, path)
    for sent in (pickled, pickle.dumps(source)):
        with pytest.raises(OSError, match=r"x\.arrow' has changed since its array was opened"):
            pickle.loads(sent)


@pytest.mark.parametrize("cache", [False, True])
@pytest.mark.parametrize(("full", "column"), [(1.5, [1.5, None]), ([1, 2], [[1, None], [2, 3]]), (True, [True, None])])
def test_nulls_name_their_file(tmp_path, cache, full, column):
    pq.write_table(pa.table({"y": [1, 2], "x": pa.array([full] * 2, pa.array(column).type)}), tmp_path / "0.parquet")
    pq.write_table(pa.table({"y": [1, 2], "x": column}), tmp_path / "1.parquet")
    where = r"1\.parquet': column 'x' has 1 nulls.*fill_null.*leave these rows or the column out"
    with pytest.raises(ValueError, match=where):
        parquet(tmp_path / "*.parquet", cache=tmp_path / "cache" if cache else None)
    assert parquet(tmp_path / "*.parquet", columns=["y"]).read(np.arange(4))["y"].tolist() == [1, 2, 1, 2]


def test_nulls_name_their_ipc_file(tmp_path):
    feather.write_feather(pa.table({"x": [1, None]}), tmp_path / "x.arrow")
    with pytest.raises(ValueError, match=r"x\.arrow': column 'x' has 1 nulls"):
        ipc(tmp_path / "x.arrow")
