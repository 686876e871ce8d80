"""Live pairs in real processes: turns, failures, spinning, memory."""

from __future__ import annotations

import math
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock_bench import activity, live_round
from penstock_bench.live_process import LiveProcess
from penstock_bench.live_round import CannotLiveError, LiveRound
from penstock_bench.outcome import Outcome
from penstock_bench.rounds import Harness, _enough
from penstock_bench.suites import find
from penstock_bench.verdict import judge

# Slices need memfd_create, waitid for stopped processes, and a clock that all processes share. Elsewhere, blocks are whole.
_IN_SLICES = pytest.mark.skipif(sys.platform != "linux", reason="slices need Linux")


def run(module: str, name: str, rounds: int = 1, size: str = "full", turns: int = 2) -> Outcome:
    with Harness([(module, find(module, name))], size, seed=1) as harness:
        for number in range(rounds):
            harness.round(number, turns={name: turns})
        (outcome,) = harness.outcomes()
    return outcome


def test_processes_of_a_round_take_turns_and_each_round_has_fresh_ones(suite):
    outcome = run(suite, "live", rounds=2, turns=4)
    assert outcome.live
    assert outcome.control == "one"
    samples = {(s.variant, s.again, s.round): s for s in outcome.samples}
    assert set(samples) == {(name, again, r) for r in (0, 1) for name, again in [("one", False), ("three", False), ("one", True)]}
    assert len({s.details["pid"] for s in outcome.samples}) == 6
    assert all(len(s.steps["speed"]) == len(s.details["blocks"]) == 4 for s in outcome.samples)
    assert [b.position for b in outcome.blocks] == [0, 1, 2] * 8
    by_turn = [[(b.variant, b.again) for b in outcome.blocks if (b.round, b.turn) == (0, turn)] for turn in range(4)]
    assert by_turn[1] == by_turn[0][::-1]
    assert by_turn[3] == by_turn[2][::-1]
    assert all(b.cpu is not None and b.faults is not None and 0 <= b.others <= 1 for b in outcome.blocks)
    starts = [b.started for b in outcome.blocks]
    assert starts == sorted(starts)


@pytest.mark.slow
def test_each_turn_is_followed_by_its_reverse_for_every_metric(suite):
    outcome = run(suite, "two metrics", turns=4)
    for metric in ("speed", "height"):
        of_metric = [block for block in outcome.blocks if block.metric == metric]
        first, second, third, fourth = ([(b.variant, b.again) for b in of_metric if b.turn == turn] for turn in range(4))
        assert second == first[::-1]
        assert fourth == third[::-1]
        assert len(first) == 4


@pytest.mark.slow
def test_variants_that_run_alone_are_measured_by_the_metrics_of_the_workload(suite):
    outcome = run(suite, "more than metrics")
    assert outcome.alone.startswith(("two still used the processor", "two used"))  # both cores may be busy
    assert {sample.variant for sample in outcome.samples} == {"one", "two"}
    assert all(set(sample.steps) == {"speed"} for sample in outcome.samples)
    assert not outcome.failures


@pytest.mark.slow
def test_quick_sizes_have_one_turn_and_no_control(suite):
    outcome = run(suite, "live", size="quick")
    assert outcome.control is None
    assert {s.variant: s.values["speed"] for s in outcome.samples} == {"one": 0.5, "three": 1.5}
    assert all(s.details["blocks"] == [0.0] for s in outcome.samples)


@pytest.mark.slow
def test_a_variant_that_breaks_in_its_turn_is_left_out_and_the_others_go_on(suite):
    outcome = run(suite, "one breaks", turns=4)
    (failure,) = outcome.failures
    assert (failure.variant, failure.round) == ("breaks", 0)
    assert "RuntimeError: in the second block" in failure.reason
    assert "about to break" in failure.output
    assert {s.variant for s in outcome.samples} == {"one", "two"}
    assert all(len(s.steps["speed"]) == 4 for s in outcome.samples)


@pytest.mark.slow
@_IN_SLICES
def test_blocks_in_slices_run_at_the_same_time_and_never_two_processes_at_once(suite):
    outcome = run(suite, "sliced", turns=2)
    assert outcome.live
    assert len(outcome.blocks) == 6
    assert all(block.slices > 2 and block.seconds >= 0.2 for block in outcome.blocks)
    pieces = [(*piece, number) for number, sample in enumerate(outcome.samples) for piece in sample.details["pieces"]]
    assert len({number for *_, number in pieces}) == 3
    pieces.sort()
    assert all(end <= begin for (_, end, _), (begin, _, _) in pairwise(pieces))
    assert sum(before != after for (*_, before), (*_, after) in pairwise(pieces)) >= 6
    # Stopped time does not count: both blocks worked for 0.2 s, and took longer.
    of_first = [(begin, end) for begin, end, number in pieces if number == 0]
    assert sum(end - begin for begin, end in of_first) <= 2 * 0.2 < of_first[-1][1] - of_first[0][0]


