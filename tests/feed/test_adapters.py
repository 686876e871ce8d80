"""Iterables of other libraries are fed as they are."""

import json

import ml_dtypes
import numpy as np
import pytest
from tests.extras import require

import penstock as ps


class Squares:
    """A data set for a DataLoader of torch, which asks for no more than these methods."""

    def __len__(self):
        return 40

    def __getitem__(self, i):
        return {"x": np.float32(i), "y": require("torch").tensor([i, i * i])}


def grain_dataset():
    return require("grain").MapDataset.range(40).seed(3).shuffle().map(lambda i: {"x": np.float32(i)}).batch(4)


def grain_loader():
    grain = require("grain")

    class Named(grain.transforms.Map):
        def map(self, i):
            return {"x": np.float32(i)}

    sampler = grain.samplers.IndexSampler(40, shuffle=True, seed=1, num_epochs=1)
    source = grain.sources.RangeDataSource(0, 40, 1)
    return grain.DataLoader(data_source=source, sampler=sampler, operations=[Named(), grain.transforms.Batch(4)])


GRAIN = {
    "MapDataset": grain_dataset,
    "IterDataset": lambda: grain_dataset().to_iter_dataset(),
    "prefetching": lambda: require("grain").experimental.ThreadPrefetchIterDataset(
        grain_dataset().to_iter_dataset(), prefetch_buffer_size=2
    ),
    "iterator": lambda: iter(grain_dataset().to_iter_dataset()),
    "DataLoader": grain_loader,
}


def xs(batches):
    return [np.asarray(batch["x"]).tolist() for batch in batches]


@pytest.mark.parametrize("make", GRAIN.values(), ids=GRAIN)
def test_grain_is_fed_and_restored_through_its_own_state(make):
    wanted = xs(make())
    with ps.feed(make()) as feed:
        assert xs(feed) == wanted
    with ps.feed(make()) as feed:
        had = [next(feed) for _ in range(3)]
        state = json.loads(json.dumps(feed.state()))
    assert xs(had) == wanted[:3]
    with ps.feed(make()) as feed:
        feed.restore(state)
        assert xs(feed) == wanted[3:]


def test_a_grain_iterator_fed_twice_must_be_restored():
    iterator = GRAIN["iterator"]()
    wanted = xs(GRAIN["iterator"]())
    with ps.feed(iterator) as feed:
        next(feed)
        state = feed.state()
    with pytest.raises(ValueError, match=r"fed before.*restore\(\)"):
        next(ps.feed(iterator))
    with ps.feed(iterator) as feed:
        feed.restore(state)
        assert xs(feed) == wanted[1:]


def test_a_state_of_grain_is_no_state_of_a_loader():
    with ps.feed(grain_dataset()) as feed:
        next(feed)
        state = feed.state()
    with pytest.raises(ValueError, match="belongs to something else"):
        ps.feed(ps.Loader(np.arange(8), 4)).restore(state)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_torch_data_loader_is_fed(workers):
    torch = require("torch")
    context = "spawn" if workers else None
    loader = torch.utils.data.DataLoader(Squares(), batch_size=4, num_workers=workers, multiprocessing_context=context)
    with ps.feed(loader) as feed:
        batches = list(feed)
    assert xs(batches) == np.arange(40, dtype=np.float32).reshape(10, 4).tolist()
    assert batches[2]["y"].tolist() == [[i, i * i] for i in range(8, 12)]


def test_torch_tensors_of_bfloat16_are_bfloat16():
    torch = require("torch")
    (batch,) = ps.feed([torch.arange(4, dtype=torch.bfloat16)])
    assert batch.dtype == ml_dtypes.bfloat16
    assert batch.tolist() == [0, 1, 2, 3]


class OneBuffer:
    """An iterable that fills one buffer for each batch."""

    def __iter__(self):
        buffer = np.zeros(4096, np.float32)
        for i in range(20):
            buffer[:] = i
            yield {"x": buffer}


