"""Paces, and the trials that decide whether the consumer works alone, with clocks that are computed."""

import itertools

import pytest

from penstock import _pace
from penstock._pace import Pace, Paces, Trials


def paces(work=0.5e-3, using=10e-6):
    made = Paces()
    for _ in range(2):
        made.producing.add(work / 2)
        made.finishing.add(work / 2)
        made.using.add(using)
    return made


def choices(trials, alone, threads, items):
    """Return the choices for so many items, which take `alone` or `threads` seconds; both may be iterators."""
    alone, threads = (itertools.repeat(x) if isinstance(x, float) else x for x in (alone, threads))
    now, chosen = 0.0, []
    for _ in range(items):
        chosen.append(trials.alone(now))
        now += next(alone if chosen[-1] else threads)
    return chosen


def test_a_pace_ignores_one_long_duration():
    pace = Pace()
    for seconds in (1.0, 1.0, 9.0):
        pace.add(seconds)
    assert pace.seconds == 1.0
    pace.add(8.0)
    assert pace.seconds == 8.0


def test_the_first_items_are_made_by_threads():
    assert choices(Trials(paces(), 6), 1e-3, 1e-3, 6) == [False] * 6


@pytest.mark.parametrize(("work", "using", "alone"), [(0.5e-3, 0.2e-3, True), (20e-3, 0.2e-3, False), (20e-3, 10e-6, True)])
def test_short_items_begin_with_the_consumer_alone_and_all_items_without_a_step(work, using, alone):
    assert choices(Trials(paces(work, using), 6), 1e-3, 1e-3, 50)[6:] == [alone] * 44


@pytest.mark.parametrize("work", [0.5e-3, 20e-3])
@pytest.mark.parametrize(("alone", "threads"), [(1e-3, 2e-3), (2e-3, 1e-3)])
def test_the_faster_way_is_found_and_kept(work, alone, threads):
    chosen = choices(Trials(paces(work), 6), alone, threads, 20_000)
    assert chosen.count(alone < threads) > 0.96 * len(chosen)


def test_trials_become_rare():
    chosen = choices(Trials(paces(), 6), 1e-3, 2e-3, 200_000)[1000:]
    assert chosen.count(False) < 0.004 * len(chosen)


def test_pauses_of_the_consumer_do_not_change_the_choice():
    def now_and_then(seconds):
        return (seconds + 0.5 * (k % 97 == 0) for k in itertools.count())

    chosen = choices(Trials(paces(), 6), now_and_then(1e-3), now_and_then(2e-3), 50_000)
    assert chosen.count(True) > 0.96 * len(chosen)


def test_a_consumer_with_work_of_its_own_gets_threads():
    trials = Trials(paces(using=2 * _pace.IDLE), 6)
    assert not any(choices(trials, 1e-3, 9e-3, 5000))
