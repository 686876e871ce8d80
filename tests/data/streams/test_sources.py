"""Streams of remote shards and of Hugging Face data sets."""

import json

import pytest
from tests.data.remote import servers
from tests.extras import require

import penstock as ps


@pytest.fixture
def site(tmp_path, monkeypatch):
    require("fsspec.implementations.http")
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    with servers.http() as site:
        for i in range(6):
            lines = [json.dumps({"x": x}) + "\n" for x in range(100 * i, 100 * i + 100)]
            site.files[f"/train-{i}.jsonl"] = "".join(lines).encode()
        yield site


def xs(batches):
    return [batch["x"].tolist() for batch in batches]


def resumed(make, taken):
    """Feed some batches, then restore the state in a new feed; return the batches of both."""
    with make() as batches:
        had = [next(batches)["x"].tolist() for _ in range(taken)]
        state = json.loads(json.dumps(batches.state()))
    with make() as batches:
        batches.restore(state)
        return had + xs(batches)


def test_remote_files_are_streamed_through_a_cache_that_has_room_for_few(site):
    urls = [f"{site.url}/train-{i}.jsonl" for i in range(6)]
    room = int(2.5 * len(site.files["/train-5.jsonl"]))

    def make():
        return ps.feed(ps.stream(ps.jsonl(ps.remote(urls, cache_bytes=room)), 50, epochs=1))

    with make() as batches:
        assert xs(batches) == [list(range(i, i + 50)) for i in range(0, 600, 50)]
    assert resumed(make, 7) == [list(range(i, i + 50)) for i in range(0, 600, 50)]


def test_a_range_of_urls_is_streamed(site):
    def make():
        return ps.feed(ps.stream(ps.jsonl(f"{site.url}/train-{{0..5}}.jsonl"), 50, shuffle=128, seed=1, epochs=2))

    with make() as batches:
        wanted = xs(batches)
    assert sorted(x for batch in wanted for x in batch) == sorted([*range(600)] * 2)
    assert resumed(make, 15) == wanted
    assert [site.gets(f"/train-{i}.jsonl") for i in range(6)] == [1] * 6, site.requests


def test_a_download_that_fails_ends_the_stream_with_its_error(site):
    del site.files["/train-3.jsonl"]
    with pytest.raises(FileNotFoundError, match=r"train-3.jsonl does not exist"):
        ps.jsonl([f"{site.url}/train-{i}.jsonl" for i in range(6)])


def numbers(start, stop):
    for x in range(start[0], stop[0]):
        yield {"x": x}


def dataset(shards=4):
    starts = [25 * i for i in range(shards)]
    return require("datasets").IterableDataset.from_generator(
        numbers, gen_kwargs={"start": starts, "stop": [start + 25 for start in starts]}
    )


@pytest.mark.parametrize(("window", "taken"), [(None, 0), (None, 7), (16, 1), (16, 15), (16, 24)])
def test_a_streamed_hugging_face_dataset_is_restored(window, taken):
    def make():
        return ps.feed(ps.stream(dataset(), 8, shuffle=window, epochs=2))

    with make() as batches:
        wanted = xs(batches)
    assert sorted(x for batch in wanted for x in batch) == sorted([*range(100)] * 2)
    assert resumed(make, taken) == wanted


def test_a_shuffle_buffer_that_would_lose_records_is_refused():
    with pytest.raises(ValueError, match="shuffle buffer of 10 records, which its state does not contain"):
        ps.stream(dataset().shuffle(seed=1, buffer_size=10), 8)
    make = lambda: ps.feed(ps.stream(dataset().shuffle(seed=1, buffer_size=1), 8, shuffle=16, epochs=2))  # noqa: E731
    with make() as batches:
        wanted = xs(batches)
    assert resumed(make, 9) == wanted
