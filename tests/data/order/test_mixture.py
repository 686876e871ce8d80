"""Mixtures: the shares, the order, the end, and that all of it is a function of the step."""

import itertools
import json
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps

COUNTS = [1000, 300, 37]
SOURCES = [{"x": np.arange(n) + 10_000 * i} for i, n in enumerate(COUNTS)]
WEIGHTS = [0.5, 0.3, 0.2]


def loader(weights=WEIGHTS, sources=SOURCES, batch_size=16, stop="first_exhausted", mix_seed=None, **options):
    mixture = ps.mix(sources, weights, stop=stop, seed=mix_seed)
    return ps.Loader(mixture, batch_size, **{"shuffle": True, "seed": 4, **options})


def source_of(x):
    return x // 10_000


@st.composite
def mixtures(draw):
    counts = draw(st.lists(st.integers(1, 60), min_size=1, max_size=5))
    shares = st.integers(0, 9) | st.just(200)  # so that a block may have no record of the others
    parts = draw(st.lists(shares, min_size=len(counts), max_size=len(counts)).filter(any))
    return counts, np.array(parts) / sum(parts)


@settings(max_examples=40)
@given(mixture=mixtures(), batch_size=st.sampled_from([1, 7, 16, 128]), shuffle=st.booleans())
def test_each_source_has_its_share_of_any_number_of_steps(mixture, batch_size, shuffle):
    counts, weights = mixture
    sources = [{"x": np.arange(n) + 10_000 * i} for i, n in enumerate(counts)]
    made = loader(weights, sources, batch_size, shuffle=shuffle, remainder="keep")
    steps = min(made.steps_per_epoch - 1, 6)
    rows = np.concatenate([made[step]["x"] for step in range(steps)] or [np.empty(0, int)])
    for i, weight in enumerate(weights):
        assert abs((source_of(rows) == i).sum() - weight * len(rows)) < len(counts)


@settings(max_examples=20)
@given(mixture=mixtures(), batch_size=st.sampled_from([1, 5, 16]), shuffle=st.booleans(), seed=st.integers(0, 5))
def test_nothing_is_read_twice_before_all_of_its_source_was_read(mixture, batch_size, shuffle, seed):
    counts, weights = mixture
    sources = [{"x": np.arange(n) + 10_000 * i} for i, n in enumerate(counts)]
    for stop in ("first_exhausted", "all_exhausted"):
        if stop == "all_exhausted" and not weights.all():
            continue
        made = loader(weights, sources, batch_size, stop, shuffle=shuffle, seed=seed, remainder="keep", epochs=1)
        rows = np.concatenate([batch["x"] for batch in made])
        for i, count in enumerate(counts):
            mine = rows[source_of(rows) == i]
            if stop == "first_exhausted":
                assert len(set(mine)) == len(mine)
            else:
                assert set(mine - 10_000 * i) == set(range(count))
            times = np.bincount(mine - 10_000 * i, minlength=count)
            assert times.max() - times.min() <= 1


@pytest.mark.parametrize("remainder", ["drop", "pad", "keep"])
def test_a_source_goes_on_from_epoch_to_epoch(remainder):
    made = ps.Loader(
        ps.mix([np.arange(101)], [1.0]), 64, shuffle=True, remainder=remainder, epochs=4, transform=lambda x: {"x": x}
    )
    rows = np.concatenate([batch["x"][batch["mask"]] if remainder == "pad" else batch["x"] for batch in made])
    times = np.bincount(rows, minlength=101)
    assert times.max() - times.min() <= 1


def test_an_epoch_ends_with_the_first_or_the_last_source():
    first, last = loader(epochs=1, batch_size=1), loader(epochs=1, batch_size=1, stop="all_exhausted")
    assert abs(len(first) - 37 / 0.2) < 5
    assert abs(len(last) - 1000 / 0.5) < 5


@pytest.mark.parametrize("stop", ["first_exhausted", "all_exhausted"])
def test_without_epochs_a_source_smaller_than_its_share_of_a_batch_repeats(stop):
    sources = [{"x": np.arange(5)}, {"x": np.arange(1000) + 10_000}]
    made = loader([0.5, 0.5], sources, 64, stop, epochs=None)
    for step in (0, 1, 10**9):
        rows = made[step]["x"]
        assert (source_of(rows) == 0).sum() == 32
        assert np.bincount(rows[rows < 10_000], minlength=5).min() >= 5
    everything = np.concatenate([made[step]["x"] for step in range(31)])
    assert len(set(everything[everything >= 10_000])) == 31 * 32
    with ps.feed(made) as feed:
        next(feed)
        state = feed.state()
    with ps.feed(made) as feed:
        feed.restore(state)
        assert np.asarray(next(feed)["x"]).tolist() == made[1]["x"].tolist()


