"""What the tests of the Keras suite share."""

from __future__ import annotations

import importlib
import warnings

import pytest


@pytest.fixture(autouse=True, scope="session")
def _later_tests_find_all_modules() -> None:
    """Import what the suite keeps out of its processes, unless it is there already: tests that come later in this one need it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in ("tensorflow", "tensorflow_text", "sklearn", "grain", "matplotlib", "pandas"):
            importlib.import_module(name)
