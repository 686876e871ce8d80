"""A configuration of a backbone: the arguments of its class, which may hold other models, and the arrays that it reads."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock_bench.suites.shard.hub.arrays import Array

_MODELS = "keras_hub.src.models"  # Keras Hub exports its backbones, but not all of their parts


@dataclass(frozen=True)
class Nested:
    """A layer or a model that is an argument of another.

    Attributes:
      name: module and class, as "vae.vae_backbone:VAEBackbone".
      arguments: of the class.
      as_configuration: whether the other takes what `get_config` returns, rather than the object.
    """

    name: str
    arguments: Mapping[str, Any]
    as_configuration: bool = False


@dataclass(frozen=True)
class Configuration:
    """The arguments of a backbone's class, and its inputs by their names.

    Attributes:
      task: the class of a task, for a backbone whose own outputs leave out parts that it holds.
      calls: methods to call on a new backbone, with their arguments.
    """

    arguments: Mapping[str, Any]
    inputs: Mapping[str, Array]
    task: str | None = None
    calls: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


def resolve(value: Any) -> Any:
    """Return the value with each `Nested` in it replaced by its object."""
    if isinstance(value, Nested):
        module, name = value.name.split(":")
        made = getattr(importlib.import_module(f"{_MODELS}.{module}"), name)(**resolve(value.arguments))
        return made.get_config() if value.as_configuration else made
    if isinstance(value, Mapping):
        return {name: resolve(each) for name, each in value.items()}
    return [resolve(each) for each in value] if isinstance(value, list) else value
