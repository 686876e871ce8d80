"""Options find the run that they continue, and its settings."""

import json
import os

import pytest

from penstock.errors import CannotStartError
from penstock.recipes.run_folder import find_run, find_settings


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Make runs of two recipes, the newest first, and something else."""
    monkeypatch.chdir(tmp_path)
    for age, (name, recipe) in enumerate([("book", "text"), ("wide", "digits"), ("text-1", "text"), ("digits-9", "digits")]):
        folder = tmp_path / "runs" / name
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "recipe.json").write_text(json.dumps({"recipe": recipe, "settings": {"steps": 7, "seed": 1}}))
        os.utime(folder / "recipe.json", (1e9 - age, 1e9 - age))
    for name, content in (("broken", "{"), ("empty", ""), ("other", "[]"), ("text-2", None)):
        (tmp_path / "runs" / name).mkdir()
        if content is not None:
            (tmp_path / "runs" / name / "recipe.json").write_text(content)
    return tmp_path / "runs"


@pytest.mark.parametrize(("recipe", "name"), [("text", "book"), ("digits", "wide")])
def test_the_newest_run_of_a_recipe_is_found_by_any_name(runs, recipe, name):
    assert find_run(recipe, None, True).name == name
    assert find_run(recipe, None, False) is None


@pytest.mark.parametrize(
    ("out", "resume", "message"),
    [
        ("runs/wide", False, "--out runs/wide: holds a run of penstock train digits; name another folder"),
        ("runs/wide", True, "--out runs/wide: holds a run of penstock train digits"),
        ("runs/text-2", True, "--out runs/text-2: there is no run to continue; leave out --resume"),
        ("runs/broken", True, "--out runs/broken: there is no run to continue"),
        ("no/such", True, "--out no/such: there is no run to continue"),
    ],
)
def test_a_folder_without_a_run_of_the_recipe_is_refused(runs, out, resume, message):
    with pytest.raises(CannotStartError, match=message):
        find_run("text", out, resume)


def test_a_run_keeps_its_settings_but_for_those_that_may_change(runs):
    run = runs / "book"
    (run / "checkpoints/step-5").mkdir()
    assert find_settings(run, {"steps": None, "seed": None}) == {"steps": 7, "seed": 1}
    assert find_settings(run, {"steps": 9, "seed": 1}) == {"steps": 9, "seed": 1}
    assert find_settings(run, {"steps": 9}) == {"steps": 9}  # a setting of another version is left out
    assert find_settings(None, {"steps": 9, "seed": None}) == {"steps": 9}
    with pytest.raises(CannotStartError, match=r"book: belongs to another run: seed was 1 and is 2\. Name another folder"):
        find_settings(run, {"steps": 9, "seed": 2})


def test_a_run_that_saved_nothing_takes_other_settings(runs):
    assert find_settings(runs / "book", {"steps": 9, "seed": 2}) == {"steps": 9, "seed": 2}
