"""`import penstock` is light: no backend, no optional library. Imports run downhill, and never in a circle."""

import ast
import functools
import importlib
import pkgutil
import subprocess
import sys
import types
from pathlib import Path

import penstock

ROOT = Path(penstock.__file__).parent
ROAD = ["data", "_feed", "shard", "train", "keras", "ray", "recipes"]
"""The folders of the package: each imports from those before it only."""
ROOMS = [
    *("errors", "unknown_costs", "units", "garbage"),
    *("mesh", "trace", "graph", "search", "apply", "hlo"),
    *("own_copy", "record", "arguments", "write_record", "axis_names", "uneven_batch", "jit"),
    *("compile_plan", "verify", "compiler", "refusals", "left_to_compiler", "memory_check", "serialization", "present"),
    *("planned", "_plan", "command"),
]
"""The files and folders of `shard/`, likewise."""
OPTIONAL = [
    "flax",
    "optax",
    "sklearn",
    "pyarrow",
    "fsspec",
    "s3fs",
    "aiohttp",
    "grain",
    "torch",
    "tensorflow",
    "datasets",
    "array_record",
    "h5py",
    "matplotlib",
    "rich",
    "PIL",
    "cv2",
    "simplejpeg",
    "keras",
    "ray",
]


@functools.cache
def imports() -> dict[str, set[str]]:
    """Return, for each module of penstock, those that it imports anywhere in it, also inside of functions."""
    files = {}
    for file in ROOT.rglob("*.py"):
        name = ".".join(["penstock", *file.relative_to(ROOT).with_suffix("").parts])
        files[name.removesuffix(".__init__")] = file
    found: dict[str, set[str]] = {name: set() for name in files}
    for name, file in files.items():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                found[name] |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
            elif isinstance(node, ast.Import):
                found[name] |= {alias.name for alias in node.names}
        submodules = {each for each in found[name] & set(files) if each != name}
        # `from package import module` needs the module, and the package only where a name is taken from it.
        found[name] = {each for each in submodules if not any(other.startswith(f"{each}.") for other in submodules)}
    return found


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


def test_imports_run_downhill():
    for package, order in (("penstock", ROAD), ("penstock.shard", ROOMS)):
        prefix = f"{package}."
        for name, imported in imports().items():
            here = name.removeprefix(prefix).split(".")[0] if name.startswith(prefix) else ""
            for each in imported if here in order else ():
                there = each.removeprefix(prefix).split(".")[0] if each.startswith(prefix) else ""
                if there in order:
                    assert order.index(there) <= order.index(here), f"{name} imports {each}"


def test_every_file_of_the_planner_has_its_place_in_the_order():
    folder = ROOT / "shard"
    present = {each.stem for each in folder.iterdir() if each.suffix == ".py" or (each / "__init__.py").exists()}
    assert present - {"__init__"} == set(ROOMS)


def test_no_module_imports_itself_by_way_of_others():
    graph = imports()
    done: set[str] = set()

    def visit(name: str, road: tuple[str, ...]) -> None:
        assert name not in road, f"a circle of imports: {' → '.join((*road[road.index(name) :], name))}"
        if name not in done:
            for each in sorted(graph[name]):
                visit(each, (*road, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_no_public_name_hides_a_module():
    """`import penstock.feed as f` gave a function, where a package was meant."""
    for info in pkgutil.walk_packages([str(ROOT)], "penstock."):
        parent, _, name = info.name.rpartition(".")
        package = importlib.import_module(parent) if not parent.startswith("penstock.keras") else None
        value = getattr(package, name, None)
        assert value is None or isinstance(value, types.ModuleType), f"{info.name} is hidden by {value!r}"


def test_the_public_names_are_those_of_the_design():
    assert {"Loader", "Source", "feed", "Feed", "per_record", "pad_to", "plan", "Plan", "PlanError"} <= set(vars(penstock))
