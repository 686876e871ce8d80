"""Import Keras on JAX as fast as possible: all modules of this suite import Keras and JAX from here."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from penstock_bench.model import VerificationError
from penstock_bench.suites.frameworks.trainer import check_device, compile_cache

SEED = 20250601

# Keras and Keras Hub import these if they are installed, which takes longer than the timed part, and do not use them here. They
# are optional, so these processes act as if they were not installed.
_UNUSED = ("tensorflow", "tensorflow_text", "sklearn", "grain", "matplotlib", "pandas")

os.environ["KERAS_BACKEND"] = "jax"
for _name in _UNUSED:
    sys.modules.setdefault(_name, None)  # type: ignore[arg-type]  # Python then raises ModuleNotFoundError

jax: Any = importlib.import_module("jax")
keras: Any = importlib.import_module("keras")


def configure() -> None:
    """Configure JAX and Keras for a run, in the same way in every process."""
    if keras.backend.backend() != "jax":
        raise VerificationError(f"KERAS_BACKEND is {keras.backend.backend()!r}: this suite is about Keras on JAX")
    check_device("JAX", on_gpu=jax.devices()[0].platform != "cpu")
    keras.config.set_floatx("float32")  # whatever the user's ~/.keras says
    keras.config.set_image_data_format("channels_last")
    keras.utils.set_random_seed(SEED)
    if cache := compile_cache("jax"):
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
