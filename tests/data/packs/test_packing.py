"""Packs: every token once, segments and positions, sources, processes, state, and errors."""

import itertools
import pickle

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.extras import require

import penstock as ps
from penstock.data import Documents
from penstock.data.packs.index import PackSettings, make_index


def documents_of(lengths, dtype=np.int32):
    """Return documents whose tokens are all different, from 1 on."""
    tokens = np.arange(1, sum(lengths) + 1, dtype=dtype)
    return np.split(tokens, np.cumsum(lengths)[:-1])


LENGTHS = [5, 3, 0, 17, 8, 1, 40, 2, 7, 7, 16, 0, 9, 4, 33]
DOCUMENTS = documents_of(LENGTHS)


def every_pack(source):
    return source.read(np.arange(len(source)))


def segments(batch):
    """Yield the tokens of each segment, after a check of segment ids, positions and padding."""
    for tokens, ids, positions in zip(batch["tokens"], batch["segment_ids"], batch["positions"], strict=True):
        count = int(ids.max())
        filled = int((ids > 0).sum())
        assert count > 0
        assert ids.tolist() == sorted(ids[:filled]) + [0] * (len(ids) - filled)
        assert set(ids[:filled]) == set(range(1, count + 1))
        assert not tokens[filled:].any()
        assert not positions[filled:].any()
        for segment in range(1, count + 1):
            assert positions[ids == segment].tolist() == list(range(int((ids == segment).sum())))
            yield tokens[ids == segment]


