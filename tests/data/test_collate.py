import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.data import stack

LENGTHS = st.lists(st.integers(0, 16), min_size=1, max_size=8)


@given(lengths=LENGTHS, buckets=st.sets(st.integers(1, 16), min_size=1, max_size=4).map(lambda s: sorted(s | {16})))
def test_records_are_padded_to_the_smallest_length_that_holds_them(lengths, buckets):
    records = [{"tokens": np.arange(1, n + 1), "label": i} for i, n in enumerate(lengths)]
    batch = ps.pad_to(buckets, value=-1, mask="mask")(records)
    length = min(b for b in buckets if b >= max(lengths))
    assert batch["tokens"].shape == (len(lengths), length)
    for row, mask, n in zip(batch["tokens"], batch["mask"], lengths, strict=True):
        assert row[:n].tolist() == list(range(1, n + 1))
        assert (row[n:] == -1).all()
        assert mask.sum() == n
    assert batch["label"].tolist() == list(range(len(lengths)))


def test_named_leaves_are_padded_and_others_are_left_alone():
    records = [{"a": np.ones((n, 2)), "b": np.ones(3)} for n in (1, 4)]
    batch = ps.pad_to({"a": [4, 8]})(records)
    assert batch["a"].shape == (2, 4, 2)
    assert batch["b"].shape == (2, 3)


def test_leaves_with_the_same_lengths_share_one():
    records = [{"x": np.ones(2), "y": np.ones(7)}]
    batch = ps.pad_to([4, 8])(records)
    assert batch["x"].shape == batch["y"].shape == (1, 8)


def test_a_record_longer_than_all_lengths_is_an_error():
    with pytest.raises(ValueError, match=r"'x'.*length 9.*\[4, 8\]"):
        ps.pad_to([4, 8])([{"x": np.ones(9)}])


@pytest.mark.parametrize("lengths", [[], [0], [-1, 4], ["a"], [1, "a"], 128, {"x": []}, {"x": 8}])
def test_lengths_must_be_positive_integers(lengths):
    with pytest.raises(ValueError, match="pad_to needs positive lengths"):
        ps.pad_to(lengths)


def test_an_unknown_leaf_is_named():
    with pytest.raises(ValueError, match=r"'token'.*\['tokens'\]"):
        ps.pad_to({"token": [4]})([{"tokens": np.ones(2)}])


def test_a_mask_needs_a_dict_and_a_free_name():
    with pytest.raises(ValueError, match="is a tuple"):
        ps.pad_to([4], mask="mask")([(np.ones(2),)])
    with pytest.raises(ValueError, match="already"):
        ps.pad_to([4], mask="x")([{"x": np.ones(2)}])


def test_records_of_different_structure_are_told_apart():
    with pytest.raises(ValueError, match=r"row 0.*row 1"):
        stack([{"x": 1}, {"y": 1}])


@pytest.mark.parametrize("text", [b"ab\0\0", "ab\0\0"])
def test_strings_and_bytes_are_left_alone_by_padding(text):
    batch = ps.pad_to([4])([{"x": np.ones(2), "raw": text}])
    assert batch["raw"].tolist() == [text]


@pytest.mark.parametrize(
    ("dtype", "value"), [(np.uint8, 0.5), (np.int64, np.nan), (np.uint8, -100), (np.int64, 10**30), (np.float16, -1e9), (bool, 2)]
)
def test_a_value_that_a_leaf_cannot_hold_is_refused(dtype, value):
    with pytest.raises(ValueError, match=rf"'x' has dtype {np.dtype(dtype)}.*value="):
        ps.pad_to([4], value=value)([{"x": np.ones(2, dtype)}])


@pytest.mark.parametrize(("dtype", "value"), [(np.float32, 0.1), (np.float16, -np.inf), (np.float32, np.nan), (np.int8, -100)])
def test_a_value_that_a_leaf_can_hold_is_what_it_is_padded_with(dtype, value):
    padded = ps.pad_to([3], value=value)([{"x": np.ones(2, dtype)}])["x"]
    assert padded.dtype == dtype
    assert np.array_equal(padded[0, 2], np.asarray(value, dtype), equal_nan=True)


def test_an_empty_record_does_not_change_the_dtype_or_shape_of_a_padded_leaf():
    batch = ps.pad_to([2], mask="mask")([{"x": np.array([])}, {"x": np.ones((1, 3), np.int32)}])
    assert batch["x"].dtype == np.int32
    assert batch["x"].shape == (2, 2, 3)
    assert batch["mask"].tolist() == [[False, False], [True, False]]


def test_lists_of_numbers_are_arrays():
    batch = ps.pad_to({"x": [4]})([{"x": [1, 2, 3], "y": [[1, 2], [3, 4]]}, {"x": [], "y": [[5, 6], [7, 8]]}])
    assert batch["x"].tolist() == [[1, 2, 3, 0], [0, 0, 0, 0]]
    assert batch["x"].dtype == np.int64
    assert batch["y"].shape == (2, 2, 2)
    assert stack([[1, 2], [3, 4], [5, 6]]).shape == (3, 2)


def test_lists_of_other_things_hold_leaves():
    first, second = stack([[np.ones(3), 1], [np.ones(3), 2]])
    assert first.shape == (2, 3)
    assert second.tolist() == [1, 2]


def test_a_ragged_list_in_a_record_is_named():
    with pytest.raises(ValueError, match=r"'x' of one record makes no array.*inhomogeneous"):
        stack([{"x": [[1, 2], [3]]}])


def test_a_scalar_given_lengths_is_named():
    with pytest.raises(ValueError, match="'label' is a scalar"):
        ps.pad_to({"label": [4]})([{"label": 1}])
