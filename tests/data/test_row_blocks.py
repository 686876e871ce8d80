"""Rows of several blocks of memory are those of the concatenated blocks, whatever the strides of the blocks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.data.arrays import RowBlocks

FORMS = {
    "contiguous": lambda x: x,
    "every third row": lambda x: x[::3],
    "backwards": lambda x: x[::-1],
    "one row again and again": lambda x: np.broadcast_to(x[:1], (5, *x.shape[1:])),
    "big-endian": lambda x: x.astype(x.dtype.newbyteorder(">")),
}


@given(
    forms=st.lists(st.sampled_from([form for form in FORMS if form != "big-endian"]), min_size=1, max_size=4),
    counts=st.lists(st.integers(1, 20), min_size=4, max_size=4),
    tail=st.sampled_from([(), (3,), (2, 5), (0,)]),
    dtype=st.sampled_from(["u1", "i4", "f8", "?", "M8[s]", "V3"]),
    can_span=st.booleans(),
    seed=st.integers(0, 99),
)
def test_rows_are_those_of_the_concatenated_blocks(forms, counts, tail, dtype, can_span, seed):
    rng = np.random.default_rng(seed)
    size = np.dtype(dtype).itemsize * int(np.prod(tail))
    arrays = [
        rng.integers(0, 2, (n, size), np.uint8).view(dtype).reshape(n, *tail) if size else np.ones((n, *tail), dtype)
        for n in counts
    ]
    blocks = [FORMS[form](x) for form, x in zip(forms, arrays, strict=False)]
    rows = RowBlocks(blocks)
    if not can_span:
        rows._memory = None  # as where blocks lie too far from each other for their size
    indices = rng.integers(0, len(rows), 30)
    got = rows.take(indices)
    assert got.dtype == np.dtype(dtype)
    assert np.array_equal(got, np.concatenate(blocks)[indices])
    assert type(got) is np.ndarray
    assert got.flags.writeable
    assert not any(np.shares_memory(got, block) for block in blocks)


def test_byte_order_is_kept():
    x = FORMS["big-endian"](np.arange(10, dtype=np.int32))
    got = RowBlocks([x, x[::2]]).take(np.array([9, 11]))
    assert got.dtype == x.dtype
    assert got.tolist() == [9, 2]


@pytest.mark.parametrize("blocks", [[np.arange(5)], [np.arange(5), np.arange(3)], [np.arange(10)[::2]]])
def test_nothing_outside_of_the_blocks_is_read(blocks):
    for wrong in (12, 2**40, 2**62, -(2**62)):
        with pytest.raises(IndexError):
            RowBlocks(blocks).take(np.array([0, wrong]))
