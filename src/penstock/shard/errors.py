"""Define the errors of planning, other than those about a wrong argument: no layout fits, or the step does not compile."""

from __future__ import annotations

import re


class PlanError(ValueError):
    """The error raised if no layout fits the memory limit. Its message describes the smallest one found, and what would help."""


class CompileError(RuntimeError):
    """The error raised if a program does not compile. Its message is that of the compiler."""


class CompilerMemoryError(CompileError):
    """The error raised if a compiler refuses a program because it needs more memory than the device has.

    Attributes:
      needed: the bytes that the program needs on one device; None if the compiler does not say it.
    """

    def __init__(self, message: str, needed: int | None = None) -> None:
        super().__init__(message)
        self.needed = needed


class CompilerFailedError(CompileError):
    """The error raised if a compiler gives no answer: it is in use by another process, crashed, was killed, or takes too long."""


_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def compile_error(message: str) -> CompileError:
    """Return the error for a message of a compiler.

    Args:
      message: the message.

    >>> compile_error("RESOURCE_EXHAUSTED: the total memory required (34.50G) exceeds available HBM (15.75G).").needed / 2**30
    34.5
    """
    if "libtpu multi-process lockfile" in message or "TPU is already in use" in message:
        return CompilerFailedError(
            "the TPU compiler is in use by another process, which holds /tmp/libtpu_lockfile: plan again when that has ended, or "
            f"remove the file if no process has it ({message.splitlines()[0][:200]})"
        )
    if "RESOURCE_EXHAUSTED" in message and re.search(r"ran out of memory|exceeds", message, re.IGNORECASE):
        size = re.search(r"\(([\d.]+)([KMGT])i?B?\) exceeds|Used ([\d.]+)([KMGT])i?B? of", message)
        number, unit = [part for part in size.groups() if part] if size else ("", "")
        return CompilerMemoryError(message, int(float(number) * _UNITS[unit]) if number else None)
    return CompileError(message)
