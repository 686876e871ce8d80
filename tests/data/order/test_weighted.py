"""Records drawn by weight: how often each, and in which order."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps


def loader(weights, **options):
    data = {"x": np.arange(len(weights))}
    return ps.Loader(data, **{"batch_size": 4, "shuffle": True, "weights": weights, "epochs": 1, "remainder": "keep", **options})


def drawn(made):
    return np.concatenate([batch["x"] for batch in made])


@settings(max_examples=50)
@given(
    weights=st.lists(st.floats(0, 1e6, allow_subnormal=False), min_size=1, max_size=60).filter(lambda w: sum(w) > 0),
    seed=st.integers(0, 99),
)
def test_each_record_is_drawn_as_often_as_its_weight_says(weights, seed):
    times = np.bincount(drawn(loader(weights, seed=seed)), minlength=len(weights))
    share = np.array(weights) / sum(weights) * len(weights)
    assert times.sum() == len(weights)
    assert (times >= np.floor(share - 1e-6)).all()
    assert (times <= np.ceil(share + 1e-6)).all()


def test_huge_weights_do_not_overflow():
    assert sorted(drawn(loader([1e308] * 10))) == list(range(10))


def test_equal_weights_read_each_record_once_an_epoch():
    made = loader(np.full(30, 0.7), epochs=3)
    rows = drawn(made).reshape(3, 30)
    assert all(sorted(epoch) == list(range(30)) for epoch in rows.tolist())
    assert len({tuple(epoch) for epoch in rows.tolist()}) == 3


def test_two_classes_come_equally_often():
    labels = np.array([0] * 990 + [1] * 10)
    weights = np.where(labels == 0, 1 / 990, 1 / 10)
    rows = labels[drawn(loader(weights, batch_size=100))].reshape(10, 100)
    assert rows.sum() == 500
    assert rows.sum(axis=1).min() > 25  # in each batch, not only over the epoch


def test_weights_are_part_of_the_state():
    with ps.feed(loader([1, 2, 3, 4])) as feed:
        state = feed.state()
    with ps.feed(loader([1, 2, 3, 5])) as feed, pytest.raises(ValueError, match="weights was"):
        feed.restore(state)


@pytest.mark.parametrize(
    ("weights", "options", "error", "words"),
    [
        ([1, 2], {}, ValueError, r"shape \(2,\).*3 records"),
        ([1, -2, 1], {}, ValueError, r"weights\[1\] = -2"),
        ([1, float("inf"), 1], {}, ValueError, r"weights\[1\] = inf"),
        ([0, 0, 0], {}, ValueError, "all weights are 0"),
        (["a", "b", "c"], {}, TypeError, "need to be numbers"),
        ([1, 1, 1], {"shuffle": False}, ValueError, "shuffle=True"),
    ],
)
def test_bad_weights_are_told_at_once(weights, options, error, words):
    with pytest.raises(error, match=words):
        ps.Loader({"x": np.arange(3)}, 1, **{"shuffle": True, "weights": weights, **options})
