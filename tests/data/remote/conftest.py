"""Servers for the tests of this folder, and an empty cache for each test."""

import pytest
from tests.data.remote import servers


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def s3_server():
    with servers.s3() as options:
        yield options


@pytest.fixture
def bucket(s3_server, request):
    """An empty bucket: its URL, the storage options, and a filesystem to write to it."""
    import s3fs

    filesystem = s3fs.S3FileSystem(**s3_server)
    name = f"bucket-{abs(hash(request.node.nodeid))}"
    filesystem.mkdir(name)
    return f"s3://{name}", s3_server, filesystem


@pytest.fixture
def site():
    with servers.http() as site:
        yield site
