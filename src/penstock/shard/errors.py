"""Define the errors of planning, other than those about a wrong argument: no layout fits, or the step does not compile."""

from __future__ import annotations


class PlanError(ValueError):
    """An error that no layout fits the memory limit. The message names the nearest one, and what would help."""


class CompileError(RuntimeError):
    """An error that a program does not compile. The message is that of the compiler."""
