"""Batches are gathered into executions, each once and in order. An error ends its execution."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock._pipeline import Exhausted
from penstock.feed.adapters import adapt
from penstock.keras.batch_iterator import ExecutionAdapter, KerasItem, assemble, gather
from penstock.keras.versions import behaviour, is_partial


@given(steps=st.integers(1, 9), epoch_batches=st.none() | st.integers(1, 20), begun=st.integers(0, 30), count=st.integers(1, 12))
def test_executions_are_all_batches_in_order_and_end_where_an_epoch_does(steps, epoch_batches, begun, count):
    batch_adapter = ExecutionAdapter(adapt([]), steps, epoch_batches, begun)
    numbers = [batch_adapter.numbers(execution) for execution in range(count)]
    batches = list(itertools.chain(*numbers))
    assert batches == list(range(len(batches)))
    for execution in numbers:
        last = begun + execution[-1] + 1
        assert len(execution) == steps or (epoch_batches and last % epoch_batches == 0 and len(execution) < steps)
        if epoch_batches:  # no execution reaches over the end of an epoch
            assert (begun + execution[0]) // epoch_batches == (last - 1) // epoch_batches


def read(number):
    if number == 3:
        raise OSError("disk is gone")
    if number >= 6:
        raise Exhausted
    return np.full(2, number)


def test_batches_are_gathered_up_to_an_error_or_the_end():
    complete, before_error = gather(read, range(0, 2)), gather(read, range(2, 5))
    assert [len(one.batches) for one in (complete, before_error)] == [2, 1]
    assert complete.failure is None
    assert str(before_error.failure) == "disk is gone"
    at_error, at_end = gather(read, range(3, 6)), gather(read, range(4, 8))
    assert (at_error.batches, str(at_error.failure)) == ([], "disk is gone")
    assert (len(at_end.batches), at_end.failure) == (2, None)
    with pytest.raises(Exhausted):
        gather(read, range(6, 8))


def placed(batch, stacked):
    return ("stack" if stacked else "batch", batch)


def test_a_stack_is_on_the_host_where_the_device_can_use_it():
    kind, stack = assemble(gather(read, range(3)), 3, placed).item
    assert kind == "stack"
    np.testing.assert_array_equal(stack, [[0, 0], [1, 1], [2, 2]])
    assert stack.ctypes.data % 64 == 0


def test_what_is_left_is_a_list_as_keras_has_it():
    left = gather(read, range(2, 5))
    if not behaviour().stacks:  # Keras 3.15 has no such list, and never needs one
        with pytest.raises(TypeError, match="one by one"):
            assemble(left, 3, placed)
        return
    ready = assemble(left, 3, placed)
    assert is_partial(ready.item)
    assert ([kind for kind, _ in ready.item], ready.steps, str(ready.failure)) == (["batch"], 1, "disk is gone")


@pytest.mark.parametrize(
    "batches",
    [
        [np.zeros(2), np.zeros(3)],
        [(np.zeros(2), np.zeros(2)), (np.zeros(2), None)],
        [np.array(["a"]), np.array(["b"])],
    ],
)
def test_batches_that_are_not_alike_are_not_stacked(batches, monkeypatch):
    monkeypatch.setattr("penstock.keras.batch_iterator.partial_batches", list)  # for any version of Keras
    ready = assemble(gather(batches.__getitem__, range(2)), 2, placed)
    assert [kind for kind, _ in ready.item] == ["batch", "batch"]
    assert ready.steps == 2


def test_what_cannot_be_placed_ends_an_execution(monkeypatch):
    monkeypatch.setattr("penstock.keras.batch_iterator.partial_batches", list)  # for any version of Keras

    def place(batch, stacked):
        if stacked or batch[0] == 5:
            raise ValueError("too large")
        return batch

    failed = assemble(gather(read, range(0, 2)), 2, place)
    assert failed[:2] == KerasItem(None, 0)[:2]
    assert str(failed.failure) == "too large"
    ready = assemble(gather(read, range(4, 7)), 3, place)
    assert (len(ready.item), ready.steps, str(ready.failure)) == (1, 1, "too large")