def test_an_epoch_shorter_than_a_batch_has_the_rows_of_a_longer_one():
    long, short = loader(batch_size=16, epochs=None), loader(batch_size=512, epochs=None, shuffle=False)
    assert long.steps_per_epoch > 1
    assert short.steps_per_epoch == 1
    rows = np.concatenate([short[step]["x"] for step in range(4)])
    for i, count in enumerate(COUNTS):
        times = np.bincount(rows[source_of(rows) == i] - 10_000 * i, minlength=count)
        assert times.max() - times.min() <= 1


@settings(max_examples=50)
@given(weights=st.lists(st.floats(0, 1e308), min_size=1, max_size=7).filter(any))
def test_the_shares_that_an_error_suggests_are_accepted(weights):
    sources = [{"x": np.arange(9)}] * len(weights)
    try:
        ps.mix(sources, weights)
    except ValueError as error:
        suggested = str(error).partition("did you mean ")[2].rstrip("?")
        made = ps.mix(sources, json.loads(suggested))
        shares = np.array(made.stages[0].shares) / 2**30
        assert np.allclose(shares, np.array(weights) / max(weights) / sum(np.array(weights) / max(weights)), atol=1e-4)


def test_shares_by_number_of_records_read_each_once():
    made = loader(None, epochs=1, remainder="keep")
    rows = np.concatenate([batch["x"] for batch in made])
    assert len(set(rows)) == len(rows)
    assert len(rows) >= sum(COUNTS) - len(COUNTS)


def test_stages_change_the_weights_at_their_steps():
    made = loader({0: [1, 0, 0], 10: [0, 0.5, 0.5], 20: [0.25, 0.25, 0.5]}, batch_size=8)
    shares = [np.bincount(source_of(made[step]["x"]), minlength=3).tolist() for step in range(40)]
    assert shares[:10] == [[8, 0, 0]] * 10
    assert shares[10:20] == [[0, 4, 4]] * 10
    assert shares[20:] == [[2, 2, 4]] * 20
    rows = np.concatenate([made[step]["x"] for step in range(40)])
    assert len(set(rows[source_of(rows) == 1])) == 10 * 4 + 20 * 2  # a source goes on where the stage before it ended


def test_a_step_does_not_depend_on_what_was_read_before_or_on_workers():
    made = loader(epochs=None)
    steps = [0, 10**9, 3, 999, 10**12, 1]
    wanted = {step: loader(epochs=None)[step]["x"].tolist() for step in steps}
    assert {step: made[step]["x"].tolist() for step in reversed(steps)} == wanted
    first = [made[step]["x"].tolist() for step in range(4)]
    assert [batch["x"].tolist() for batch in itertools.islice(iter(loader(workers=2)), 4)] == first
    sent = pickle.loads(pickle.dumps(loader()))
    assert [sent[step]["x"].tolist() for step in range(4)] == first


@settings(max_examples=20)
@given(mixture=mixtures(), count=st.sampled_from([2, 4, 8]), step=st.integers(0, 10**10))
def test_processes_have_the_rows_of_the_global_batch(mixture, count, step):
    counts, weights = mixture
    sources = [{"x": np.arange(n) + 10_000 * i} for i, n in enumerate(counts)]
    options = {"batch_size": 16, "remainder": "pad"}
    whole = loader(weights, sources, process=(0, 1), **options)[step]
    parts = [loader(weights, sources, process=(p, count), **options)[step] for p in range(count)]
    for name in ("x", "mask"):
        assert np.concatenate([part[name] for part in parts]).tolist() == whole[name].tolist()


def test_seeds_select_the_records_and_the_rows():
    rows = {name: made[5]["x"] for name, made in {
        "a": loader(), "other seed": loader(seed=5), "other mix": loader(mix_seed=9), "same": loader(mix_seed=4),
    }.items()}  # fmt: skip
    assert rows["a"].tolist() == rows["same"].tolist()
    assert rows["a"].tolist() != rows["other seed"].tolist()
    assert source_of(rows["a"]).tolist() != source_of(rows["other mix"]).tolist()
    assert sorted(rows["a"]) == sorted(rows["other mix"])


def test_a_source_may_have_no_row_in_an_epoch():
    made = loader([0.0001, 0.9999], [SOURCES[2], SOURCES[0]], epochs=None)
    assert (made[0]["x"] < 10_000).all()
    assert 4 < sum((source_of(made[step]["x"]) == 2).sum() for step in range(4000)) < 9


def test_without_shuffle_sources_come_in_their_own_order():
    x = np.concatenate([batch["x"] for batch in itertools.islice(loader(shuffle=False), 5)])
    for i in range(3):
        mine = x[source_of(x) == i] - 10_000 * i
        assert mine.tolist() == [k % COUNTS[i] for k in range(len(mine))]


