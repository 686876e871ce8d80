"""The state of a feed is the position of its consumer, and restoring it continues there."""

import json

import numpy as np
import pytest
from tests.extras import require
from tests.feed.batches import X, loader, values

import penstock as ps


def test_state_counts_the_batches_that_were_taken():
    with ps.feed(loader()) as feed:
        assert feed.state()["step"] == 0
        for step in range(1, 6):
            next(feed)
            assert feed.state()["step"] == step


@pytest.mark.parametrize(("taken", "workers"), [(0, None), (1, 2), (7, None), (7, 2), (20, None)])
def test_a_restored_feed_goes_on_where_the_state_was_taken(taken, workers):
    wanted = values(loader())
    with ps.feed(loader(workers=workers)) as feed:
        for _ in range(taken):
            next(feed)
        state = json.loads(json.dumps(feed.state()))
    assert len(json.dumps(state)) < 1000
    with ps.feed(loader(workers=workers)) as feed:
        feed.restore(state)
        assert feed.state() == state
        assert values(feed) == wanted[taken:]


def test_a_state_may_be_restored_with_other_workers_processes_and_epochs():
    state = ps.feed(loader()).state()
    for options in ({"workers": 2}, {"process": (1, 2)}, {"epochs": 5}):
        ps.feed(loader(**options)).restore(state)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seed": 2}, "seed was 1 and is 2"),
        ({"batch_size": 8}, "batch_size was 4 and is 8"),
        ({"shuffle": False}, "shuffle was True and is False"),
        ({"remainder": "keep"}, "remainder was 'drop' and is 'keep'"),
    ],
)
def test_a_state_of_another_loader_is_refused_with_what_differs(options, words):
    state = ps.feed(loader()).state()
    with pytest.raises(ValueError, match=words):
        ps.feed(loader(**options)).restore(state)


def test_a_state_of_other_data_is_refused():
    state = ps.feed(loader()).state()
    with pytest.raises(ValueError, match=r"records was 40 and is 39"):
        ps.feed(ps.Loader({"x": X[1:]}, 4, shuffle=True, seed=1)).restore(state)
    with pytest.raises(ValueError, match=r"source was 'x: int32\[N\]' and is 'y: int32\[N\]'"):
        ps.feed(ps.Loader({"y": X}, 4, shuffle=True, seed=1)).restore(state)


def test_a_state_past_the_end_is_refused():
    state = ps.feed(loader()).state() | {"step": 21}
    with pytest.raises(ValueError, match="past the 20 steps"):
        ps.feed(loader()).restore(state)


@pytest.mark.parametrize("state", [{}, {"version": 99, "step": 0}, {"version": 1}, {"version": 1, "step": "7"}, [], None])
def test_what_is_no_state_is_refused(state):
    with pytest.raises(ValueError, match="not a state of a feed"):
        ps.feed(loader()).restore(state)


def test_restore_comes_before_the_first_batch():
    with ps.feed(loader()) as feed:
        state = feed.state()
        next(feed)
        with pytest.raises(RuntimeError, match="before the first batch"):
            feed.restore(state)


def generated(batches):
    yield from batches


def test_a_state_of_an_iterable_that_cannot_be_restored_is_refused_when_it_is_asked_for():
    with ps.feed(generated([np.zeros(1)] * 3)) as feed:
        assert feed.state()["step"] == 0  # the beginning is a state of anything
        next(feed)
        with pytest.raises(TypeError, match=r"a feed of generator cannot be restored: .*Feed a Loader"):
            feed.state()
        assert len(list(feed)) == 2


def test_a_torch_loader_cannot_be_restored_and_says_to_load_its_data_set():
    torch = require("torch")
    batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.arange(8)), batch_size=4)
    with ps.feed(batches) as feed:
        next(feed)
        with pytest.raises(TypeError, match=r"a feed of DataLoader cannot be restored: .*ps\.Loader of its TensorDataset"):
            feed.state()


def test_a_plain_iterable_cannot_be_restored_and_says_what_can():
    state = ps.feed(generated([])).state() | {"step": 1}
    with pytest.raises(TypeError, match=r"ps\.stream.*or an iterable that starts at batch 1"):
        ps.feed(generated([np.zeros(1)] * 3)).restore(state)


def test_a_list_of_batches_is_restored_by_its_length():
    batches = [np.full(1, i) for i in range(5)]
    with ps.feed(batches) as feed:
        next(feed), next(feed)
        state = json.loads(json.dumps(feed.state()))
    with ps.feed(batches) as feed:
        feed.restore(state)
        assert [int(batch[0]) for batch in feed] == [2, 3, 4]
    with pytest.raises(ValueError, match="length was 5 and is 4"):
        ps.feed(batches[:4]).restore(state)


@pytest.mark.parametrize("change", [{"step": -1}, {"step": True}, {"of": None}, {"version": 99}])
def test_a_state_that_was_changed_is_refused(change):
    feed = ps.feed(ps.Loader(X, 2))
    with pytest.raises(ValueError, match="not a state of a feed"):
        feed.restore({**feed.state(), **change})


def test_a_state_from_before_the_first_batch_is_the_beginning_of_anything():
    batches = [np.full(1, i) for i in range(3)]
    feed = ps.feed(batches)
    feed.restore(ps.feed(batches).state())
    assert [int(batch[0]) for batch in feed] == [0, 1, 2]


def test_only_the_difference_of_long_descriptions_is_told():
    names = [f"column_{i}" for i in range(60)]
    was = {name: np.zeros(8, np.int32) for name in names}
    now = was | {"column_33": np.zeros(8, np.int64)}
    with ps.feed(ps.Loader(was, 2)) as feed:
        state = feed.state()
    with ps.feed(ps.Loader(now, 2)) as feed, pytest.raises(ValueError, match="belongs to something else") as caught:
        feed.restore(state)
    told = str(caught.value)
    assert "column_33: int32[N]" in told
    assert "column_33: int64[N]" in told
    assert "source was 'column_0: int32[N]" in told
    assert "column_20" not in told
    assert "column_50" not in told
    assert len(told) < 350
    others = ps.Loader({f"other_{i}": np.zeros(8) for i in range(90)}, 2)
    with ps.feed(others) as feed, pytest.raises(ValueError, match="belongs to something else") as caught:
        feed.restore(state)
    assert len(str(caught.value)) < 600
