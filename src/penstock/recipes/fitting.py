"""The call of `fit` that recipes share: a step, a state and batches go in; the trained state and the last point come out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import penstock as ps
from penstock.recipes.run_folder import CannotStartError

_SAVE_EVERY = 100  # steps


def fit_in(folder: Path, step: Any, state: Any, batches: ps.Feed, *, quiet: bool, **settings: Any) -> tuple[Any, ps.Point | None]:
    """Train in a run folder, with metrics.jsonl and a progress bar.

    Args:
      folder: the run folder.
      step, state, batches: as for `ps.fit`.
      quiet: whether to show no progress.
      **settings: further arguments of `ps.fit`.

    Returns:
      The state, and the last point, which only the first process has.

    Raises:
      CannotStartError: the folder is that of another run.
    """
    points: list[ps.Point] = []
    progress = [] if quiet else [ps.log.progress(summary=False)]
    log = [points.append, ps.log.jsonl(folder / "metrics.jsonl"), *progress]
    try:
        trained = ps.fit(step, state, batches, checkpoint=folder, save_every=_SAVE_EVERY, log=log, **settings)
    except ps.OtherRunError as error:
        raise CannotStartError(f"--out {folder}: {error}") from error
    return trained, points[-1] if points else None


def validation_batch_size(about: int, devices: int) -> int:
    """Return about so many records, in a multiple of the number of devices."""
    return -(-about // devices) * devices
