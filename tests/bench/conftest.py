"""A suite of fake variants, in a module that the harness's worker processes can import."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

_SUITE = """
import json, os, pathlib, signal, sys, time
from dataclasses import dataclass
from penstock.bench.model import Measurement, Metric, Target, Variant, VerificationError, Workload

@dataclass(frozen=True)
class Size:
    scale: float

def fixed(value):
    def measure(size):
        print("a library may print on stdout")
        return Measurement({"speed": value * size.scale}, {"pid": os.getpid(), "mark": getattr(sys, "mark", None)})
    return measure

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

SIZES = {"full": Size(1.0), "quick": Size(0.5)}

def workload(name, *variants, **kw):
    return Workload(name, "a title", (Metric("speed", "m/s", "higher"),), "one", variants, SIZES, **kw)

ONE, THREE = Variant("one", fixed(1.0), note="the slow one"), Variant("three", fixed(3.0))
BAD = Variant("crash", crash), Variant("wrong", wrong), Variant("exits", exits), Variant("silent", silent)
WORKLOADS = (
    workload("plain", ONE, THREE, targets=(Target("three", "speed", 2, "one"), Target("three", "speed", 4, "one"))),
    workload("marks", Variant("one", mark), Variant("two", mark)),
    workload("missing", ONE, Variant("absent", fixed(9.0), ("json", "no_such_module_of_ours", "tensorflow_of_ours"))),
    workload("failing", ONE, *BAD),
    workload("hanging", Variant("hang", hang), time_limit=6.0),
    workload("interrupting", Variant("interrupt", interrupt)),
    workload("flaky", ONE, Variant("flaky", flaky), targets=(Target("flaky", "speed", 2, "one"),)),
)
"""


@pytest.fixture
def suite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The module's name."""
    name = f"fake_suite_{os.getpid()}"
    (tmp_path / f"{name}.py").write_text(_SUITE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("FLAKY", str(tmp_path / "flaky"))
    return name
