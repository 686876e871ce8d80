"""The examples run as they stand, and find what they say. The recipes among them stay short."""

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.extras import require

FOLDER = Path(__file__).parent.parent / "examples"
RECIPES = sorted((FOLDER / "recipes").glob("*.py"))
# A benchmark runs by penstock bench, so its test is that of penstock-bench.
EXAMPLES = [each for each in (*sorted(FOLDER.glob("*.py")), *RECIPES) if each.stem != "own_benchmark"]


def imports(example: Path) -> set[str]:
    """Return the modules at the top level that an example imports."""
    nodes = list(ast.walk(ast.parse(example.read_text())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.partition(".")[0] for name in names}


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_an_example_runs(example):
    for name in sorted(imports(example)):
        if importlib.util.find_spec(name) is None:
            require(name)
    done = subprocess.run([sys.executable, example], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_recipes_have_at_most_60_lines_and_examples_of_frameworks_40():
    frameworks = {FOLDER / f"plan_{name}.py": 40 for name in ("nnx", "linen", "equinox")}
    for example, most in {**dict.fromkeys(RECIPES, 60), **frameworks}.items():
        assert len(example.read_text().splitlines()) <= most, example.name


def test_the_page_of_recipes_shows_a_part_of_each():
    page = (FOLDER.parent / "docs" / "recipes.md").read_text()
    shown = re.findall(r"\]\(\.\./examples/recipes/(\w+)\.py\)\n\n```py\n(.*?)```\n", page, re.DOTALL)
    assert sorted(name for name, _ in shown) == [recipe.stem for recipe in RECIPES]
    assert [name for name, part in shown if part not in (FOLDER / "recipes" / f"{name}.py").read_text()] == []
