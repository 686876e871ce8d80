"""List the faults of XLA that penstock works around, and the releases of jaxlib that have them.

A workaround applies if its fault is `present`. `tests/shard/test_faults.py` reproduces each fault and compares the outcome with
`fixed`, so a release that no longer needs a workaround is noticed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock._versions import installed, numbers

if TYPE_CHECKING:
    from penstock._versions import Version


@dataclass(frozen=True)
class Fault:
    """A fault of XLA.

    Attributes:
      what: the wrong behaviour.
      instead: what penstock does to avoid it.
      where: the file and function of the workaround.
      fixed: the first release of jaxlib without it, as (major, minor); None while there is none.
    """

    what: str
    instead: str
    where: str
    fixed: Version | None = None

    @property
    def present(self) -> bool:
        """Return whether the installed jaxlib has the fault."""
        version = installed("jaxlib")
        return self.fixed is None or version is None or numbers(version)[:2] < self.fixed


SCATTER_OF_A_SLICE = Fault(
    "On the CPU, a scatter into an array that was cut to a device's shard gives wrong values: XLA fuses the two.",
    "An optimisation barrier between the cut and the scatter.",
    "shard/apply/sharding_constraints.py, _Evaluation.evaluate",
    fixed=(0, 12),
)
PATCHES_SHARDED_TWICE = Fault(
    "A convolution of windows that do not overlap (patches) gives wrong values where positions are sharded over one mesh axis "
    "and output features over another.",
    "Plans leave the positions of such a convolution unsharded.",
    "shard/trace/rules/contract.py, conv_general_dilated, which then needs a factor for them",
)
DENSE_DEPTHWISE_GRADIENT = Fault(
    "On the CPU, the gradient of a depthwise kernel is computed for every pair of features, of which all but the equal ones are "
    "thrown away.",
    "Plans count the FLOPs of the dense convolution.",
    "shard/trace/flops.py, _convolution",
)
FAULTS = (SCATTER_OF_A_SLICE, PATCHES_SHARDED_TWICE, DENSE_DEPTHWISE_GRADIENT)
