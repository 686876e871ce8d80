import hashlib
import pickle
from datetime import date
from decimal import Decimal
from functools import partial

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps

X = np.arange(100)


def digest(batch):
    leaves = jax.tree.leaves(batch)
    return hashlib.sha256(
        b"".join(str((x.shape, x.dtype)).encode() + np.ascontiguousarray(x).tobytes() for x in leaves)
    ).hexdigest()


def digests(loader):
    return [digest(batch) for batch in loader]


def add_noise(batch, rng):
    return {"x": batch["x"] + rng.integers(0, 1000, len(batch["x"]))}


def augment(record, rng):
    return {"x": record["x"] + rng.integers(0, 1000)}


def loader(**options):
    return ps.Loader({"x": X}, **{"batch_size": 8, "shuffle": True, "seed": 3, "epochs": 2, **options})


def test_a_step_is_always_the_same_batch():
    first, second = loader(), loader()
    wanted = [digest(first[k]) for k in range(24)]
    assert [digest(second[k]) for k in reversed(range(24))] == wanted[::-1]
    assert digests(loader()) == wanted
    assert loader()[np.int64(5)]["x"].tolist() == first[5]["x"].tolist()


@pytest.mark.parametrize(
    ("transform", "workers"),
    [(add_noise, 0), (add_noise, 3), (ps.per_record(augment), 1), (ps.per_record(augment), "process:1")],
)
def test_batches_do_not_depend_on_the_workers(transform, workers):
    options = {"transform": transform, "remainder": "keep", "epochs": 1}
    assert digests(loader(workers=workers, **options)) == digests(loader(**options))


@settings(max_examples=25, deadline=None)
@given(
    records=st.integers(1, 60),
    batch_size=st.sampled_from([4, 8, 12]),
    count=st.sampled_from([1, 2, 4]),
    remainder=st.sampled_from(["drop", "pad"]),
)
def test_slices_of_processes_make_up_the_global_batch(records, batch_size, count, remainder):
    if remainder == "drop" and batch_size > records:
        return
    data = {"x": np.arange(records)}
    options = {"batch_size": batch_size, "shuffle": True, "remainder": remainder, "epochs": 1}
    whole = ps.Loader(data, **options, process=(0, 1))
    parts = [ps.Loader(data, **options, process=(p, count)) for p in range(count)]
    for k in range(len(whole)):
        for name in whole[k]:
            assert np.concatenate([part[k][name] for part in parts]).tolist() == whole[k][name].tolist()


def test_random_numbers_of_records_do_not_depend_on_the_number_of_processes():
    transform = ps.per_record(augment)
    parts = [loader(transform=transform, process=(p, 2))[3]["x"] for p in range(2)]
    assert np.concatenate(parts).tolist() == loader(transform=transform)[3]["x"].tolist()


def test_random_numbers_differ_between_steps_processes_and_seeds():
    def draw(batch, rng):
        return {"x": rng.integers(0, 2**40, len(batch["x"]))}

    drawn = [loader(transform=draw, seed=seed, process=(p, 2))[k]["x"][0] for seed in (0, 1) for p in (0, 1) for k in (0, 1)]
    assert len(set(drawn)) == 8


def test_each_epoch_has_each_record_once_and_its_own_order():
    batches = [b["x"] for b in loader(batch_size=10)]
    first, second = np.concatenate(batches[:10]), np.concatenate(batches[10:])
    assert sorted(first) == sorted(second) == X.tolist()
    assert first.tolist() != second.tolist()


def test_without_shuffle_records_come_in_order():
    assert loader(shuffle=False)[1]["x"].tolist() == list(range(8, 16))


@pytest.mark.parametrize(("remainder", "steps", "last"), [("drop", 12, 8), ("pad", 13, 8), ("keep", 13, 4)])
def test_the_last_records_of_an_epoch(remainder, steps, last):
    made = loader(remainder=remainder, epochs=1)
    assert (made.steps_per_epoch, len(made), len(list(made))) == (steps, steps, steps)
    assert len(made[steps - 1]["x"]) == last


def test_padding_has_a_mask_in_every_batch():
    batches = list(loader(remainder="pad", epochs=1))
    assert [b["mask"].sum() for b in batches] == [8] * 12 + [4]
    assert all(b["mask"].dtype == bool for b in batches)
    real = np.concatenate([b["x"][b["mask"]] for b in batches])
    assert sorted(real) == X.tolist()
    padding = batches[-1]["x"][4:]
    assert (padding == batches[-1]["x"][3]).all()


