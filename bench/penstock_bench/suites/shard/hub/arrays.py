"""Descriptions of the arrays that a backbone reads: a shape without its batch dimension, and the values to fill it with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np


class Array(Protocol):
    """A description of one input."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...

    def draw(self, rows: int, rng: np.random.Generator) -> np.ndarray:
        """Return an array of the shape [rows, *shape]."""


@dataclass(frozen=True)
class Tokens:
    """Random integers from `low`, inclusive, to `high`, exclusive. The default of `low` leaves out 0, a common id of padding."""

    shape: tuple[int, ...]
    high: int
    low: int = 1
    dtype: str = "int32"

    def draw(self, rows: int, rng: np.random.Generator) -> np.ndarray:
        return rng.integers(self.low, self.high, (rows, *self.shape)).astype(self.dtype)


@dataclass(frozen=True)
class Marked:
    """Random tokens with the same special tokens in each row: spans of (start, stop, token)."""

    tokens: Tokens
    spans: tuple[tuple[int, int, int], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tokens.shape

    @property
    def dtype(self) -> str:
        return self.tokens.dtype

    def draw(self, rows: int, rng: np.random.Generator) -> np.ndarray:
        drawn = self.tokens.draw(rows, rng)
        for start, stop, token in self.spans:
            drawn[:, start:stop] = token
        return drawn


@dataclass(frozen=True)
class Ones:
    """Ones, as of a mask that hides nothing."""

    shape: tuple[int, ...]
    dtype: str = "int32"

    def draw(self, rows: int, rng: np.random.Generator) -> np.ndarray:
        return np.ones((rows, *self.shape), self.dtype)


@dataclass(frozen=True)
class Floats:
    """Random numbers, uniform between `low` and `high`."""

    shape: tuple[int, ...]
    low: float = 0.0
    high: float = 1.0
    dtype: str = "float32"

    def draw(self, rows: int, rng: np.random.Generator) -> np.ndarray:
        return rng.uniform(self.low, self.high, (rows, *self.shape)).astype(self.dtype)


class Same:
    """The same values in each row."""

    def __init__(self, values: Iterable, dtype: str = "int32"):
        self.values = np.array(list(values), dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def dtype(self) -> str:
        return str(self.values.dtype)

    def draw(self, rows: int, rng: np.random.Generator) -> np.ndarray:
        return np.repeat(self.values[None], rows, axis=0)
