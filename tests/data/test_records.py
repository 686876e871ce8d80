"""Sources that are read record by record, or a list of records at a time."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from tests.extras import require

import penstock as ps
from penstock.data import as_source
from penstock.data.files import list_files
from penstock.data.records import expand


class Squares:
    def __len__(self):
        return 100

    def __getitem__(self, i):
        return {"x": np.float32(i), "y": i * i}


class Batched(Squares):
    def __init__(self):
        self.calls = 0

    def __getitems__(self, indices):
        self.calls += 1
        return [self[i] for i in indices]


def test_records_of_any_object_with_len_and_getitem_are_stacked():
    batch = ps.Loader(Squares(), 4)[2]
    assert batch["x"].tolist() == [8, 9, 10, 11]
    assert batch["y"].tolist() == [64, 81, 100, 121]


def test_getitems_is_called_once_a_batch():
    data = Batched()
    loader = ps.Loader(data, 10)
    assert loader[1]["y"].tolist() == [i * i for i in range(10, 20)]
    assert data.calls == 1


def test_a_list_of_records():
    loader = ps.Loader([{"a": np.arange(2) + i} for i in range(5)], 5)
    assert loader[0]["a"].shape == (5, 2)


def test_a_torch_dataset_and_a_subset_of_it():
    torch = require("torch")

    class TorchSquares(torch.utils.data.Dataset):
        def __len__(self):
            return 100

        def __getitem__(self, i):
            return torch.full((2,), float(i)), i * i

    x, y = ps.Loader(TorchSquares(), 3)[1]
    assert x.tolist() == [[3, 3], [4, 4], [5, 5]]
    assert y.tolist() == [9, 16, 25]
    assert ps.Loader(torch.utils.data.Subset(TorchSquares(), [7, 8]), 2)[0][1].tolist() == [49, 64]


def test_a_grain_source_and_a_grain_dataset():
    grain = require("grain")
    assert ps.Loader(grain.sources.RangeDataSource(10, 20, 1), 4)[1].tolist() == [14, 15, 16, 17]
    assert ps.Loader(grain.MapDataset.range(10).map(lambda i: {"i": i * 2}), 3)[1]["i"].tolist() == [6, 8, 10]


def array_record_writer(path):
    return require("array_record.python.array_record_module").ArrayRecordWriter(str(path), "group_size:1")


def test_array_record_files(tmp_path):
    path = str(tmp_path / "x.array_record")
    writer = array_record_writer(path)
    for i in range(50):
        writer.write(np.arange(i, i + 3, dtype=np.int32).tobytes())
    writer.close()
    decode = ps.per_record(lambda raw: {"x": np.frombuffer(raw, np.int32)})
    loader = ps.Loader(path, 10, shuffle=True, seed=1, epochs=1, transform=decode)
    assert sorted(np.concatenate([b["x"][:, 0] for b in loader]).tolist()) == list(range(50))
    with pytest.raises(FileNotFoundError, match="nowhere"):
        as_source(str(tmp_path / "nowhere.array_record"))


@pytest.mark.parametrize(
    "damage",
    [lambda b: b[: len(b) // 2], lambda b: b[:-10], lambda b: b"", lambda b: b"no ArrayRecord" * 10_000],
    ids=["half", "nearly all", "empty", "foreign"],
)
def test_a_damaged_array_record_file_is_named_with_its_size(tmp_path, damage):
    whole, damaged = tmp_path / "whole.array_record", tmp_path / "damaged.array_record"
    writer = array_record_writer(whole)
    for i in range(50):
        writer.write(b"record %d" % i)
    writer.close()
    damaged.write_bytes(damage(whole.read_bytes()))
    with pytest.raises(ValueError, match=r"damaged\.array_record.*[\d,]+ bytes.*cut short"):
        as_source([whole, damaged])


def test_a_source_of_ten_lines():
    class Mine:
        def __len__(self):
            return 1000

        def read(self, indices):
            return {"x": indices * 2}

    assert isinstance(Mine(), ps.Source)
    assert ps.Loader(Mine(), 4)[1]["x"].tolist() == [8, 10, 12, 14]


class FailsAt(Squares):
    def __init__(self, bad):
        self.bad = bad

    def __len__(self):
        return 20_000

    def __getitem__(self, i):
        if i == self.bad:
            raise OSError("disk on fire")
        return super().__getitem__(i)


class FailsAtBatched(FailsAt):
    def __getitems__(self, indices):
        return [self[i] for i in indices]


class FailsAtRead:
    def __init__(self, bad):
        self.bad = bad

    def __len__(self):
        return 20_000

    def read(self, indices):
        if self.bad in indices:
            raise OSError("disk on fire")
        return {"x": indices}


@pytest.mark.parametrize("kind", [FailsAt, FailsAtBatched, FailsAtRead])
def test_an_error_names_the_record_and_the_batch(kind):
    with pytest.raises(OSError, match="disk on fire") as caught:
        ps.Loader(kind(12_345), 100)[123]
    notes = " ".join(caught.value.__notes__)
    assert "record 12345" in notes
    assert "batch 123" in notes


def test_a_source_that_returns_too_few_rows_is_told():
    class Short(FailsAtRead):
        def read(self, indices):
            return {"x": indices[1:]}

    with pytest.raises(ValueError, match=r"Short\.read was given 4 indices and returned 3 rows"):
        ps.Loader(Short(-1), 4)[0]


def test_records_of_different_shape_point_to_pad_to():
    with pytest.raises(ValueError, match=r"'x' differs in shape.*pad_to"):
        ps.Loader([{"x": np.arange(i)} for i in range(4)], 4)[0]


@pytest.fixture
def tree(tmp_path):
    """A folder with files at three depths, and a folder whose name ends like a file."""
    for path in ("a.bin", "x/b.bin", "x/y/c.bin", "x/d.txt", "e.bin/f.bin"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    return tmp_path


@pytest.mark.parametrize("list_paths", [expand, lambda paths: list_files(paths).names], ids=["expand", "list_files"])
@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("**/*.bin", ["a.bin", "e.bin/f.bin", "x/b.bin", "x/y/c.bin"]),
        ("x/**", ["x/b.bin", "x/d.txt", "x/y/c.bin"]),
        ("**/y/*.bin", ["x/y/c.bin"]),
        ("**/**/[ab].bin", ["a.bin", "x/b.bin"]),
        ("*/*.bin", ["e.bin/f.bin", "x/b.bin"]),
    ],
)
def test_two_stars_are_any_number_of_folders(tree, list_paths, pattern, found):
    assert list_paths(tree / pattern) == [str(tree / path) for path in found]


def test_a_pattern_of_two_stars_needs_a_file(tree):
    with pytest.raises(FileNotFoundError, match=r"no such file or folder: .*\*\*/q\*\.bin"):
        expand(tree / "**/q*.bin")


def test_every_source_finds_files_at_any_depth_and_in_the_folder_of_the_user(tmp_path, monkeypatch):
    pa, pq = require("pyarrow"), require("pyarrow.parquet")
    from penstock.data.arrow import parquet

    monkeypatch.setenv("HOME", str(tmp_path))
    for number, folder in enumerate(["", "x", "x/y"]):
        (tmp_path / folder).mkdir(exist_ok=True)
        table = pa.table({"id": [number]})
        pq.write_table(table, tmp_path / folder / "t.parquet")
        with pa.ipc.new_file(tmp_path / folder / "t.arrow", table.schema) as file:
            file.write_table(table)
        (tmp_path / folder / "t.jsonl.gz").write_bytes(gzip.compress(json.dumps({"id": number}).encode()))
    for pattern in ("~/**/*.parquet", "~/**/*.arrow", Path("~/**/t.parquet")):
        assert [batch["id"].tolist() for batch in ps.Loader(pattern, 1, epochs=1)] == [[0], [1], [2]]
    stream = ps.stream(ps.jsonl("~/**/*.jsonl.gz"), 1, epochs=1)
    assert [batch["id"].tolist() for batch in stream] == [[0], [1], [2]]
    assert ps.local("~/x/t.arrow") == str(tmp_path / "x/t.arrow")
    parquet("~/t.parquet", cache="~/cache")
    assert len(list((tmp_path / "cache").iterdir())) == 1
