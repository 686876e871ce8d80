"""Files of records are read from any position, and damage is named with its file and place."""

import gzip
import io
import json
import tarfile

import numpy as np
import pytest

import penstock as ps


def first_batch(records, size=1):
    return next(iter(ps.stream(records, size)))


def lines(number):
    return b"".join(json.dumps({"x": i, "text": "word " * (i % 7)}).encode() + b"\n" for i in range(number))


def tar_bytes(members):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return file.getvalue()


def shard(number, start=0):
    long = "very-" * 40  # a name that needs a header of its own
    members = []
    for i in range(start, start + number):
        members += [(f"{long}{i:04}.txt", b"t" * (i * 37 % 1500)), (f"{long}{i:04}.cls", str(i).encode())]
    return tar_bytes(members)


def restored_equal(make):
    """Check that a stream goes on exactly after each of its batches."""
    wanted = [batch["x"].tolist() for batch in make()]
    iterator = iter(make())
    for had in range(len(wanted)):
        again = iter(make())
        again.set_state(json.loads(json.dumps(iterator.get_state())))
        assert [batch["x"].tolist() for batch in again] == wanted[had:]
        next(iterator)
    return [x for batch in wanted for x in batch]


@pytest.mark.parametrize("compress", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_json_lines_are_read_from_any_position(tmp_path, compress):
    for i in range(3):
        (tmp_path / f"{i}.jsonl").write_bytes(compress(lines(10)))
    records = ps.jsonl(tmp_path / "*.jsonl")
    number = ps.per_record(lambda record: {"x": record["x"]})
    assert restored_equal(lambda: ps.stream(records, 2, epochs=1, transform=number)) == [*range(10)] * 3
    assert sorted(restored_equal(lambda: ps.stream(records, 2, shuffle=7, epochs=1, transform=number))) == sorted(
        [*range(10)] * 3
    )


@pytest.mark.parametrize("compress", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_shards_of_a_webdataset_are_read_from_any_position(tmp_path, compress):
    for i in range(3):
        (tmp_path / f"shard-{i}.tar").write_bytes(compress(shard(10, 10 * i)))
    records = ps.webdataset(str(tmp_path / "shard-{0..2}.tar"))
    number = ps.per_record(lambda record: {"x": record["cls"]})
    assert restored_equal(lambda: ps.stream(records, 2, epochs=1, transform=number)) == [*range(30)]
    assert sorted(restored_equal(lambda: ps.stream(records, 2, shuffle=7, epochs=1, transform=number))) == [*range(30)]


def test_fields_of_a_webdataset_are_decoded_by_their_endings(tmp_path):
    array = io.BytesIO()
    np.save(array, np.arange(3))
    members = {"d/1.jpg": b"\xff\xd8", "d/1.seg.json": b"[1, 2]", "d/1.txt": "é".encode(), "d/1.npy": array.getvalue()}
    (tmp_path / "x.tar").write_bytes(tar_bytes([("d/.hidden", b""), ("d/noextension", b""), *members.items()]))
    seen = []
    keep = ps.per_record(lambda record: seen.append(record) or {"x": 1})
    first_batch_of = ps.stream(ps.webdataset(tmp_path / "x.tar"), 1, transform=keep)
    next(iter(first_batch_of))
    (record,) = seen
    assert (record["__key__"], record["jpg"], record["seg.json"], record["txt"]) == ("d/1", b"\xff\xd8", [1, 2], "é")
    assert record["npy"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("ending", ["pyd", "pkl", "pickle", "pth"])
def test_pickles_are_refused(tmp_path, ending):
    (tmp_path / "x.tar").write_bytes(tar_bytes([(f"a.{ending}", b"")]))
    with pytest.raises(ValueError, match=rf"x.tar, record 'a': member '{ending}' is a pickle, which can run any code"):
        first_batch(ps.webdataset(tmp_path / "x.tar"))


ARRAY = b"\x93NUMPY\x01\x00"


@pytest.mark.parametrize(
    ("ending", "data"),
    [
        ("npy", b""),
        ("npy", ARRAY),
        ("npy", b"PK\x03\x04 no archive"),
        ("npy", ARRAY + b"\x30\0{'descr': '<f4', 'fortran_order': False, 'shape': (" + b"9" * 9 + b",)}\n"),
        ("cls", b""),
        ("cls", b"cat"),
        ("json", b""),
        ("json", b"[" * 100_000),
        ("txt", b"\xff\xfe"),
    ],
)
def test_a_member_that_cannot_be_decoded_is_named_with_its_size(tmp_path, ending, data):
    (tmp_path / "x.tar").write_bytes(tar_bytes([(f"a.{ending}", data)]))
    with pytest.raises(ValueError, match=rf"x.tar, record 'a': member '{ending}' cannot be decoded: .+ \({len(data):,} bytes\)"):
        first_batch(ps.webdataset(tmp_path / "x.tar"))


def test_an_array_of_objects_in_a_webdataset_is_refused(tmp_path):
    array = io.BytesIO()
    np.save(array, np.array([{}], dtype=object))
    (tmp_path / "x.tar").write_bytes(tar_bytes([("a.npy", array.getvalue())]))
    with pytest.raises(ValueError, match=r"x.tar, record 'a': member 'npy' cannot be decoded"):
        first_batch(ps.webdataset(tmp_path / "x.tar"))


def test_a_line_that_is_no_json_is_named(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b'{"x": 1}\n\n{"x": \n{"x": 3}\n')
    with pytest.raises(ValueError, match=r"x.jsonl, line 3 is not JSON \(.*\): '\{\"x\": '$"):
        first_batch(ps.jsonl(tmp_path / "x.jsonl"), 3)


@pytest.mark.parametrize("text", ['[{"x": 1},\n{"x": 2}]\n', '[{"x": 1}, {"x": 2}]', '{\n"x": 1\n}\n'])
def test_a_file_of_one_json_value_is_named_with_the_remedy(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=r"x\.json.* ps\.jsonl needs a complete value on each line, as `jq -c"):
        first_batch(ps.jsonl(tmp_path / "x.json"))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32"])
def test_another_encoding_is_named_with_the_remedy(tmp_path, encoding):
    (tmp_path / "x.jsonl").write_bytes('{"x": 1}\n{"x": 2}\n'.encode(encoding))
    with pytest.raises(ValueError, match=r"x\.jsonl is not UTF-8, but UTF-16 or UTF-32: .*iconv"):
        first_batch(ps.jsonl(tmp_path / "x.jsonl"))


def test_a_line_may_be_a_list(tmp_path):
    (tmp_path / "x.jsonl").write_text('[{"x": 1}]\n[{"x": 2}]\n')
    assert first_batch(ps.jsonl(tmp_path / "x.jsonl"), 2)[0]["x"].tolist() == [1, 2]


@pytest.mark.parametrize("read", [ps.jsonl, ps.webdataset])
def test_no_paths_and_empty_ranges_are_refused(read):
    with pytest.raises(ValueError, match=r"paths=\[\]: needs at least one path or URL"):
        read([])
    with pytest.raises(ValueError, match=r"'x-\{3\.\.1\}': the range \{3\.\.1\} is empty: .*as \{1\.\.3\}"):
        read("x-{3..1}")
    for wrong in (3, None, b"x", ["x", 1]):
        with pytest.raises(TypeError, match=r"is not a path: needs a path or URL as text"):
            read(wrong)


def test_records_of_files_say_what_they_are(tmp_path):
    (tmp_path / "x").write_bytes(lines(3))
    assert repr(ps.jsonl(tmp_path / "x")).startswith("JsonLines(1 file of ")
    assert repr(ps.webdataset(tmp_path / "x")).startswith("WebDataset(1 file of ")
    shown = repr(ps.stream(ps.jsonl(tmp_path / "x"), 2, shuffle=8, seed=3))
    assert shown.startswith("Stream(JSON lines in 1 file of ")
    assert shown.endswith("; batch_size=2, shuffle=8, seed=3, epochs=None, deal='records', process=(0, 1))")


def test_a_last_line_that_was_cut_is_named(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b'{"x": 1}\n{"x": 2')
    with pytest.raises(ValueError, match=r"x.jsonl, line 2 is not JSON .*cut short"):
        first_batch(ps.jsonl(tmp_path / "x.jsonl"), 2)


@pytest.mark.parametrize("cut", [20, 400, 1000])
def test_a_compressed_file_that_was_cut_is_named(tmp_path, cut):
    data = gzip.compress(b"".join(np.random.default_rng(i).bytes(40).hex().encode() + b"\n" for i in range(100)))
    (tmp_path / "x.jsonl").write_bytes(data[:cut])
    with pytest.raises(ValueError, match=r"x.jsonl is damaged after line \d+ \(byte [\d,]+\): .*Was it cut short"):
        first_batch(ps.jsonl(tmp_path / "x.jsonl"), 100)


def test_a_compressed_file_that_was_changed_is_named(tmp_path):
    data = bytearray(gzip.compress(lines(1000)))
    data[len(data) // 2] ^= 255
    (tmp_path / "x.jsonl").write_bytes(data)
    with pytest.raises(ValueError, match=r"x.jsonl(, line \d+ is not JSON| is damaged after line \d+)"):
        first_batch(ps.jsonl(tmp_path / "x.jsonl"), 1000)


def test_another_compression_is_named(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b"\x28\xb5\x2f\xfd rest")
    with pytest.raises(ValueError, match=r"x.jsonl is compressed with zstd, which is not supported"):
        first_batch(ps.jsonl(tmp_path / "x.jsonl"))


def test_a_tar_that_was_cut_anywhere_is_never_read_as_complete(tmp_path):
    data = shard(6)
    end = len(data.rstrip(b"\0"))  # the rest is the end-of-archive marker
    for cut in {*range(0, end, 300), *range(0, end, 512)}:
        (tmp_path / "x.tar").write_bytes(data[:cut])
        with pytest.raises(ValueError, match=r"x.tar is damaged after byte [\d,]+: .*Was it cut short"):
            list(ps.stream(ps.webdataset(tmp_path / "x.tar"), 1, epochs=1, transform=ps.per_record(lambda r: {"x": r["cls"]})))


@pytest.mark.parametrize(("compress", "marker"), [(bytes, 512), (gzip.compress, 1024), (bytes, 5000 * 512)])
def test_archives_that_follow_each_other_in_one_file_are_all_read(tmp_path, compress, marker):
    parts = [shard(3, 3 * i).rstrip(b"\0") for i in range(3)]
    parts = [part + bytes(-len(part) % 512) for part in parts]
    (tmp_path / "x.tar").write_bytes(compress(b"".join(part + bytes(marker) for part in parts)))
    number = ps.per_record(lambda record: {"x": record["cls"]})
    assert restored_equal(lambda: ps.stream(ps.webdataset(tmp_path / "x.tar"), 1, epochs=1, transform=number)) == [*range(9)]


def test_a_record_ends_with_its_archive(tmp_path):
    (tmp_path / "x.tar").write_bytes(tar_bytes([("a.cls", b"1")]) + tar_bytes([("a.cls", b"2")]))
    number = ps.per_record(lambda record: {"x": record["cls"]})
    stream = ps.stream(ps.webdataset(tmp_path / "x.tar"), 1, epochs=1, transform=number)
    assert [batch["x"].tolist() for batch in stream] == [[1], [2]]


def test_what_follows_an_archive_and_is_none_is_named(tmp_path):
    (tmp_path / "x.tar").write_bytes(shard(2) + b"something else" * 100)
    with pytest.raises(ValueError, match=r"x.tar is damaged after byte [\d,]+: .*Copy it again"):
        list(ps.stream(ps.webdataset(tmp_path / "x.tar"), 1, epochs=1, transform=ps.per_record(lambda r: {"x": r["cls"]})))


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE])
def test_links_in_a_tar_are_refused(tmp_path, kind):
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        link = tarfile.TarInfo("b.cls")
        link.type, link.linkname = kind, "a.cls"
        tar.addfile(link)
    with pytest.raises(ValueError, match=r"x.tar: member 'b.cls' is a link to 'a.cls', .*--dereference"):
        first_batch(ps.webdataset(tmp_path / "x.tar"))


def test_a_tar_with_a_wrong_header_is_named(tmp_path):
    data = bytearray(shard(6))
    data[data.index(b"ustar", len(data) // 2) - 200] ^= 255  # in the name, which the checksum of the header covers
    (tmp_path / "x.tar").write_bytes(data)
    with pytest.raises(ValueError, match=r"x.tar is damaged after byte [\d,]+: .*end-of-archive"):
        list(ps.stream(ps.webdataset(tmp_path / "x.tar"), 1, epochs=1, transform=ps.per_record(lambda r: {"x": r["cls"]})))


def test_missing_files_and_folders_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such file"):
        ps.jsonl(tmp_path / "no-*.jsonl")
    with pytest.raises(IsADirectoryError, match="is a folder: give a pattern"):
        ps.webdataset(tmp_path)
