"""Findings on memory, threads and programs, and the limits that cgroups set."""

from __future__ import annotations

import os

import pytest

from penstock import run_command
from penstock.environment import machine


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
    assert machine.cgroup_limits(hierarchy(tmp_path / "some", version, 2 * 2**30, 50_000)) == machine.Limits(True, 2 * 2**30, 0.5)
    assert machine.cgroup_limits(hierarchy(tmp_path / "none", version, None, None)) == machine.Limits(True, None, None)


def test_cgroups_that_cannot_be_read_are_unknown(tmp_path, monkeypatch):
    unknown = machine.cgroup_limits(tmp_path)
    assert unknown == machine.Limits(False, None, None)
    monkeypatch.setattr(machine, "cgroup_limits", lambda: unknown)
    found = {finding.name: finding for finding in machine.examine()}
    assert found["cores"].status == found["memory"].status == "unknown"


def test_a_quota_below_the_cores_is_worth_a_look_also_beside_an_affinity(monkeypatch):
    monkeypatch.setattr(machine, "cgroup_limits", lambda: machine.Limits(True, 2 * 2**30, 2.0))
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
    monkeypatch.setattr(machine, "read", lambda path: f"x [{chosen}] y" if "hugepage" in str(path) else "")
    monkeypatch.setenv("GLIBC_TUNABLES", tunables)
    finding = machine._huge_pages("")
    assert (finding.status, finding.found, finding.remedy) == ("ok", found, "")


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


@pytest.mark.parametrize("name", ["accel0", "vfio/3", "kfd", "vfio/vfio", "null", None])
def test_an_accelerator_is_found_by_its_device_file(tmp_path, monkeypatch, name):
    monkeypatch.setattr(machine, "nvidia_gpu", lambda: False)
    if name is not None:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert machine.has_accelerator(tmp_path) == (name in ("accel0", "vfio/3", "kfd"))
