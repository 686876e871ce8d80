"""Options and fixtures that the tests of both distributions share."""

from __future__ import annotations

import gc
import os
import re
import shutil
from collections.abc import Generator, Iterator
from importlib.util import find_spec

import hypothesis
import jax
import numpy as np
import pytest
from tests.extras import in_an_extra, remedy, require

from penstock._jaxlib_faults import CASES, Outcome, keep

jax.config.update("jax_num_cpu_devices", 8)
os.environ.setdefault("KERAS_BACKEND", "jax")  # before any test imports Keras, in whichever order tests are given

# A deadline, or a limit for how long examples take to make, would be a timing asserted in a test, and fail on a busy machine.
hypothesis.settings.register_profile("untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the slow tests too")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--all"):
        config.option.markexpr = ""


@pytest.fixture(autouse=True)
def _names_of_doctests(doctest_namespace):
    """Give the examples in docstrings the names that they use without importing them."""
    import penstock as ps

    doctest_namespace.update({"np": np, "ps": ps})


@pytest.fixture
def refusals_name_no_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse steps without a search for what would fit instead, which takes seconds and is tested by itself."""
    monkeypatch.setattr("penstock.shard.planning.find_options", lambda *_: ("", {}))


# Runs in an interpreter of its own, which has what it imports; collecting its doctests would import it here.
collect_ignore = ["bench/penstock_bench/suites/frameworks/xla_trainer.py"]

collect_ignore_glob = [
    "bench/scripts/*",  # programs, which import their neighbours
    # Keeps TensorFlow and others out of the processes of its suite; collecting its doctests would keep them out of this one.
    "bench/penstock_bench/suites/keras/*",
    # Each needs packages of the extra `outside`, which is not part of `test`.
    "bench/penstock_bench/suites/shard/outside/[!_]*",
    # A module whose import failed stays half imported, so that the next one that imports it fails with another error.
    *([] if find_spec("keras") else ["src/penstock/keras/*"]),
]


class _FailuresAreShownAtOnce:
    """Print a failure when it happens, and not only at the end, which a run that is killed for its time does not reach."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._terminal.ensure_newline()
            self._terminal.line(f"{report.nodeid} failed in its {report.when}")
            self._terminal.line(report.longreprtext)


def pytest_sessionstart(session: pytest.Session) -> None:
    plugins = session.config.pluginmanager
    terminal = plugins.get_plugin("terminalreporter")
    if terminal is not None and not hasattr(session.config, "workerinput"):
        plugins.register(_FailuresAreShownAtOnce(terminal))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skip a file that imports an optional library which is not installed; the reason names the extra that has it."""
    report = yield
    missing = re.search(r"^E +ModuleNotFoundError: No module named '(\w+)", report.longreprtext, re.MULTILINE)
    if report.failed and missing and in_an_extra(missing[1]):
        reason = f"Skipped: needs {missing[1]}: {remedy(missing[1])}"
        report.outcome, report.longrepr = "skipped", (str(collector.path), 1, reason)
    return report


def pytest_collection_finish() -> None:
    """Leave what was imported out of later collections of garbage: they took a fifth of the time of the quick tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _settings_of_jax_are_put_back() -> Iterator[None]:
    """Undo the settings of JAX that a test made; a variant of a benchmark makes some for its own process."""
    before = dict(jax.config.values)
    yield
    for name, value in jax.config.values.items():
        if value != before[name]:
            jax.config.update(name, before[name])


@pytest.fixture(autouse=True, scope="module")
def _programs_are_let_go() -> Iterator[None]:
    """Free the programs of a module's tests. Linux lets a process have 65,530 memory maps, and each program has several.

    Beyond them, the compiler ends the process with a segmentation fault.
    """
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(autouse=True, scope="session")
def _commands_take_this_jaxlib_for_right(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let commands find no known faults of jaxlib, as tests read what they print. tests/test_jaxlib_faults.py is about faults."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        keep([Outcome(case.name, case.link, case.remedy, "right", "taken for right") for case in CASES])
        yield


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    """Chromium, with a profile of its own and a folder for downloads; the test is skipped without it."""
    webdriver = require("selenium.webdriver")
    names = ("chromium", "chromium-browser", "google-chrome")
    programs = [program for program in map(shutil.which, names) if program]
    driver = shutil.which("chromedriver")
    if not programs or not driver:
        pytest.skip("pages are tested in a browser: install chromium and chromedriver (in Debian: chromium chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = programs[0]
    for switch in (
        "headless",
        "no-sandbox",
        "disable-gpu",
        "disable-dev-shm-usage",
        "disable-quic",
        "no-first-run",
        "disable-background-networking",
        "disable-component-update",
        "disable-sync",
        f"user-data-dir={tmp_path_factory.mktemp('profile')}",
    ):
        options.add_argument(f"--{switch}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield chrome
    chrome.quit()
