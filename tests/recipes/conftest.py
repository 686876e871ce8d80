"""A fixture that the tests of recipes share."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def _programs_are_compiled_fast():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
