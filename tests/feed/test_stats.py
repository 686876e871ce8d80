import threading

import numpy as np

import penstock as ps
from penstock.feed import Stats


def stats(**changes):
    told = {"steps": 100, "startup": 1.0, "seconds": 10.0, "wait": 9.0, "starved": 7.8, "host": {"read": 1.0, "transform": 8.0}}
    return Stats(**{**told, "workers": 1, "place": 0.5, "bytes": 10**6, **changes})


def test_the_verdict_names_what_the_step_waits_on_and_what_helps():
    assert stats().verdict.startswith("input-bound: 78.0 % of the step waits on `transform`; give the Loader workers=4")
    assert "`read`" in stats(host={"read": 5.0, "transform": 1.0}).verdict
    assert "`place`" in stats(place=20.0).verdict
    assert "`iterate`" in stats(host={"iterate": 9.0}).verdict


def test_work_spread_over_workers_counts_by_its_share():
    assert stats(workers=1, place=3.0).bottleneck == "transform"
    assert stats(workers=4, place=3.0).bottleneck == "place"


def test_a_feed_that_keeps_up_says_so():
    assert stats(starved=0.01).verdict.startswith("keeps up")


def test_before_the_second_batch_there_is_no_verdict():
    assert "no verdict" in stats(steps=1, seconds=0.0).verdict


def test_a_loop_that_was_only_started_gets_no_verdict():
    assert "no verdict yet: 0.9 ms" in stats(steps=12, seconds=0.9e-3, starved=0.7e-3).verdict


def test_a_slow_transform_is_found():
    list(ps.feed([np.arange(4)]))  # JAX starts here: it would count as the placement of the first batch

    def wait(batch):
        threading.Event().wait(0.05)
        return batch

    feed = ps.feed(ps.Loader({"x": np.arange(64)}, 4, epochs=1, transform=wait))
    assert len(list(feed)) == 16
    assert feed.stats().bottleneck == "transform"
    assert "`transform`" in feed.stats().verdict


def test_every_part_has_advice():
    for part in ("read", "transform", "collate", "iterate"):
        assert f"`{part}`; " in stats(host={part: 9.0}).verdict
    assert "`place`; " in stats(place=99.0).verdict
