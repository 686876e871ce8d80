"""Examine whether training in this environment is correct and fast: `ps.doctor()`, and the command `penstock doctor`.

Each private function makes the findings of one section: versions, devices, known faults of jaxlib, private parts of JAX. The
sections on the machine are in `machine.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from penstock import _jax, _jaxlib_faults
from penstock._versions import JAX, KERAS, PYTHON, Supported, installed, keras_version, python_version
from penstock.environment import machine
from penstock.environment.report import Finding, Report, Status
from penstock.errors import UnsupportedVersionError

DESCRIPTION = """\
Look at versions, devices, known faults of this jaxlib, memory, threads and optional programs, and say what to do about each.
It takes a few seconds, at most a minute on a busy machine, and changes nothing. Exit status 1: something gives wrong results
or cannot work."""
EPILOG = "example:\n  penstock doctor --json"

# The program that prints the devices. JAX may wait forever for an accelerator that another process holds.
_DEVICES = """
import json, jax
memory = lambda device: (device.memory_stats() or {}).get("bytes_limit")
print("devices", json.dumps([[each.platform, each.device_kind, memory(each)] for each in jax.local_devices()]))
"""
_SECONDS = 60.0  # as for the known faults: it takes 1 s where nothing else runs

# Libraries that penstock works with, and what pip installs for each.
_LIBRARIES = (
    *((name, "penstock[train]") for name in ("flax", "optax", "orbax-checkpoint")),
    *(("grain", "penstock[grain]"), ("pyarrow", "penstock[arrow]"), ("torch", "penstock[torch]")),
    *(("tensorflow", "tensorflow"), ("equinox", "equinox")),
)


def doctor() -> Report:
    """Examine versions, devices, known faults of this jaxlib, memory, threads and optional tools.

    It takes a few seconds, and at most a minute on a busy machine. JAX is started in processes of its own, never in this one, so
    no device is occupied and no setting of JAX is fixed.

    Returns:
      A `Report`: print it, or read its `findings`. `ok` is False if something gives wrong results or cannot work.

    Examples:
      >>> report = ps.doctor()
      >>> [finding.found for finding in report.findings if finding.name == "penstock"] == [ps.__version__]
      True
    """
    with ThreadPoolExecutor(3) as pool:
        outcomes, devices, gpus = pool.submit(_jaxlib_faults.run), pool.submit(_devices), pool.submit(machine.nvidia_gpus)
        findings = [*_versions(), *devices.result(), *_unused_gpus(devices.result(), gpus.result())]
        _jaxlib_faults.keep(outcomes.result())
        findings += [*_cases(outcomes.result()), *_private_parts(), *machine.examine()]
    return Report(tuple(findings))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `penstock doctor`."""
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(args: argparse.Namespace) -> int:
    """Print the report, and return the exit status: 0, or 1 if something is wrong."""
    report = doctor()
    print(report.to_json() if args.json else report)
    return 0 if report.ok else 1


def _versions() -> Iterator[Finding]:
    section = "Versions"
    yield Finding(section, "penstock", "ok", installed("penstock") or "not installed")
    yield _supported(section, PYTHON, python_version())
    yield _supported(section, JAX, installed("jax"))
    yield Finding(section, "jaxlib", "ok", str(installed("jaxlib")))
    yield _supported(section, KERAS, keras_version(), "penstock[keras]")
    for name, requirement in _LIBRARIES:
        version = installed(name) or installed(f"{name}-cpu")
        yield _absent(section, name, requirement) if version is None else Finding(section, name, "ok", version)


def _supported(section: str, supported: Supported, version: str | None, requirement: str = "") -> Finding:
    if version is None:
        return _absent(section, supported.name, requirement)
    if version in supported:
        return Finding(section, supported.name, "ok", version)
    if supported.is_newer(version):
        found = f"{version}, which is newer than {supported.works}, the versions that penstock is known to work with"
        return Finding(section, supported.name, "warning", found, supported.install)
    return Finding(section, supported.name, "wrong", f"{version}, and penstock works with {supported.works}", supported.install)


def _absent(section: str, name: str, requirement: str) -> Finding:
    return Finding(section, name, "absent", "not installed", f'if you use it: pip install "{requirement}"')


def _devices() -> Sequence[Finding]:
    """Return the devices that JAX finds, in a process of its own that does not allocate their memory."""
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TPU_SKIP_MDS_QUERY": "1"}
    command = [sys.executable, "-P", "-c", _DEVICES]
    try:
        done = subprocess.run(
            command, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS, env=environment
        )
    except subprocess.TimeoutExpired:
        remedy = "try again when the machine is less busy; python -c 'import jax; jax.devices()' shows more"
        if machine.has_accelerator():
            remedy = "is an accelerator held by another process? JAX_PLATFORMS=cpu leaves it out"
        return [Finding("Devices", "JAX", "unknown", f"JAX named no devices within {_SECONDS:.0f} s", remedy)]
    lines = [line for line in done.stdout.splitlines() if line.startswith("devices ")]
    if done.returncode or not lines:
        errors = re.findall(r"^\w*(?:Error|Exception): .+", done.stderr, re.MULTILINE)
        last = (errors or done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        if platforms := os.environ.get("JAX_PLATFORMS"):
            last += f" (JAX_PLATFORMS={platforms})"
        remedy = "python -c 'import jax; jax.devices()' shows more"
        return [Finding("Devices", "JAX", "wrong", f"JAX does not start: {last}", remedy)]
    kinds = Counter(map(tuple, json.loads(lines[-1].partition(" ")[2])))
    return [
        Finding("Devices", platform, "ok", f"{count} × {kind}" + (f", {memory / 2**30:.1f} GiB each" if memory else ""))
        for (platform, kind, memory), count in kinds.items()
    ]


def _unused_gpus(devices: Sequence[Finding], gpus: Sequence[str]) -> Iterator[Finding]:
    """Yield a warning for GPUs that their driver reports and JAX does not use."""
    if gpus and not any(finding.name in ("gpu", "cuda") for finding in devices):
        found = f"{', '.join(gpus)} here, and JAX uses none"
        yield Finding("Devices", "gpu", "warning", found, 'pip install "jax[cuda13]", or unset JAX_PLATFORMS')


def _cases(outcomes: Sequence[_jaxlib_faults.Outcome]) -> Iterator[Finding]:
    section = f"Known faults of jaxlib {installed('jaxlib')} on the CPU"
    words = {"right": "computed right", "wrong": "WRONG VALUES", "crash": "CRASH", "unknown": "unknown"}
    for outcome in outcomes:
        found = f"{outcome.name}: {words[outcome.verdict]}, {outcome.detail} ({outcome.link})"
        status: Status = "wrong" if outcome.fails else "unknown" if outcome.verdict == "unknown" else "ok"
        remedy = {"wrong": outcome.remedy, "unknown": _jaxlib_faults.UNKNOWN}.get(status, "")
        yield Finding(section, "#" + outcome.link.rpartition("/")[2], status, found, remedy)


def _private_parts() -> Iterator[Finding]:
    missing = []
    for module, *names in _jax.PARTS:
        try:
            _jax.part(module, *names)
        except UnsupportedVersionError:
            missing.append(f"{module}.{names[0]}")
    section = "Private parts of JAX that penstock uses"
    if missing:
        yield Finding(section, "all", "warning", f"this JAX lacks {', '.join(missing)}", JAX.install)
    else:
        yield Finding(section, "all", "ok", f"{len(_jax.PARTS)} of {len(_jax.PARTS)} are here")
