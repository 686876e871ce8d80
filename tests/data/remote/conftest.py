"""Servers for the tests of this folder, and an empty cache for each test."""

import pytest
from tests.data.remote import servers
from tests.extras import require


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def _pauses_between_attempts_are_short(monkeypatch):
    monkeypatch.setattr("penstock.data.remote.store._FIRST_PAUSE", 0.01)


@pytest.fixture(scope="session")
def s3_server():
    require("s3fs")
    require("moto.moto_server.werkzeug_app")
    with servers.s3() as options:
        yield options


@pytest.fixture
def bucket(s3_server, request):
    """An empty bucket: its URL, the storage options, and a filesystem to write to it."""
    filesystem = require("s3fs").S3FileSystem(**s3_server)
    name = f"bucket-{abs(hash(request.node.nodeid))}"
    filesystem.mkdir(name)
    return f"s3://{name}", s3_server, filesystem


@pytest.fixture
def site():
    require("fsspec.implementations.http")
    with servers.http() as site:
        yield site
