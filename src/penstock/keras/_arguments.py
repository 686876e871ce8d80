"""Read the arguments of `AutoShardDistribution`: meshes and devices of Keras or of JAX, and a sample of the data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.sharding import Mesh
from keras.src.distribution.distribution_lib import DeviceMesh

from penstock.keras._model_step import abstract_batch


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
      ValueError: it is empty, or a device does not exist.
    """
    from keras.src.backend.jax.distribution_lib import _to_backend_device

    if isinstance(given, (str, int)) or not hasattr(given, "__iter__"):
        raise TypeError(f'devices={given!r} is not a list of devices, such as jax.devices() or ["cpu:0", "cpu:1"]')
    found = [_to_backend_device(each) for each in given]
    if not found:
        raise ValueError("devices is empty; a plan needs at least one device")
    return found


def read_batch(given: Any, usage: str) -> Any:
    """Return the shapes and dtypes of a batch.

    Args:
      given: the batch, or None.
      usage: the call with a batch, for the message.

    Raises:
      ValueError: there is none.
      TypeError: a leaf is not an array.
    """
    if given is None:
        raise ValueError(
            "the shapes of the layers and the cost of a step depend on the data, and there is no sample: give one batch as fit "
            f"gets it, {usage}. Shapes are enough, such as jax.ShapeDtypeStruct((32, 128), 'int32')"
        )
    return abstract_batch(given)
