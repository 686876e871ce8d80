"""List the known faults of jaxlib, and find out which of them this release has.

A `Fault` is one that penstock works around where it is `present`. `tests/shard/test_faults.py` reproduces each one and compares
the outcome with `fixed`, so a release that no longer needs a workaround is noticed.

A `Case` is a program that some releases compute wrongly or crash on, from a report to JAX's developers. It runs in a process of
its own, so a crash or a hang ends only that process, and this process starts no JAX backend. The outcomes are kept on disk by
jaxlib, processor and XLA flags, so that a command can warn without running the programs again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock._atomic_write import replace
from penstock._cache_folder import user_cache
from penstock._versions import JAX, installed, numbers, untested

if TYPE_CHECKING:
    from penstock._versions import Version

# The faults that penstock works around.


@dataclass(frozen=True)
class Fault:
    """A fault of XLA.

    Attributes:
      what: the wrong behaviour.
      instead: what penstock does to avoid it.
      where: the file and function of the workaround.
      fixed: the first release of jaxlib without it, as (major, minor); None while there is none.
    """

    what: str
    instead: str
    where: str
    fixed: Version | None = None

    @property
    def present(self) -> bool:
        """Return whether the installed jaxlib has the fault."""
        version = installed("jaxlib")
        return self.fixed is None or version is None or numbers(version)[:2] < self.fixed


SCATTER_OF_A_SLICE = Fault(
    "On the CPU, a scatter into an array that was cut to a device's shard gives wrong values: XLA fuses the two.",
    "An optimisation barrier between the cut and the scatter.",
    "shard/apply/sharding_constraints.py, _Evaluation.evaluate",
    fixed=(0, 12),
)
PATCHES_SHARDED_TWICE = Fault(
    "A convolution of windows that do not overlap (patches) gives wrong values where positions are sharded over one mesh axis "
    "and output features over another.",
    "Plans leave the positions of such a convolution unsharded.",
    "shard/trace/rules.py, conv_general_dilated, which then needs a factor for them",
)
DENSE_DEPTHWISE_GRADIENT = Fault(
    "On the CPU, the gradient of a depthwise kernel is computed for every pair of features, of which all but the equal ones are "
    "thrown away.",
    "Plans count the FLOPs of the dense convolution.",
    "shard/trace/flops.py, _convolution_flops",
)
GATHERED_TRANSFORM = Fault(
    "The partitioner gathers the batch of a Fourier transform, though its transforms are independent.",
    "Plans leave the batch of a Fourier transform unsharded.",
    "shard/trace/rules.py, fft",
    fixed=(0, 12),
)
FAULTS = (SCATTER_OF_A_SLICE, PATCHES_SHARDED_TWICE, DENSE_DEPTHWISE_GRADIENT, GATHERED_TRANSFORM)

# The programs that show whether this release has other faults.

_TOLERANCE = 1e-4  # relative; float32 sums of ten terms differ by 1e-6, the wrong values by 1e-3 and more
_SECONDS = 60.0  # a case takes about 1 s, and ten times as long where other programs use all cores

# Signals that a program causes itself. Others come from outside, such as SIGKILL if memory is short.
_CRASHES = frozenset((signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE))

UNKNOWN = "if that is no fault of XLA_FLAGS or of the installation, try again when the machine is less busy"

_BEFORE = "import jax, jax.numpy as jnp, numpy as np\n"
_AFTER = """
difference = np.abs(np.asarray(got, float) - expected).max() / np.abs(expected).max()
print("difference", float(np.nan_to_num(difference, nan=np.inf)), flush=True)
"""


@dataclass(frozen=True)
class Case:
    """A program with a known result.

    Attributes:
      name: a description of the computation.
      link: the report to JAX's developers.
      program: lines that set `got`, computed by JAX, and `expected`, computed by NumPy; `jax`, `jnp` and `np` are imported.
      remedy: the advice for a jaxlib that fails.
      fails: the releases of jaxlib that were observed to fail, with the verdict. All others in the range were observed to be
        right.
    """

    name: str
    link: str
    program: str
    remedy: str
    fails: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case.

    Attributes:
      name, link, remedy: as in the case.
      verdict: "right", "wrong", "crash", or "unknown" if it did not end in time or could not be run.
      detail: the largest relative difference, the signal, or the reason for an unknown verdict.
    """

    name: str
    link: str
    remedy: str
    verdict: str
    detail: str

    @property
    def fails(self) -> bool:
        """Return whether this jaxlib computes the case wrongly or crashes on it."""
        return self.verdict in ("wrong", "crash")


