"""`penstock doctor` and `ps.doctor()`."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import version

import pytest

import penstock as ps
from penstock import _jax, _jaxlib_faults
from penstock._jaxlib_faults import CASES, Outcome
from penstock._versions import JAX
from penstock.cli import main
from penstock.environment import doctor
from penstock.environment.report import Finding, Report


def outcomes(verdict: str) -> list[Outcome]:
    return [Outcome(each.name, each.link, each.remedy, verdict, "seen") for each in CASES]


@pytest.fixture
def quick(monkeypatch):
    """Return a function that sets the verdict of the known faults, so that no process is started."""

    def set_to(verdict: str) -> None:
        monkeypatch.setattr(_jaxlib_faults, "run", lambda: outcomes(verdict))
        monkeypatch.setattr(doctor, "_devices", lambda: [Finding("Devices", "cpu", "ok", "1 × cpu")])

    set_to("right")
    return set_to


def by_name(report: Report) -> dict[str, Finding]:
    return {finding.name: finding for finding in report.findings}


def test_it_says_what_is_here_in_a_process_that_never_starts_jax():
    script = """
import penstock as ps
from penstock import _jaxlib_faults
_jaxlib_faults.run = lambda: []
print(ps.doctor())
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    for word in (version("jaxlib"), "cpu", "allocator"):
        assert word in ended.stdout


def test_a_wrong_jaxlib_is_said_with_its_remedy_and_exit_status_1(quick, capsys):
    quick("wrong")
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert printed.count("WRONG VALUES") == len(CASES)
    assert all(case.link in printed and case.remedy in printed for case in CASES)
    quick("right")
    assert main(["doctor"]) == 0


def test_what_could_not_be_found_out_is_unknown_and_not_right(quick):
    quick("unknown")
    report = ps.doctor()
    assert by_name(report)["#39103"].status == "unknown"
    assert "unknown (?)" in report.summary


def test_json_has_all_findings(quick, capsys):
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is True
    assert {"section", "name", "status", "found", "remedy"} == set(found["findings"][0])


def test_every_line_that_is_not_right_says_what_to_do(quick, monkeypatch):
    quick("wrong")
    monkeypatch.setattr(doctor, "installed", lambda name: None if name in ("grain", "libtpu") else version("jax"))
    report = ps.doctor()
    assert all(finding.remedy for finding in report.findings if finding.status in ("absent", "warning", "wrong"))


def test_a_version_out_of_range_is_wrong_and_one_beyond_is_worth_a_look(quick):
    assert doctor._supported("", JAX, "0.9.2").status == "wrong"
    assert doctor._supported("", JAX, "0.13.0").status == "warning"
    assert doctor._supported("", JAX, "0.11.0").status == "ok"
    assert doctor._supported("", JAX, "0.9.2").remedy == JAX.install


def test_a_jax_without_a_private_part_is_said(quick, monkeypatch):
    monkeypatch.setattr(_jax, "PARTS", (*_jax.PARTS, ("jax._src.core", "no_such_part")))
    finding = by_name(ps.doctor())["all"]
    assert finding.status == "warning"
    assert "jax._src.core.no_such_part" in finding.found


def test_a_jax_that_does_not_start_is_wrong(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "no_such_platform")
    (finding,) = doctor._devices()
    assert (finding.status, finding.name) == ("wrong", "JAX")
    assert "no_such_platform" in finding.found


@pytest.mark.parametrize(("accelerator", "advice"), [(True, "held by another process"), (False, "less busy")])
def test_only_a_machine_with_an_accelerator_is_asked_about_it(monkeypatch, accelerator, advice):
    monkeypatch.setattr(doctor, "_SECONDS", 0.01)
    monkeypatch.setattr(doctor.machine, "has_accelerator", lambda: accelerator)
    (finding,) = doctor._devices()
    assert (finding.status, finding.name) == ("unknown", "JAX")
    assert advice in finding.remedy
    assert ("accelerator" in finding.remedy) == accelerator


def test_gpus_that_jax_does_not_use_are_named():
    on_cpu = [Finding("Devices", "cpu", "ok", "1 × cpu")]
    (finding,) = doctor._unused_gpus(on_cpu, ["NVIDIA H200"])
    assert finding.status == "warning"
    assert "NVIDIA H200" in finding.found
    assert not list(doctor._unused_gpus([Finding("Devices", "gpu", "ok", "1 × NVIDIA H200")], ["NVIDIA H200"]))
