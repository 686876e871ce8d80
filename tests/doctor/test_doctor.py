"""`penstock doctor` and `ps.doctor()`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version

import pytest

import penstock as ps
from penstock import _jax
from penstock._doctor import Finding, Report, cases, examination, machine
from penstock._doctor.cases import CASES, Outcome
from penstock._versions import JAX
from penstock.cli import main


def outcomes(verdict: str) -> list[Outcome]:
    return [Outcome(each.name, each.link, each.remedy, verdict, "seen") for each in CASES]


@pytest.fixture
def quick(monkeypatch):
    """Known faults as they are asked for, and no processes."""

    def set_to(verdict: str) -> None:
        monkeypatch.setattr(cases, "run", lambda: outcomes(verdict))
        monkeypatch.setattr(examination, "_devices", lambda: [Finding("Devices", "cpu", "ok", "1 × cpu")])

    set_to("right")
    return set_to


def by_name(report: Report) -> dict[str, Finding]:
    return {finding.name: finding for finding in report.findings}


def test_it_says_what_is_here_in_a_process_that_never_starts_jax():
    script = """
import penstock as ps
print(ps.doctor())
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    words = [
        f"jaxlib {version('jaxlib')}",
        version("jax"),
        "cpu",
        "#39103",
        "huge pages",
        "allocator",
        "TPU compiler",
        "Chromium",
        "Ray",
    ]
    for word in words:
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
    monkeypatch.setattr(examination, "installed", lambda name: None if name in ("grain", "libtpu") else version("jax"))
    report = ps.doctor()
    assert all(finding.remedy for finding in report.findings if finding.status in ("absent", "warning", "wrong"))


def test_a_version_out_of_range_is_wrong_and_one_beyond_is_worth_a_look(quick):
    assert examination._supported("", JAX, "0.9.2").status == "wrong"
    assert examination._supported("", JAX, "0.13.0").status == "warning"
    assert examination._supported("", JAX, "0.11.0").status == "ok"
    assert examination._supported("", JAX, "0.9.2").remedy == JAX.install


def test_a_jax_without_a_private_part_is_said(quick, monkeypatch):
    monkeypatch.setattr(_jax, "PARTS", (*_jax.PARTS, ("jax._src.core", "no_such_part")))
    finding = by_name(ps.doctor())["all"]
    assert finding.status == "warning"
    assert "jax._src.core.no_such_part" in finding.found


def test_a_jax_that_does_not_start_is_wrong(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "no_such_platform")
    (finding,) = examination._devices()
    assert (finding.status, finding.name) == ("wrong", "JAX")
    assert "no_such_platform" in finding.found


def test_a_quota_below_the_cores_is_worth_a_look(tmp_path, monkeypatch):
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    (tmp_path / "memory.max").write_text(f"{2 * 2**30}\n")
    monkeypatch.setattr(machine, "_cgroup_folders", lambda: [tmp_path])
    found = {finding.name: finding for finding in machine.examine()}
    assert machine.cores_allowed()[1] == 0.5
    assert found["cores"].status == "warning"
    assert "taskset -c 0-0" in found["cores"].remedy
    assert found["memory"].status == "warning"
    assert "2.0 GiB for this cgroup" in found["memory"].found
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    found = {finding.name: finding for finding in machine.examine()}
    assert found["cores"].status == found["memory"].status == "ok"


@pytest.mark.parametrize(("triton", "status"), [("3.6.0", "ok"), ("3.7.1", "warning"), ("3.9.0", "warning")])
def test_a_triton_that_crashes_after_tensorflow_is_named(monkeypatch, triton, status):
    monkeypatch.setattr(machine, "installed", lambda name: triton if name == "triton" else "2.21.0")
    found = {finding.name: finding for finding in machine.examine()}
    assert found["Triton"].status == status


def test_what_is_preloaded_is_the_allocator():
    script = "from penstock._doctor import machine; print([f.found for f in machine.examine() if f.name == 'allocator'])"
    environment = os.environ | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, timeout=120)
    assert "GLIBC_TUNABLES=glibc.malloc.hugetlb=1" in ended.stdout