@given(
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=60).filter(any),
    length=st.integers(1, 40),
    method=st.sampled_from(["best_fit", "concat"]),
    window=st.integers(1, 70),
    seed=st.none() | st.integers(0, 5),
)
def test_every_token_of_every_document_is_in_one_pack(lengths, length, method, window, seed):
    source = ps.pack(documents_of(lengths), length, method=method, window=window, seed=seed)
    found = list(segments(every_pack(source)))
    assert sorted(np.concatenate(found)) == list(range(1, sum(lengths) + 1))
    owner = np.repeat(np.arange(len(lengths)), lengths)
    for piece in found:
        assert (np.diff(piece) == 1).all()  # contiguous
        assert len(set(owner[piece - 1])) == 1  # of one document
    assert source.tokens == sum(lengths)
    assert source.fullness == sum(lengths) / (len(source) * length)
    if method == "concat":
        assert len(source) == -(-sum(lengths) // length)
    else:
        pieces = sum(-(-n // length) for n in lengths)
        assert len(found) == pieces  # none is cut without need


@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=40).filter(any),
    length=st.integers(1, 15),
    method=st.sampled_from(["best_fit", "concat"]),
    seed=st.none() | st.integers(0, 5),
)
def test_each_document_is_followed_by_one_end_of_sequence(lengths, length, method, seed):
    source = ps.pack(documents_of(lengths), length, method=method, seed=seed, eos=9999)
    found = list(segments(every_pack(source)))
    filled = [n for n in lengths if n]
    assert sum(map(len, found)) == sum(filled) + len(filled) == source.tokens
    assert sum((piece == 9999).sum() for piece in found) == len(filled)
    assert all(9999 not in piece[:-1] for piece in found)
    lasts = set(np.cumsum(lengths).tolist())
    for piece in found:
        if piece[-1] == 9999 and len(piece) > 1:
            assert piece[-2] in lasts
        elif piece[-1] in lasts:
            assert len(piece) == length or method == "concat"  # its end of sequence is the next piece
    assert sorted(t for piece in found for t in piece if t != 9999) == list(range(1, sum(lengths) + 1))


def test_concat_is_the_stream_of_the_documents_cut_at_every_length():
    batch = every_pack(ps.pack(DOCUMENTS, 16, method="concat"))
    assert batch["tokens"].ravel()[: sum(LENGTHS)].tolist() == list(range(1, sum(LENGTHS) + 1))
    assert batch["segment_ids"][0].tolist() == [1] * 5 + [2] * 3 + [3] * 8
    assert batch["positions"][1].tolist()[:3] == [0, 1, 2]  # of the rest of the third document


def test_a_document_as_long_as_a_pack_fills_it():
    batch = every_pack(ps.pack([np.arange(8), np.arange(4)], 8))
    assert batch["tokens"].tolist() == [list(range(8)), [0, 1, 2, 3, 0, 0, 0, 0]]
    assert batch["segment_ids"].tolist() == [[1] * 8, [1] * 4 + [0] * 4]


def test_one_document_is_enough():
    source = ps.pack([np.arange(20)], 8)
    assert len(source) == 3
    assert every_pack(source)["tokens"].ravel()[:20].tolist() == list(range(20))


@pytest.mark.parametrize(("length", "seed"), [(512, 7), (4096, None)])
def test_best_fit_fills_packs(length, seed):
    lengths = np.random.default_rng(0).integers(10, 2001, 50_000)
    for window in (4096, 16_384):
        index = make_index(lengths, PackSettings(length, "best_fit", window, "split", seed, False))
        assert lengths.sum() / (len(index.starts) - 1) / length >= 0.99
        assert sum(array.nbytes for array in vars(index).values()) <= 40 * len(lengths)


def test_another_seed_is_another_order_and_the_same_one_the_same():
    one, same, other = (every_pack(ps.pack(DOCUMENTS, 16, seed=seed, window=4))["tokens"] for seed in (1, 1, 2))
    assert np.array_equal(one, same)
    assert one.shape != other.shape or (one != other).any()


def test_padding_has_the_value_that_was_asked_for():
    batch = every_pack(ps.pack([np.arange(3)], 5, padding=-100))
    assert batch["tokens"].tolist() == [[0, 1, 2, -100, -100]]


class TorchDataset:
    """A data set of torch, which asks for no more than these methods."""

    def __len__(self):
        return len(DOCUMENTS)

    def __getitem__(self, i):
        return {"tokens": require("torch").from_numpy(DOCUMENTS[i]), "id": i}


class Own:
    """A source that reads a list of records, and has a dict with another leaf."""

    def __len__(self):
        return len(DOCUMENTS)

    def read(self, indices):
        return [{"tokens": DOCUMENTS[i], "id": i} for i in indices]


def flat_memmap(folder):
    np.concatenate(DOCUMENTS).tofile(folder / "tokens.bin")
    offsets = np.concatenate([[0], np.cumsum(LENGTHS)])
    np.save(folder / "offsets.npy", offsets)
    return Documents(np.memmap(folder / "tokens.bin", np.int32, "r"), np.load(folder / "offsets.npy", mmap_mode="r"))


def flat_h5py(folder):
    with h5py.File(folder / "x.h5", "w") as file:
        file["tokens"] = np.concatenate(DOCUMENTS)
    return Documents(h5py.File(folder / "x.h5", "r")["tokens"], np.concatenate([[0], np.cumsum(LENGTHS)]))


def memmaps(folder):
    for i, document in enumerate(DOCUMENTS):
        np.save(folder / f"{i}.npy", document)
    return [np.load(folder / f"{i}.npy", mmap_mode="r" if len(x) else None) for i, x in enumerate(DOCUMENTS)]


def table(chunk=4, kind=None):
    column = pa.chunked_array(
        [pa.array([x.tolist() for x in DOCUMENTS[i : i + chunk]], kind or pa.list_(pa.int32())) for i in range(0, 15, chunk)]
    )
    return pa.table({"text": ["a"] * len(DOCUMENTS), "tokens": column})


def parquet(folder):
    pa.parquet.write_table(table(), folder / "x.parquet", row_group_size=4)
    return str(folder / "x.parquet")


def hugging_face(folder):
    datasets = require("datasets")
    features = datasets.Features(tokens=datasets.List(datasets.Value("int32")), label=datasets.Value("int64"))
    data = datasets.Dataset.from_dict({"tokens": [x.tolist() for x in DOCUMENTS], "label": range(15)}, features=features)
    data.save_to_disk(folder / "hf", num_shards=3)
    return datasets.load_from_disk(folder / "hf")


SOURCES = {
    "arrays": lambda folder: DOCUMENTS,
    "records": lambda folder: [{"tokens": x, "text": "abc"} for x in DOCUMENTS],
    "flat": lambda folder: Documents(np.concatenate(DOCUMENTS), np.concatenate([[0], np.cumsum(LENGTHS)])),
    "every other": lambda folder: Documents(
        np.repeat(np.concatenate(DOCUMENTS), 2)[::2], np.r_[0, np.cumsum(LENGTHS)].astype("u4")
    ),
    "flat memmap": flat_memmap,
    "flat h5py": flat_h5py,
    "memmaps": memmaps,
    "torch tensors": lambda folder: [require("torch").from_numpy(x) for x in DOCUMENTS],
    "torch dataset": lambda folder: TorchDataset(),
    "own source": lambda folder: Own(),
    "arrow": lambda folder: table(),
    "one chunk": lambda folder: table(15),
    "large lists": lambda folder: table(kind=pa.large_list(pa.int32())),
    "slice": lambda folder: pa.concat_tables([table().slice(0, 6), table().slice(6)]),
    "parquet": parquet,
    "hugging face": hugging_face,
    "hugging face, in another order": lambda folder: hugging_face(folder).select(range(14, -1, -1)).select(range(14, -1, -1)),
}


OPTIONS = [{}, {"method": "concat"}, {"eos": 5, "seed": 3}]


@pytest.mark.parametrize(("make", "options"), list(zip(SOURCES.values(), itertools.cycle(OPTIONS), strict=False)), ids=SOURCES)
def test_packs_do_not_depend_on_where_the_documents_lie(make, options, tmp_path):
    expected = every_pack(ps.pack(DOCUMENTS, 16, **options))
    source = ps.pack(make(tmp_path), 16, leaf=None, **options)
    indices = np.array([3, 0, len(source) - 1, 3])
    for each in (source, pickle.loads(pickle.dumps(source))):
        got = every_pack(each)
        assert sorted(got) == ["positions", "segment_ids", "tokens"]
        for name, leaf in got.items():
            assert leaf.dtype == np.int32
            assert leaf.flags.writeable
            assert np.array_equal(leaf, expected[name])
        assert np.array_equal(each.read(indices)["tokens"], expected["tokens"][indices])
        assert each.read(np.empty(0, np.int64))["tokens"].shape == (0, 16)


@pytest.mark.parametrize("make", [flat_memmap, memmaps, hugging_face])
def test_documents_and_index_in_files_are_sent_by_path(make, tmp_path):
    buffers = []
    pickled = pickle.dumps(ps.pack(make(tmp_path), 16, index=tmp_path / "index"), protocol=5, buffer_callback=buffers.append)
    assert len(pickled) < 6000
    assert sum(buffer.raw().nbytes for buffer in buffers) == 0


def test_documents_and_index_in_memory_are_sent_once():
    buffers = []
    source = ps.pack(Documents(np.arange(10**6), np.arange(0, 10**6 + 1, 100)), 1024)
    assert len(pickle.dumps(source, protocol=5, buffer_callback=buffers.append)) < 6000
    assert sum(buffer.raw().nbytes for buffer in buffers) < 8.3e6


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int64, ">u2", np.float32])
def test_the_dtype_of_the_tokens_is_kept(dtype):
    batch = every_pack(ps.pack([np.arange(9).astype(dtype), np.arange(2).astype(dtype)], 8))
    assert batch["tokens"].dtype == np.dtype(dtype).newbyteorder("=")
    assert batch["segment_ids"].dtype == batch["positions"].dtype == np.int32


