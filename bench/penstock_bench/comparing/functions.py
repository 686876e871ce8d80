"""Make a live variant of a user's function: import it, make its arguments, and call it in blocks."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from penstock_bench.file_import import import_file
from penstock_bench.garbage_collector import freeze_gc
from penstock_bench.model import Live, Measurement, Outputs, VerificationError

_WARM_UP = 3  # calls at least, and
_WARM_SECONDS = 0.5  # seconds: caches and allocators reach their steady state


def load_function(reference: str) -> Callable[..., Any]:
    """Import the function that FILE.py:NAME names.

    Raises:
      ValueError: there is no such file or function.
    """
    file, _, name = reference.rpartition(":")
    function = getattr(import_file(Path(file)), name, None)
    if not callable(function):
        raise ValueError(f"{file} has no function {name}" if function is None else f"{name} in {file} is not a function")
    return function


class Call:
    """A function with its arguments, which may be called again and again.

    A training step often donates its state: JAX deletes the arrays that it gets. Then the result, or the first part of it,
    becomes the first argument of the next call, if it has the same structure, shapes and dtypes.

    Args:
      reference: FILE.py:NAME of the function.
      inputs: FILE.py:NAME of the function that makes its arguments; "" for none. A tuple is the positional arguments; anything
        else is the only argument.
    """

    def __init__(self, reference: str, inputs: str):
        self._function = load_function(reference)
        made = load_function(inputs)() if inputs else ()
        self._arguments: tuple[Any, ...] = made if isinstance(made, tuple) else (made,)
        self._name = reference.rpartition(":")[2]

    def __call__(self) -> Any:
        """Call the function, wait for its results if they are JAX's, and return them."""
        result = self._function(*self._arguments)
        jax = sys.modules.get("jax")
        if jax is not None:
            jax.block_until_ready(result)
            if any(getattr(leaf, "is_deleted", bool)() for leaf in jax.tree.leaves(self._arguments)):
                self._arguments = self._fed_back(jax, result)
        return result

    def _fed_back(self, jax: Any, result: Any) -> tuple[Any, ...]:
        """Return the arguments of the next call, after a call that donated some of them."""
        first, *others = self._arguments
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(others) if hasattr(leaf, "is_deleted")):
            raise VerificationError(f"{self._name} donates more than its first argument, so that it cannot be called again")
        for candidate in (result, result[0] if isinstance(result, tuple) and result else None):
            if candidate is not None and _kind(jax, candidate) == _kind(jax, first):
                return (candidate, *others)
        raise VerificationError(
            f"{self._name} donates its first argument, and neither its result nor the first part of it can take the argument's "
            "place in the next call"
        )


def _kind(jax: Any, tree: Any) -> Any:
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(np.shape(leaf), getattr(leaf, "dtype", type(leaf))) for leaf in leaves]


@contextlib.contextmanager
def live(reference: str, inputs: str, size: Any) -> Iterator[Live]:
    """Import a function, and warm it up."""
    call = Call(reference, inputs)
    _cache_what_jax_compiles()
    begin = time.perf_counter()
    for number in itertools.count(1):
        call()
        if number >= _WARM_UP and time.perf_counter() - begin > _WARM_SECONDS:
            break
    freeze_gc()

    def block(seconds: float) -> float:
        calls, begin = 0, time.perf_counter()
        while True:
            call()
            calls += 1
            if (spent := time.perf_counter() - begin) >= seconds:
                return spent / calls * 1e3

    yield Live({"time": block}, Measurement)


def _cache_what_jax_compiles() -> None:
    """Let the processes of later rounds find what takes long to compile, unless the user has a cache."""
    jax, folder = sys.modules.get("jax"), os.environ.get("PENSTOCK_BENCH_CACHE")
    if jax is not None and folder and jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(Path(folder) / "jax"))


def outputs(reference: str, inputs: str, size: Any) -> Outputs:
    """Return the results of the first call as arrays by name, for the comparison of functions.

    Raises:
      VerificationError: there is no result that can be compared.
    """
    found: dict[str, np.ndarray] = {}
    for name, array in as_arrays(Call(reference, inputs)()).items():
        found |= _finite_parts(f"output: {name}", array)
    return found


def _finite_parts(name: str, array: np.ndarray) -> dict[str, np.ndarray]:
    """Return an array without infinities and NaN, and where these are, so that equal ones count as equal."""
    if array.dtype.kind == "c":
        return {**_finite_parts(f"{name}.real", array.real), **_finite_parts(f"{name}.imag", array.imag)}
    if array.dtype.kind != "f" or np.isfinite(array).all():
        return {name: array}
    codes = np.select([np.isnan(array), array == np.inf, array == -np.inf], [1.0, 2.0, 3.0])
    return {name: np.where(np.isfinite(array), array, 0), f"{name} (NaN and infinities)": codes}


def as_arrays(result: Any) -> dict[str, np.ndarray]:
    """Return the numeric leaves of a result by their places in it.

    Raises:
      VerificationError: a leaf is not numeric, or there is none.
    """
    if (jax := sys.modules.get("jax")) is not None:
        flat = {jax.tree_util.keystr(path) or "result": leaf for path, leaf in jax.tree_util.tree_leaves_with_path(result)}
    else:
        flat = dict(_leaves(result, ""))
    if not flat:
        raise VerificationError("it returns nothing, so that its work cannot be compared: return the result")
    return {name: _array(name, leaf) for name, leaf in flat.items()}


def _leaves(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of dicts, lists and tuples, where JAX is not used."""
    if isinstance(tree, dict):
        parts: Iterator[tuple[Any, Any]] = iter(tree.items())
    elif isinstance(tree, list | tuple):
        parts = iter(enumerate(tree))
    else:
        if tree is not None:
            yield path or "result", tree
        return
    for key, part in parts:
        yield from _leaves(part, f"{path}[{key!r}]")


def _array(name: str, leaf: Any) -> np.ndarray:
    if (jax := sys.modules.get("jax")) is not None and isinstance(leaf, jax.Array):
        if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        elif leaf.dtype == jax.numpy.bfloat16:
            leaf = leaf.astype("float32")
    if hasattr(leaf, "detach"):  # PyTorch's
        leaf = leaf.detach().cpu().numpy()
    array = np.asarray(leaf)
    if array.dtype.kind not in "biufc":
        raise VerificationError(f"its output {name} is {type(leaf).__name__}, which has no numbers to compare")
    return array
