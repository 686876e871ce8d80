"""The examples run as they stand, and find what they say. The recipes among them stay short."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples"
RECIPES = sorted((FOLDER / "recipes").glob("*.py"))
EXAMPLES = [*sorted(FOLDER.glob("*.py")), *RECIPES]
FRAMEWORKS = [FOLDER / f"plan_{name}.py" for name in ("nnx", "linen", "equinox")]
SUITES = {"own_benchmark": ["-m", "penstock", "bench"]}


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_an_example_runs(example):
    suite = SUITES.get(example.stem)
    command = [sys.executable, *suite, example, "--quick"] if suite else [sys.executable, example]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_a_recipe_has_at_most_60_lines(recipe):
    assert len(recipe.read_text().splitlines()) <= 60


@pytest.mark.parametrize("example", FRAMEWORKS, ids=lambda example: example.stem)
def test_an_example_of_a_framework_has_at_most_40_lines(example):
    assert len(example.read_text().splitlines()) <= 40


def test_the_page_of_recipes_shows_a_part_of_each():
    page = (FOLDER.parent / "docs" / "recipes.md").read_text()
    shown = re.findall(r"\]\(\.\./examples/recipes/(\w+)\.py\)\n\n```py\n(.*?)```\n", page, re.DOTALL)
    assert sorted(name for name, _ in shown) == [recipe.stem for recipe in RECIPES]
    assert [name for name, part in shown if part not in (FOLDER / "recipes" / f"{name}.py").read_text()] == []