YNNPACK = "--xla_cpu_experimental_ynn_fusion_type"  # the flag of XLA that names the kinds of YNNPACK fusions; empty for none
_WITHOUT_YNNPACK = (
    f'use another jaxlib (pip install "{JAX.requirement},!=0.10.2,!=0.11.0"), or start with penstock run, or set '
    f'XLA_FLAGS="$XLA_FLAGS {YNNPACK}=" before JAX starts'
)

CASES = (
    Case(
        "a product under vmap, then a sum",
        "https://github.com/jax-ml/jax/issues/39103",
        """m, x = jnp.eye(3), np.zeros((32_769, 3), "f"); x[:, 0] = np.arange(32_769)
got = jax.jit(jax.vmap(lambda row: jnp.sum((m @ row) ** 2)))(x)
expected = (x**2).sum(1)""",
        _WITHOUT_YNNPACK,
        (("0.10.2", "wrong"),),
    ),
    Case(
        "a sum over one of eight dimensions",
        "https://github.com/jax-ml/jax/issues/39257",
        """a, b = np.ones((10, 4, 6), "f"), np.ones((10, 4, 6, 9, 9, 9, 9, 9), "f")
got = jax.jit(lambda a, b: jnp.log(jnp.maximum(jnp.sum(a[..., None, None, None, None, None] * b, axis=2), 1e-9)))(a, b)
expected = np.full((10, 4, 9, 9, 9, 9, 9), np.log(6))""",
        _WITHOUT_YNNPACK,
        (("0.10.2", "crash"), ("0.11.0", "crash")),
    ),
    Case(
        "a sum over one of seven dimensions, another of which is 1",
        "https://github.com/jax-ml/jax/issues/40412",
        """a, b = np.full((2, 3, 1, 2, 2, 8, 8, 8), 2, "f")
got = jax.jit(lambda a, b: jnp.sum(a * b, axis=3))(a, b)
expected = (a * b).sum(3)""",
        _WITHOUT_YNNPACK,
        (("0.10.2", "crash"),),
    ),
    Case(
        "the arctangent of 200 numbers",
        "https://github.com/jax-ml/jax/issues/39352",
        """x = np.linspace(-3, 3, 200, dtype="f")
got = jnp.arctan(x)
expected = np.arctan(x)""",
        f'use another jaxlib: pip install "{JAX.requirement},!=0.10.2"',
    ),
)


def run(cases: Sequence[Case] = CASES, seconds: float = _SECONDS) -> list[Outcome]:
    """Run cases in parallel on the CPU, each in a process of its own. A case that takes longer than `seconds` is unknown."""
    deadline = time.monotonic() + seconds
    processes = []
    try:
        for case in cases:
            processes.append(_start(case))
        return [_outcome(case, process, deadline, seconds) for case, process in zip(cases, processes, strict=True)]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


_found: dict[str, list[Outcome]] = {}  # the outcomes that `known` has returned in this process


def known(cases: Sequence[Case] = CASES) -> list[Outcome]:
    """Return the outcomes for this jaxlib, processor and XLA flags from disk; run the cases if there are none.

    A process reads the disk once. Outcomes are written to disk only if none is unknown.
    """
    about = _about(cases)
    if about not in _found:
        kept = _read(_kept_at(about), cases)
        _found[about] = run(cases) if kept is None else kept
        if kept is None:
            keep(_found[about], cases)
    return _found[about]