@pytest.mark.slow
@_IN_SLICES
def test_a_variant_that_breaks_in_a_slice_is_left_out_and_the_others_go_on(suite):
    outcome = run(suite, "one breaks in slices", turns=4)
    (failure,) = outcome.failures
    assert "RuntimeError: in the second block" in failure.reason
    assert {s.variant for s in outcome.samples} == {"one", "two"}
    assert all(len(s.steps["speed"]) == 4 for s in outcome.samples)


@pytest.mark.slow
@_IN_SLICES
def test_blocks_whose_memory_does_not_fit_at_the_same_time_run_one_after_the_other(suite, monkeypatch):
    gigabyte = 1 << 30
    monkeypatch.setattr(live_round.activity, "total_memory", lambda: 0)
    monkeypatch.setattr(live_round.activity, "available_memory", lambda: 5 * gigabyte)
    monkeypatch.setattr(live_round.activity.Session, "shrunk", lambda session: 2 * gigabyte)
    outcome = run(suite, "sliced")
    assert outcome.live
    assert {block.slices for block in outcome.blocks} == {1}


@pytest.mark.slow
@_IN_SLICES
def test_a_variant_that_measures_slices_by_another_clock_is_left_out(suite):
    (failure,) = run(suite, "another clock").failures
    assert failure.variant == "two"
    assert "'speed' was measured without working_clock.now" in failure.reason


def test_slices_have_a_shortest_length():
    workload = find("penstock_bench.suites.keras", "bert-fit-b8")
    for seconds in (0.0, -1.0, float("nan"), 1e-6):
        with pytest.raises(ValueError, match="slices of"):
            replace(workload, slice_seconds=seconds)


