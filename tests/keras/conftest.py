"""Fixtures that leave JAX, Keras and the process as they were, so that other tests may run in the same process."""

import threading

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache


@pytest.fixture(scope="module", autouse=True)
def _programs_are_compiled_once(tmp_path_factory):
    """Cache compiled programs, as each test trains twice with the same ones, and compile them quickly."""
    settings = {
        "jax_compilation_cache_dir": str(tmp_path_factory.getbasetemp() / "programs"),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_disable_most_optimizations": True,
    }
    before = {name: jax.config.values[name] for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # it would be used until the end of the process


@pytest.fixture(scope="module", autouse=True)
def _keras_is_as_it_was():
    """Put back the class that data of penstock has replaced, and drop what Keras keeps from model to model."""
    import keras  # here, so that the files of this folder can be skipped without it

    from penstock.keras import replace_iterator
    from penstock.keras.session import Session

    yield
    replace_iterator._restore_original()
    Session.data_was_made = False
    keras.distribution.set_distribution(None)
    keras.backend.clear_session()


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    import penstock.keras as pk

    yield
    pk.disable_threaded_epochs()
    for thread in threading.enumerate():
        if thread.name == "penstock-signals":  # nobody waits for it
            thread.join(5)
    assert not feeding_threads()


def feeding_threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("penstock-")]
