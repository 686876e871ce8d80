"""What the doctor looks at beside Python: memory, threads, the kernel's settings, and programs that some commands need."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from penstock._doctor import cases
from penstock._doctor.report import Finding
from penstock._versions import installed

_SMALL_SHM = 1 << 30  # bytes; a worker process passes a few batches through /dev/shm


def examine() -> Iterator[Finding]:
    """Yield findings on memory and threads, and on optional programs."""
    yield from _memory_and_threads()
    yield from _programs()


def nvidia_gpus() -> list[str]:
    """Names of the NVIDIA GPUs that their driver reports; none without the driver."""
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def _memory_and_threads() -> Iterator[Finding]:
    section = "Memory and threads"
    yield Finding(section, "processor", "ok", cases.processor())
    yield _cores(section)
    yield _memory(section)
    yield _huge_pages(section)
    yield _allocator(section)
    yield _shared_memory(section)
    yield _files(section)


def cores_allowed() -> tuple[int, float | None]:
    """Return the cores of the machine that this process may run on, and the quota of its cgroup in cores; None for no quota."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for folder in _cgroup_folders() if (quota := _quota(folder)) is not None]
    return usable, min(quotas) if quotas else None


def _cores(section: str) -> Finding:
    """XLA and most libraries start a thread for each core of the machine, whatever the cgroup allows."""
    usable, quota = cores_allowed()
    total = os.cpu_count() or 1
    limit = min(usable, quota or usable)
    found = f"{total} cores, {limit:g} for this process"
    if usable < total or limit >= usable:
        return Finding(section, "cores", "ok", found + (" (by affinity, which XLA follows)" if usable < total else ""))
    remedy = (
        f"XLA starts {usable} threads, which take turns on {limit:g} cores and are stopped when the quota is spent: "
        f"taskset -c 0-{max(1, int(limit)) - 1} COMMAND"
    )
    return Finding(section, "cores", "warning", f"{found}: the quota of its cgroup", remedy)


def _memory(section: str) -> Finding:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None
    limits = [limit for folder in _cgroup_folders() if (limit := _number(folder / "memory.max")) is not None]
    limit = min(limits, default=None)
    if total is None:
        return Finding(section, "memory", "unknown", "this system does not tell")
    if limit is None or limit >= total:
        return Finding(section, "memory", "ok", f"{total / 2**30:.1f} GiB, with no limit by a cgroup")
    remedy = "the kernel ends the process at the limit: buffers of a feed and a shuffle count towards it"
    found = f"{limit / 2**30:.1f} GiB for this cgroup, of {total / 2**30:.1f} GiB"
    return Finding(section, "memory", "ok" if limit > 4 * 2**30 else "warning", found, "" if limit > 4 * 2**30 else remedy)


def _huge_pages(section: str) -> Finding:
    text = _text(Path("/sys/kernel/mm/transparent_hugepage/enabled"))
    chosen = text.partition("[")[2].partition("]")[0]
    name = "huge pages"
    if not chosen:
        return Finding(section, name, "unknown", "this kernel does not tell about transparent huge pages")
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    if chosen == "always" or (chosen == "madvise" and "glibc.malloc.hugetlb=1" in tunables):
        return Finding(section, name, "ok", f"transparent huge pages: {chosen}")
    remedy = (
        "on a CPU, JAX spends a part of each step in page faults: GLIBC_TUNABLES=glibc.malloc.hugetlb=1 COMMAND"
        if chosen == "madvise"
        else "on a CPU, JAX spends a part of each step in page faults; as root: "
        "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
    )
    return Finding(section, name, "warning", f"transparent huge pages: {chosen}, and malloc does not ask for them", remedy)


def _allocator(section: str) -> Finding:
    preloaded = [Path(each).name for each in re.split(r"[ :]+", os.environ.get("LD_PRELOAD", "")) if each]
    name, version = platform.libc_ver()
    settings = [f"{key}={os.environ[key]}" for key in ("GLIBC_TUNABLES", "MALLOC_ARENA_MAX", "MALLOC_CONF") if key in os.environ]
    allocator = ", ".join(preloaded) if preloaded else f"{name or 'libc'} {version}".strip()
    return Finding(section, "allocator", "ok", ", ".join([allocator, *settings]))


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
    libtpu = installed("libtpu")
    yield _optional(section, "TPU compiler", f"libtpu {libtpu}" if libtpu else "", 'plans for TPUs: pip install "penstock[tpu]"')
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next((path for path in map(shutil.which, names) if path), None)
    driver = shutil.which("chromedriver")
    both = f"{browser}, {driver}" if browser and driver else ""
    yield _optional(
        section, "Chromium", both, "the tests of pages need it and its driver: apt-get install chromium chromium-driver"
    )
    ray = installed("ray")
    yield _optional(section, "Ray", f"ray {ray}" if ray else "", 'training on a cluster: pip install "penstock[ray]"')
    if installed("triton") and importlib.util.find_spec("tensorflow") is not None:
        yield _triton(section)


def _triton(section: str) -> Finding:
    """Triton from 3.7 on crashes where TensorFlow 2.20 or 2.21 was imported before it: each brings an LLVM of its own."""
    version = installed("triton") or ""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    found = f"Triton {version} and TensorFlow {installed('tensorflow') or installed('tensorflow-cpu')} in one process"
    if numbers < (3, 7):
        return Finding(section, "Triton", "ok", found)
    remedy = 'importing triton (as torch.compile does) after tensorflow crashes Python: pip install "torch==2.11.0"'
    return Finding(section, "Triton", "warning", found, remedy)


def _optional(section: str, name: str, found: str, remedy: str) -> Finding:
    return Finding(section, name, "ok" if found else "absent", found or "not here", "" if found else remedy)


def _cgroup_folders() -> list[Path]:
    """The cgroup (version 2) of this process and those that it is in, up to the root."""
    line = next((line for line in _text(Path("/proc/self/cgroup")).splitlines() if line.startswith("0::")), "")
    root = Path("/sys/fs/cgroup")
    if not line or not root.is_dir():
        return []
    folder = root / line[3:].lstrip("/")
    return [each for each in (folder, *folder.parents) if each.is_relative_to(root)]


def _quota(folder: Path) -> float | None:
    """The quota of a cgroup in cores; None for no quota."""
    parts = _text(folder / "cpu.max").split()
    return int(parts[0]) / int(parts[1]) if len(parts) == 2 and parts[0] != "max" else None


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdigit() else None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
