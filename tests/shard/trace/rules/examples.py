"""Strategies of small programs that hold equations of the primitives that have a rule: their registry."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st


@dataclass(frozen=True)
class Example:
    """A function, and the arrays that it is given."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]

    def __repr__(self) -> str:
        return f"{self.function.__qualname__}{tuple(getattr(each, 'shape', each) for each in self.arguments)}"


Strategy = st.SearchStrategy[Example]
EXAMPLES: dict[str, tuple[tuple[str, ...], Strategy]] = {}
"""What it is an example of → the primitives that its program holds, strategy."""

size = st.sampled_from([8, 6, 4, 3, 2, 1])
even = st.sampled_from([8, 6, 4, 2])
"""Sizes that 2 divides; not all of them 4."""


def shapes(least: int = 1, most: int = 3) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(size, min_size=least, max_size=most).map(tuple)


def examples(*primitives: str) -> Callable[[Callable[..., Strategy]], Callable[..., Strategy]]:
    """Register a composite strategy as one of programs that hold these primitives."""

    def register(strategy: Callable[..., Strategy]) -> Callable[..., Strategy]:
        EXAMPLES[strategy.__name__] = (primitives, strategy())
        return strategy

    return register


def example(function: Callable[..., Any], *arguments: Any) -> Example:
    """Of an argument that is a shape, numbers of that shape are made."""
    return Example(function, tuple(numbers(each) if isinstance(each, tuple) else each for each in arguments))


def numbers(shape: tuple[int, ...]) -> np.ndarray:
    """Multiples of 1/4, so that sums of products are the same in any order."""
    return (np.random.default_rng(0).integers(1, 16, shape) / 4).astype(np.float32)


def distinct(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(0).permutation(math.prod(shape)).reshape(shape).astype(np.float32)


def integers(shape: tuple[int, ...], below: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, below, shape).astype(np.int32)
