"""Make input batch by batch, in a `keras.utils.PyDataset` as users write it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from penstock_bench import working_clock
from penstock_bench.suites.keras.keras_setup import keras


class Batches(keras.utils.PyDataset):  # type: ignore[misc]  # Keras has no types
    """An epoch of `count` batches; `make` returns the batch of a number.

    Attributes:
      made: for each batch since `forget`, whether the main thread made it, and the seconds that this took, without stops.
    """

    def __init__(self, count: int, make: Callable[[int], Any]):
        super().__init__()  # workers=1: Keras calls it on whichever thread wants the batch
        self._count, self._make = count, make
        self.made: list[tuple[bool, float]] = []

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> Any:
        begin = working_clock.now()
        batch = self._make(number)
        self.made.append((threading.current_thread() is threading.main_thread(), working_clock.now() - begin))
        return batch

    def forget(self) -> None:
        self.made.clear()
