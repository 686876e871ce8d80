"""Describe the machine that the numbers are measured on: hardware, versions, flags and load, as data for JSON."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import penstock
from penstock import _jaxlib_faults as cases
from penstock._versions import installed, keras_version
from penstock_bench import activity

_PACKAGES = (
    *("jax", "jaxlib", "numpy", "scipy", "flax", "optax", "keras", "keras-hub", "tokenizers", "grain", "torch", "torch_xla"),
    *("tensorflow-cpu", "tensorflow", "datasets", "pyarrow", "pillow", "psutil"),
)
# Environment variables that change what is measured begin with one of these.
_FLAGS = (
    *("JAX_", "XLA_", "LIBTPU_", "PJRT_", "KERAS_", "TORCH", "PYTORCH_", "TF_ENABLE_", "TF_XLA_", "TF_NUM_", "TF_FORCE_"),
    *("OMP_", "KMP_", "GOMP_", "MKL_", "ONEDNN_", "DNNL_", "ATEN_", "OPENBLAS_", "CUDA_", "NVIDIA_", "NCCL_"),
    *("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD", "PYTHONMALLOC"),
)
# The versions of the driver that an image of NVIDIA accepts, in a thousand characters.
_NOISE = ("NVIDIA_REQUIRE_",)
_SECRET = ("KEY", "TOKEN", "SECRET", "PASS", "CREDENTIAL")


def describe() -> dict[str, Any]:
    """Return CPU, GPUs, memory, clocks, versions, flags and load as data for JSON; None for values that the system hides."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": cases.processor(),
        "cores": os.cpu_count(),
        "usable_cores": activity.cores(),
        "memory_bytes": activity.total_memory(),
        "clocks": _clocks(),
        "huge_pages": _chosen("/sys/kernel/mm/transparent_hugepage/enabled"),
        "gpus": _gpus(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version for name in _PACKAGES if (version := _version(name))},
        "known_cases": [asdict(outcome) for outcome in cases.known()] if _version("jaxlib") else [],
        "flags": flags(),
        "load_average": os.getloadavg() if hasattr(os, "getloadavg") else None,
        "penstock": penstock.__version__,
        "commit": _commit(),
    }


def known_faults(described: Mapping[str, Any]) -> str:
    """Return a line for the report: the known faults that this jaxlib has, as `describe` found them."""
    found = described["known_cases"]
    if not found:
        return "known faults of jaxlib: unknown, as there is none"
    said = [f"{case['name']}: {case['verdict']} ({case['link']})" for case in found if case["verdict"] != "right"]
    return "known faults of jaxlib: " + ("; ".join(said) or f"none, all {len(found)} cases are computed right")


def flags() -> dict[str, str]:
    """Return the environment variables that may change the measurements; leave out those that may hold a secret."""
    known = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_FLAGS) and not name.startswith(_NOISE)}
    return {name: value for name, value in known.items() if not any(word in name.upper() for word in _SECRET)}


def _clocks() -> str | None:
    """Return the clocks of the cores and the governor that sets them."""
    found = [line.partition(":")[2] for line in _read("/proc/cpuinfo").splitlines() if line.startswith("cpu MHz")]
    if not found:
        return None
    now = sorted(float(text) for text in found)
    governor = _read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").strip()
    return f"{now[0]:.0f} to {now[-1]:.0f} MHz, governor {governor or 'unknown'}"


def _chosen(path: str) -> str | None:
    """Return the word in brackets of a kernel's setting such as "always [madvise] never"."""
    return _read(path).partition("[")[2].partition("]")[0] or None


def _gpus() -> list[str]:
    """Return name, driver, clocks and power limit of each NVIDIA GPU."""
    query = "name,driver_version,clocks.sm,clocks.max.sm,power.limit"
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return [f"{line.strip()} ({query})" for line in done.stdout.splitlines() if line.strip()]


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _version(package: str) -> str | None:
    if package == "keras":  # which keras-nightly provides too
        return keras_version()
    return installed(package)


def _commit() -> str | None:
    """Return the commit of penstock, with "+changes" where its files differ from it; None if it is not a checkout."""
    if _git("ls-files", "--error-unmatch", "__init__.py") is None:
        return None  # installed inside of another project's repository
    commit = _git("rev-parse", "HEAD")
    return commit and commit + ("+changes" if _git("status", "--porcelain", "--", ".", str(Path(__file__).parent)) else "")


def _git(*args: str) -> str | None:
    folder = Path(penstock.__file__).parent
    try:
        done = subprocess.run(["git", *args], cwd=folder, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
