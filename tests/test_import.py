"""`import penstock` is light: no backend, no optional library, and imports run downhill."""

import ast
import subprocess
import sys
from pathlib import Path

import penstock

ROAD = ["data", "feed", "shard", "keras", "recipes", "bench"]
OPTIONAL = [
    "flax",
    "optax",
    "pyarrow",
    "grain",
    "torch",
    "tensorflow",
    "datasets",
    "array_record",
    "h5py",
    "matplotlib",
    "rich",
    "keras",
]


def test_importing_starts_no_backend_and_loads_no_optional_library():
    script = f"""
import sys, penstock
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
assert not [name for name in {OPTIONAL} if name in sys.modules]
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_imports_run_downhill():
    root = Path(penstock.__file__).parent
    for file in root.rglob("*.py"):
        folder = file.relative_to(root).parts[0]
        if folder not in ROAD:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            modules += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for module in modules:
                parts = module.split(".")
                if parts[0] == "penstock" and len(parts) > 1 and parts[1] in ROAD:
                    assert ROAD.index(parts[1]) <= ROAD.index(folder), f"{file} imports {module}"


def test_the_public_names_are_those_of_the_design():
    assert {"Loader", "Source", "feed", "Feed", "per_record", "pad_to"} <= set(vars(penstock))
