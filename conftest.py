import jax
import numpy as np
import pytest

jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture(autouse=True)
def _names_of_doctests(doctest_namespace):
    """What the examples in docstrings use without importing it."""
    import penstock as ps

    doctest_namespace.update({"np": np, "ps": ps})
