"""The errors that penstock raises, below one base class.

Each also inherits from the built-in exception that fits it, so `except ValueError` still catches a `PlanError`. Wrong arguments
raise plain `TypeError` and `ValueError`, and errors of your own functions are passed on.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.shard.plan import Plan


class PenstockError(Exception):
    """The base class of all errors that only penstock raises."""


class UnsupportedVersionError(PenstockError, ImportError):
    """penstock does not work with this version of Python or of a library.

    The message is one line: the version found, the versions that work, and the command that installs one. An uncaught error is
    printed without a traceback, which would show only imports.
    """


class CannotStartError(PenstockError, ValueError):
    """A command of penstock cannot start. The message is one line with the reason and the remedy."""


class WorkerDiedError(PenstockError, RuntimeError):
    """A worker process of a Loader ended by itself: it crashed, was killed for memory, or could not start."""


class PlanError(PenstockError, ValueError):
    """No layout fits the memory limit. The message describes the smallest one found, and what would help.

    Attributes:
      needed: the bytes that one device needs with the smallest layout found.
      options: plans that are predicted to fit, by what they change. Each is made, and compiled if necessary, when it is read.
    """

    def __init__(self, message: str, needed: int | None = None, options: Mapping[str, Plan] = MappingProxyType({})) -> None:
        super().__init__(message)
        self.needed, self.options = needed, options


class CompileError(PenstockError, RuntimeError):
    """A program does not compile. The message is the compiler's."""


class CompilerMemoryError(CompileError):
    """A compiler refuses a program because it needs more memory than the device has.

    Attributes:
      needed: the bytes that the program needs on one device; None if the compiler does not say it.
    """

    def __init__(self, message: str, needed: int | None = None) -> None:
        super().__init__(message)
        self.needed = needed


class CompilerFailedError(CompileError):
    """A compiler gives no answer: it is in use by another process, crashed, was killed, or takes too long."""


class SplitError(PenstockError, ValueError):
    """A step cannot run in parts of its batch. The message says why, and names the line."""


class OtherStepError(PenstockError, ValueError):
    """A step or its arguments do not fit a plan. The message says what differs."""


class ExplicitAxesError(PenstockError, ValueError):
    """A planned step is traced with arrays on a mesh with explicit axes, or prescribes layouts of them."""


class DistributedError(PenstockError, RuntimeError):
    """The processes of a run could not join.

    The message says which process this is, of how many, and where it looked for the others. It names the missing ones, as far as
    they are known, and says what to do.
    """


class FirstProcessError(PenstockError, RuntimeError):
    """Raised in the other processes where process 0 has failed, with the message of process 0.

    Attributes:
      kind: the name of the class of the error in process 0.
      reason: the message of that error.
    """

    def __init__(self, kind: str, reason: str):
        super().__init__(f"process 0 failed: {kind}: {reason}")
        self.kind, self.reason = kind, reason


class StepError(PenstockError, TypeError):
    """A step given to `ps.fit` does not return (state, metrics), with a state like the one it was given."""


class NonfiniteError(PenstockError, ArithmeticError):
    """A metric or the state is not finite any more.

    Attributes:
      step: number of the step, from 0, whose metrics were the first that were not finite. If only the state is not finite, the
        number of steps that it had.
      checkpoint: the step of the last good checkpoint; None if there is none.
    """

    def __init__(self, message: str, step: int, checkpoint: int | None):
        super().__init__(message)
        self.step, self.checkpoint = step, checkpoint


class CheckpointError(PenstockError, RuntimeError):
    """A checkpoint could not be written or read. The message says why, and which one is intact."""


class OtherRunError(PenstockError, ValueError):
    """A folder belongs to something else than this run. The message says what differs."""


class OtherStateError(PenstockError, ValueError):
    """A checkpoint does not hold the state of this model. The message lists the leaves that differ."""
