"""A fixture that the tests of recipes share."""

import jax
import pytest


@pytest.fixture(scope="module")
def programs_are_compiled_fast():
    """Compile without most optimizations, which pays where programs run few times."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
