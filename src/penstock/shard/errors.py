"""Define the errors of planning, other than those about a wrong argument: no layout fits, or the step does not compile."""

from __future__ import annotations


class PlanError(ValueError):
    """The error raised if no layout fits the memory limit. Its message describes the smallest one found, and what would help."""


class CompileError(RuntimeError):
    """The error raised if a program does not compile. Its message is that of the compiler."""
