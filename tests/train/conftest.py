"""Fixtures that the tests of training share."""

import pytest
from tests.train.training import fit


@pytest.fixture(scope="session")
def straight():
    """The state after 40 steps in one go."""
    return fit(40)
