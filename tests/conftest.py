"""What the tests of several folders have in common."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import jax
import pytest
from selenium.webdriver import Chrome, ChromeOptions, ChromeService


@pytest.fixture(autouse=True)
def _settings_of_jax_are_put_back() -> Iterator[None]:
    """What sets JAX up for a process of its own, as a variant of a benchmark does, would otherwise decide about later tests."""
    before = dict(jax.config.values)
    yield
    for name, value in jax.config.values.items():
        if value != before[name]:
            jax.config.update(name, before[name])


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