def test_lists_of_numbers_and_empty_lists_are_documents():
    batch = every_pack(ps.pack([[], [1, 2], [], [3]], 4))
    assert batch["tokens"].tolist() == [[1, 2, 3, 0]]
    assert batch["tokens"].dtype == np.int64
    assert every_pack(ps.pack([{"x": {"ids": []}}, {"x": {"ids": [1, 2]}}], 4, leaf="x/ids"))["tokens"].tolist() == [[1, 2, 0, 0]]


def test_rows_of_an_array_are_documents_of_one_length(tmp_path):
    rows = np.arange(30).reshape(6, 5)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = rows
    for data in (
        rows,
        {"x": rows, "y": np.arange(6)},
        {"x": h5py.File(tmp_path / "x.h5", "r")["x"]},
        pa.table({"x": list(rows)}),
    ):
        batch = every_pack(ps.pack(data, 11))
        assert batch["tokens"][0].tolist() == [*range(10), 0]
        assert batch["tokens"].shape == (3, 11)


def test_documents_can_be_loaded_as_they_are():
    documents = Documents(np.concatenate(DOCUMENTS), np.concatenate([[0], np.cumsum(LENGTHS)]))
    batch = ps.Loader(documents, 15, collate=ps.pad_to([40], mask="real"), transform=ps.per_record(lambda x: {"x": x}))[0]
    assert batch["real"].sum(axis=1).tolist() == LENGTHS


