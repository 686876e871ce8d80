"""Examine the machine: memory, threads, settings of the kernel, and programs that some commands need.

The limits of memory and CPU time are the lowest in the process's own cgroup and all that contain it, of version 1 or 2. The files
are described in Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/ of the Linux kernel.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from penstock._jaxlib_faults import processor
from penstock._versions import installed, numbers
from penstock.environment.report import Finding
from penstock.run_command import PRELOAD, choose, nvidia_gpu

_LITTLE_MEMORY = 4 << 30  # bytes; JAX and a small model take one or two GiB
_SMALL_SHM = 1 << 30  # bytes; worker processes pass batches through /dev/shm
_NO_LIMIT = 1 << 62  # version 1 of cgroups writes the largest multiple of a page where there is no limit


def examine() -> Iterator[Finding]:
    """Yield findings on memory and threads, and on optional programs."""
    section = "Memory and threads"
    yield Finding(section, "processor", "ok", processor())
    for find in (_cores, _memory, _huge_pages, _allocator, _shared_memory, _files):
        yield find(section)
    yield from _programs()


def nvidia_gpus() -> list[str]:
    """Return the names of the NVIDIA GPUs that their driver reports; none if there is no driver."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def has_accelerator(devices: Path = Path("/dev")) -> bool:
    """Return whether the machine has a GPU or a TPU that programs may use, by its device files, without starting a framework."""
    return nvidia_gpu() or any(any(devices.glob(each)) for each in ("accel*", "vfio/[0-9]*", "kfd"))


def _cores(section: str) -> Finding:
    # XLA and most libraries start a thread for each core that the affinity of the process allows, and ignore the quota.
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    found = f"{len(cores)} of {os.cpu_count()} for this process"
    limits = cgroup_limits()
    if limits.cores is None or limits.cores >= len(cores):
        unread = "" if limits.known else ", and the quota of a cgroup cannot be read"
        return Finding(section, "cores", "ok" if limits.known else "unknown", found + unread)
    few = ",".join(map(str, cores[: max(1, int(limits.cores))]))
    remedy = (
        f"XLA starts {len(cores)} threads, which are all stopped when the quota of {limits.cores:g} cores is spent: "
        f"taskset -c {few} COMMAND"
    )
    return Finding(section, "cores", "warning", f"{found}, with a quota of {limits.cores:g} by its cgroup", remedy)


def _memory(section: str) -> Finding:
    if not hasattr(os, "sysconf"):
        return Finding(section, "memory", "unknown", "this system does not tell")
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = cgroup_limits()
    if limits.memory is None or limits.memory >= total:
        limit = "with no limit by a cgroup" if limits.known else "and the limit of a cgroup cannot be read"
        return Finding(section, "memory", "ok" if limits.known else "unknown", f"{total / 2**30:.1f} GiB, {limit}")
    found = f"{limits.memory / 2**30:.1f} GiB for this cgroup, of {total / 2**30:.1f} GiB"
    if limits.memory > _LITTLE_MEMORY:
        return Finding(section, "memory", "ok", found)
    remedy = "the kernel ends the process at the limit, and the buffers of a feed count towards it: ask for more"
    return Finding(section, "memory", "warning", found, remedy)


def _huge_pages(section: str) -> Finding:
    text = read(Path("/sys/kernel/mm/transparent_hugepage/enabled"))
    chosen = text.partition("[")[2].partition("]")[0]
    if not chosen:
        return Finding(section, "huge pages", "unknown", "this kernel does not tell about transparent huge pages")
    asks = "glibc.malloc.hugetlb=1" in os.environ.get("GLIBC_TUNABLES", "")
    asked = ", and malloc asks for them" if chosen == "madvise" and asks else ""
    return Finding(section, "huge pages", "ok", f"transparent huge pages: {chosen}{asked}")


def _allocator(section: str) -> Finding:
    preloaded = [Path(each).name for each in re.split(r"[ :]+", os.environ.get(PRELOAD, "")) if each]
    name, version = platform.libc_ver()
    settings = [f"{key}={value}" for key, value in sorted(os.environ.items()) if key.startswith(("GLIBC_TUNABLES", "MALLOC_"))]
    allocator = ", ".join(preloaded) if preloaded else f"{name or 'libc'} {version}".strip()
    found = ", ".join([allocator, *settings])
    choice = choose()
    if choice.same_allocator:  # `penstock run` would leave it as it is
        return Finding(section, "allocator", "ok", found)
    remedy = "on a CPU, JAX gets the memory of each step from the system anew: penstock run -- COMMAND"
    if PRELOAD not in choice.variables:
        remedy += "; it loads tcmalloc if it finds it, which is faster still: apt-get install libtcmalloc-minimal4"
    return Finding(section, "allocator", "warning", found, remedy)


