"""Verdicts agree with arithmetic in loops that take known times on this machine."""

from __future__ import annotations

import pytest

from penstock_bench.suites.feed import verdicts


@pytest.mark.slow
def test_the_verdicts_of_short_loops_are_those_of_arithmetic(monkeypatch):
    monkeypatch.setattr(verdicts, "_LOOPS", ("every loss fetched", "asynchronous, donated"))
    measured = verdicts.measure(verdicts.Size(steps=24, times=((0.045, 0.015), (0.005, 0.025))))
    wrong = [row for row in measured.details["verdicts"] if row["differs"]]
    assert wrong == []
    assert measured.values["right"] == 16