@pytest.mark.slow
@pytest.mark.parametrize("make", [SOURCES["flat memmap"], SOURCES["hugging face"], SOURCES["torch dataset"]])
@pytest.mark.parametrize("keep", [False, True], ids=["in memory", "on disk"])
def test_batches_are_the_same_for_any_workers_and_processes(make, keep, tmp_path):
    source = ps.pack(make(tmp_path), 8, index=tmp_path / "pack.index" if keep else None)
    options = {"batch_size": 4, "shuffle": True, "seed": 2, "epochs": 2}
    expected = [batch["tokens"] for batch in ps.Loader(source, **options)]
    for workers in (2, "process:2"):
        got = [batch["tokens"] for batch in ps.Loader(source, **options, workers=workers)]
        assert np.array_equal(got, expected)
    halves = [[batch["tokens"] for batch in ps.Loader(source, **options, process=(p, 2))] for p in range(2)]
    assert np.array_equal(np.concatenate(halves, axis=1), expected)


def test_a_run_resumes_where_it_was_and_not_on_other_documents_or_settings():
    def feed(documents=DOCUMENTS, **options):
        return ps.feed(ps.Loader(ps.pack(documents, 16, **options), 2, shuffle=True))

    with feed() as batches:
        for _ in range(37):
            next(batches)
        state = batches.state()
        expected = [np.asarray(next(batches)["tokens"]) for _ in range(20)]
    with feed() as batches:
        batches.restore(state)
        assert np.array_equal([np.asarray(next(batches)["tokens"]) for _ in range(20)], expected)
    other = [x.copy() for x in DOCUMENTS]
    other[3][0] += 1
    swapped = [DOCUMENTS[1], DOCUMENTS[0], *DOCUMENTS[2:]]
    for documents, options in (
        (swapped, {}),
        (other, {}),
        (DOCUMENTS, {"seed": 1}),
        (DOCUMENTS, {"window": 3}),
        (DOCUMENTS, {"eos": 1}),
    ):
        with feed(documents, **options) as batches, pytest.raises(ValueError, match="pack"):
            batches.restore(state)


def test_a_run_that_goes_on_with_fewer_processes_has_each_token_once():
    def loaders(count):
        source = ps.pack(DOCUMENTS, 4, seed=1)
        return [ps.Loader(source, 8, shuffle=True, epochs=1, remainder="pad", process=(p, count)) for p in range(count)]

    seen = []
    for step in range(len(loaders(1)[0])):
        parts = [loader[step] for loader in loaders((8, 4, 2, 1)[step % 4])]
        mask = np.concatenate([part["mask"] for part in parts])
        seen.append(np.concatenate([part["tokens"] for part in parts])[mask].ravel())
    tokens = np.concatenate(seen)
    assert sorted(tokens[tokens > 0]) == list(range(1, sum(LENGTHS) + 1))


def test_step_a_billion_is_a_step_like_any_other():
    loader = ps.Loader(ps.pack(DOCUMENTS, 16), 2, shuffle=True)
    assert loader[10**9]["tokens"].shape == (2, 16)


