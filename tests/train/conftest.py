"""Fixtures that the tests of training share."""

import jax
import pytest
from tests.train.training import fit


@pytest.fixture(autouse=True, scope="module")
def _programs_are_compiled_fast():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="module")
def straight():
    """The state after 40 steps in one go."""
    return fit(40)
