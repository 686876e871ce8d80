"""Find the line of the user's code that makes an operation, from what JAX recorded when the operation was traced."""

from __future__ import annotations

import itertools
import linecache
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock._jax import source_frames

_TRACING = tuple(f"{folder}{os.sep}" for folder in (Path(__file__).parent, Path(__file__).parents[2] / "keras"))
"""The folders of the code that calls the step. Frames further out are not part of the step."""
_TRANSFORMATIONS = re.compile(r"\b(?:jvp|transpose|vmap|checkpoint|rematted_computation)\(|\)")
"""The names that JAX adds to the names of scopes."""
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
"""Parts of the paths of files that belong to installed packages."""

_Frame = tuple[str, int, str]
"""File, line and function."""


def describe_source(sources: Sequence[Any]) -> str:
    """Return the line that makes an operation: "model.py:42 (block)".

    A line of an installed package is followed by the line of the user's code that calls the package. If there is none, as for the
    layers of Keras, the name of the scope follows, which is the path of the layer. The text is "" if the line is unknown.

    Args:
      sources: where the equation was traced, then where the equations around it were. JAX ends the first at the call of a jitted
        function, where the next continues.
    """
    frames = _frames(sources)
    if not frames:
        return ""
    own = _own_frame(frames)
    line = _describe(frames[0])
    if own is None:
        scope = _TRANSFORMATIONS.sub("", str(sources[0].name_stack))
        return f"{line}, in {scope!r}" if scope else line
    return line if own == frames[0] else f"{line}, called from {_describe(own)}"


def source_text(sources: Sequence[Any]) -> str:
    """Return the text of the line of the user's code that makes an operation, or "" if it cannot be read.

    Args:
      sources: as in `describe_source`.
    """
    own = _own_frame(_frames(sources))
    return "" if own is None else " ".join(linecache.getline(*own[:2]).split())


def _frames(sources: Sequence[Any]) -> list[_Frame]:
    return [frame for source in sources for frame in _frames_of_step(source)]


def _own_frame(frames: Sequence[_Frame]) -> _Frame | None:
    """Return the innermost frame outside of installed packages."""
    return next((frame for frame in frames if not any(part in frame[0] for part in _INSTALLED)), None)


def _frames_of_step(source: Any) -> list[_Frame]:
    """Return the frames of an equation inside of the step, the innermost first."""
    return list(itertools.takewhile(lambda frame: not frame[0].startswith(_TRACING), source_frames(source)))


def _describe(frame: _Frame) -> str:
    """Return a frame as text."""
    file, line, function = frame
    return f"{os.path.basename(file)}:{line} ({function})"