def test_a_data_set_smaller_than_the_batch_can_be_padded_or_kept():
    assert ps.Loader({"x": X[:3]}, 8, remainder="pad")[0]["mask"].tolist() == [True] * 3 + [False] * 5
    assert ps.Loader({"x": X[:3]}, 8, remainder="keep")[0]["x"].tolist() == [0, 1, 2]


def test_without_epochs_it_goes_on_for_ever():
    endless = loader(epochs=None)
    assert endless[10**9]["x"].shape == (8,)
    with pytest.raises(TypeError, match="steps_per_epoch"):
        len(endless)


@pytest.mark.parametrize("step", [-1, 24, 10**12])
def test_a_step_outside_is_an_index_error(step):
    with pytest.raises(IndexError, match=f"{step}.*24"):
        loader()[step]


def test_step_10_to_the_9_of_10_to_the_10_records_costs_a_batch_of_memory():
    class Huge:
        def __len__(self):
            return 10**10

        def read(self, indices):
            return {"x": indices}

    for epochs in (None, 10**10):
        x = ps.Loader(Huge(), 128, shuffle=True, epochs=epochs)[10**9]["x"]
        assert len(set(x.tolist())) == 128
        assert x.max() < 10**10


def test_a_transform_may_work_in_place():
    def in_place(batch):
        batch["x"] *= 0
        return batch

    assert loader(transform=in_place, shuffle=False)[0]["x"].sum() == 0
    assert X.sum() == 4950


def test_indices_that_a_source_returns_as_data_may_be_written_to():
    class Indices:
        def __len__(self):
            return 100

        def read(self, indices):
            return {"x": indices}

    made = ps.Loader(Indices(), 10, shuffle=True)
    before = made[3]["x"].tolist()
    made[3]["x"][:] = 0
    assert made[3]["x"].tolist() == before


def test_the_dicts_and_lists_of_a_users_records_are_not_changed():
    def take(record):
        record["y"].append(record.pop("x"))
        return {"y": np.array(record["y"])}

    records = [{"x": i, "y": [i]} for i in range(4)]
    made = ps.Loader(records, 2, transform=ps.per_record(take))
    assert made[0]["y"].tolist() == made[0]["y"].tolist() == [[0, 0], [1, 1]]
    collated = ps.Loader(records, 2, collate=lambda batch: {"x": np.array([record.pop("x") for record in batch])})
    assert collated[1]["x"].tolist() == collated[1]["x"].tolist() == [2, 3]


def test_a_loader_pickles_and_gives_the_same_batches():
    made = loader(transform=add_noise)
    made[0]
    assert digests(pickle.loads(pickle.dumps(made))) == digests(made)


def test_its_repr_says_what_it_is():
    assert "100 records of x: int64[N]; 12 steps of 8 an epoch, 2 epochs" in repr(loader())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 0}, r"batch_size=0.*>= 1"),
        ({"batch_size": 2.5}, r"batch_size=2\.5"),
        ({"batch_size": 101}, r"batch_size=101 is more than the 100 records.*pad"),
        ({"epochs": 0}, "epochs=0"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": "a"}, "seed='a'"),
        ({"remainder": "wrap"}, "'wrap'.*drop, pad, keep"),
        ({"workers": -1}, "workers=-1.*process:N"),
        ({"workers": "thread:2"}, "workers='thread:2'"),
        ({"workers": "process:0"}, "workers='process:0'"),
        ({"process": (0, 3)}, "batch_size=8.*3 processes.*multiple of 3"),
        ({"process": (2, 2)}, r"process=\(2, 2\)"),
        ({"process": 3}, r"process=3: needs \(index, count\)"),
        ({"process": (0,)}, r"process=\(0,\)"),
        ({"process": ()}, r"process=\(\)"),
        ({"process": ("0", "1")}, r"process=\('0', '1'\)"),
        ({"process": (0.5, 2)}, r"process=\(0\.5, 2\)"),
        ({"process": (0, 8), "remainder": "keep"}, "leaves 4 records.*8 processes"),
        ({"process": (0, 2), "collate": ps.pad_to([4, 8])}, "pad_to with several lengths"),
        ({"workers": "process:1", "transform": lambda batch: batch}, "transform does not pickle"),
    ],
)
def test_bad_arguments_are_told_at_once(options, words):
    with pytest.raises(ValueError, match=words):
        loader(**options)


def test_a_transform_that_is_no_function():
    with pytest.raises(TypeError, match="transform=3"):
        loader(transform=3)
    with pytest.raises(TypeError, match=r"transform=\[\]"):
        loader(transform=[])
    with pytest.raises(TypeError, match="collate=3"):
        loader(collate=3)
    with pytest.raises(TypeError, match="per_record needs a function"):
        ps.per_record(3)


