"""A Loader reads remote files as it reads local ones, and a state does not fit other versions of them."""

import io
import json
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.extras import require

import penstock as ps
from penstock.data.arrow import ipc, parquet
from penstock.data.files import list_files


def parquet_bytes(start, stop):
    file = io.BytesIO()
    pq.write_table(pa.table({"x": np.arange(start, stop), "y": np.arange(start, stop) * 2.0}), file)
    return file.getvalue()


def ids(batches, leaf="x"):
    return [batch[leaf].tolist() for batch in batches]


@pytest.fixture
def train(bucket):
    """A bucket with 100 records in three Parquet files: the pattern, the storage options, and the filesystem."""
    url, options, filesystem = bucket
    for i, (start, stop) in enumerate([(0, 30), (30, 70), (70, 100)]):
        filesystem.pipe_file(f"{url}/train/{i}.parquet", parquet_bytes(start, stop))
    return f"{url}/train/*.parquet", options, filesystem


def loader(data, **options):
    return ps.Loader(data, 10, **{"shuffle": True, "seed": 3, "epochs": 1, **options})


def test_parquet_files_of_s3_are_the_records_of_a_loader(train):
    pattern, options, _ = train
    remote = loader(ps.remote(pattern, storage_options=options))
    local = loader({"x": np.arange(100), "y": np.arange(100) * 2.0})
    assert ids(remote) == ids(local)
    assert "100 records of x: int64, y: double; 3 remote files" in repr(remote)


def test_a_url_is_data_for_a_loader(train, monkeypatch):
    pattern, options, _ = train
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    monkeypatch.setenv("AWS_ENDPOINT_URL", options["endpoint_url"])
    assert sorted(chain(*ids(loader(pattern)))) == list(range(100))
    assert len(ids(loader([pattern.replace("*", "0")]))) == 3


def test_columns_and_a_decoded_copy_may_be_chosen(train, tmp_path):
    pattern, options, _ = train
    files = ps.remote(pattern, storage_options=options)
    for source in (parquet(files, columns=["x"]), parquet(files, columns=["x"], cache=tmp_path / "decoded")):
        assert list(source.read(np.array([99, 3]))) == ["x"]
    assert len(list((tmp_path / "decoded").iterdir())) == 1


@pytest.mark.slow
def test_worker_processes_read_remote_files(train, site):
    pattern, options, _ = train
    files = ps.remote(pattern, storage_options=options)
    assert ids(loader(files, workers="process:1")) == ids(loader(files))


def test_other_formats_are_read(bucket, tmp_path):
    ArrayRecordWriter = require("array_record.python.array_record_module").ArrayRecordWriter  # noqa: N806
    url, options, filesystem = bucket
    writer = ArrayRecordWriter(str(tmp_path / "x.array_record"), "group_size:1")
    for i in range(10):
        writer.write(bytes([i]))
    writer.close()
    filesystem.put_file(str(tmp_path / "x.array_record"), f"{url}/x.array_record")
    decode = ps.per_record(lambda record: np.frombuffer(record, np.uint8))
    records = ps.Loader(ps.remote(f"{url}/x.array_record", storage_options=options), 10, transform=decode)
    assert records[0].ravel().tolist() == list(range(10))

    with pa.ipc.new_file(str(tmp_path / "x.arrow"), pa.schema([("x", pa.int64())])) as file:
        file.write(pa.table({"x": [1, 2, 3]}))
    filesystem.put_file(str(tmp_path / "x.arrow"), f"{url}/x.arrow")
    source = ipc(ps.remote(f"{url}/x.arrow", storage_options=options))
    assert source.read(np.array([2, 0]))["x"].tolist() == [3, 1]

    np.save(tmp_path / "x.npy", np.arange(20).reshape(10, 2))
    filesystem.put_file(str(tmp_path / "x.npy"), f"{url}/x.npy")
    array = np.load(ps.local(f"{url}/x.npy", storage_options=options), mmap_mode="r")
    assert ps.Loader(array, 2)[1].tolist() == [[4, 5], [6, 7]]


def test_a_state_is_restored_onto_the_same_files_and_refused_onto_others(train):
    pattern, options, filesystem = train

    def feed():
        return ps.feed(loader(ps.remote(pattern, storage_options=options)))

    with feed() as batches:
        wanted = ids(batches)
    with feed() as batches:
        next(batches)
        state = json.loads(json.dumps(batches.state()))
    with feed() as batches:
        batches.restore(state)
        assert ids(batches) == wanted[1:]
    filesystem.pipe_file(pattern.replace("*", "1"), parquet_bytes(31, 71))
    with feed() as batches, pytest.raises(ValueError, match=r"source was 'x: int64.*version \w+' and is"):
        batches.restore(state)


def test_a_damaged_remote_file_is_named_by_its_url(bucket):
    url, options, filesystem = bucket
    filesystem.pipe_file(f"{url}/x.parquet", parquet_bytes(0, 10)[:-5])
    with pytest.raises(ValueError, match="not a complete Parquet file") as caught:
        ps.Loader(ps.remote(f"{url}/x.parquet", storage_options=options), 2)
    assert f"is the copy of {url}/x.parquet, and has all of its bytes" in caught.value.__notes__[0]


def test_files_of_an_unknown_kind_name_the_way_to_open_them(site):
    site.files["/x.npy"] = b"x"
    with pytest.raises(TypeError, match=r"cannot tell what 'x.npy' holds.*np.load\(ps.local\(url\), mmap_mode='r'\)"):
        ps.Loader(f"{site.url}/x.npy", 2)


def test_images_by_url_name_the_function(site):
    site.files["/x.jpg"] = b"x"
    with pytest.raises(TypeError, match=r"a Loader does not read 'x.jpg' itself: ps.Loader\(ps.images"):
        ps.Loader(f"{site.url}/x.jpg?sig=secret", 2)


def test_ranges_of_names_are_expanded(tmp_path):
    for i in range(8, 12):
        (tmp_path / f"shard-{i:03}.tar").touch()
    files = list_files(str(tmp_path / "shard-{008..011}.tar"))
    assert [name[-7:] for name in files.names] == ["008.tar", "009.tar", "010.tar", "011.tar"]


def test_a_filesystem_of_memory_works_like_the_others():
    require("fsspec").filesystem("memory").pipe_file("/penstock/x.parquet", parquet_bytes(0, 10))
    assert sorted(chain(*ids(ps.Loader("memory://penstock/*.parquet", 5, epochs=1)))) == list(range(10))
