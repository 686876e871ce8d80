"""Benchmark libraries, functions and commands against each other: in processes of their own, and compared before they are timed.

This package is the tool: it takes workloads and writes a report. `suites` holds penstock's own workloads, written as a user
would write theirs. `compare` compares a user's functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock_bench.comparing.api import compare as compare

__all__ = ["compare"]


def __getattr__(name: str) -> Any:
    """Import `compare` when it is used, as it needs SciPy, and variants run where that is not installed."""
    if name == "compare":
        from penstock_bench.comparing.api import compare

        return compare
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
