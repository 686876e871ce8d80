import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.data.order.batch_order import Order, Shuffled, Weighted
from penstock.data.order.mixture import MixedSequence, mix
from penstock.data.order.rows import slice_rows


def all_rows(order):
    return slice_rows(order.batch_sizes, (0, 1))


def indices(order, step, rows=None):
    block, k = order.block(step, rows or all_rows(order))
    return block.indices[k]


@given(
    records=st.integers(1, 500),
    batch_size=st.integers(1, 64),
    remainder=st.sampled_from(["drop", "pad", "keep"]),
    shuffle=st.booleans(),
)
def test_each_epoch_visits_each_record_once_but_for_what_is_dropped(records, batch_size, remainder, shuffle):
    order = Order(Shuffled(records, shuffle, 5), batch_size, remainder)
    steps = order.steps_per_epoch
    for epoch in (0, 1, 10**9):
        batches = [indices(order, k) for k in range(epoch * steps, (epoch + 1) * steps)]
        batches = [batch[: order.rows(k)] for k, batch in enumerate(batches)]  # without the padding
        seen = np.concatenate(batches) if batches else np.empty(0, np.int64)
        assert len(set(seen.tolist())) == len(seen)
        assert len(seen) == (records - records % batch_size if remainder == "drop" else records)


def test_epochs_differ():
    order = Order(Shuffled(1000, True, 0), 100, "drop")
    assert indices(order, 0).tolist() != indices(order, 10).tolist()


def test_slices_of_processes_make_up_the_global_batch():
    order = Order(Shuffled(10_000, True, 0), 64, "drop")
    whole = indices(order, 77)
    assert np.concatenate([indices(order, 77, slice_rows([64], (p, 4))) for p in range(4)]).tolist() == whole.tolist()


def test_memory_does_not_grow_with_the_number_of_records():
    import tracemalloc

    tracemalloc.start()
    order = Order(Shuffled(10**10, True, 0), 256, "drop")
    for step in (0, 10**6, 10**9):
        indices(order, step)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8e6


def test_padding_repeats_the_last_record():
    order = Order(Shuffled(10, True, 3), 4, "pad")
    last = indices(order, 2).tolist()
    assert last[1:] == [last[1]] * 3


def test_orders_are_the_same_on_every_machine():
    """A change of these numbers breaks every saved state."""
    mixture = mix([np.arange(1000), np.arange(50)], {0: [0.75, 0.25], 1000: [0.5, 0.5]})
    mixed = Order(MixedSequence(mixture, 8, "drop", True, 42, endless=True), 8, "drop")
    weighted = Order(Weighted([1, 2, 3, 4], 4, 42), 4, "drop")
    by_length = Order(Shuffled(1000, True, 42), 8, "drop", np.arange(1000) % 100, 64, 42)
    got = [indices(order, step).tolist() for order in (mixed, weighted, by_length) for step in (0, 10**9)]
    assert got == [
        [991, 284, 18, 1009, 103, 732, 1027, 921],
        [1034, 832, 175, 675, 1033, 1009, 433, 1012],
        [3, 1, 2, 3],
        [2, 0, 3, 1],
        [71, 271, 570, 270, 170, 370, 470, 870],
        [393, 793, 93, 593, 493, 293, 592, 692],
    ]
