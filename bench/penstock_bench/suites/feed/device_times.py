"""Measure when a device worked on steps, from inside of their compiled programs, and when the loop got their batches.

The programs of `known_times` call `DeviceTimes`, which computes the share of the time in which the device was idle. A verdict is
compared with this measurement, so it shares no code with the statistics of a feed.

The programs call Python, so they need the interpreter lock at the begin and at the end of a step.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import time
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np


class Lost(NamedTuple):
    """The share of a time, 0 to 1, in which a device had no step.

    They differ by the time from the moment at which the loop has a batch until the step with it begins. On a busy machine, the
    loop and the thread that computes the step wait for a processor meanwhile. Whether the input is to blame is open.

    Attributes:
      least: if this time belongs to the step.
      most: if it does not.
    """

    least: float
    most: float

    @property
    def mean(self) -> float:
        """Return the mean of both."""
        return (self.least + self.most) / 2


class DeviceTimes:
    """The times of the steps and batches of one loop, in seconds of `time.perf_counter`.

    Times of steps are added to the newest `DeviceTimes`, because a program calls a function of the process.

    Attributes:
      begins, ends: when the steps began and ended.
      taken: when the loop had taken a batch, or several at once.
    """

    _newest: ClassVar[DeviceTimes]

    def __init__(self) -> None:
        self.begins: list[float] = []
        self.ends: list[float] = []
        self.taken: list[float] = []
        DeviceTimes._newest = self

    @classmethod
    def newest(cls) -> DeviceTimes:
        """Return the newest times, to which the times of all steps are added."""
        return cls._newest

    def clear(self) -> None:
        """Forget all times, after a step that was only compiled."""
        for times in (self.begins, self.ends, self.taken):
            times.clear()

    def take(self) -> None:
        """Note that the loop has taken a batch now, or several."""
        self.taken.append(time.perf_counter())

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Record the code inside of this context as a step, for a loop whose steps run on the host."""
        self.begins.append(time.perf_counter())
        try:
            yield
        finally:
            self.ends.append(time.perf_counter())

    def lost(self, seconds: float) -> Lost:
        """Return the share of some seconds in which the device had no step."""
        at_once = -(-len(self.begins) // len(self.taken)) if self.taken else 1
        busy, most, before = 0.0, 0.0, -math.inf
        for number, (begin, end) in enumerate(zip(sorted(self.begins), sorted(self.ends), strict=True)):
            taken = self.taken[number // at_once] if self.taken else begin
            busy += end - max(before, begin)
            most += end - max(before, min(begin, taken))
            before = end
        return Lost(1.0 - most / seconds, 1.0 - busy / seconds)


DeviceTimes()  # of steps before the first loop that is measured


def sleep(x: jax.Array, seconds: float, is_step: bool) -> jax.Array:
    """Return a float32 zero, `seconds` after the scalar `x` is there. To be called inside of `jax.jit`.

    Args:
      x: any scalar that is computed before.
      seconds: for how long to sleep.
      is_step: whether to note the sleep as a step, in the newest `DeviceTimes`.
    """
    _register()
    arguments = x * 0 + np.array([seconds, is_step], np.float32)
    return jax.ffi.ffi_call(
        "penstock_sleep", jax.ShapeDtypeStruct((), np.float32), custom_call_api_version=1, has_side_effect=True
    )(arguments)


def _sleep(out: int, inputs: Any) -> None:
    """Sleep inside of a compiled program, without the interpreter lock.

    Args:
      out: the address of a float32, which becomes zero.
      inputs: the addresses of the inputs. The first one is float32 [2]: the seconds, and whether the sleep is a step.
    """
    seconds, is_step = inputs[0][0], inputs[0][1]
    with DeviceTimes.newest().step() if is_step else contextlib.nullcontext():
        time.sleep(seconds)
    ctypes.memset(out, 0, np.dtype(np.float32).itemsize)


_function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.POINTER(ctypes.POINTER(ctypes.c_float)))(_sleep)


@functools.cache
def _register() -> None:
    """Register `_sleep` as a custom call."""
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    address = ctypes.cast(_function, ctypes.c_void_p).value
    jax.ffi.register_ffi_target("penstock_sleep", capsule(address, None, None), platform="cpu", api_version=0)