def test_sources_of_records_and_of_arrays_can_be_mixed():
    records = [{"x": np.int64(50_000 + i)} for i in range(20)]
    made = ps.Loader(ps.mix([records, {"x": np.arange(20)}], [0.5, 0.5]), 8, transform=ps.per_record(lambda r: r))
    assert (made[0]["x"] >= 50_000).sum() == 4
    both = ps.concat([records, {"x": np.arange(20)}])
    assert [int(r["x"]) for r in both.read(np.array([20, 0, 39]))] == [0, 50_000, 19]


def test_a_state_is_refused_by_another_mixture():
    with ps.feed(loader()) as feed:
        next(feed)
        state = feed.state()
    with ps.feed(loader()) as feed:
        feed.restore(state)
        assert np.asarray(next(feed)["x"]).tolist() == loader()[1]["x"].tolist()
    grown = [*SOURCES[:2], {"x": np.arange(38) + 20_000}]
    for other in (loader([0.5, 0.25, 0.25]), loader(sources=grown), loader(mix_seed=1), loader(stop="all_exhausted")):
        with ps.feed(other) as feed, pytest.raises(ValueError, match="belongs to something else"):
            feed.restore(state)


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ([0.5, 0.3], r"3 numbers, one for each source, and has the shape \(2,\)"),
        ([0.5, 0.3, 0.1], r"sum to 0\.9.*need to sum to 1.*0\.5556"),
        ([2, 1, 1], r"sum to 4.*did you mean \[0\.5, 0\.25, 0\.25\]"),
        ([0, 0, 0], "sum to 0"),
        ([1.2, -0.1, -0.1], "finite and >= 0"),
        ([float("nan"), 0.5, 0.5], "finite and >= 0"),
        ({5: [0.5, 0.3, 0.2]}, "begin at step 0"),
        ({0: [0.5, 0.3, 0.2], -1: [1, 0, 0]}, "step of weights"),
        ({0: [0.5, 0.3, 0.2], 10: [1, 0]}, r"weights\[10\]"),
        ({}, "begin at step 0"),
    ],
)
def test_bad_weights_are_told_at_once(weights, words):
    with pytest.raises(ValueError, match=words):
        ps.mix(SOURCES, weights)


def test_bad_sources_are_told_at_once():
    with pytest.raises(ValueError, match="no records") as caught:
        ps.mix([SOURCES[0], {"x": np.arange(0)}], [0.5, 0.5])
    assert "source 1 of mix" in str(caught.value.__notes__)

    class Empty:
        def __len__(self):
            return 0

        def read(self, indices):
            return {"x": indices}

    with pytest.raises(ValueError, match="source 0 of mix has no records"):
        ps.mix([Empty(), SOURCES[0]], [0.5, 0.5])
    with pytest.raises(ValueError, match="concat of no sources"):
        ps.concat([])
    with pytest.raises(TypeError, match="mix needs a list of sources"):
        ps.mix({"a": SOURCES[0]}, [1])
    with pytest.raises(TypeError, match="source 1 of mix is a mixture"):
        ps.mix([SOURCES[0], ps.mix(SOURCES, WEIGHTS)], [0.5, 0.5])
    with pytest.raises(TypeError, match=r"source 0 of concat is a mixture, whose weights would be lost"):
        ps.concat([ps.mix(SOURCES, WEIGHTS), SOURCES[0]])
    with pytest.raises(TypeError, match=r"mixture.*pack each source"):
        ps.pack(ps.mix([[[1, 2]], [[3]]]), 4)
    for batches in (loader(), ps.Steps(len)):
        with pytest.raises(TypeError, match="gives batches and not records"):
            ps.mix([batches, SOURCES[0]], [0.5, 0.5])
    with pytest.raises(ValueError, match="stop='never'"):
        ps.mix(SOURCES, WEIGHTS, stop="never")
    with pytest.raises(ValueError, match="would never come: source 2"):
        ps.Loader(ps.mix(SOURCES, {0: WEIGHTS, 2: [0.5, 0.5, 0]}, stop="all_exhausted"), 8)
    with pytest.raises(ValueError, match="give mix"):
        loader()[0], ps.Loader(ps.mix(SOURCES, WEIGHTS), 8, shuffle=True, weights=np.ones(1337))
    for batch_size, stop, words in (
        (200, "first_exhausted", r"rows of an epoch.*epochs=None.*stop='all_exhausted'"),
        (10_000, "all_exhausted", "rows of an epoch.*epochs=None"),
    ):
        with pytest.raises(ValueError, match=words):
            loader(batch_size=batch_size, stop=stop, epochs=1)


def test_arrays_that_differ_later_than_in_their_first_record_name_their_sources():
    class Changing:
        def __len__(self):
            return 9

        def read(self, indices):
            return {"x": indices.astype(np.int64 if indices.max() < 2 else np.float32)}

    made = ps.Loader(ps.mix([{"x": np.arange(9)}, Changing()], [0.5, 0.5]), 8)
    with pytest.raises(ValueError, match=r"source 0 and source 1 differ.*int64.*float32"):
        made[0]
