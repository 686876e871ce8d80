"""The state of Keras callbacks as values for JSON, with arrays beside them.

A callback with `get_state()` and `set_state(state)` says itself what its state is. Keras's own callbacks have neither. Their
state is what has changed since `on_train_begin`: numbers, texts and arrays, and lists and dicts of them. So settings such as a
patience remain as the script has them.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# Attributes of Keras's callbacks that they set anew. The sign of `min_delta` is changed when a monitor is first used.
_NOT_STATE = {"params", "min_delta"}

Arrays = dict[str, np.ndarray]


class CallbackStates:
    """The states of the callbacks of a `fit`, after its `on_train_begin`."""

    def __init__(self, callbacks: Sequence[Any]):
        self._callbacks = named(callbacks)
        self._begin = {name: _attributes(callback) for name, callback in self._callbacks.items() if not _has_state(callback)}

    def get(self) -> tuple[dict[str, Any], Arrays]:
        """Return the states by name, for JSON, and the arrays in them.

        Raises:
          TypeError: `get_state` returned something that cannot be saved.
        """
        arrays: Arrays = {}
        states: dict[str, Any] = {}
        for name, callback in self._callbacks.items():
            if _has_state(callback):
                states[name] = encode(callback.get_state(), arrays, name)
                continue
            states[name], begin = {}, self._begin[name]
            for attribute, value in _attributes(callback).items():
                if attribute not in begin or not _same(value, begin[attribute]):
                    states[name][attribute] = encode(value, arrays, f"{name}.{attribute}")
            if isinstance(callback, keras.callbacks.CSVLogger):
                with contextlib.suppress(OSError):
                    states[name]["(bytes)"] = [str(callback.filename), os.path.getsize(callback.filename)]
        return states, arrays

    def set(self, states: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
        """Give the callbacks the states that `get` returned. A callback without one stays as it is."""
        for name, callback in self._callbacks.items():
            if name not in states:
                continue
            if _has_state(callback):
                callback.set_state(decode(states[name], arrays))
                continue
            for attribute, value in states[name].items():
                if attribute != "(bytes)":
                    setattr(callback, attribute, decode(value, arrays))


@contextlib.contextmanager
def continued_files(callbacks: Sequence[Any], states: Mapping[str, Any]) -> Iterator[None]:
    """Let each `CSVLogger` that begins inside of the `with` continue its file, cut to its length when the states were taken."""
    changed = []
    for name, callback in named(callbacks).items():
        saved = states.get(name, {}).get("(bytes)") if isinstance(callback, keras.callbacks.CSVLogger) else None
        if saved is not None and saved[0] == str(callback.filename):
            with contextlib.suppress(OSError):  # the file is gone
                if os.path.getsize(callback.filename) > saved[1]:
                    os.truncate(callback.filename, saved[1])
            changed.append((callback, callback.append))
            callback.append = True
    try:
        yield
    finally:
        for callback, append in changed:
            callback.append = append


def named(callbacks: Sequence[Any]) -> dict[str, Any]:
    """Return the callbacks that have a state, by their class and a number within the class.

    Raises:
      TypeError: a callback has only one of `get_state` and `set_state`.
    """
    seen: Counter[str] = Counter()
    found = {}
    for callback in callbacks:
        kind = f"{type(callback).__module__}.{type(callback).__qualname__}"
        seen[kind] += 1
        if _has_state(callback) or _is_of_keras(callback):
            found[f"{kind} {seen[kind]}"] = callback
    return found


def _has_state(callback: Any) -> bool:
    has = [callable(getattr(callback, name, None)) for name in ("get_state", "set_state")]
    if any(has) and not all(has):
        raise TypeError(
            f"the callback {type(callback).__name__} has only one of get_state and set_state: it needs both, or neither"
        )
    return all(has)


def _is_of_keras(callback: Any) -> bool:
    """Return whether a callback is one of Keras's with a state, or derived from one."""
    if isinstance(callback, keras.callbacks.ProgbarLogger):
        return False
    kinds = [kind for kind in type(callback).__mro__ if kind not in (keras.callbacks.Callback, object)]
    return any(kind.__module__.startswith("keras.") for kind in kinds)


def _attributes(callback: Any) -> dict[str, Any]:
    """Return copies of the attributes of a callback that can be saved."""
    found = {}
    for name, value in vars(callback).items():
        if name not in _NOT_STATE:
            arrays: Arrays = {}
            with contextlib.suppress(TypeError):
                found[name] = decode(encode(value, arrays, name), arrays)
    return found


def _same(one: Any, other: Any) -> bool:
    first: Arrays = {}
    second: Arrays = {}
    same = encode(one, first, "") == encode(other, second, "")
    return same and all(np.array_equal(first[name], second[name]) for name in first)


def encode(value: Any, arrays: Arrays, name: str) -> Any:
    """Return a value for JSON.

    Args:
      value: None, a bool, number, text or array, or a list, tuple or dict of such values.
      arrays: gets copies of the bytes of the arrays.
      name: names the value in errors.

    Raises:
      TypeError: the value is something else.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (list, tuple):
        items = [encode(item, arrays, f"{name}[{number}]") for number, item in enumerate(value)]
        return items if type(value) is list else {"tuple": items}
    if type(value) is dict:
        return {"dict": [[encode(key, arrays, name), encode(item, arrays, f"{name}[{key!r}]")] for key, item in value.items()]}
    if isinstance(value, (np.ndarray, np.generic, jax.Array)) and value.dtype.kind not in "OSUMm":
        host = np.ascontiguousarray(value).reshape(value.shape)
        place = str(len(arrays)) if host.size else ""  # no file holds an empty array
        if host.size:
            arrays[place] = np.frombuffer(host.tobytes(), np.uint8)
        kind = "jax" if isinstance(value, jax.Array) else "array" if isinstance(value, np.ndarray) else "scalar"
        return {kind: place, "dtype": host.dtype.name, "shape": list(host.shape)}
    raise TypeError(
        f"the state of the callback {name} has a {type(value).__name__}, which cannot be saved: use numbers, texts and arrays, "
        "and lists, tuples and dicts of them"
    )


def decode(value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """Return the value that `encode` was given."""
    if isinstance(value, list):
        return [decode(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    if "tuple" in value:
        return tuple(decode(item, arrays) for item in value["tuple"])
    if "dict" in value:
        return {decode(key, arrays): decode(item, arrays) for key, item in value["dict"]}
    (kind, place), dtype, shape = next(iter(value.items())), np.dtype(value["dtype"]), tuple(value["shape"])
    content = np.asarray(arrays[place]).tobytes() if place in arrays else b""
    array = np.frombuffer(content, dtype).reshape(shape).copy()
    return array if kind == "array" else jax.numpy.asarray(array) if kind == "jax" else array[()]


def sharding_on_host() -> Any:
    """Return the sharding with which arrays of callbacks are saved: on the host, or replicated in several processes."""
    if jax.process_count() == 1:
        return jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    return NamedSharding(Mesh(np.array(jax.devices()), ("all",)), PartitionSpec())


def placed(array: np.ndarray) -> jax.Array:
    """Return the bytes of an array of a callback as an array of JAX."""
    return jax.make_array_from_callback(array.shape, sharding_on_host(), lambda index: array[index])
