"""Columns of Arrow tables: their forms, dtypes, nulls and memory."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.extras import require

import penstock as ps
from penstock.data import as_source
from penstock.data.arrow import Rows, as_column

ROWS = np.random.default_rng(0).integers(0, 1000, (30, 8), np.int32)


def chunked(*chunks, kind=None):
    return pa.chunked_array([pa.array(chunk, kind) for chunk in chunks])


def padded(column, length):
    """Read all rows as one batch."""
    data = pa.table({"x": column})
    return ps.Loader(data, len(data), collate=ps.pad_to([length]))[0]["x"]


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    width=st.integers(1, 5),
    dtype=st.sampled_from([np.uint8, np.int16, np.float32, np.int64]),
    data=st.data(),
)
def test_rows_of_scattered_blocks_are_those_of_their_concatenation(sizes, width, dtype, data):
    rng = np.random.default_rng(0)
    blocks = [rng.integers(0, 100, (size, width)).astype(dtype) for size in sizes]
    whole = np.concatenate(blocks)
    indices = np.array(data.draw(st.lists(st.integers(0, len(whole) - 1), min_size=1, max_size=20)))
    assert np.array_equal(Rows(blocks).take(indices), whole[indices])


@pytest.mark.parametrize("index", [-1, 30, 10**12])
@pytest.mark.parametrize("chunks", [1, 7])
def test_a_row_outside_of_the_table_is_never_read(index, chunks):
    column = Rows([np.ascontiguousarray(part) for part in np.array_split(ROWS, chunks)])
    if index == -1 and chunks == 1:
        return  # NumPy gives negative indices a meaning
    with pytest.raises(IndexError):
        column.take(np.array([0, index]))


def test_wide_rows_far_apart_in_memory_are_gathered():
    # For one array over both, NumPy would count the distance in elements times the bytes of a row: more than 2^63.
    wide = np.zeros((3, 1_000_001), np.float32)
    wide[:, 0] = np.arange(3)
    near = pa.FixedSizeListArray.from_arrays(pa.array(wide.ravel()), 1_000_001)
    column = as_column("x", pa.chunked_array([near, pa.concat_arrays([near, near])]))  # memory of NumPy, and of Arrow
    assert column.take(np.array([8, 0, 5, 5, 4]))[:, 0].tolist() == [2, 0, 2, 2, 1]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(pa.list_(pa.list_(pa.float32(), 2)), np.float32), (pa.list_(pa.list_(pa.uint8())), np.uint8)],
    ids=["list of fixed-size lists", "list of lists"],
)
def test_ragged_nested_lists_keep_their_dtype_and_rows_without_elements(kind, dtype):
    column = chunked([[[1, 2]], [], [[3, 4], [5, 6]]], [[], []], [[[7, 8]]], kind=kind)
    batch = padded(column, 2)
    assert batch.dtype == dtype
    assert batch.tolist() == [
        [[1, 2], [0, 0]],
        [[0, 0], [0, 0]],
        [[3, 4], [5, 6]],
        [[0, 0], [0, 0]],
        [[0, 0], [0, 0]],
        [[7, 8], [0, 0]],
    ]


POINTS = st.integers(0, 3).flatmap(
    lambda width: st.lists(st.lists(st.integers(-9, 9), min_size=width, max_size=width), max_size=3)
)


@given(chunks=st.lists(st.lists(POINTS, max_size=4), min_size=1, max_size=4), data=st.data())
def test_rows_of_nested_lists_are_those_of_the_column(chunks, data):
    column = chunked(*chunks, kind=pa.list_(pa.list_(pa.int8())))
    begin = data.draw(st.integers(0, len(column)))
    column = column.slice(begin, data.draw(st.integers(0, len(column) - begin)))
    if len(column) == 0:
        return
    indices = data.draw(st.lists(st.integers(0, len(column) - 1), min_size=1, max_size=5))
    rows = as_column("x", column).take(np.array(indices))
    assert [row.tolist() for row in rows] == [column[i].as_py() for i in indices]
    assert all(row.dtype == np.int8 for row in rows)


def test_a_slice_of_a_ragged_nested_column_has_its_own_rows():
    column = chunked([[[9, 9, 9]], [[1, 2]], [[3, 4], [5, 6]], [[None]]]).slice(1, 2)
    assert padded(column, 2).tolist() == [[[1, 2], [0, 0]], [[3, 4], [5, 6]]]


def test_a_column_of_empty_nested_lists_is_empty_arrays():
    assert as_column("x", chunked([[], []], kind=pa.list_(pa.list_(pa.int32())))).take(np.array([1, 0])).shape == (2, 0, 0)


def test_images_of_several_sizes_are_arrays_of_their_own():
    kind = pa.list_(pa.list_(pa.uint8()))
    images = as_column("x", chunked([[[1, 2], [3, 4]], [[5, 6, 7]]], kind=kind)).take(np.array([1, 0]))
    assert [(image.tolist(), image.dtype) for image in images] == [([[5, 6, 7]], np.uint8), ([[1, 2], [3, 4]], np.uint8)]


def test_a_row_that_is_ragged_itself_names_the_column():
    for column in (chunked([[[1, 2], [3]], [[4]]]), chunked([[[1, 2], [3]]], kind=pa.list_(pa.list_(pa.int64()), 2))):
        with pytest.raises(ValueError, match=r"column 'x' has a row whose own lists differ in length.*flatten"):
            padded(column, 4)


@pytest.mark.parametrize(
    ("column", "nulls"),
    [
        (chunked([1], [None, None], kind=pa.int64()), "2 nulls,"),
        (chunked([[1], None]), "1 nulls,"),
        (chunked([[1, None], [2, 3]]), "1 nulls inside of its lists"),
        (chunked([[[1, None]], [[3, 4], [5, 6]]]), "1 nulls inside of its lists"),
        (chunked([[[1], None], [[3]]]), "1 nulls inside of its lists"),
        (pa.chunked_array([pa.DictionaryArray.from_arrays([0, 1, 1], pa.array([7, None]))]), "2 nulls,"),
    ],
)
def test_nulls_are_counted_at_every_level_and_the_column_is_named(column, nulls):
    with pytest.raises(ValueError, match=f"column 'x' has {nulls}.*fill_null"):
        as_source(pa.table({"x": column}))


def test_a_null_in_a_dictionary_of_strings_is_none():
    column = pa.chunked_array([pa.DictionaryArray.from_arrays([0, 1, 0], pa.array(["a", None]))])
    assert as_column("x", column).take(np.array([1, 2])) == [None, "a"]


def filtered(values, features=None):
    data = require("datasets").Dataset.from_dict({"x": values, "y": list(range(len(values)))}, features=features)
    return data.filter(lambda record: record["x"] is not None and None not in np.ravel(record["x"]))


def test_nulls_in_rows_that_were_filtered_out_do_not_matter():
    batch = as_source(filtered([1, None, 3, 4])).read(np.array([2, 0, 1]))
    assert batch["x"].tolist() == [4, 1, 3]
    assert batch["y"].tolist() == [3, 0, 2]
    lists = as_source(filtered([[1, None], [2, 3], None, [4, 5]])).read(np.array([1, 0, 1]))
    assert lists["x"].tolist() == [[4, 5], [2, 3], [4, 5]]
    datasets = require("datasets")
    features = datasets.Features(x=datasets.Array2D((1, 2), "float32"), y=datasets.Value("int32"))
    arrays = as_source(filtered([[[1, 2]], None, [[3, 4]]], features)).read(np.array([1, 0]))
    assert arrays["x"].tolist() == [[[3, 4]], [[1, 2]]]


def test_nulls_in_rows_that_were_chosen_are_counted():
    chosen = require("datasets").Dataset.from_dict({"x": [1, None, None, 4]}).select([3, 1])
    with pytest.raises(ValueError, match="column 'x' has 1 nulls"):
        as_source(chosen)


def test_a_hugging_face_array_of_any_height_keeps_its_dtype():
    datasets = require("datasets")
    features = datasets.Features(x=datasets.Array2D((None, 2), "float32"))
    data = datasets.Dataset.from_dict({"x": [np.ones((3, 2)), np.full((1, 2), 2)]}, features=features)
    batch = ps.Loader(data, 2, collate=ps.pad_to([3]))[0]["x"]
    assert batch.dtype == np.float32
    assert batch[:, :, 0].tolist() == [[1, 1, 1], [2, 0, 0]]


@pytest.mark.parametrize("permutation", [None, [1, 0]])
@pytest.mark.parametrize("chunks", [1, 3])
def test_tensors_keep_their_shape(permutation, chunks):
    kind = pa.fixed_shape_tensor(pa.int32(), (2, 4), permutation=permutation)
    parts = [pa.FixedSizeListArray.from_arrays(pa.array(part.ravel()), 8) for part in np.array_split(ROWS, chunks)]
    column = as_column("x", pa.chunked_array([pa.ExtensionArray.from_storage(kind, part) for part in parts]))
    expected = ROWS.reshape(-1, 2, 4)
    indices = np.array([29, 0, 11])
    assert np.array_equal(column.take(indices), (expected.transpose(0, 2, 1) if permutation else expected)[indices])


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (pa.timestamp("us"), "datetime64[us]"),
        (pa.timestamp("ms", "Europe/Berlin"), "datetime64[ms]"),
        (pa.date32(), "datetime64[D]"),
        (pa.duration("ns"), "timedelta64[ns]"),
    ],
)
def test_dates_times_and_durations_are_arrays_whose_nulls_are_nat(kind, dtype):
    batch = ps.Loader(pa.table({"x": chunked([1, 2], [None], kind=kind)}), 3)[0]["x"]
    assert batch.dtype == dtype
    assert batch[:2].astype(np.int64).tolist() == [1, 2]
    assert np.isnat(batch[2])


@pytest.mark.parametrize("rows", [[[True], [True, True]], [[1], [1, 1]], [[[1]], [[1, 1]]]], ids=["bool", "int", "nested"])
def test_a_ragged_row_is_the_callers_to_write_to(rows):
    column = as_column("x", chunked(rows))
    (row,) = column.take(np.array([1]))
    row[:] = 0
    assert column.take(np.array([1]))[0].tolist() == rows[1]


@pytest.mark.parametrize("chunks", [1, 4])
def test_objects_are_taken_from_the_chunks_they_are_in(chunks):
    texts = [f"text {i}" for i in range(20)]
    parts = [part.tolist() for part in np.array_split(np.array(texts, object), chunks)]
    assert as_column("x", chunked(*parts)).take(np.array([19, 0, 7, 7, 5])) == [texts[i] for i in (19, 0, 7, 7, 5)]
    structs = chunked(*[[{"t": text, "n": [1]} for text in part] for part in parts])
    assert as_column("x", structs).take(np.array([19, 4])) == [{"t": texts[19], "n": [1]}, {"t": texts[4], "n": [1]}]


def test_more_text_than_one_array_of_it_can_hold_is_read():
    chunk = pa.array(["x" * (1 << 20)])
    column = as_column("x", pa.chunked_array([chunk] * 2100))  # 2.2 GB according to its offsets, 1 MB of memory
    assert [len(text) for text in column.take(np.array([2099, 0]))] == [1 << 20] * 2


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize(
    "kind",
    [
        pa.string_view(),
        pa.binary_view(),
        pa.list_(pa.string_view()),
        pa.struct([("t", pa.string_view())]),
        pa.list_(pa.binary_view()),
    ],
    ids=str,
)
def test_views_of_text_are_read(kind, chunks):
    texts = ["a", None, "a text that is longer than twelve bytes"]
    make = {"string_view": lambda t: t, "binary_view": lambda t: t and t.encode()}.get(str(kind))
    if make is None:
        inner = (lambda t: t) if "string" in str(kind) else (lambda t: t and t.encode())
        make = (lambda t: {"t": inner(t)}) if pa.types.is_struct(kind) else (lambda t: [inner(t)] * 2)
    values = [make(text) for text in texts]
    column = as_column("x", pa.chunked_array([pa.array(values, kind)] * chunks))
    assert column.take(np.array([2, 0, 1])) == [values[2], values[0], values[1]]
