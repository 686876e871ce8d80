"""Say what is compared, as text: a worker process gets it on its command line, and makes the same workload from it.

A *function* is written FILE.py:NAME, as in train.py:step_a. A *command* is a line for the shell's rules of quoting, which is run
without a shell.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

Kind = Literal["functions", "commands"]
_FUNCTION = ".py:"


@dataclass(frozen=True)
class Specification:
    """A comparison that a user asks for.

    Attributes:
      kind: "functions" or "commands".
      variants: from a name in the report to FILE.py:NAME, or to a command line.
      inputs: FILE.py:NAME of the function that makes the arguments; "" for functions without arguments, and for commands.
      tolerance: the largest relative difference of outputs that is accepted; None to compare no outputs.
      seconds: the length of a block.
    """

    kind: Kind
    variants: Mapping[str, str]
    inputs: str = ""
    tolerance: float | None = 1e-3
    seconds: float = 0.3

    def as_text(self) -> str:
        """Return the specification as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def of_text(cls, text: str) -> Specification:
        """Return the specification that `as_text` wrote."""
        return cls(**json.loads(text))


def is_function(text: str) -> bool:
    """Tell whether a word names a function in a file."""
    file, _, name = text.rpartition(":")
    return file.endswith(".py") and name.isidentifier()


def kind_of(texts: list[str]) -> Kind:
    """Return what the arguments of `penstock compare` are.

    Raises:
      ValueError: some are functions and others are commands, or one is a mistyped function.
    """
    functions = [text for text in texts if is_function(text)]
    if len(functions) == len(texts):
        return "functions"
    others = [text for text in texts if text not in functions]
    if functions:
        raise ValueError(f"{functions[0]} is a function and {others[0]!r} is a command: compare functions, or commands")
    for text in others:
        if _FUNCTION in text and len(shlex.split(text)) == 1:
            raise ValueError(f"{text}: after the colon is no name of a function, as in train.py:step")
    return "commands"


def names_of(texts: list[str]) -> dict[str, str]:
    """Return short names for the report: the function's name or the command, with a number where two are the same."""
    short = [text.rpartition(":")[2] if is_function(text) else text for text in texts]
    if len(set(short)) < len(set(texts)):  # functions of the same name in several files
        short = list(texts)
    names: dict[str, str] = {}
    for name, text in zip(short, texts, strict=True):
        number = 2
        unique = name
        while unique in names:
            unique, number = f"{name} ({number})", number + 1
        names[unique] = text
    return names