def test_a_document_that_is_too_long_is_refused_if_asked():
    with pytest.raises(ValueError, match=r"document 3 has 17 tokens.*length=16.*'split'"):
        ps.pack(DOCUMENTS, 16, long="error")
    with pytest.raises(ValueError, match=r"document 0 has 5 tokens and its eos, more than length=5"):
        ps.pack([[1, 2, 3, 4, 5]], 5, long="error", eos=0)
    assert len(ps.pack(DOCUMENTS, 40, long="error")) > 0


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((DOCUMENTS, 0), {}, r"length=0: needs an integer >= 1"),
        ((DOCUMENTS, 8), {"window": 0}, r"window=0"),
        ((DOCUMENTS, 8), {"seed": -1}, r"seed=-1"),
        ((DOCUMENTS, 8), {"method": "first_fit"}, r"method='first_fit': choose from best_fit, concat"),
        ((DOCUMENTS, 8), {"long": "drop"}, r"long='drop': choose from split, error"),
        ((DOCUMENTS, 8), {"leaf": "ids"}, r"no leaf 'ids'; they are arrays without names"),
        (([np.zeros(2, np.uint16)], 8), {"padding": -1}, r"tokens are uint16, which cannot hold padding=-1"),
        (([np.zeros(2, np.uint16)], 8), {"eos": 70_000}, r"cannot hold eos=70000"),
        (([], 8), {}, r"no records"),
        (([[], []], 8), {}, r"no tokens: all 2 documents are empty"),
        ((Documents(np.arange(3), [1, 1]), 8), {}, r"no tokens: all 1 documents are empty"),
        (([{"x": [1]}, {"y": [1]}], 8), {}, r"record 1 has no leaf 'x'"),
        (([{"x": [1], "y": [1]}], 8), {}, r"several leaves \('x', 'y'\).*leaf='name'"),
        (([{"x": [1]}], 8), {"leaf": "y"}, r"no leaf 'y'; they have \['x'\]"),
        (([{"x": "to be"}], 8), {}, r"leaf 'x' of record 0 is str.*tokenize"),
        (([np.zeros((2, 3))], 8), {}, r"record 0 is float64\[2,3\]; it needs one array"),
        (([np.zeros(2), np.float32(1)], 8), {}, r"record 1 is float32\[\]"),
        (([np.array([None, 1], dtype=object)], 8), {}, r"record 0 is object\[2\]"),
        ((np.arange(10), 8), {}, r"one number.*Documents\(tokens, offsets\)"),
        ((np.zeros((3, 4, 5)), 8), {}, r"1-D documents.*float64\[3,4,5\]"),
        ((pa.table({"a": [[1], [1, 2]], "b": [[1], [1, 2]]}), 8), {}, r"several columns of lists, \['a', 'b'\]"),
        ((pa.table({"a": [[1], [1, 2]]}), 8), {"leaf": "b"}, r"no leaf 'b'; they have \['a'\]"),
        ((pa.table({"a": ["to", "be"]}), 8), {}, r"str.*tokenize"),
        ((pa.table({"a": [[[1], [2, 3]], [[4]]]}), 8), {}, r"."),
    ],
)
def test_bad_values_are_named(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        ps.pack(*arguments, **options)


@pytest.mark.parametrize(
    ("tokens", "offsets", "message"),
    [
        (np.arange(9), [0, 5, 3], r"offsets\[2\] = 3 is less than offsets\[1\] = 5"),
        (np.arange(9), [0, 10], r"reach from 0 to 10, and there are 9 tokens"),
        (np.arange(9), [-1, 9], r"reach from -1 to 9"),
        (np.arange(9), [0], r"int64\[1\]: give integers \[N \+ 1\]"),
        (np.arange(9), [0.0, 9.0], r"float64\[2\]"),
        (np.zeros((3, 3)), [0, 3], r"tokens of Documents are float64\[3,3\]"),
        ({"x": np.zeros(3)}, [0, 3], r"are dict"),
    ],
)
def test_bad_offsets_are_named(tokens, offsets, message):
    with pytest.raises(ValueError, match=message):
        Documents(tokens, offsets)


def test_a_document_that_becomes_shorter_is_an_error():
    documents = [{"tokens": np.arange(10)} for _ in range(4)]

    class Changing:
        def __len__(self):
            return 4

        def read(self, indices):
            return [documents[i] for i in indices]

    source = ps.pack(Changing(), 10)
    documents[2] = {"tokens": np.arange(6)}
    with pytest.raises(ValueError, match=r"document 2 has 6 tokens, and had at least 10"):
        every_pack(source)


class Records:
    """A data set that gives one document at a time."""

    def __init__(self, documents):
        self.documents = documents

    def __len__(self):
        return len(self.documents)

    def __getitem__(self, i):
        return self.documents[i]


@pytest.mark.parametrize("make", [list, Records])
@pytest.mark.parametrize(
    ("one", "other"),
    [("u8", "i8"), ("u8", "i1"), ("i4", "f4"), ("f8", "i8"), ("?", "f4"), ("i2", "bfloat16")],
)
def test_tokens_that_no_dtype_holds_without_loss_are_refused(make, one, other):
    import ml_dtypes  # noqa: F401 - makes bfloat16 known to NumPy

    documents = [np.ones(3, one), np.ones(0, "c8"), np.ones(2, one), np.ones(4, other)]
    with pytest.raises(ValueError, match=rf"document 0 has tokens of {np.dtype(one)}, and document 3 of {np.dtype(other)}"):
        ps.pack(make(documents), 8)


@pytest.mark.parametrize("make", [list, Records])
def test_tokens_of_several_dtypes_have_one_that_holds_all(make):
    documents = [np.array([255], "u1"), np.array([-1], "i1"), [], np.array([40_000], "u2")]
    tokens = every_pack(ps.pack(make(documents), 8))["tokens"]
    assert tokens.dtype == np.int32
    assert tokens[0, :3].tolist() == [255, -1, 40_000]
    assert every_pack(ps.pack(make([[1, 2], [2**40]]), 8))["tokens"].dtype == np.int64
    with pytest.raises(ValueError, match="document 0 has tokens of int64, and document 1 of uint64"):
        ps.pack(make([[1], [2**63]]), 8)
    with pytest.raises(ValueError, match="document 0 has tokens of int64, and document 1 of float64"):
        ps.pack(make([[1], [0.5]]), 8)
