"""The index of packs on disk: it is made once, checked when it is opened, and never seen half-written."""

import json
import multiprocessing
import os
import pickle
import resource
import zlib

import numpy as np
import pytest

import penstock as ps
from penstock.data import Documents
from penstock.data.packs.index import open_index

RNG = np.random.default_rng(0)
LENGTHS = RNG.integers(1, 60, 500)
TOKENS = RNG.integers(0, 1000, LENGTHS.sum(), np.uint16)


def documents(lengths=LENGTHS, tokens=TOKENS):
    return Documents(tokens, np.concatenate([[0], np.cumsum(lengths)]))


class Slow:
    """A source whose lengths are known only after all of it was read; it counts the records that were read."""

    def __init__(self, data):
        self.data, self.reads = data, 0

    def __len__(self):
        return len(self.data)

    def read(self, indices):
        self.reads += len(indices)
        return self.data.read(indices)


def tokens_of(source):
    return source.read(np.arange(len(source)))["tokens"]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "new folder" / "pack.index"


@pytest.mark.parametrize("options", [{}, {"method": "concat"}, {"eos": 0, "seed": 1}])
def test_an_index_is_made_once_and_gives_the_same_packs(path, options):
    expected = ps.pack(documents(), 64, **options)
    made = ps.pack(documents(), 64, index=path, **options)
    written = path.stat().st_mtime_ns
    opened = ps.pack(documents(), 64, index=str(path), **options)
    assert path.stat().st_mtime_ns == written
    assert os.listdir(path.parent) == ["pack.index"]
    for source in (made, opened, pickle.loads(pickle.dumps(opened))):
        assert np.array_equal(tokens_of(source), tokens_of(expected))
        assert source.fingerprint == expected.fingerprint
        assert source.describe() == expected.describe()


def test_a_later_run_reads_only_a_sample_of_documents_whose_lengths_are_unknown(path):
    first, second = Slow(documents()), Slow(documents())
    made = ps.pack(first, 64, index=path)
    assert first.reads >= 500
    opened = ps.pack(second, 64, index=path)
    assert second.reads < 200
    assert np.array_equal(tokens_of(opened), tokens_of(made))


def changed(kind):
    lengths, tokens = LENGTHS.copy(), TOKENS.copy()
    if kind == "one more":
        return documents(np.append(lengths, 3), np.append(tokens, [1, 2, 3]).astype(np.uint16))
    if kind == "lengths":
        lengths[[250, 251]] += [1, -1]
        return documents(lengths, tokens)
    if kind == "dtype":
        return documents(lengths, tokens.astype(np.int32))
    tokens[0] += 1
    return documents(lengths, tokens)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("one more", r"there were 500, and are 501.*Delete it to pack them again"),
        ("lengths", r"their lengths differ"),
        ("dtype", r"their tokens were uint16, and are int32"),
        ("tokens", r"document 0 holds other tokens"),
    ],
)
def test_documents_that_changed_are_refused(path, kind, message):
    ps.pack(documents(), 64, index=path)
    with pytest.raises(ValueError, match=message) as error:
        ps.pack(changed(kind), 64, index=path)
    assert str(path) in str(error.value)


def test_a_change_of_a_source_with_unknown_lengths_is_found_in_the_sample(path):
    ps.pack(Slow(documents()), 64, index=path)
    other = documents(np.r_[LENGTHS[-1:], LENGTHS[1:-1], LENGTHS[:1]])
    with pytest.raises(ValueError, match=r"document 0 had \d+ tokens, and has \d+"):
        ps.pack(Slow(other), 64, index=path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 65}, r"length=64 \(now 65\)"),
        ({"seed": 3}, r"seed=None \(now 3\)"),
        ({"method": "concat"}, r"method='best_fit' \(now 'concat'\)"),
        ({"window": 10}, r"window=16384 \(now 10\)"),
        ({"eos": 1}, r"has_eos=False \(now True\)"),
    ],
)
def test_an_index_of_other_settings_is_refused(path, options, message):
    ps.pack(documents(), 64, index=path)
    with pytest.raises(ValueError, match=message + r".*another path, or delete it"):
        ps.pack(documents(), **{"length": 64, "index": path, **options})


def cut(content, at):
    return content[:at]


def flip(content, at):
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


