"""The bytes of a text as tokens: a file is mapped into memory, and windows of it are records for training and validation.

The text is that of a file, or the topics of Python's `help()`, which every Python carries.
"""

from __future__ import annotations

import gzip
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

import penstock as ps
from penstock.data.sliding_windows import WindowSource

_HELD_OUT = 0.1  # share of the text


@dataclass(frozen=True)
class Text:
    """A text in two parts: the first is for training, and the last tenth is held out for validation.

    No training window overlaps the held-out text. `ps.windows` makes only windows that lie within the array it is given, and for
    training that is `training`, which ends where `held_out` begins.

    Attributes:
      tokens: uint8 [N], all bytes, mapped from the file.
      context: number of bytes that a model reads at once.
    """

    tokens: np.ndarray
    context: int

    @property
    def held_out_bytes(self) -> int:
        """Return M: the multiple of `context` that is nearest to a tenth of the text, but at least one."""
        return max(1, round(_HELD_OUT * len(self.tokens) / self.context)) * self.context

    @property
    def training(self) -> np.ndarray:
        """Return the first N - M bytes, which the model learns from."""
        return self.tokens[: max(0, len(self.tokens) - self.held_out_bytes)]

    @property
    def held_out(self) -> np.ndarray:
        """Return the last M bytes, on which the model is judged."""
        return self.tokens[len(self.training) :]

    def training_windows(self) -> WindowSource:
        """Return records `{"tokens": uint8 [context + 1]}`: inputs and targets of each window of the training text."""
        return ps.windows({"tokens": self.training}, self.context + 1, stride=self.context)

    def held_out_windows(self) -> WindowSource:
        """Return records as for training, in which each held-out byte is a target exactly once.

        The first window begins with the last byte of the training text, which is an input and no target.
        """
        return ps.windows({"tokens": self.tokens[len(self.training) - 1 :]}, self.context + 1, stride=self.context)


def open_text(path: str | Path | None, context: int) -> Text:
    """Map a file into memory as a `Text`; None maps a temporary file with `topics`, which no folder shows.

    Raises:
      OSError: the file cannot be read.
      ValueError: the file is empty.
    """
    with _open(path) as file:  # the mapping stays when it is closed
        return Text(np.memmap(file, np.uint8, mode="r"), context)


def topics() -> bytes:
    """Return the text of all topics of Python's `help()`, in alphabetical order; it differs a little between releases of Python.

    Each paragraph comes once. The topics repeat whole sections of each other, so a model could otherwise have learnt by heart a
    part of the text that is held out. In Python 3.12, 7 % of the held-out bytes are in runs of 50 bytes that are in the training
    text too, and none in runs of 80; with all paragraphs, 18 % would be in runs of 50.
    """
    from pydoc_data.topics import topics

    once: dict[str, str] = {}
    for name in sorted(topics):
        for paragraph in topics[name].split("\n\n"):
            # Compared word by word, because a section that another topic repeats may be indented.
            once.setdefault(" ".join(paragraph.split()), paragraph)
    return "\n\n".join(once.values()).encode()


def gzip_bits_per_byte(text: np.ndarray) -> float:
    """Return the size of a text uint8 [N] after `gzip -9`, in bits for each of its bytes, with the 18 bytes of gzip's own."""
    return 8 * len(gzip.compress(text.tobytes(), 9, mtime=0)) / len(text)


def _open(path: str | Path | None) -> IO[bytes]:
    if path is not None:
        return Path(path).open("rb")
    file = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    file.write(topics())
    file.flush()
    return file
