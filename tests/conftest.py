"""Fixtures that the tests of several folders share."""

from __future__ import annotations

import gc
import shutil
from collections.abc import Iterator

import hypothesis
import jax
import pytest
from selenium.webdriver import Chrome, ChromeOptions, ChromeService

from penstock._doctor import jaxlib_faults

# A deadline, or a limit for how long examples take to make, would be a timing asserted in a test, and fail on a busy machine.
hypothesis.settings.register_profile("untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("untimed")


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
    """Tests of commands read what they print, which has a line more on a jaxlib with known faults. Theirs is in tests/doctor."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        jaxlib_faults.keep(
            [jaxlib_faults.Outcome(case.name, case.link, case.remedy, "right", "taken for right") for case in jaxlib_faults.CASES]
        )
        yield


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chrome]:
    """Chromium, with a profile of its own and a folder for downloads."""
    options = ChromeOptions()
    names = ("chromium", "chromium-browser", "google-chrome")
    programs = [program for program in map(shutil.which, names) if program]
    driver = shutil.which("chromedriver")
    assert programs, "pages are tested in a browser: install chromium"
    assert driver, "pages are tested in a browser: install chromedriver (in Debian: chromium-driver)"
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
    chrome = Chrome(options=options, service=ChromeService(driver))
    yield chrome
    chrome.quit()
