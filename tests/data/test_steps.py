"""Any function from a step to a batch, fed with a state."""

import numpy as np
import pytest

import penstock as ps


def numbers(step):
    return {"x": np.full(3, step), "y": [step, 2 * step]}


def test_it_is_fed_in_order_and_restored_at_any_step():
    steps = ps.Steps(numbers, 100)
    with ps.feed(steps) as feed:
        assert [int(next(feed)["x"][0]) for _ in range(5)] == [0, 1, 2, 3, 4]
        state = feed.state()
    assert state["step"] == 5
    with ps.feed(steps) as feed:
        feed.restore(state)
        assert [int(batch["x"][0]) for batch in feed] == list(range(5, 100))
    with ps.feed(ps.Steps(numbers)) as feed:
        feed.restore({**state, "step": 10**9})
        assert int(next(feed)["x"][0]) == 10**9


def test_a_function_may_fill_the_same_buffer_for_each_step():
    buffer = np.zeros(1000)

    def fill(step):
        buffer[:] = step
        return {"x": buffer}

    with ps.feed(ps.Steps(fill, 20)) as feed:
        batches = list(feed)
    assert [int(batch["x"][0]) for batch in batches] == list(range(20))


@pytest.mark.parametrize("workers", [None, 3, "process:1"])
def test_workers_change_nothing(workers):
    with ps.feed(ps.Steps(numbers, 20, workers=workers)) as feed:
        assert [int(batch["x"][0]) for batch in feed] == list(range(20))


def test_it_can_be_indexed_and_iterated():
    steps = ps.Steps(numbers, 4)
    assert len(steps) == 4
    assert repr(steps) == "Steps(numbers, 4 steps)"
    assert [int(batch["x"][0]) for batch in steps] == [0, 1, 2, 3]
    with pytest.raises(IndexError, match="no step 4 in Steps of length 4"):
        steps[4]
    with pytest.raises(TypeError, match="go on for ever"):
        len(ps.Steps(numbers))


def test_errors_have_the_step():
    def fails(step):
        return {"x": np.ones(3)} if step < 2 else 1 / 0

    with ps.feed(ps.Steps(fails)) as feed:
        next(feed), next(feed)
        with pytest.raises(ZeroDivisionError) as caught:
            next(feed)
    assert "made batch 2" in str(caught.value.__notes__)
    with ps.feed(ps.Steps(lambda step: {"x": np.array([None])})) as feed, pytest.raises(TypeError, match="batch 0 of"):
        next(feed)


def test_another_function_is_refused_a_state():
    with ps.feed(ps.Steps(numbers)) as feed:
        state = feed.state()
    with ps.feed(ps.Steps(numbers, name="other")) as feed, pytest.raises(ValueError, match=r"Steps\(numbers\).*Steps\(other\)"):
        feed.restore(state)
    with ps.feed(ps.Steps(numbers, 3)) as feed, pytest.raises(ValueError, match=r"past the 3 steps.*length"):
        feed.restore({**state, "step": 4})


def test_bad_arguments_are_told_at_once():
    with pytest.raises(TypeError, match="needs a function"):
        ps.Steps([1, 2])
    with pytest.raises(ValueError, match="length=-1"):
        ps.Steps(numbers, -1)
    with pytest.raises(ValueError, match="does not pickle"):
        ps.Steps(lambda step: step, workers="process:2")
