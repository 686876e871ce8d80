"""Packs of several sources are read as one, and are the same as those of each source."""

import pickle

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.data import Documents


def as_list(documents):
    return documents


def as_table(documents):
    return pa.table({"tokens": [d.tolist() for d in documents]}, schema=pa.schema([("tokens", pa.list_(pa.int32()))]))


def as_one_array(documents):
    return Documents(np.concatenate(documents), np.cumsum([0, *map(len, documents)]))


@settings(max_examples=40)
@given(
    sizes=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=12), min_size=1, max_size=4),
    forms=st.lists(st.sampled_from([as_list, as_table, as_one_array]), min_size=4, max_size=4),
    methods=st.lists(st.sampled_from(["best_fit", "concat"]), min_size=4, max_size=4),
    eos=st.sampled_from([None, -5]),
    seed=st.integers(0, 99),
)
def test_packs_are_those_of_the_sources(sizes, forms, methods, eos, seed):
    rng = np.random.default_rng(seed)
    packs = []
    for lengths, form, method in zip(sizes, forms, methods, strict=False):
        documents = [rng.integers(0, 1000, n).astype(np.int32) for n in lengths]
        packs.append(ps.pack(form(documents), 16, method=method, eos=eos, padding=-1))
    both = ps.concat(packs)
    assert both._joined is not None
    indices = rng.integers(0, len(both), 20)
    each = [pack.read(np.arange(len(pack))) for pack in packs]
    got = both.read(indices)
    assert set(got) == set(each[0])
    for name, leaf in got.items():
        wanted = np.concatenate([batch[name] for batch in each])
        assert leaf.dtype == wanted.dtype
        assert np.array_equal(leaf, wanted[indices])


def test_packs_of_stored_arrays_are_joined(tmp_path):
    import h5py

    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["x"] = np.arange(100, dtype=np.int32)
    with h5py.File(tmp_path / "a.h5", "r") as file:
        packs = [ps.pack(Documents(x, np.arange(0, 101, 10)), 20) for x in (file["x"], np.arange(100, 200, dtype=np.int32))]
        both = ps.concat(packs)
        got = both.read(np.arange(len(both)))["tokens"]
        assert np.sort(got.reshape(-1)).tolist() == list(range(200))


def test_packs_with_other_values_are_read_one_by_one():
    packs = [ps.pack([np.arange(5), np.arange(9)], 8, padding=padding) for padding in (0, -1)]
    both = ps.concat(packs)
    assert both._joined is None
    assert [row.tolist() for row in both.read(np.arange(len(both)))["tokens"]] == [
        row.tolist() for pack in packs for row in pack.read(np.arange(len(pack)))["tokens"]
    ]


def test_joined_packs_go_to_other_processes():
    both = ps.concat([ps.pack([np.arange(5), np.arange(9)], 8), ps.pack([np.arange(50)], 8)])
    copy = pickle.loads(pickle.dumps(both))
    for name, leaf in both.read(np.arange(len(both))).items():
        assert np.array_equal(copy.read(np.arange(len(both)))[name], leaf)


def test_an_error_names_the_source():
    class Shrinking:
        longest = 9

        def __len__(self):
            return 3

        def __getitem__(self, number):
            return np.arange(self.longest)

    documents = Shrinking()
    both = ps.concat([ps.pack([np.arange(5)], 8), ps.pack(documents, 8)])
    documents.longest = 2
    with pytest.raises(ValueError, match="had at least") as caught:
        both.read(np.arange(len(both)))
    assert "penstock: source 1 of the 2 that are read as one" in caught.value.__notes__
