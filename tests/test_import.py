"""`import penstock` is light: no backend, no optional library."""

import importlib
import inspect
import pickle
import pkgutil
import subprocess
import sys
import types
from pathlib import Path

import numpy as np

import penstock

ROOT = Path(penstock.__file__).parent
OPTIONAL = [
    *("flax", "optax", "sklearn", "pyarrow", "fsspec", "s3fs", "aiohttp", "grain", "torch", "tensorflow"),
    *("datasets", "array_record", "h5py", "matplotlib", "rich", "PIL", "cv2", "simplejpeg", "keras", "ray"),
]


def test_importing_and_the_command_line_start_no_backend_and_load_no_optional_library():
    script = f"""
import sys, penstock
from jax._src import xla_bridge
assert not [name for name in {OPTIONAL} if name in sys.modules]
from penstock import cli
cli._parser(["plan"])
assert not [name for name in {OPTIONAL} if name in sys.modules and name != "rich"]
assert not xla_bridge.backends_are_initialized()
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_no_public_name_hides_a_module():
    for info in pkgutil.walk_packages([str(ROOT)], "penstock."):
        parent, _, name = info.name.rpartition(".")
        package = importlib.import_module(parent) if not parent.startswith("penstock.keras") else None
        value = getattr(package, name, None)
        assert value is None or isinstance(value, types.ModuleType), f"{info.name} is hidden by {value!r}"


def test_feed_is_a_package_and_a_function():
    import penstock.feed as package

    assert package is penstock.feed
    assert pickle.loads(pickle.dumps(package)) is package
    assert list(inspect.signature(package).parameters)[:2] == ["batches", "to"]
    with penstock.feed([np.arange(2)]) as batches:
        assert isinstance(batches, package.Feed)


def test_the_public_names_are_those_of_the_design():
    assert {"Loader", "Source", "feed", "Feed", "per_record", "pad_to", "plan", "Plan", "PlanError"} <= set(vars(penstock))