def _shared_memory(section: str) -> Finding:
    name = "shared memory"
    if not Path("/dev/shm").is_dir():
        return Finding(section, name, "unknown", "there is no /dev/shm")
    size = shutil.disk_usage("/dev/shm").total
    found = f"/dev/shm of {size / 2**30:.2g} GiB"
    if size >= _SMALL_SHM:
        return Finding(section, name, "ok", found)
    remedy = 'workers="process:N" pass batches through it: docker run --shm-size=8g, or use threads as workers'
    return Finding(section, name, "warning", found, remedy)


def _files(section: str) -> Finding:
    try:
        import resource
    except ImportError:  # Windows
        return Finding(section, "open files", "unknown", "this system does not tell")
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = 0 <= soft < 1024
    remedy = "ulimit -n 65536, for data of many files" if few else ""
    count = "any number" if soft == resource.RLIM_INFINITY else f"{soft:,}"
    return Finding(section, "open files", "warning" if few else "ok", f"{count} at a time", remedy)


def _programs() -> Iterator[Finding]:
    section = "Optional programs"
    libtpu, ray = installed("libtpu"), installed("ray")
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    chromium = f"{browser}, {driver}" if browser and driver else None
    for name, found, remedy in (
        ("TPU compiler", libtpu and f"libtpu {libtpu}", 'plans for TPUs: pip install "penstock[tpu]"'),
        ("Chromium", chromium, "the tests of pages need it and its driver: apt-get install chromium chromium-driver"),
        ("Ray", ray and f"ray {ray}", 'training on a cluster: pip install "penstock[ray]"'),
    ):
        yield Finding(section, name, "ok", found) if found else Finding(section, name, "absent", "not here", remedy)
    triton, tensorflow = installed("triton"), installed("tensorflow") or installed("tensorflow-cpu")
    if triton and tensorflow:
        # Triton from 3.7 on crashes if TensorFlow 2.20 or 2.21 was imported before. Each has its own LLVM.
        crashes = numbers(triton)[:2] >= (3, 7)
        remedy = 'importing triton (as torch.compile does) after tensorflow crashes Python: pip install "torch==2.11.0"'
        found = f"Triton {triton} and TensorFlow {tensorflow} in one process"
        yield Finding(section, "Triton", "warning" if crashes else "ok", found, remedy if crashes else "")


# The limits of cgroups.


@dataclass(frozen=True)
class Limits:
    """The limits that cgroups set.

    Attributes:
      known: whether the cgroups of this process could be read.
      memory: bytes; None for no limit.
      cores: CPU seconds per second; None for no quota.
    """

    known: bool
    memory: int | None
    cores: float | None


def cgroup_limits(proc: Path = Path("/proc")) -> Limits:
    """Return the lowest limits that apply to this process."""
    memory, cpu = list(cgroup_folders("memory", proc)), list(cgroup_folders("cpu", proc))
    bytes_ = [limit for limit in map(cgroup_memory_limit, memory) if limit is not None]
    cores = [limit for limit in map(_cpu_quota, cpu) if limit is not None]
    return Limits(bool(memory or cpu), min(bytes_, default=None), min(cores, default=None))


def cgroup_memory_limit(folder: Path) -> int | None:
    """Return the bytes that the cgroup of a folder may use; None for no limit."""
    for name in ("memory.max", "memory.limit_in_bytes"):
        text = read(folder / name).strip()
        if text.isdigit() and int(text) < _NO_LIMIT:
            return int(text)
    return None


def _cpu_quota(folder: Path) -> float | None:
    """Return the CPU seconds per second that the cgroup of a folder may use; None for no quota."""
    quota = read(folder / "cpu.max").split() or [read(folder / f"cpu.cfs_{part}_us").strip() for part in ("quota", "period")]
    return int(quota[0]) / int(quota[1]) if all(part.isdigit() for part in quota) else None


def cgroup_folders(controller: str, proc: Path) -> Iterator[Path]:
    """Yield the folders of this process's cgroup and those above it, in each hierarchy that may have the controller."""
    for line in read(proc / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        for mount in _mounts(proc, controller if controllers else None):
            folder = mount / path.lstrip("/")
            if not folder.is_dir():  # in a container, this may be a path of the host
                folder = mount
            yield from (each for each in (folder, *folder.parents) if each.is_relative_to(mount))


def _mounts(proc: Path, controller: str | None) -> Iterator[Path]:
    """Yield the mount points of the hierarchy of a controller; None stands for version 2, which has all controllers."""
    for line in read(proc / "mounts").splitlines():
        _, where, kind, options, *_ = line.split()
        if kind == "cgroup2" if controller is None else kind == "cgroup" and controller in options.split(","):
            yield Path(where)


def read(path: Path) -> str:
    """Return the text of a file; "" if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
