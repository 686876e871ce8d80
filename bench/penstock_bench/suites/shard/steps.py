"""Find the steps of a suite by their names: of the zoo, of other packages (`outside`), or of Keras Hub (`hub`)."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from types import ModuleType
from typing import TYPE_CHECKING

from penstock_bench.suites.shard.task import LIMITS

if TYPE_CHECKING:
    from penstock_bench.suites.shard.zoo.model import Model

_NEEDS = {"zoo": ("flax", "equinox", "optax"), "keras": ("keras", "keras_hub")}
_LAST_WITH_FLAX = 4  # releases of transformers from 5 on have no models in Flax


def names(suite: str) -> tuple[str, ...]:
    """Return the names of the steps of a suite, "zoo", "outside" or "keras"."""
    found: tuple[str, ...] = getattr(_module(suite), {"zoo": "ZOO", "outside": "OUTSIDE", "keras": "BACKBONES"}[suite])
    return found


def load(suite: str, name: str) -> Model:
    """Return a step by its name.

    Raises:
      ValueError: the suite has no such step.
    """
    if suite == "keras":
        from penstock_bench.suites.shard.hub import step

        return step.load(name)
    model: Model = _module(suite).load(name)
    return model


def needs(suite: str, name: str) -> tuple[str, ...]:
    """Return the packages that a step imports, besides JAX and NumPy."""
    if suite in _NEEDS:
        return _NEEDS[suite]
    found: tuple[str, ...] = _module(suite).needs(name)
    return found


def limits(suite: str, name: str) -> tuple[str, ...]:
    """Return the limits of memory to plan a step for (`task.LIMITS`)."""
    from penstock_bench.suites.shard import hub

    return LIMITS if suite != "keras" or name in hub.DEEP else ("loose", "half")


def unsuited(suite: str, name: str) -> str:
    """Return why a step cannot run with the packages that are installed; "" if it can, or if they are missing."""
    if "transformers" not in needs(suite, name) or importlib.util.find_spec("transformers") is None:
        return ""
    version = importlib.metadata.version("transformers")
    if int(version.split(".")[0]) <= _LAST_WITH_FLAX:
        return ""
    return f'transformers {version} has no models in Flax: pip install -e "bench[outside]"'


def _module(suite: str) -> ModuleType:
    # Imported here, because it imports JAX.
    return importlib.import_module(f"penstock_bench.suites.shard.{'hub' if suite == 'keras' else suite}")
