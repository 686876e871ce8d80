"""How a step is changed so that it needs less memory, with the same results."""

from __future__ import annotations

from dataclasses import dataclass

from penstock._jax import ClosedJaxpr
from penstock.shard.trace.microbatches import split_batch
from penstock.shard.trace.recompute import Recomputation, recompute


@dataclass(frozen=True)
class Rewriting:
    """The changes of a plan to a step.

    Attributes:
      microbatches: the number of parts of the batch that run one after the other; 1 leaves the batch whole.
      batch: the flat arguments that are split: their first dimensions are the rows.
      groups: the number of groups of consecutive rows. A part of the batch has the same number of rows of each, so that devices
        with a group each take the rows of a part from their own.
      recomputed: the values that the backward pass computes again.
      checkpoints: whether the calls of `jax.checkpoint` in the step are kept.
    """

    microbatches: int = 1
    batch: tuple[int, ...] = ()
    groups: int = 1
    recomputed: tuple[Recomputation, ...] = ()
    checkpoints: bool = True

    def apply(self, closed: ClosedJaxpr, part: ClosedJaxpr | None) -> ClosedJaxpr:
        """Return the changed step.

        Args:
          part: the step with a part of its batch; None if there is one part.

        Raises:
          SplitError: the step cannot run in parts.
        """
        return recompute(closed if part is None else split_batch(closed, part, self.microbatches, self.groups), self.recomputed)


AS_WRITTEN = Rewriting()
"""A step that stays as it is."""
