"""Say which line of the user's code makes an operation.

In: the `sources` of an `Op`. Out: text such as "model.py:42 (block)". Nothing is read before the text is asked for.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock._jax import source_frames

_TRACING = tuple(f"{folder}{os.sep}" for folder in (Path(__file__).parent, Path(__file__).parents[2] / "keras"))
"""The folders of the code that calls the step. Frames further out are not part of the step."""
_TRANSFORMATIONS = re.compile(r"\b(?:jvp|transpose|vmap|checkpoint|rematted_computation)\(|\)")
"""The names that JAX adds to those of scopes."""
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
"""Parts of the paths of files that belong to installed packages."""


def describe_source(sources: Sequence[Any]) -> str:
    """Return the line that makes an operation: "model.py:42 (block)".

    A line of an installed package is followed by the line of the user's code that calls the package. If there is none, as for the
    layers of Keras, the name of the scope follows, which is the path of the layer.

    Args:
      sources: where the equation was traced, then where those around it were. JAX cuts the first off at the call of a jitted
        function, where the next continues.

    Returns:
      The text; "" if the line is unknown.
    """
    frames = [frame for source in sources for frame in _frames_of_step(source)]
    if not frames:
        return ""
    own = next((frame for frame in frames if not _is_installed(frame)), None)
    line = _describe(frames[0])
    if own is None:
        scope = _TRANSFORMATIONS.sub("", str(sources[0].name_stack))
        return f"{line}, in {scope!r}" if scope else line
    return line if own == frames[0] else f"{line}, called from {_describe(own)}"


def _frames_of_step(source: Any) -> list[tuple[str, int, str]]:
    """Return the frames of an equation inside of the step, the innermost first."""
    frames = source_frames(source)
    end = next((at for at, (file, _, _) in enumerate(frames) if file.startswith(_TRACING)), len(frames))
    return frames[:end]


def _is_installed(frame: tuple[str, int, str]) -> bool:
    """Return whether a frame is in an installed package."""
    return any(part in frame[0] for part in _INSTALLED)


def _describe(frame: tuple[str, int, str]) -> str:
    """Return a frame as text."""
    file, line, function = frame
    return f"{os.path.basename(file)}:{line} ({function})"
