from __future__ import annotations

import importlib.metadata
import importlib.util

import pytest
from tests.extras import require

from penstock_bench.progress import lacks
from penstock_bench.suites.shard import steps
from penstock_bench.suites.shard.outside import OUTSIDE
from penstock_bench.suites.shard.task import Task
from penstock_bench.suites.shard.workload import plans_workload
from penstock_bench.suites.shard.zoo import ZOO


def variant(name: str):
    (found,) = plans_workload([Task(name, "2x4", suite="outside")]).variants
    return found


@pytest.fixture
def installed(monkeypatch):
    """Say which packages are installed, with their versions."""

    def say(**versions: str) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in versions or None)
        monkeypatch.setattr(importlib.metadata, "version", versions.__getitem__)

    return say


def test_suites_have_the_names_of_their_steps():
    assert (steps.names("zoo"), steps.names("outside")) == (ZOO, OUTSIDE)


@pytest.mark.parametrize(("suite", "name"), [("zoo", "mlp"), ("outside", "equinox-gru")])
def test_a_step_is_loaded_by_its_name(suite, name):
    if suite == "outside":
        require("equinox")
    assert steps.load(suite, name).name == name


def test_a_step_whose_packages_are_missing_is_named_with_what_to_install(installed):
    installed(optax="0.2.8", flax="0.12")
    assert lacks(variant("haiku-lstm")).command == "pip install dm-haiku"
    assert lacks(variant("bert")).command == 'pip install "transformers==4.46.*"'


def test_a_release_without_the_models_is_named_with_what_to_install(installed):
    installed(optax="0.2.8", flax="0.12", transformers="5.1.0")
    assert lacks(variant("bert")).reason == 'transformers 5.1.0 has no models in Flax: pip install -e "bench[outside]"'
    installed(optax="0.2.8", flax="0.12", transformers="4.46.3")
    assert lacks(variant("bert")) is None