def test_a_function_object_without_items_is_still_called():
    class Steps(list):
        def __call__(self, given):
            return {"y": np.zeros(8)}

    assert list(loader(transform=Steps())[0]) == list(loader(collate=Steps())[0]) == ["y"]


def test_numbers_of_numpy_are_numbers():
    made = loader(workers=np.int64(2), process=(np.int64(0), np.int64(2)))
    assert made[0]["x"].shape == (4,)
    assert made.workers.count == 2


def test_a_generator_that_is_bound_already_is_kept():
    mine = partial(add_noise, rng=np.random.default_rng(0))
    wanted = np.arange(8) + np.random.default_rng(0).integers(0, 1000, 8)
    assert loader(shuffle=False, transform=mine)[0]["x"].tolist() == wanted.tolist()
    assert digests(loader(transform=partial(add_noise))) == digests(loader(transform=add_noise))


@pytest.mark.parametrize(
    ("transform", "words"),
    [
        (lambda b: {"x": b["x"][:3]}, r"batch 2: .*'x' as int64\[3\].*8 rows"),
        (lambda b: {"x": b["x"].sum()}, r"batch 2: .*'x' as int64\[\]"),
        (lambda b: None, "batch 2: .*without arrays"),
        (lambda b: {"x": b["x"]} if b["x"][0] < 16 else {"y": b["x"]}, "batch 2: .*but .* for batch 0"),
    ],
)
def test_a_transform_that_breaks_its_promise_is_told_with_the_batch(transform, words):
    made = loader(transform=transform, shuffle=False)
    if "batch 0" in words:
        made[0]
    with pytest.raises(ValueError, match=words):
        made[2]


def test_padding_needs_a_dict():
    with pytest.raises(ValueError, match=r"remainder='pad'.*is a tuple"):
        ps.Loader((X, X), 8, remainder="pad")
    with pytest.raises(ValueError, match=r"remainder='pad'.*'mask'.*already"):
        ps.Loader({"mask": X}, 8, remainder="pad")


def test_an_error_in_a_transform_names_the_batch():
    def bad(batch):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        loader(transform=bad)[3]
    assert "batch 3" in caught.value.__notes__[0]


def test_an_error_in_a_record_function_names_the_record_and_its_row():
    def bad(record):
        return {"x": 1 // (int(record["x"]) - 77)}

    with pytest.raises(ZeroDivisionError) as caught:
        loader(transform=ps.per_record(bad), shuffle=False)[9]
    notes = " ".join(caught.value.__notes__)
    assert "record 77" in notes
    assert "row 5" in notes
    assert "batch 9" in notes


def test_no_record_is_blamed_for_an_error_of_many():
    class Few:
        def __len__(self):
            return 100

        def read(self, indices):
            if len(indices) > 5:
                raise OSError("too many at once")
            return {"x": indices}

    with pytest.raises(OSError, match="too many") as caught:
        ps.Loader(Few(), 20)[0]
    assert "not at one record alone" in caught.value.__notes__[0]


@pytest.mark.parametrize(("made", "words"), [([1, 2], "'x/0' as int"), (np.float32(1), "'x' as float32")])
def test_a_source_that_returns_no_rows_is_told(made, words):
    class Wrong:
        def __len__(self):
            return 10

        def read(self, indices):
            return {"x": made}

    with pytest.raises(TypeError, match=rf"Wrong\.read returned leaf {words}.*batch 1.*\[2, \.\.\.\]"):
        ps.Loader(Wrong(), 2)[1]


def test_who_made_a_wrong_batch_is_named():
    class Changes:
        def __len__(self):
            return 10

        def read(self, indices):
            return {"y" if 4 in indices else "x": indices}

    made = ps.Loader(Changes(), 2)
    made[0]
    with pytest.raises(ValueError, match=r"batch 2: Changes\.read returned the structure"):
        made[2]
    with pytest.raises(ValueError, match="batch 0: collate returned leaf 'x'"):
        loader(collate=lambda records: {"x": np.zeros(3)})[0]


@pytest.mark.parametrize("thing", [date(2020, 1, 1), Decimal(1), {1}])
def test_arrays_of_python_objects_are_refused(thing):
    with pytest.raises(TypeError, match=rf"batch 0: the transform returned leaf 'x'.*{type(thing).__name__}"):
        loader(transform=lambda batch: {"x": np.array([thing] * 8, object)})[0]


def test_strings_and_bytes_may_stay_on_the_host():
    batch = ps.Loader([{"text": "a", "raw": b"b\0"}] * 4, 4)[0]
    assert batch["text"].tolist() == ["a"] * 4
    assert batch["raw"].tolist() == [b"b\0"] * 4
