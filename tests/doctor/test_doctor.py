"""`penstock doctor` and `ps.doctor()`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version

import pytest

import penstock as ps
from penstock import _jax, run_command
from penstock._doctor import Finding, Report, cgroup, examination, jaxlib_faults, machine
from penstock._doctor.jaxlib_faults import CASES, Outcome
from penstock._versions import JAX
from penstock.cli import main


def outcomes(verdict: str) -> list[Outcome]:
    return [Outcome(each.name, each.link, each.remedy, verdict, "seen") for each in CASES]


@pytest.fixture
def quick(monkeypatch):
    """Return a function that sets the verdict of the known faults, so that no process is started."""

    def set_to(verdict: str) -> None:
        monkeypatch.setattr(jaxlib_faults, "run", lambda: outcomes(verdict))
        monkeypatch.setattr(examination, "_devices", lambda: [Finding("Devices", "cpu", "ok", "1 × cpu")])

    set_to("right")
    return set_to


def by_name(report: Report) -> dict[str, Finding]:
    return {finding.name: finding for finding in report.findings}


def test_it_says_what_is_here_in_a_process_that_never_starts_jax():
    script = """
import penstock as ps
from penstock._doctor import jaxlib_faults
jaxlib_faults.run = lambda: []
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


def hierarchy(folder, version, memory, quota, period=100_000):
    """Write a /proc and the cgroup of this process, two levels deep, in the layout of version 1 or 2 of cgroups."""
    proc = folder / "proc"
    (proc / "self").mkdir(parents=True)
    kinds = {"": "cgroup2"} if version == 2 else {"memory": "cgroup", "cpu,cpuacct": "cgroup"}
    for number, (controllers, kind) in enumerate(kinds.items()):
        mount = folder / f"mount{number}"
        own = mount / "outer" / "own"
        own.mkdir(parents=True)
        with (proc / "mounts").open("a") as file:
            file.write(f"cgroup {mount} {kind} rw,{controllers or 'nsdelegate'} 0 0\n")
        with (proc / "self/cgroup").open("a") as file:
            file.write(f"{number}:{controllers}:/outer/own\n")
        if version == 2:
            (own / "memory.max").write_text("max\n")
            (own.parent / "memory.max").write_text(f"{memory or 'max'}\n")
            (own / "cpu.max").write_text(f"{quota or 'max'} {period}\n")
        elif controllers == "memory":
            (own / "memory.limit_in_bytes").write_text(f"{memory or 9223372036854771712}\n")
        else:
            (own.parent / "cpu.cfs_quota_us").write_text(f"{quota or -1}\n")
            (own.parent / "cpu.cfs_period_us").write_text(f"{period}\n")
    return proc


@pytest.mark.parametrize("version", [1, 2])
def test_the_least_limit_of_the_cgroups_counts(tmp_path, version):
    assert cgroup.limits(hierarchy(tmp_path / "some", version, 2 * 2**30, 50_000)) == cgroup.Limits(True, 2 * 2**30, 0.5)
    assert cgroup.limits(hierarchy(tmp_path / "none", version, None, None)) == cgroup.Limits(True, None, None)


def test_cgroups_that_cannot_be_read_are_unknown(tmp_path, monkeypatch):
    unknown = cgroup.limits(tmp_path)
    assert unknown == cgroup.Limits(False, None, None)
    monkeypatch.setattr(cgroup, "limits", lambda: unknown)
    found = {finding.name: finding for finding in machine.examine()}
    assert found["cores"].status == found["memory"].status == "unknown"


def test_a_quota_below_the_cores_is_worth_a_look_also_beside_an_affinity(monkeypatch):
    monkeypatch.setattr(cgroup, "limits", lambda: cgroup.Limits(True, 2 * 2**30, 2.0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4, 36)))
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    found = {finding.name: finding for finding in machine.examine()}
    assert found["cores"].status == "warning"
    assert "32 of 64 for this process, with a quota of 2" in found["cores"].found
    assert "taskset -c 4,5 COMMAND" in found["cores"].remedy
    assert found["memory"].status == "warning"
    assert "2.0 GiB for this cgroup" in found["memory"].found


@pytest.mark.parametrize(
    ("chosen", "tunables", "found"),
    [
        ("always", "", "transparent huge pages: always"),
        ("madvise", "glibc.malloc.hugetlb=1", "transparent huge pages: madvise, and malloc asks for them"),
        ("never", "glibc.malloc.hugetlb=1", "transparent huge pages: never"),
    ],
)
def test_huge_pages_are_told(monkeypatch, chosen, tunables, found):
    monkeypatch.setattr(machine, "_text", lambda path: f"x [{chosen}] y" if "hugepage" in str(path) else "")
    monkeypatch.setenv("GLIBC_TUNABLES", tunables)
    finding = machine._huge_pages("")
    assert (finding.status, finding.found, finding.remedy) == ("ok", found, "")


def test_gpus_that_jax_does_not_use_are_named():
    on_cpu = [Finding("Devices", "cpu", "ok", "1 × cpu")]
    (finding,) = examination._unused_gpus(on_cpu, ["NVIDIA H200"])
    assert finding.status == "warning"
    assert "NVIDIA H200" in finding.found
    assert not list(examination._unused_gpus([Finding("Devices", "gpu", "ok", "1 × NVIDIA H200")], ["NVIDIA H200"]))


@pytest.mark.parametrize(("triton", "status"), [("3.6.0", "ok"), ("3.7.1", "warning")])
def test_a_triton_that_crashes_after_tensorflow_is_named(monkeypatch, triton, status):
    monkeypatch.setattr(machine, "installed", lambda name: triton if name == "triton" else "2.21.0")
    found = {finding.name: finding for finding in machine.examine()}
    assert found["Triton"].status == status


def test_tunables_are_told_with_the_allocator(monkeypatch):
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
    found = {finding.name: finding for finding in machine.examine()}
    assert "GLIBC_TUNABLES=glibc.malloc.hugetlb=1" in found["allocator"].found


@pytest.mark.parametrize(
    ("environment", "status"),
    [({}, "warning"), ({"MALLOC_ARENA_MAX": "1"}, "ok"), ({"LD_PRELOAD": "/lib/libjemalloc.so.2"}, "ok")],
)
def test_an_allocator_that_nobody_chose_is_worth_penstock_run(monkeypatch, environment, status):
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD"))]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(run_command, "nvidia_gpu", lambda: False)
    monkeypatch.setattr(machine.platform, "libc_ver", lambda: ("glibc", "2.36"))
    for installed in (False, True):
        found = (run_command.Setting("LD_PRELOAD", "libtcmalloc.so", "why"),) if installed else ()
        monkeypatch.setattr(run_command, "preload", lambda name, found=found: found)
        finding = machine._allocator("")
        assert finding.status == status
        assert ("penstock run" in finding.remedy) == (status == "warning")
        assert ("libtcmalloc" in finding.remedy) == (status == "warning" and not installed)
