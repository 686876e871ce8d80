import os

import jax
import numpy as np
import pytest

jax.config.update("jax_num_cpu_devices", 8)
os.environ.setdefault("KERAS_BACKEND", "jax")  # before any test imports Keras, in whichever order tests are given


@pytest.fixture(autouse=True)
def _names_of_doctests(doctest_namespace):
    """What the examples in docstrings use without importing it."""
    import penstock as ps

    doctest_namespace.update({"np": np, "ps": ps})


# Runs in an interpreter of its own, which has what it imports; collecting its doctests would import it here.
collect_ignore = ["src/penstock/bench/suites/frameworks/xla_trainer.py"]

collect_ignore_glob = [
    # Keeps TensorFlow and others out of the processes of its suite; collecting its doctests would keep them out of this one.
    "src/penstock/bench/suites/keras/*",
    # Each needs packages of the extra `outside`, which is not part of `test`.
    "src/penstock/bench/suites/shard/outside/[!_]*",
]
