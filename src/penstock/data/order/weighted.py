"""Records that are drawn by weight, such as those of rare classes more often.

Weights [N] go in; the record at each position of an epoch comes out. The method is systematic sampling (Madow & Madow, 1944): the
weights are laid end to end, and N equally spaced points are placed on them. So a record with the share w of all weights is drawn
⌊N·w⌋ or ⌈N·w⌉ times an epoch, and luck adds at most one. A permutation of the points gives the order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from penstock.data.order.batch_order import digest
from penstock.data.order.permutation import epoch_keys, permute


class Weighted:
    """The order of one source whose records are drawn by weight.

    Args:
      weights: numbers [N] >= 0, one for each record; their sum may be anything above 0.
      records: N.
      seed: selects the draws and their order.

    Attributes:
      records: number of draws in an epoch, which is that of the records.

    Raises:
      TypeError: the weights are not numbers.
      ValueError: the weights are of another number, negative, not finite, or all 0.
    """

    def __init__(self, weights: Any, records: int, seed: int):
        self.records, self.seed = records, seed
        given = np.asarray(weights)
        if given.dtype.kind not in "fiub":
            raise TypeError(f"weights are {given.dtype}, and need to be numbers, one for each record")
        if given.shape != (records,):
            raise ValueError(f"weights have the shape {given.shape}, and there are {records:,} records: give one weight for each")
        if wrong := np.flatnonzero(~(np.isfinite(given) & (given >= 0))).tolist():
            raise ValueError(
                f"weights[{wrong[0]}] = {given[wrong[0]]}: weights need to be finite and >= 0"
                + (f"; {len(wrong):,} of them are not" if len(wrong) > 1 else "")
            )
        if not given.any():
            raise ValueError("all weights are 0, so no record can be drawn")
        self._ends = np.cumsum(given / given.max(), dtype=np.float64)  # scaled, so that the sum cannot overflow
        self._last = int(np.flatnonzero(given)[-1])
        self._digest = digest(given.astype(np.float64))

    def at(self, epoch: int, positions: np.ndarray) -> np.ndarray:
        """Return the record indices at some positions of an epoch."""
        keys = epoch_keys(self.seed, epoch)
        offset = float(keys[-1] >> np.uint64(11)) * 2.0**-53  # in [0, 1), one for all points of the epoch
        points = (permute(positions, self.records, keys) + offset) * (self._ends[-1] / self.records)
        # Rounding may put the last point on the end of the weights.
        return np.minimum(np.searchsorted(self._ends, points, side="right"), self._last).astype(np.int64)

    def fingerprint(self) -> Mapping[str, Any]:
        """Return the options, with a hash of the weights."""
        return {"shuffle": True, "seed": self.seed, "weights": self._digest}
