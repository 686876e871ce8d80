"""A small Loader, and the values of its batches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

import penstock as ps

X = np.arange(40, dtype=np.int32)


def loader(**options: Any) -> ps.Loader:
    """Return a Loader of 20 batches of 4 records, in a shuffled order."""
    return ps.Loader({"x": X}, **{"batch_size": 4, "shuffle": True, "seed": 1, "epochs": 2, **options})


def values(batches: Iterable[Any]) -> list[list[int]]:
    """Return the numbers in each batch."""
    return [np.asarray(batch["x"]).tolist() for batch in batches]
