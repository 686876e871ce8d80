"""A compiled training step that runs until the test lets it end, so that what is true meanwhile can be asserted without a clock.

The program calls back into this process and waits there, without the interpreter lock. `jax.pure_callback` would not do: XLA:CPU
runs a program that has one before the call returns.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

State = dict[str, jax.Array]

_permits = threading.Semaphore(0)


def release(runs: int = 1) -> None:
    """Let so many runs of held programs end, the ones that begin first."""
    _permits.release(runs)


def reset() -> None:
    """Let all runs of held programs end, and take back what is left of earlier releases. To be called after each test."""
    release(1000)
    jax.block_until_ready(jax.live_arrays())
    while _permits.acquire(blocking=False):
        pass


def hold(x: jax.Array) -> jax.Array:
    """Return a float32 zero once `x` is there and the test calls `release`. To be called inside of a jitted function."""
    _register()
    # The product of floats with zero is one that XLA does not leave out, as it may be NaN. So the wait depends on `x`.
    zero = jnp.ravel(x)[0].astype(jnp.float32) * 0
    # XLA:CPU runs a program that seems cheap before the call returns. A product of matrices makes it dear.
    square = jnp.ones((256, 256), jnp.float32) * zero
    return jax.ffi.ffi_call(
        "penstock_hold", jax.ShapeDtypeStruct((), np.float32), custom_call_api_version=1, has_side_effect=True
    )((square @ square)[0, 0])


@functools.cache
def step(donate: bool = False) -> Any:
    """Return a compiled step from a state and a batch to the next state and a loss, each run of which is held."""

    def held(state: State, batch: Any) -> tuple[State, jax.Array]:
        zero = hold(state["w"] + jax.tree.leaves(batch)[0].ravel()[0] * 0)
        return jax.tree.map(lambda w: w + zero, state), state["w"].sum() + zero

    return jax.jit(held, donate_argnums=0 if donate else ())


def new_state() -> State:
    """Return the state of a small model."""
    return {"w": jnp.zeros(8), "b": jnp.zeros((64, 64))}


def _wait(out: int, inputs: int) -> None:
    """Wait inside of a compiled program. `out` is the address of a float32, which becomes zero."""
    _permits.acquire(timeout=120)  # a test that fails before its release must not hang
    ctypes.memset(out, 0, np.dtype(np.float32).itemsize)


_function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(_wait)


@functools.cache
def _register() -> None:
    """Register `_wait` as a custom call."""
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    address = ctypes.cast(_function, ctypes.c_void_p).value
    jax.ffi.register_ffi_target("penstock_hold", capsule(address, None, None), platform="cpu", api_version=0)
