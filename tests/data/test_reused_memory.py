"""Functions of the user that fill one buffer again and again are found in the first batches."""

import numpy as np
import pytest

import penstock as ps

X = np.arange(4 * 64, dtype=np.float32).reshape(64, 4)


def into(buffers):
    """Return a transform that fills some buffers in turn."""
    calls = iter(range(10**6))

    def transform(batch):
        out = buffers[next(calls) % len(buffers)]
        return {"x": np.multiply(batch["x"], 2, out=out[: len(batch["x"])])}

    return transform


def loader(**options):
    return ps.Loader({"x": X}, 8, **{"epochs": 1, **options})


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("workers", [None, 2])
def test_a_transform_that_fills_buffers_in_turn_is_refused(count, workers):
    made = loader(transform=into([np.empty((10, 4), np.float32) for _ in range(count)]), workers=workers)
    with (
        ps.feed(made) as feed,
        pytest.raises(ValueError, match=r"the transform returned leaf 'x' in the memory of batch") as caught,
    ):
        list(feed)
    assert "out=" in str(caught.value)
    for _ in range(2):
        with pytest.raises(ValueError, match="in the memory of batch"):
            list(made)


def test_a_collate_that_fills_a_buffer_is_refused():
    buffer = np.empty((8, 4), np.float32)
    records = [{"x": row} for row in X]
    made = ps.Loader(records, 8, collate=lambda rows: {"x": np.stack([row["x"] for row in rows], out=buffer)})
    made[0]
    with pytest.raises(ValueError, match="collate returned leaf 'x' in the memory of batch 0"):
        made[1]


def test_a_source_that_fills_a_buffer_is_refused():
    class Source:
        buffer = np.empty((8, 4), np.float32)

        def __len__(self):
            return 64

        def read(self, indices):
            return np.take(X, indices, 0, out=self.buffer)

    with pytest.raises(ValueError, match=r"Source\.read returned leaf 'batch' in the memory of batch 0"):
        list(ps.Loader(Source(), 8, epochs=1))


@pytest.mark.parametrize("workers", [None, pytest.param("process:1", marks=pytest.mark.slow)])
def test_a_function_of_a_record_that_fills_a_buffer_is_refused(workers):
    made = loader(transform=ps.per_record(_Doubled()), workers=workers)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"ps\.per_record wrote to leaf 'x'"):
            list(made)


class _Doubled:
    """A function that makes its buffer at the first call, in whichever process that is."""

    buffer = None

    def __call__(self, data):
        if self.buffer is None:
            self.buffer = np.empty_like(data["x"])
        return {"x": np.multiply(data["x"], 2, out=self.buffer)}


def test_a_worker_process_copies_each_batch_so_it_may_use_a_buffer_again():
    assert np.array_equal(np.concatenate([b["x"] for b in loader(transform=_Doubled(), workers="process:1")]), 2 * X)


def test_constants_changes_in_place_and_views_are_allowed():
    constant, table = np.arange(8), np.arange(1000)

    def transform(batch):
        batch["x"] *= 2
        rows = int(batch["x"][0, 0]) // 8
        return {"x": batch["x"], "flipped": batch["x"][:, ::-1], "same": constant, "part": table[rows : rows + 8]}

    for step, batch in enumerate(loader(transform=transform)):
        assert np.array_equal(batch["x"], 2 * X[8 * step : 8 * step + 8])
        batch["x"] += 1  # the caller owns it
    same = np.zeros(3)
    batches = list(loader(transform=ps.per_record(lambda record: {**record, "same": same})))
    assert np.array_equal(np.concatenate([batch["x"] for batch in batches]), X)


def test_the_first_batch_is_not_kept_for_long():
    made = loader(transform=lambda batch: batch, epochs=None)
    for step in range(20):
        made[step]
    assert made._local._reuse._first is None
