"""Batches of a stream have each record once an epoch, and a restored stream goes on exactly where it was."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.extras import require

import penstock as ps


def write(folder, sizes):
    """Write files of JSON lines whose records are numbered throughout."""
    start = 0
    for file, size in enumerate(sizes):
        lines = [json.dumps({"x": x, "file": file}) for x in range(start, start + size)]
        (folder / f"{file:02}.jsonl").write_text("".join(line + "\n" for line in lines))
        start += size
    return str(folder / "*.jsonl")


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    return write(tmp_path_factory.mktemp("lines"), [7, 0, 31, 12, 1, 5, 44, 3, 20, 9, 16])


def xs(batches):
    return [batch["x"].tolist() for batch in batches]


def flat(batches):
    return [x for batch in xs(batches) for x in batch]


def test_records_come_in_the_order_of_the_files(paths):
    assert flat(ps.stream(ps.jsonl(paths), 4, epochs=1)) == list(range(148))
    assert flat(ps.stream(ps.jsonl(paths), 10, epochs=1)) == list(range(140))
    assert flat(ps.stream(ps.jsonl(paths), 10, epochs=1, remainder="keep")) == list(range(148))


@pytest.mark.parametrize("window", [2, 50, 1000])
def test_a_shuffled_epoch_has_each_record_once_in_another_order(paths, window):
    batches = ps.stream(ps.jsonl(paths), 4, shuffle=window, seed=1, epochs=2)
    epochs = np.reshape(flat(batches), (2, 148))
    assert (np.sort(epochs) == np.arange(148)).all()
    assert (epochs[0] != epochs[1]).any()
    assert flat(batches) == epochs.ravel().tolist()
    assert flat(ps.stream(ps.jsonl(paths), 4, shuffle=window, seed=2, epochs=2)) != epochs.ravel().tolist()


def test_a_window_mixes_records_of_several_files(tmp_path):
    paths = write(tmp_path, [1000] * 8)
    batches = ps.stream(ps.jsonl(paths), 64, shuffle=512, seed=1, epochs=1)
    assert min(len(set(batch["file"].tolist())) for batch in batches) == 8


@settings(max_examples=20)
@given(
    window=st.one_of(st.none(), st.integers(2, 60)),
    batch_size=st.integers(1, 40),
    taken=st.lists(st.integers(0, 12), min_size=1, max_size=4),
    seed=st.integers(0, 3),
)
def test_a_stream_that_is_restored_again_and_again_gives_the_same_batches(paths, window, batch_size, taken, seed):
    def stream():
        return ps.stream(ps.jsonl(paths), batch_size, shuffle=window, seed=seed, epochs=3)

    wanted, had, state = xs(stream()), [], None
    for number in [*taken, 10**9]:
        iterator = iter(stream())
        if state is not None:
            iterator.set_state(json.loads(json.dumps(state)))
        for _ in range(number):
            batch = next(iterator, None)
            if batch is None:
                break
            had.append(batch["x"].tolist())
        state = iterator.get_state()
        iterator.close()
        assert len(json.dumps(state)) < 1000
    assert had == wanted


def test_a_fed_stream_is_restored_by_the_state_of_the_feed(paths):
    def feed():
        return ps.feed(ps.stream(ps.jsonl(paths), 8, shuffle=20, seed=3, epochs=2))

    with feed() as batches:
        wanted = xs(batches)
    with feed() as batches:
        had = [next(batches)["x"].tolist() for _ in range(7)]
        state = json.loads(json.dumps(batches.state()))
    with feed() as batches:
        batches.restore(state)
        assert had + xs(batches) == wanted


@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("count", [2, 4])
def test_processes_that_share_records_have_the_batches_of_one(paths, window, count):
    def stream(process):
        return ps.stream(ps.jsonl(paths), 8, shuffle=window, epochs=2, process=process)

    shares = zip(*(xs(stream((p, count))) for p in range(count)), strict=True)
    assert [[x for share in batch for x in share] for batch in shares] == xs(stream((0, 1)))


def test_a_state_of_shared_records_fits_another_number_of_processes(paths):
    one = iter(ps.stream(ps.jsonl(paths), 8, shuffle=30, process=(0, 1)))
    first = [next(one) for _ in range(5)]
    assert len(first) == 5
    state, wanted = one.get_state(), next(one)["x"].tolist()
    halves = []
    for p in range(2):
        iterator = iter(ps.stream(ps.jsonl(paths), 8, shuffle=30, process=(p, 2)))
        iterator.set_state(state)
        halves += next(iterator)["x"].tolist()
    assert halves == wanted


def test_only_the_rows_of_a_process_are_decoded_and_transformed(paths):
    seen = []
    record = ps.per_record(lambda record: seen.append(record["x"]) or {"x": record["x"]})
    next(iter(ps.stream(ps.jsonl(paths), 8, transform=record, process=(1, 2))))
    assert seen == [4, 5, 6, 7]


def test_processes_may_share_files(paths):
    def stream(process):
        return ps.stream(ps.jsonl(paths), 8, shuffle=4, deal="files", process=process)

    seen = []
    for p in range(2):
        iterator = iter(stream((p, 2)))
        seen.append({x for _ in range(100) for x in next(iterator)["x"].tolist()})
        state = iterator.get_state()
    assert len(seen[0]) + len(seen[1]) == 148
    assert seen[0] | seen[1] == set(range(148))
    with pytest.raises(ValueError, match=r"process was \[1, 2\] and is \[0, 1\].*deal='records' from the beginning"):
        iter(stream((0, 1))).set_state(state)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"deal": "files", "epochs": 1}, "hang in the next collective; use epochs=None"),
        ({"deal": "own", "epochs": 1}, "hang in the next collective"),
        ({"remainder": "keep"}, "cannot be divided among 12 processes"),
        ({"batch_size": 13}, "batch_size=13 cannot be divided among 12 processes"),
        ({"deal": "files"}, "there are 11 files: use deal='records'"),
    ],
)
def test_processes_that_could_not_step_together_are_refused(paths, options, words):
    with pytest.raises(ValueError, match=words):
        ps.stream(ps.jsonl(paths), **{"batch_size": 12, "process": (0, 12), **options})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": 2}, "seed was 1 and is 2"),
        ({"shuffle": 9}, "shuffle was 8 and is 9"),
        ({"batch_size": 5}, "batch_size was 4 and is 5"),
    ],
)
def test_a_state_of_another_stream_is_refused(paths, change, words):
    options = {"batch_size": 4, "shuffle": 8, "seed": 1}
    iterator = iter(ps.stream(ps.jsonl(paths), **options))
    next(iterator)
    with pytest.raises(ValueError, match=words):
        iter(ps.stream(ps.jsonl(paths), **{**options, **change})).set_state(iterator.get_state())


def test_a_state_of_other_files_is_refused(tmp_path):
    paths = write(tmp_path, [10, 10])
    iterator = iter(ps.stream(ps.jsonl(paths), 4))
    next(iterator)
    write(tmp_path, [10, 11])
    with pytest.raises(ValueError, match=r"source was 'JSON lines in 2 files.*version \w+' and is"):
        iter(ps.stream(ps.jsonl(paths), 4)).set_state(iterator.get_state())


def test_random_numbers_depend_on_the_step_and_not_on_processes(paths):
    noise = ps.per_record(lambda record, rng: {"x": rng.random()})

    def first(process):
        return next(iter(ps.stream(ps.jsonl(paths), 8, transform=noise, seed=5, process=process)))["x"].tolist()

    assert first((0, 2)) + first((1, 2)) == first((0, 1))


def test_a_batch_transform_and_a_collate_are_applied(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"x": [1]}\n{"x": [1, 2, 3]}\n')
    batches = ps.stream(
        ps.jsonl(tmp_path / "x.jsonl"), 2, epochs=1, collate=ps.pad_to([4]), transform=lambda batch: {"y": batch["x"] * 2}
    )
    assert [batch["y"].tolist() for batch in batches] == [[[2, 0, 0, 0], [2, 4, 6, 0]]]


def test_errors_of_a_transform_name_the_record(paths):
    def fail(record):
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken") as caught:
        next(iter(ps.stream(ps.jsonl(paths), 4, transform=ps.per_record(fail))))
    assert "00.jsonl, line 1" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"shuffle": True}, ValueError, "give its size in records"),
        ({"shuffle": 1}, ValueError, r"shuffle=1: needs an integer >= 2\. .*window, .*10_000, or None"),
        ({"batch_size": 0}, ValueError, "batch_size=0"),
        ({"epochs": 0}, ValueError, "epochs=0"),
        ({"remainder": "pad"}, ValueError, "remainder='pad': choose from drop, keep"),
        ({"deal": "all"}, ValueError, "deal='all': choose from records, files, own"),
        ({"collate": 3}, TypeError, "collate=3"),
        ({"source": "x.jsonl"}, TypeError, r"for files, ps.jsonl\(paths\)"),
        ({"source": np.arange(3)}, TypeError, "ps.Loader"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(options, error, words):
    with pytest.raises(error, match=words):
        ps.stream(**{"source": [1, 2], "batch_size": 2, **options})


def test_an_empty_stream_is_an_error_and_not_an_endless_loop(tmp_path):
    (tmp_path / "x.jsonl").touch()
    with pytest.raises(ValueError, match="no records: epoch 0 of JSON lines in 1 file of 0 bytes"):
        next(iter(ps.stream(ps.jsonl(tmp_path / "x.jsonl"), 2)))


class Counting:
    """An iterable or iterator of records whose methods for its state have these names."""

    def __init__(self, get, put, end):
        self.n, self.end = 0, end
        setattr(self, get, lambda: {"n": np.int64(self.n)})
        setattr(self, put, lambda state: setattr(self, "n", state["n"]))

    def __iter__(self):
        return self

    def __next__(self):
        if self.n == self.end:
            raise StopIteration
        self.n += 1
        return {"x": self.n}


NAMES = [("get_state", "set_state"), ("state_dict", "load_state_dict")]


@pytest.mark.parametrize("names", NAMES, ids=["Grain", "torch"])
def test_iterators_with_a_state_are_restored(names):
    def feed():
        return ps.feed(ps.stream(Counting(*names, 50), 4, shuffle=16, seed=1))

    with feed() as batches:
        wanted = xs(batches)
    assert sorted(x for batch in wanted for x in batch) == sorted(range(1, 49)) or len(wanted) == 12
    with feed() as batches:
        had = [next(batches)["x"].tolist() for _ in range(5)]
        state = json.loads(json.dumps(batches.state()))
    with feed() as batches:
        batches.restore(state)
        assert had + xs(batches) == wanted


def test_records_of_grain_are_restored():
    def feed():
        dataset = require("grain").MapDataset.range(100).seed(1).shuffle().map(lambda i: {"x": i}).to_iter_dataset()
        return ps.feed(ps.stream(dataset, 8, shuffle=24, epochs=2))

    with feed() as batches:
        wanted = xs(batches)
    assert len(wanted) == 25
    with feed() as batches:
        had = [next(batches)["x"].tolist() for _ in range(14)]
        state = json.loads(json.dumps(batches.state()))
    with feed() as batches:
        batches.restore(state)
        assert had + xs(batches) == wanted


def test_an_iterable_without_a_state_is_streamed_and_says_so_when_its_state_is_asked_for():
    with ps.feed(ps.stream([{"x": i} for i in range(8)], 4, epochs=1)) as batches:
        next(batches)
        with pytest.raises(TypeError, match="a feed of Stream cannot be restored"):
            batches.state()


def test_an_iterator_is_not_read_twice():
    stream = ps.stream(({"x": i} for i in range(8)), 4)
    assert xs(stream) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(ValueError, match="an iterator that was read before"):
        next(iter(stream))


@pytest.mark.parametrize(("batch_size", "shuffle"), [(0, None), (-2, 4), ("a", None), (2.5, 4)])
def test_a_batch_size_is_a_positive_integer(batch_size, shuffle):
    with pytest.raises(ValueError, match="batch_size="):
        ps.stream([{"x": 1}] * 4, batch_size, shuffle=shuffle)


def test_less_than_one_batch_is_refused_instead_of_an_empty_stream():
    with pytest.raises(ValueError, match=r"6 records in 2 epochs.* 8: .*'keep'"):
        next(iter(ps.stream([{"x": 1}] * 3, 8, epochs=2)))
    assert len(list(ps.stream([{"x": 1}] * 3, 8, epochs=1, remainder="keep"))) == 1
    assert len(list(ps.stream([{"x": 1}] * 3, 2, epochs=1))) == 1