@pytest.mark.slow
@_IN_SLICES
def test_a_stopped_process_is_gone_when_its_round_is_closed_and_when_its_harness_is_killed(suite, tmp_path):
    program = (
        "import sys, time; from pathlib import Path; from penstock_bench.live_process import LiveProcess; "
        "from penstock_bench.suites import find; suite, folder = sys.argv[1:]; w = find(suite, 'sliced'); "
        "p = LiveProcess(suite, w, w.variants[0], 'full', Path(folder), sliced=True); "
        "p.wait_until_ready(); p.stop(); print(p.session, flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", program, suite, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as harness:
        worker = int(harness.stdout.readline())
        watched = os.pidfd_open(worker)
        assert _state(worker) == "T"
        harness.kill()
    assert select.select([watched], [], [], 60)[0], "the worker did not end"
    os.close(watched)

    workload = find(suite, "sliced")
    process = LiveProcess(suite, workload, workload.variants[0], "full", tmp_path, sliced=True)
    process.wait_until_ready()
    process.stop()
    process.close()
    with pytest.raises(ProcessLookupError):
        os.kill(process.session, 0)


def _state(process: int) -> str:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.slow
def test_variants_that_do_not_start_or_are_wrong_at_the_end_are_left_out(suite):
    outcome = run(suite, "one starts not")
    assert {failure.variant: failure.reason for failure in outcome.failures} == {
        "starts not": "RuntimeError: not this time",
        "wrong": "VerificationError: the sum is wrong",
    }
    assert {s.variant for s in outcome.samples} == {"one"}


@pytest.mark.slow
def test_a_variant_that_spins_while_it_waits_makes_all_of_them_run_alone(suite):
    outcome = run(suite, "one spins")
    assert not outcome.live
    assert outcome.alone.startswith(
        ("spins still used the processor 2 s after its block", "spins used")
    )  # both cores may be busy
    assert {s.variant for s in outcome.samples} == {"one", "spins"}
    assert not outcome.blocks


def test_a_first_round_ends_with_its_share_of_the_time(suite):
    with Harness([(suite, find(suite, "live"))], "full", seed=1) as harness:
        harness.round(0, share=0.0)
        (outcome,) = harness.outcomes()
    assert {block.turn for block in outcome.blocks} == {0, 1}  # a turn and its reverse


def test_variants_that_do_not_fit_into_memory_together_run_alone(suite, monkeypatch):
    monkeypatch.setattr(activity, "available_memory", lambda: 100 << 20)
    outcome = run(suite, "live", size="quick")
    assert not outcome.live
    assert "2 processes of up to" in outcome.alone
    assert "do not fit into memory together" in outcome.alone
    assert {s.values["speed"] for s in outcome.samples} == {0.5, 1.5}


def test_processes_that_lack_memory_cannot_go_on_and_none_is_left_when_their_round_is_interrupted(suite, tmp_path, monkeypatch):
    workload = find(suite, "live")
    live = LiveRound(suite, workload, [("one", False), ("three", False)], "full", tmp_path, 1, 1, time.perf_counter)
    with pytest.raises(KeyboardInterrupt), live:
        live.start()
        pids = [seated.process.session for seated in live._seated.values()]
        with monkeypatch.context() as patch:
            patch.setattr(live_round, "_room", lambda: 1 << 20)
            patch.setattr(activity.Session, "shrunk", lambda session: 1 << 30)  # the memory that a process once had
            with pytest.raises(CannotLiveError, match="fit into memory together only while they wait"):
                live.turn()
        os.kill(live._seated["three", False].process.session, signal.SIGKILL)  # as the system does
        with pytest.raises(CannotLiveError, match="three did not get enough memory beside 1 other process"):
            live.turn()
        raise KeyboardInterrupt
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.skipif(not activity.known(), reason="this system does not tell what a process uses")
def test_memory_that_a_process_has_given_back_is_known():
    code = "x = b'x' * (200 << 20); del x; print(flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], start_new_session=True, **pipes) as process:
        process.stdout.readline()
        session = activity.Session(process.pid)
        assert 190 << 20 < session.shrunk() < 210 << 20
        assert session.memory() < 100 << 20
        process.stdin.close()


def test_live_variants_beside_one_that_is_not_run_alone_without_a_word(suite):
    outcome = run(suite, "mixed", size="quick")
    assert not outcome.live
    assert not outcome.alone
    assert {s.variant: s.values["speed"] for s in outcome.samples} == {"one": 0.5, "three": 1.5}


def test_a_round_begins_with_the_reverse_of_the_order_of_the_round_before(suite, tmp_path):
    """So a drift cancels over two rounds of a single turn, as does the advantage of the process that is started first."""
    workload = find(suite, "live")
    first, started = [], []
    for number in range(2):
        with LiveRound(
            suite, workload, [("one", False), ("three", False)], "quick", tmp_path, number, 1, time.perf_counter
        ) as live:
            live.start()
            started.append([variant for variant, _ in live._seated])
            live.turn()
        first.append([block.variant for block in live.blocks[:2]])
    assert first[1] == first[0][::-1]
    assert started[1] == started[0][::-1]


@pytest.mark.parametrize(
    ("starting", "turning", "turns", "enough"),
    [(10.0, 5.1, 1, True), (10.0, 4.9, 1, False), (10.0, 9.0, 2, False), (10.0, 11.0, 2, True)],
)
def test_a_first_round_has_a_single_turn_only_if_two_take_longer_than_a_start(starting, turning, turns, enough):
    live = SimpleNamespace(starting=starting, turning=turning, turns=turns)
    assert _enough(live, None, "full", math.inf) == enough


def test_a_gpu_is_shared_among_the_processes(monkeypatch):
    monkeypatch.setattr(live_round, "nvidia_gpu", lambda: True)
    assert live_round._share_of_gpu(5) == {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.150"}
    monkeypatch.setattr(live_round, "nvidia_gpu", lambda: False)
    assert live_round._share_of_gpu(5) == {}


@pytest.mark.slow
def test_a_report_of_live_pairs_is_judged_from_its_rounds(suite):
    from penstock_bench.outcome import Run

    outcome = run(suite, "live", rounds=4)
    made = Run("fake", "full", 1, {}, (outcome,), 1.0)
    control, claim = judge(made).claims[0]
    assert control.comparison.ratio == 1
    assert claim.comparison.ratio == pytest.approx(3)
    assert claim.comparison.turns == 8
    assert claim.call == "different"


def test_the_use_of_the_processor_is_that_of_a_process_and_its_children():
    busy = "import subprocess, sys; sum(range(10**7)); subprocess.run([sys.executable, '-c', 'sum(range(10**7)); input()'])"
    process = subprocess.Popen([sys.executable, "-c", busy], stdin=subprocess.PIPE, start_new_session=True)
    try:
        session = activity.Session(process.pid)
        deadline = time.monotonic() + 60
        while len(list(activity._processes(process.pid))) < 2 and time.monotonic() < deadline:
            os.sched_yield()
        first = session.look()
        assert first.cpu > 0
        assert first.faults > 100
        while session.look().since(first).cpu < 0.01 and time.monotonic() < deadline:
            os.sched_yield()
        assert session.look().cpu > first.cpu
        assert session.memory() > 1 << 20
    finally:
        process.stdin.close()
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_a_process_that_was_started_since_the_last_look_is_found_by_the_next():
    code = (
        "import subprocess, sys, time; input(); p = subprocess.Popen([sys.executable, '-c', 'while True: pass']);"
        "print(flush=True); input(); p.kill(); p.wait(); print(flush=True); input()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    with subprocess.Popen([sys.executable, "-c", code], start_new_session=True, **pipes) as parent:
        session = activity.Session(parent.pid)
        before = session.look()
        assert len(session._processes) == 1
        print(file=parent.stdin)
        parent.stdout.readline()
        while session.look().since(before).cpu < 0.05:  # the child works
            pass
        assert len(session._processes) == 2
        during = session.look()
        print(file=parent.stdin)
        parent.stdout.readline()
        after = session.look().since(during)  # without the child, which used more than its parent since
        assert after.cpu >= 0
        assert after.faults >= 0
        assert len(session._processes) == 1
        print(file=parent.stdin)
