"""Make the initial weights of every framework, and the batches on which they are compared, with NumPy and fixed seeds.

The canonical layout is JAX's. A linear kernel is [in, out], the kernel of the patches [height, width, channels, D], and images
are [B, H, W, 3]. The 3·D outputs of the qkv layer are first all queries, then all keys, then all values. Within each of these are
the heads, one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from penstock_bench.suites.frameworks.experiment import Geometry

Weights = Mapping[str, np.ndarray]

_SEED = 20210608


class HostBatch(NamedTuple):
    """Images float32 [B, H, W, 3], labels int32 [B]."""

    images: np.ndarray
    labels: np.ndarray


def shapes(geometry: Geometry) -> dict[str, tuple[int, ...]]:
    """Return the canonical names of all weights, and their shapes."""
    width, patch = geometry.width, geometry.patch
    found: dict[str, tuple[int, ...]] = {
        "patch/kernel": (patch, patch, 3, width),
        "patch/bias": (width,),
        "cls": (width,),
        "position": (geometry.tokens, width),
    }
    for number in range(geometry.depth):
        block = f"blocks/{number}"
        found |= _norm(f"{block}/norm1", width) | _linear(f"{block}/qkv", width, 3 * width)
        found |= _linear(f"{block}/out", width, width) | _norm(f"{block}/norm2", width)
        found |= _linear(f"{block}/widen", width, 4 * width) | _linear(f"{block}/narrow", 4 * width, width)
    return found | _norm("norm", width) | _linear("head", width, geometry.classes)


def _linear(name: str, inputs: int, outputs: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}/kernel": (inputs, outputs), f"{name}/bias": (outputs,)}


def _norm(name: str, width: int) -> dict[str, tuple[int, ...]]:
    return {f"{name}/scale": (width,), f"{name}/bias": (width,)}


def initial(geometry: Geometry) -> dict[str, np.ndarray]:
    """Return weights, float32, with which every part of the model changes the outputs, so that a missing part is detected.

    Kernels have variance 1/inputs, so queries and keys vary and attention is not uniform. Scales are not 1, and biases are not 0.
    """
    rng = np.random.default_rng(_SEED)
    return {name: _draw(rng, name, shape) for name, shape in shapes(geometry).items()}


def _draw(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> np.ndarray:
    normal = rng.standard_normal(shape, np.float32)
    if name.endswith("/kernel"):
        return normal / np.sqrt(np.prod(shape[:-1]), dtype=np.float32)
    if name.endswith("/scale"):
        return 1 + np.float32(0.1) * normal
    return np.float32(0.1) * normal


def updates(before: Weights, after: Weights, optimizer: str) -> dict[str, np.ndarray]:
    """Return the change of each weight by training, float64, by the name of the output for the parity check.

    The bias of the keys has no gradient: it adds the same number to all scores of a query, which the softmax cancels. AdamW
    divides a gradient by its own size, so its update of this bias is only rounding. It is left out of the `qkv` bias.
    """
    found = {name: after[name].astype(np.float64) - before[name] for name in before}
    if optimizer == "adamw":
        for name in (name for name in found if name.endswith("/qkv/bias")):
            query, _, value = np.split(found[name], 3)
            found[name] = np.concatenate([query, value])
    return {f"update: {name}": update for name, update in found.items()}


def norm(arrays: Mapping[str, np.ndarray]) -> float:
    """Return the Euclidean norm of all arrays together, in float64."""
    return float(np.sqrt(sum(np.square(array, dtype=np.float64).sum() for array in arrays.values())))


def fixed_batch(geometry: Geometry, records: int, number: int = 0) -> HostBatch:
    """Return the batch of this number, which is the same in every framework."""
    rng = np.random.default_rng([_SEED, number])
    images = rng.standard_normal((records, geometry.image, geometry.image, 3), np.float32)
    return HostBatch(images, rng.integers(0, geometry.classes, records, np.int32))
