import threading

import jax
import pytest


@pytest.fixture(scope="module", autouse=True)
def _programs_are_compiled_once(tmp_path_factory):
    """Cache compiled programs: each test trains twice with the same ones."""
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.getbasetemp() / "programs"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    yield
    jax.config.update("jax_compilation_cache_dir", None)


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    import penstock.keras as pk

    pk.disable_threaded_epochs()
    for thread in threading.enumerate():
        if thread.name == "penstock-signals":  # nobody waits for it
            thread.join(5)
    assert not feeding_threads()


def feeding_threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("penstock-")]
