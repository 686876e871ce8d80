"""The torture test, shortened: ten kills, and some of everything else. `penstock bench faults` is the whole."""

import json

import numpy as np
import pytest

from penstock.cli import main
from penstock_bench.faults import command
from penstock_bench.faults.scenarios import Bench


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return Bench(tmp_path_factory.mktemp("faults"), seed=11)


def check(outcome, count):
    assert outcome.failures == []
    assert (outcome.tried, outcome.good) == (count, count)


@pytest.mark.slow
def test_ten_kills_lose_nothing(bench):
    check(bench.kills(10), 10)


@pytest.mark.slow
def test_signals_end_well_and_lose_nothing(bench):
    check(bench.signals(4), 4)


@pytest.mark.slow
def test_damaged_checkpoints_are_passed_over(bench):
    check(bench.damaged(5), 5)


@pytest.mark.slow
def test_another_number_of_devices_and_processes_loses_nothing(bench):
    check(bench.devices(3), 3)
    check(bench.processes(2), 2)
    check(bench.losses(1), 1)


@pytest.mark.slow
def test_lost_and_changed_results_are_seen(bench, tmp_path):
    """A bench that could not fail would show nothing."""
    reference = bench.reference

    def problems(**changes):
        np.savez(tmp_path / "result.npz", **{**reference.arrays, **changes})
        digests = {name: "another" if name in changes else digest for name, digest in reference.digests.items()}
        (tmp_path / "result.json").write_text(json.dumps({"digests": digests}))
        return bench._compare(tmp_path, ended=None)

    assert problems() == []
    assert problems(a=reference.arrays["a"] + 1e-7) == ["not equal bit for bit: a"]
    seen = reference.arrays["seen"].copy()
    seen[[5, 6]] = seen[[6, 5]]
    assert problems(seen=seen)[0] == "records are lost or repeated, first at step 5"


@pytest.mark.slow
def test_command_writes_its_reports(tmp_path, capsys):
    report = tmp_path / "faults.json"
    status = main(["bench", "faults", "--only", "kills", "--count", "1", "--seed", "2", "--json", str(report)])
    assert status == 0
    assert "kill -9: 1 of 1 as they should be" in capsys.readouterr().out
    (scenario,) = json.loads(report.read_text())["scenarios"]
    assert (scenario["tried"], scenario["good"]) == (1, 1)


def test_unusable_arguments_are_told_in_one_line(tmp_path, capsys):
    assert main(["bench", "faults", "--count", "0"]) == 2
    assert capsys.readouterr().err == "penstock bench faults: error: --count 0: needs an integer >= 1\n"
    assert main(["bench", "faults", "--json", str(tmp_path / "no/folder.json")]) == 2


def test_every_scenario_is_a_method():
    assert all(callable(getattr(Bench, name)) for name in command._COUNTS if name != "keras")
