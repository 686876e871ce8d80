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


@pytest.mark.parametrize("lengths", [[], [0], [-1, 4], ["a"], {"x": []}])
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