def torch_one_buffer():
    class TorchOneBuffer(OneBuffer, require("torch").utils.data.IterableDataset):
        pass

    return TorchOneBuffer()


@pytest.mark.parametrize(
    "make",
    [OneBuffer, torch_one_buffer, lambda: require("torch").utils.data.DataLoader(torch_one_buffer(), batch_size=None)],
    ids=["of nobody", "of torch", "in a DataLoader"],
)
def test_a_buffer_that_is_filled_again_is_fed_as_it_was(make):
    with ps.feed(make(), host_buffer=8) as feed:
        assert [set(x) for x in xs(feed)] == [{float(i)} for i in range(20)]


class Counting:
    """An iterator with a state of its own kind."""

    def __init__(self, encode, decode):
        self.n, self.encode, self.decode = 0, encode, decode

    def __iter__(self):
        return self

    def __next__(self):
        self.n += 1
        return np.full(1, self.n)

    def get_state(self):
        return self.encode(self.n)

    def set_state(self, state):
        self.n = self.decode(state)


@pytest.mark.parametrize(
    ("encode", "decode"),
    [(int, int), (lambda n: {"n": np.int64(n)}, lambda s: s["n"]), (lambda n: bytes([200, n]), lambda s: s[1])],
    ids=["a number", "a NumPy number", "bytes that are no text"],
)
def test_a_state_of_any_kind_goes_through_json(encode, decode):
    with ps.feed(Counting(encode, decode)) as feed:
        for _ in range(3):
            next(feed)
        state = json.loads(json.dumps(feed.state()))
    with ps.feed(Counting(encode, decode)) as feed:
        feed.restore(state)
        assert int(next(feed)[0]) == 4


def test_a_state_of_a_grain_dataset_of_another_length_is_refused():
    with ps.feed(grain_dataset()) as feed:
        next(feed)
        state = feed.state()
    with pytest.raises(ValueError, match=r"length was 10 and is 3"):
        ps.feed(require("grain").MapDataset.range(12).map(lambda i: {"x": np.float32(i)}).batch(4)).restore(state)


def test_tf_data_is_fed():
    tf = require("tensorflow")
    dataset = tf.data.Dataset.from_tensor_slices({"x": np.arange(12, dtype=np.float32)}).batch(4).prefetch(2)
    with ps.feed(dataset) as feed:
        assert xs(feed) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_generators_lists_tuples_and_classes_are_fed():
    class Batches:
        def __iter__(self):
            return (np.full(2, i) for i in range(3))

    batches = [np.full(2, i) for i in range(3)]
    for kind in (batches, tuple(batches), iter(batches), (b for b in batches), map(np.copy, batches), Batches()):
        with ps.feed(kind) as feed:
            assert [int(batch[0]) for batch in feed] == [0, 1, 2]


def test_a_generator_is_closed_with_its_feed():
    closed = []

    def batches():
        try:
            while True:
                yield np.zeros(1)
        finally:
            closed.append(True)

    with ps.feed(batches()) as feed:
        next(feed)
    assert closed == [True]


def test_numbers_and_lists_of_numbers_are_arrays():
    with ps.feed([{"n": 3, "f": 0.5, "l": [1, 2]}]) as feed:
        (batch,) = feed
    assert (int(batch["n"]), float(batch["f"])) == (3, 0.5)


class Failing(list):
    def __init__(self, error):
        super().__init__([{"x": np.zeros(2)}])
        self.error = error

    def __len__(self):
        raise self.error


@pytest.mark.parametrize("error", [TypeError("the dataset is infinite"), NotImplementedError()])
def test_an_iterable_without_a_length_is_fed(error):
    with ps.feed(Failing(error)) as feed:
        assert len(list(feed)) == 1
        assert "length" not in feed.state()["of"]


def test_an_error_in_a_length_is_raised_and_not_left_out_of_the_state():
    with pytest.raises(OSError, match="the index is unreadable"):
        ps.feed(Failing(OSError("the index is unreadable")))