def keep(outcomes: Sequence[Outcome], cases: Sequence[Case] = CASES) -> None:
    """Write outcomes to disk for `known`, if none is unknown."""
    path = _kept_at(_about(cases))
    if path is None or any(outcome.verdict == "unknown" for outcome in outcomes):
        return
    with contextlib.suppress(OSError):  # a folder that is not writable costs the next command some seconds
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, json.dumps([asdict(outcome) for outcome in outcomes]))


def fails_with_ynnpack(version: str | None) -> bool:
    """Return whether a fault of YNNPACK fusions is known in this version of jaxlib."""
    return any(each == version for case in CASES if case.remedy == _WITHOUT_YNNPACK for each, _ in case.fails)


def warn_of_known_faults() -> None:
    """Print a warning to standard error if this jaxlib fails known cases, and one for each version that is not tested."""
    for line in (*untested(), warning(known())):
        if line:
            print(f"penstock: warning: {line}", file=sys.stderr)


def warning(outcomes: Sequence[Outcome]) -> str | None:
    """Return one line that warns of cases that this jaxlib fails on the CPU, or that are unknown; None if all are right."""
    here = f"jaxlib {installed('jaxlib')}"
    if failing := [outcome for outcome in outcomes if outcome.fails]:
        failures = ", ".join(f"jax#{outcome.link.rpartition('/')[2]} {outcome.verdict}" for outcome in failing)
        return f"{here} fails known cases on the CPU ({failures}): {failing[0].remedy}; penstock doctor says more"
    if unknown := [outcome for outcome in outcomes if outcome.verdict == "unknown"]:
        return f"whether {here} computes known cases right is unknown: {unknown[0].detail}; penstock doctor says more"
    return None


def _start(case: Case) -> subprocess.Popen[str]:
    # The child uses one CPU device, whatever the settings of this process. It inherits the XLA flags, which may be the remedy.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")} | {"JAX_PLATFORMS": "cpu"}
    command, pipe = [sys.executable, "-P", "-c", _BEFORE + case.program + _AFTER], subprocess.PIPE
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, env=environment)


def _outcome(case: Case, process: subprocess.Popen[str], deadline: float, seconds: float) -> Outcome:
    verdict, detail = "unknown", f"no end within {seconds:g} s"
    with contextlib.suppress(subprocess.TimeoutExpired):
        printed, errors = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
        if process.returncode < 0:
            verdict = "crash" if -process.returncode in _CRASHES else "unknown"
            detail = f"the process died of signal {-process.returncode}"
        elif process.returncode > 0:
            detail = errors.strip().splitlines()[-1] if errors.strip() else f"the process ended with status {process.returncode}"
        else:
            difference = float(printed.split()[-1])
            verdict = "right" if difference <= _TOLERANCE else "wrong"
            detail = f"largest relative difference {difference:.2g}"
    return Outcome(case.name, case.link, case.remedy, verdict, detail)


def _about(cases: Sequence[Case]) -> str:
    """Return a text of all that outcomes depend on (JAX, processor, flags, cases), and of the folder in which they are kept."""
    flags = (os.environ.get("XLA_FLAGS"), os.environ.get("XDG_CACHE_HOME"), os.environ.get("HOME"))
    return repr((installed("jax"), installed("jaxlib"), processor(), *flags, *cases))


def _kept_at(about: str) -> Path | None:
    """Return the path of the file for outcomes; None for a user without a home."""
    cache = user_cache()
    return None if cache is None else cache / f"known-cases-{hashlib.sha256(about.encode()).hexdigest()[:16]}.json"


def processor() -> str:
    """Return the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _read(path: Path | None, cases: Sequence[Case]) -> list[Outcome] | None:
    if path is None:
        return None
    try:
        outcomes = [Outcome(**each) for each in json.loads(path.read_text())]
    except (OSError, ValueError, TypeError):  # no file, or not one that `keep` wrote: the cases are run
        return None
    return outcomes if [outcome.name for outcome in outcomes] == [case.name for case in cases] else None
