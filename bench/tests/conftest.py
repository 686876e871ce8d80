"""A suite of fake variants, in a module that the harness's worker processes can import."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from penstock_bench.suites import SUITES

_SUITE = """
import contextlib, json, os, pathlib, signal, sys, threading, time
from dataclasses import dataclass
from functools import partial
import numpy as np
from penstock_bench import working_clock
from penstock_bench.environment import Environment
from penstock_bench.model import Agreement, Live, Measurement, Metric, Remarks, Target, Variant, VerificationError, Workload

@dataclass(frozen=True)
class Size:
    scale: float

def fixed(value):
    def measure(size):
        print("a library may print on stdout")
        return Measurement({"speed": value * size.scale}, {"pid": os.getpid(), "mark": getattr(sys, "mark", None)})
    return measure

def elsewhere(size):
    return Measurement({"speed": 2.0}, {"from": os.environ.get("FROM_ELSEWHERE"), "versions": {"that": "2"}})

def not_a_number(size):
    return Measurement({"speed": float("nan")})

def quits(size):
    print("gone without a word", flush=True)
    os._exit(0)

def noisy(ratio):
    def measure(size):
        # In its first 6 rounds, of 3 runs each, each run is faster than the one before. As every second round has the reverse
        # order, both gain.
        runs = pathlib.Path(os.environ["FLAKY"]).with_name("noisy")
        before = runs.stat().st_size if runs.exists() else 0
        runs.write_bytes(bytes(before + 1))
        return Measurement({"speed": ratio * (1.015 ** (before % 3) if before < 18 else 1.0)})
    return measure

def waiting(size):
    pathlib.Path(os.environ["WAITING"]).write_text(str(os.getpid()))
    time.sleep(600)

def mark(size):
    sys.mark = "seen"
    return fixed(1.0)(size)

def crash(size):
    print("about to crash", file=sys.stderr)
    raise RuntimeError("no such luck")

def wrong(size):
    raise VerificationError("record 3 comes 2 times")

def exits(size):
    os._exit(7)

def hang(size):
    print("hanging", flush=True)
    time.sleep(600)

def silent(size):
    return Measurement({"other": 1.0})

def flaky(size):
    there = pathlib.Path(os.environ["FLAKY"])
    if there.exists():
        raise RuntimeError("the second time")
    there.touch()
    return Measurement({"speed": 5.0})

def interrupt(size):
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(600)

def stepping(size):
    return Measurement(steps={"speed": [100.0, *range(1, 19), 100.0]})

def no_steps(size):
    return Measurement(steps={"speed": []})

def outputs(error, **more):
    def compute(size):
        pathlib.Path(os.environ["COMPUTED"]).open("a").write(".")
        return {"logits": np.array([3.0, 4.0 + error]), **{k: np.array(v) for k, v in more.items()}}
    return compute

def shown(loss):
    return lambda size: Measurement({"speed": 2.0}, evidence={"loss": loss})

def scores(size):
    exempt = Remarks({"why": "too hot"}, notes=["<b>"], exempt={"speed": "nothing moves"})
    broken = Remarks(failure="it fell over", missed={"speed": "it fell over"})
    table = Remarks({"why": "-"}, {"Parts": [{"part": "wing", "count": "2"}]})
    return Measurement(parts={
        "fast": Measurement({"speed": 3.0, "error": -1.0}, remarks=table),
        "slow": Measurement({"speed": 1.0, "error": 0.5}, remarks=table),
        "still": Measurement(remarks=exempt),
        "broken": Measurement({"error": 0.0}, remarks=broken),
    })

def crashing_outputs(size):
    raise RuntimeError("cannot be computed")

@contextlib.contextmanager
def steady(value, size):
    blocks = []
    def block(seconds):
        blocks.append(seconds)
        return value * size.scale
    def finish():
        return Measurement(details={"pid": os.getpid(), "blocks": blocks}, evidence={"loss": 1.0})
    yield Live({"speed": block}, finish)

@contextlib.contextmanager
def busy(size):
    # Works for 0.2 s, without the time of its stops, and notes from when to when by the clock of the machine.
    pieces, stopped = [], working_clock._sums[0]
    def block(seconds):
        end, latest = working_clock.now() + 0.2, None
        while working_clock.now() < end:
            total, at = stopped[0], time.perf_counter()
            if stopped[0] != total:
                continue
            if total != latest:
                pieces.append([at, at])
            latest, pieces[-1][1] = total, at
        return 1.0
    yield Live({"speed": block}, lambda: Measurement(details={"pieces": pieces}))

@contextlib.contextmanager
def several(value, size):
    yield Live({name: (lambda seconds: value) for name in ("speed", "height", "weight")})

@contextlib.contextmanager
def broken(size):
    calls = []
    def block(seconds):
        calls.append(working_clock.now())
        print("about to break", file=sys.stderr)
        if len(calls) == 2:
            raise RuntimeError("in the second block")
        return 1.0
    yield Live({"speed": block})

@contextlib.contextmanager
def starts_for_ever(size):
    waiting(size)
    yield

@contextlib.contextmanager
def starts_not(size):
    raise RuntimeError("not this time")
    yield

@contextlib.contextmanager
def wrong_at_last(size):
    def finish():
        raise VerificationError("the sum is wrong")
    yield Live({"speed": lambda seconds: 1.0}, finish)

@contextlib.contextmanager
def spinning(size):
    def spin():
        while True:
            pass
    def block(seconds):
        if not any(thread.name == "spin" for thread in threading.enumerate()):
            threading.Thread(target=spin, name="spin", daemon=True).start()
        return 1.0
    yield Live({"speed": block})

