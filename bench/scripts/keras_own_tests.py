"""Run Keras's own tests of its JAX trainer with threaded epochs and without, and compare the outcomes.

    python bench/scripts/keras_own_tests.py
    python bench/scripts/keras_own_tests.py trainers/trainer_test.py --json own-tests.json
    python bench/scripts/keras_own_tests.py --tests ../keras           # a checkout of Keras, for a version without tests

The package of Keras 3.15 has its tests in it, the package of 3.16 has none. `--tests` then names a checkout of Keras's
repository, as near to the version as possible. Its tests are run in a copy of the package. Tests of later changes fail in both
runs.

The tests run twice, side by side, with KERAS_JAX_EPOCH_ITERATOR=default and =threaded, on 8 virtual devices. Exit status 0: every
test ended alike, and threads of penstock read batches in the one run and not in the other. Needs what Keras's tests import:
`pip install -e ".[test]"`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from penstock._versions import keras_version
from penstock_bench import machine

_PATHS = ("trainers", "distribution", "backend/jax/trainer_test.py")

# With one device, tests of distribution are skipped or fail.
_ENVIRONMENT = {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}

# No configuration of this repository counts.
# A test that hangs ends the run and shows where its threads are; the longest takes half a minute.
_CONFIGURATION = "[pytest]\nfaulthandler_timeout = 300\nfaulthandler_exit_on_timeout = true\n"


@dataclass(frozen=True)
class Result:
    outcome: str  # "passed", "skipped" or "failed"
    readers: tuple[tuple[str, str], ...] = ()  # module of the epoch iterator, and thread that took a batch for it
    text: str = ""  # why it failed

    @property
    def by_penstock(self) -> bool:
        """Tell whether it had batches from an epoch iterator of penstock."""
        return any(module.startswith("penstock.") for module, _ in self.readers)

    @property
    def by_thread(self) -> bool:
        """Tell whether a thread of penstock read batches."""
        return any(module.startswith("penstock.") and thread.startswith("penstock-") for module, thread in self.readers)


@dataclass(frozen=True)
class Report:
    iterator: str  # module of the class in the place of Keras's JAXEpochIterator
    tests: dict[str, Result]
    keras: str = ""  # the version that was imported

    @property
    def outcomes(self) -> Counter[str]:
        return Counter(test.outcome for test in self.tests.values())


@dataclass(frozen=True)
class Comparison:
    differences: dict[str, tuple[str, str]]  # by test: how it ended by default and threaded
    problems: tuple[str, ...]  # why the two runs are not what was to be compared

    @property
    def ok(self) -> bool:
        return not self.differences and not self.problems


def compare(default: Report, threaded: Report) -> Comparison:
    """Compare two runs: each test must have the same outcome in both, and only one run may be threaded."""
    ends = {
        name: tuple(report.tests[name].outcome if name in report.tests else "absent" for report in (default, threaded))
        for name in default.tests | threaded.tests
    }
    elsewhere = [
        name
        for name, test in default.tests.items()
        if test.readers and name in threaded.tests and not threaded.tests[name].by_penstock
    ]
    faults = {
        f"Keras {default.keras} by default, {threaded.keras} threaded": default.keras != threaded.keras,
        "no test passed": not default.outcomes["passed"],
        f"default run: the epoch iterator is of {default.iterator}": default.iterator.startswith("penstock."),
        "default run: penstock read batches": any(test.by_penstock for test in default.tests.values()),
        f"threaded run: the epoch iterator is of {threaded.iterator}": not threaded.iterator.startswith("penstock."),
        f"threaded run: Keras's own iterator read for {', '.join(elsewhere)}": bool(elsewhere),
        "threaded run: no thread of penstock read a batch": not any(test.by_thread for test in threaded.tests.values()),
    }
    return Comparison(
        {name: pair for name, pair in ends.items() if len(set(pair)) > 1},
        tuple(fault for fault, present in faults.items() if present),
    )


class _Session:
    """A process that runs Keras's tests. It starts immediately."""

    def __init__(self, choice: str, package: Path, paths: list[str], folder: Path):
        self.choice, self._report, self._output = choice, folder / f"{choice}.json", folder / f"{choice}.txt"
        configuration, home = folder / "pytest.ini", folder / choice
        configuration.write_text(_CONFIGURATION)
        home.mkdir()
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "penstock.keras", "-p", "keras_watch"]
        command += ["-c", configuration, "--rootdir", package.parent, "--confcutdir", package]
        command += ["--continue-on-collection-errors", "--watch-report", self._report]
        command += (package / "src" / path for path in paths)
        path = os.pathsep.join([str(Path(__file__).parent), str(package.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
        environment |= _ENVIRONMENT | {"KERAS_JAX_EPOCH_ITERATOR": choice, "KERAS_HOME": str(home), "PYTHONPATH": path}
        self._begin = time.perf_counter()
        with self._output.open("w") as output:
            self.process = subprocess.Popen(command, env=environment, cwd=home, stdout=output, stderr=subprocess.STDOUT)

    def report(self) -> tuple[Report, float]:
        """Wait for the report, and return it with the seconds that it took.

        Raises:
          RuntimeError: pytest did not come to an end.
        """
        status = self.process.wait()
        seconds = time.perf_counter() - self._begin
        if status not in (0, 1) or not self._report.exists():
            tail = "\n".join(self._output.read_text().splitlines()[-150:])
            raise RuntimeError(f"the {self.choice} run ended with exit status {status}, and no report to trust:\n{tail}")
        found = json.loads(self._report.read_text())
        tests = {
            name: Result(test["outcome"], tuple((module, thread) for module, thread in test["readers"]), test["text"])
            for name, test in found["tests"].items()
        }
        return Report(found["iterator"], tests, found["keras"]), seconds


def package_with_tests(paths: list[str], checkout: Path | None, folder: Path) -> Path:
    """Return the package `keras` with the tests of those paths in it: the installed one, or a copy with a checkout's tests.

    Raises:
      SystemExit: there are no tests to run.
    """
    (installed,) = map(Path, importlib.util.find_spec("keras").submodule_search_locations)
    if checkout is None:
        missing = [path for path in paths if not _tests(installed / "src" / path)]
        if missing:
            sys.exit(
                f"Keras {keras_version()} in {installed} has no tests in {', '.join(missing)}: give --tests a checkout of "
                "https://github.com/keras-team/keras, as near to that version as can be had"
            )
        return installed
    package = folder / "keras"
    shutil.copytree(installed, package, ignore=shutil.ignore_patterns("__pycache__", "*_test.py"))
    for path in paths:
        found = _tests(checkout / "keras" / "src" / path)
        if not found:
            sys.exit(f"{checkout} has no tests in keras/src/{path}: give --tests the folder of a checkout of Keras's repository")
        for test in found:
            shutil.copy(test, package / test.relative_to(checkout / "keras"))
    return package


def _tests(path: Path) -> list[Path]:
    return [path] if path.is_file() else sorted(path.rglob("*_test.py"))


def run(paths: list[str], checkout: Path | None = None) -> dict[str, tuple[Report, float]]:
    """Run the tests twice; return the reports and seconds by choice of the epoch iterator."""
    with tempfile.TemporaryDirectory() as folder:
        package = package_with_tests(paths, checkout, Path(folder))
        sessions: list[_Session] = []
        try:
            sessions += (_Session(choice, package, paths, Path(folder)) for choice in ("default", "threaded"))
            return {session.choice: session.report() for session in sessions}
        finally:
            for session in sessions:
                session.process.kill()
                session.process.wait()


def _table(runs: dict[str, tuple[Report, float]]) -> Table:
    reports = [report for report, _ in runs.values()]
    table = Table("", title=f"Keras {reports[0].keras}: its own tests, 8 virtual devices")
    for choice in runs:
        table.add_column(choice, justify="right")
    for outcome in ("passed", "skipped", "failed"):
        table.add_row(outcome, *(str(report.outcomes[outcome]) for report in reports))
    counts = {
        "tests that read epochs": lambda test: bool(test.readers),
        "… through penstock's iterator": lambda test: test.by_penstock,
        "… on a thread of penstock": lambda test: test.by_thread,
    }
    for name, counted in counts.items():
        table.add_row(name, *(str(sum(map(counted, report.tests.values()))) for report in reports))
    table.add_row("seconds", *(f"{seconds:.0f}" for _, seconds in runs.values()))
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="*", default=_PATHS, help="of tests, in keras/src (default: %(default)s)")
    parser.add_argument("--tests", type=Path, help="a checkout of Keras whose tests to run (default: those in its package)")
    parser.add_argument("--json", type=Path, help="write both reports")
    args = parser.parse_args()
    runs = run(args.paths, args.tests)
    default, threaded = (report for report, _ in runs.values())
    comparison = compare(default, threaded)
    console = Console()
    console.print(_table(runs))
    for name, (before, after) in comparison.differences.items():
        console.print(f"{name}: {before} by default, {after} threaded", markup=False, soft_wrap=True)
        for report in (default, threaded):
            if name in report.tests and report.tests[name].text:
                console.print(report.tests[name].text, markup=False, highlight=False, soft_wrap=True)
    for problem in comparison.problems:
        console.print(problem, markup=False, soft_wrap=True)
    console.print("All ended alike, and one run was threaded." if comparison.ok else "NOT the same.")
    if args.json:
        everything = {
            "machine": machine.describe(),
            "ok": comparison.ok,
            "runs": {choice: asdict(report) | {"seconds": seconds} for choice, (report, seconds) in runs.items()},
        }
        args.json.write_text(json.dumps(everything, indent=1) + "\n")
    return 0 if comparison.ok else 1


if __name__ == "__main__":
    sys.exit(main())