@pytest.mark.parametrize("damage", [cut, flip])
def test_damage_anywhere_is_found(path, damage):
    ps.pack(documents(), 64, index=path)
    content = path.read_bytes()
    header = 32 + int.from_bytes(content[16:24], "little")
    for at in (3, 10, 15, 17, 24, 26, 40, header - 10, header + 100, len(content) // 2, len(content) - 70):
        path.write_bytes(damage(content, at))
        with pytest.raises(
            ValueError, match=r"damaged index of ps\.pack.*Delete it|is not an index of ps\.pack.*another path"
        ) as error:
            ps.pack(documents(), 64, index=path)
        assert str(path) in str(error.value)
    path.write_bytes(content + b"x")
    with pytest.raises(ValueError, match="damaged"):
        ps.pack(documents(), 64, index=path)
    path.write_bytes(content)
    ps.pack(documents(), 64, index=path)


def test_a_change_of_a_byte_anywhere_is_found(path):
    made = ps.pack(documents(LENGTHS[:9], TOKENS[: LENGTHS[:9].sum()]), 64, index=path)
    content = path.read_bytes()
    assert len(content) < 3000
    for at in range(0, len(content), 3):
        path.write_bytes(flip(content, at))
        with pytest.raises(ValueError, match=r"damaged index of ps\.pack.*Delete it|is not an index of ps\.pack.*another path"):
            open_index(str(path))
    path.write_bytes(content)
    assert np.array_equal(open_index(str(path))[0].starts, made._reader.index.starts)


def with_header(content, change):
    """Return the content of an index with another header, whose checksum is right."""
    size = int.from_bytes(content[16:24], "little")
    header = json.loads(content[28 : 28 + size])
    change(header)
    text = json.dumps(header).encode()
    body = content[-(-(28 + size) // 64) * 64 :]
    start = -(-(28 + len(text)) // 64) * 64
    prefix = content[:16] + len(text).to_bytes(8, "little") + zlib.crc32(text).to_bytes(4, "little")
    return (prefix + text).ljust(start, b"\0") + body


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda header: header.pop("version"), "its header has no 'version'"),
        (lambda header: header.update(version="1"), "its header has 'version' as '1'"),
        (lambda header: header.pop("made_of"), "its header has no 'made_of'"),
        (lambda header: header["made_of"].pop("dtype"), "'made_of' has no 'dtype'"),
        (lambda header: header["arrays"][1].pop("dtype"), "an array has no 'dtype'"),
        (lambda header: header["arrays"][1].update(dtype="O"), "array 'documents' is O"),
        (lambda header: header["arrays"][1].update(offset=7), "array 'documents' is"),
        (lambda header: header["arrays"].pop(), "and needs"),
        (lambda header: header.update(version=2), "has version 2 of the format.*delete it"),
    ],
)
def test_a_header_that_lacks_something_is_damage(path, change, message):
    ps.pack(documents(), 64, index=path)
    content = path.read_bytes()
    assert with_header(content, lambda header: None) == content
    path.write_bytes(with_header(content, change))
    with pytest.raises(ValueError, match=rf"{message}.*|version 2") as error:
        ps.pack(documents(), 64, index=path)
    assert "elete it" in str(error.value)


def test_an_empty_file_and_an_empty_path_are_errors(path):
    path.parent.mkdir()
    path.touch()
    with pytest.raises(ValueError, match=r"is empty \(0 bytes\): delete it"):
        ps.pack(documents(), 64, index=path)
    with pytest.raises(ValueError, match="index='' is not a path"):
        ps.pack(documents(), 64, index="")


@pytest.mark.parametrize("content", [b"my thesis", os.urandom(1000)])
def test_another_file_is_never_overwritten(path, content):
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"is not an index of ps\.pack \(it begins with .*another path"):
        ps.pack(documents(), 64, index=path)
    assert path.read_bytes() == content


def test_a_folder_and_a_folder_that_cannot_be_made_are_errors(tmp_path):
    with pytest.raises(IsADirectoryError, match=r"is a folder: give the path of a file"):
        ps.pack(documents(), 64, index=tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"[\d,]+ bytes.*None to keep it in memory"):
        ps.pack(documents(), 64, index=tmp_path / "file" / "pack.index")


def test_a_full_disk_is_an_error_and_leaves_nothing(path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(OSError, match=r"the index of ps\.pack needs .*make room") as error:
            ps.pack(Documents(np.zeros(10**6, np.uint8), np.arange(0, 10**6, 10)), 64, index=path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert str(path) in str(error.value)
    assert os.listdir(path.parent) == []


def pack_at(path, barrier, results):
    barrier.wait()
    results.put(tokens_of(ps.pack(documents(), 64, index=path)).sum())


def test_two_processes_may_make_one_index_at_once(path):
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(2), context.Queue()
    process = context.Process(target=pack_at, args=(path, barrier, results))
    process.start()
    pack_at(path, barrier, results)
    assert [results.get(timeout=120) for _ in range(2)] == [TOKENS.astype(int).sum()] * 2
    process.join()
    assert os.listdir(path.parent) == ["pack.index"]


def test_an_index_that_was_replaced_under_a_run_is_refused_by_its_workers(path):
    pickled = pickle.dumps(ps.pack(documents(), 64, index=path))
    path.unlink()
    ps.pack(documents(), 32, index=path)
    with pytest.raises(ValueError, match="was replaced by an index of other documents or settings"):
        pickle.loads(pickled)


def test_an_index_that_another_process_made_again_is_read_by_workers(path):
    packed = ps.pack(documents(), 64, index=path)
    path.unlink()
    ps.pack(documents(), 64, index=path)
    assert np.array_equal(tokens_of(pickle.loads(pickle.dumps(packed))), tokens_of(packed))