def live(name, make, *args): return Variant(name, live=partial(make, *args))

SIZES = {"full": Size(1.0), "quick": Size(0.5)}

def workload(name, *variants, **kw):
    return Workload(name, "a title", (Metric("speed", "m/s", "higher"),), "one", variants, SIZES, **kw)

REFERENCE = Variant("reference", fixed(0.0), outputs=outputs(0.0))
ALIKE = Agreement("two numbers", REFERENCE, {"logits": 1e-3, "loss": 1e-3})
def alike(name, compute, loss=1.0): return Variant(name, shown(loss), outputs=compute)

ONE, THREE = Variant("one", fixed(1.0), note="the slow one"), Variant("three", fixed(3.0))
MISHAPS = {"crash": crash, "wrong": wrong, "exits": exits, "silent": silent, "nan": not_a_number, "quits": quits}
BAD = [Variant(name, measure) for name, measure in MISHAPS.items()]
WORKLOADS = (
    workload("plain", ONE, THREE, targets=(Target("three", "speed", 2, "one"), Target("three", "speed", 4, "one"))),
    workload("marks", Variant("one", mark), Variant("two", mark)),
    workload(
        "missing",
        ONE,
        Variant("absent", fixed(9.0), ("json", "no_such_module_of_ours", "tensorflow_of_ours")),
        Variant("elsewhere", fixed(9.0), ("json",), environment=Environment("no_such_place", ("this==1", "that==2"))),
    ),
    workload("here", ONE, Variant("two", elsewhere, ("json",), environment=Environment("here", ("numpy",)))),
    workload("unsuited", ONE, Variant("two", fixed(2.0), unsuited="it has no wings")),
    workload("waiting", Variant("waiting", waiting)),
    workload("comparing", alike("one", outputs(0.0)), alike("two", waiting), agreement=ALIKE),
    Workload(
        "two metrics", "a title", (Metric("speed", "m/s", "higher"), Metric("height", "m", "higher")), "one",
        (live("one", several, 1.0), live("two", several, 2.0), live("three", several, 3.0)), SIZES,
    ),
    workload("more than metrics", live("one", several, 1.0), live("two", spinning)),
    workload("starting", live("one", steady, 1.0), live("three", starts_for_ever)),
    Workload(
        "scored", "scores", (Metric("speed", "m/s", "higher"), Metric("error", "%", "zero")), None,
        (Variant("bird", scores),), SIZES,
        targets=(
            Target(None, "speed", 2.0), Target(None, "speed", 2.0, over="half"), Target(None, "error", 0.5, over="median"),
            Target("bird fast", "speed", 2.0),
        ),
        scored=True, method="Counted.",
    ),
    workload("noisy", Variant("one", noisy(1.0)), Variant("two", noisy(2.0))),
    workload("steps", Variant("one", stepping), Variant("none", no_steps)),
    workload(
        "agreeing",
        *[alike(name, outputs(e, loss=[1.0])) for name, e in [("one", 0.0), ("near", 1e-3), ("far", 0.1), ("nan", float("nan"))]],
        Variant("silent", shown(1.0)),
        alike("crash", crashing_outputs),
        alike("quits", quits),
        alike("liar", outputs(0.0, loss=[1.0]), loss=1.1),
        alike("lost", outputs(0.0, loss=[1.0]), loss=float("nan")),
        agreement=Agreement("a", Variant("reference", fixed(0.0), outputs=outputs(0.0, loss=[1.0])), ALIKE.tolerances),
    ),
    workload(
        "agreeing again",
        *[alike(name, outputs(e, loss=[1.0])) for name, e in [("one", 0.0), ("near", 1e-3)]],
        agreement=Agreement("a", Variant("reference", fixed(0.0), outputs=outputs(0.0, loss=[1.0])), ALIKE.tolerances),
    ),
    workload(
        "no reference",
        alike("one", outputs(0.0)),
        agreement=Agreement("b", Variant("reference", fixed(0.0), outputs=crashing_outputs), ALIKE.tolerances),
    ),
    workload("failing", ONE, *BAD),
    workload("hanging", Variant("hang", hang), time_limit=6.0),
    workload("interrupting", ONE, Variant("interrupt", interrupt)),
    workload("live", live("one", steady, 1.0), live("three", steady, 3.0), targets=(Target("three", "speed", 2, "one"),)),
    workload("one breaks", live("one", steady, 1.0), live("breaks", broken), live("two", steady, 2.0)),
    workload("one starts not", live("one", steady, 1.0), live("starts not", starts_not), live("wrong", wrong_at_last)),
    workload("one spins", live("one", steady, 1.0), live("spins", spinning)),
    workload("sliced", live("one", busy), live("two", busy), slice_seconds=0.01),
    workload("another clock", live("one", busy), live("two", steady, 1.0), slice_seconds=0.01),
    workload(
        "one breaks in slices", live("one", busy), live("breaks", broken), live("two", busy),
        slice_seconds=0.01,
    ),
    workload("mixed", live("one", steady, 1.0), THREE),
    workload("flaky", ONE, Variant("flaky", flaky), targets=(Target("flaky", "speed", 2, "one"),)),
)
"""


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The module's name; `penstock bench` knows it as "fake"."""
    name = f"fake_suite_{os.getpid()}"
    (tmp_path / f"{name}.py").write_text(_SUITE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("FLAKY", str(tmp_path / "flaky"))
    monkeypatch.setenv("COMPUTED", str(tmp_path / "computed"))
    monkeypatch.setenv("PENSTOCK_BENCH_ENVIRONMENTS", str(tmp_path / "environments"))
    monkeypatch.setitem(SUITES, "fake", name)
    return name
