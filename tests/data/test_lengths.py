"""Batches of records of similar length."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps

LENGTHS = np.random.default_rng(0).integers(1, 500, 1000)
RECORDS = [{"tokens": np.full(n, i), "id": i} for i, n in enumerate(LENGTHS)]
BUCKETS = [64, 128, 256, 500]


def loader(**options):
    options = {"batch_size": 16, "shuffle": True, "collate": ps.pad_to({"tokens": BUCKETS}), "epochs": 1, **options}
    return ps.Loader(RECORDS, **options)


def padding(made):
    return sum(batch["tokens"].size for batch in made) / sum(LENGTHS[batch["id"]].sum() for batch in made)


@settings(max_examples=25)
@given(
    records=st.integers(1, 200),
    batch_size=st.integers(1, 24),
    remainder=st.sampled_from(["drop", "pad", "keep"]),
    shuffle=st.booleans(),
)
def test_each_record_comes_once_an_epoch(records, batch_size, remainder, shuffle):
    if remainder == "drop" and batch_size > records:
        return
    made = ps.Loader(
        {"id": np.arange(records)}, batch_size, shuffle=shuffle, remainder=remainder, epochs=1, batch_by_length=LENGTHS[:records]
    )
    batches = list(made)
    real = np.concatenate([b["id"][b["mask"]] if remainder == "pad" else b["id"] for b in batches])
    assert len(set(real)) == len(real) == (len(made) * batch_size if remainder == "drop" else records)
    assert [len(b["id"]) for b in batches[:-1]] == [batch_size] * (len(batches) - 1)


def test_batches_are_padded_less():
    plain, sorted_ = padding(loader()), padding(loader(batch_by_length=LENGTHS))
    assert plain > 1.9
    assert sorted_ < 1.4
    assert {b["tokens"].shape[1] for b in loader()} == {500}
    assert {b["tokens"].shape[1] for b in loader(batch_by_length=LENGTHS)} == set(BUCKETS)


def test_the_lengths_can_be_read_from_a_leaf():
    by_name, by_number = loader(batch_by_length="tokens"), loader(batch_by_length=LENGTHS)
    assert all((a["id"] == b["id"]).all() for a, b in zip(by_name, by_number, strict=True))


def test_lengths_do_not_follow_the_order_of_the_steps():
    longest = [LENGTHS[batch["id"]].max() for batch in loader(batch_by_length=LENGTHS)]
    assert longest != sorted(longest, reverse=True)
    assert longest != sorted(longest)


@pytest.mark.parametrize("count", [2, 4])
def test_all_processes_pad_to_the_same_length(count):
    whole = loader(batch_by_length=LENGTHS)
    parts = [loader(batch_by_length=LENGTHS, process=(p, count)) for p in range(count)]
    for step in range(len(whole)):
        rows = [part[step]["tokens"] for part in parts]
        assert np.concatenate(rows).tolist() == whole[step]["tokens"].tolist()


def test_it_is_a_function_of_the_step():
    made = loader(batch_by_length=LENGTHS, epochs=None)
    wanted = {step: loader(batch_by_length=LENGTHS, epochs=None)[step]["id"].tolist() for step in (10**9, 0, 61, 62, 5)}
    assert {step: made[step]["id"].tolist() for step in wanted} == wanted


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ([1, 2, 3], ValueError, r"shape \(3,\).*1,000 records"),
        (np.full(1000, 0.5), TypeError, r"needs integers.*ndarray of float64\[1000\]: give lengths.astype"),
        ([None] * 1000, TypeError, r"needs integers.*list of object\[1000\]"),
        (np.full(1000, 2**63, np.uint64), ValueError, r"has 9223372036854775808 at record 0: .*less than 2\*\*63"),
        (np.full(1000, -1), ValueError, "-1 at record 0"),
        ("text", ValueError, r"no leaf of that name; it has .*tokens"),
        ("id", ValueError, "without a length"),
    ],
)
def test_bad_lengths_are_told_at_once(given, error, words):
    with pytest.raises(error, match=words):
        loader(batch_by_length=given)


def test_a_record_longer_than_announced_is_told():
    with pytest.raises(ValueError, match=r"length \d+, and batch_by_length has at most 1 "):
        loader(batch_by_length=np.ones(1000, int))[0]
