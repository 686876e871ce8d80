"""The errors of planning that are not about a wrong argument."""

from __future__ import annotations


class PlanError(ValueError):
    """No layout within the memory limit; the message names the nearest one and what would help."""


class CompileError(RuntimeError):
    """A program that the compiler refused; the text is the compiler's."""
