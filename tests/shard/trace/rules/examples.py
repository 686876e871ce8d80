"""The registry of example programs: hypothesis strategies of small programs with the primitives that have a rule."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st


@dataclass(frozen=True)
class Example:
    """A function with its arguments."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]

    def __repr__(self) -> str:
        return f"{self.function.__qualname__}{tuple(getattr(each, 'shape', each) for each in self.arguments)}"


Strategy = st.SearchStrategy[Example]
EXAMPLES: dict[str, tuple[tuple[str, ...], Strategy]] = {}
"""Name of the example → the primitives in its program, and the strategy."""

size = st.sampled_from([8, 6, 4, 3, 2, 1])
even = st.sampled_from([8, 6, 4, 2])
"""Sizes that 2 divides; 4 does not divide all of them."""


def shapes(least: int = 1, most: int = 3) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(size, min_size=least, max_size=most).map(tuple)


def examples(*primitives: str) -> Callable[[Callable[..., Strategy]], Callable[..., Strategy]]:
    """Return a decorator that registers a composite strategy of programs with these primitives."""

    def register(strategy: Callable[..., Strategy]) -> Callable[..., Strategy]:
        EXAMPLES[strategy.__name__] = (primitives, strategy())
        return strategy

    return register


def example(function: Callable[..., Any], *arguments: Any) -> Example:
    """Return an example; a tuple among the arguments is a shape, and becomes an array of numbers."""
    return Example(function, tuple(numbers(argument) if isinstance(argument, tuple) else argument for argument in arguments))


def numbers(shape: tuple[int, ...]) -> np.ndarray:
    """Return multiples of 1/4, so that sums of products are the same in any order."""
    return (np.random.default_rng(0).integers(1, 16, shape) / 4).astype(np.float32)


def distinct(shape: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(0).permutation(math.prod(shape)).reshape(shape).astype(np.float32)


def integers(shape: tuple[int, ...], below: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, below, shape).astype(np.int32)


def drawn(strategy, count):
    """Return examples of a strategy, the simplest first."""
    found = []

    @settings(
        max_examples=count, database=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    @given(strategy)
    def draw(example):
        found.append(example)

    draw()
    return found
