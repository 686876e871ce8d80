"""Read the arguments of `AutoShardDistribution`: meshes and devices of Keras or of JAX, and a sample of the data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import Mesh
from keras.src.distribution.distribution_lib import DeviceMesh

from penstock._arguments import brief
from penstock.keras._model_step import abstract_batch
from penstock.shard.mesh.shapes import refuse_repeated


def read_mesh(given: Any) -> Mesh | None:
    """Return a mesh of JAX for a mesh of Keras or of JAX; None for None.

    Args:
      given: the mesh.

    Raises:
      TypeError: it is no mesh.
    """
    if given is None or isinstance(given, Mesh):
        return given
    if isinstance(given, DeviceMesh):
        mesh: Mesh = given.backend_mesh
        return mesh
    raise TypeError(
        f"device_mesh is of type {type(given).__name__}, and a keras.distribution.DeviceMesh or a jax.sharding.Mesh is needed"
    )


def read_devices(given: Sequence[Any]) -> list[Any]:
    """Return the devices of JAX for a list of them, or of the names that Keras gives them.

    Args:
      given: the devices.

    Raises:
      TypeError: it is not such a list.
      ValueError: it is empty, has a device twice, or a device does not exist.
    """
    ordered = not isinstance(given, (str, dict, set, frozenset)) and hasattr(given, "__iter__")
    named = list(given) if ordered else []
    if not ordered or not all(isinstance(each, (str, jax.Device)) for each in named):
        raise TypeError(f'devices={brief(given)} is not a list of devices, such as jax.devices() or ["cpu:0", "cpu:1"]')
    if not named:
        raise ValueError("devices is empty; a plan needs at least one device")
    found = [_find_device(each) if isinstance(each, str) else each for each in named]
    refuse_repeated(found)
    return found


def _find_device(name: str) -> jax.Device:
    """Return the device that Keras calls "cpu:0"."""
    platform, _, number = name.partition(":")
    try:
        devices = jax.devices(platform)
    except RuntimeError:
        devices = []
    for device in devices:
        if number == str(device.id):
            return device
    there = [f"{device.platform}:{device.id}" for device in devices or jax.devices()]
    raise ValueError(f"there is no device {name!r}; there are {brief(there)}")


def read_build(given: Any) -> Callable[[], Any]:
    """Return a function that makes a model.

    Args:
      given: the function.

    Raises:
      TypeError: it is something else, such as the model.
    """
    if _is_model(given):
        raise TypeError("build is a model, and a function that returns one is needed; for a model: shard(model, (x, y))")
    if not callable(given):
        raise TypeError(f"build={brief(given)} is not a function that returns a model")
    build: Callable[[], Any] = given
    return build


def check_model(given: Any) -> None:
    """Raise TypeError if something is not a Keras model.

    Args:
      given: what should be a model.
    """
    if not _is_model(given):
        also = "; for a function that makes one: plan(build, (x, y))" if callable(given) else ""
        raise TypeError(f"model is of type {type(given).__name__}, and a keras.Model is needed{also}")


def _is_model(given: Any) -> bool:
    import keras

    return isinstance(given, keras.Model)


def read_batch(given: Any, usage: str) -> Any:
    """Return the shapes and dtypes of a batch.

    Args:
      given: the batch, or None.
      usage: the call with a batch, for the message.

    Raises:
      ValueError: there is none, it has no rows, or a dimension is unknown.
      TypeError: a leaf is not an array.
    """
    if given is None:
        raise ValueError(
            "the shapes of the layers and the cost of a step depend on the data, and there is no sample: give one batch as fit "
            f"gets it, {usage}. Shapes are enough, such as jax.ShapeDtypeStruct((32, 128), 'int32')"
        )
    batch = abstract_batch(given)
    for leaf in jax.tree_util.tree_leaves(batch):
        if leaf.shape[:1] == (0,):
            raise ValueError(
                f"the sample has no rows, but an array of shape {leaf.shape}: give one batch as fit gets it, {usage}"
            )
    return batch
