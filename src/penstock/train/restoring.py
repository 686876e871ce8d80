"""Choose the checkpoint from which a run continues: what the caller asked for goes in, a verified checkpoint comes out."""

from __future__ import annotations

import os
from pathlib import Path

from penstock._arguments import check_path
from penstock.train.checkpoint_folder import Checkpoint
from penstock.train.checkpoints import Checkpoints, read


def find_checkpoint(checkpoints: Checkpoints | None, restore: str | os.PathLike[str] | None) -> Checkpoint | None:
    """Return the checkpoint from which a run continues; None if it starts anew.

    Args:
      checkpoints: those of the run folder; None if there is no run folder.
      restore: see `fit`.

    Raises:
      ValueError: `restore` is None, and there are checkpoints; or it names a checkpoint of this run folder that is not the
        newest.
      CheckpointError: the one that is named is damaged, or there is none.
    """
    if restore is None:
        if checkpoints and (steps := checkpoints.steps()):
            raise ValueError(
                f"restore=None, but {checkpoints.folder} has checkpoints up to step {steps[-1]:,}: continue from them with "
                "restore='latest', or name a new folder for a run that starts anew"
            )
        return None
    if not isinstance(restore, (str, os.PathLike)):
        raise TypeError(f"restore={restore!r}: needs 'latest', the folder of a checkpoint, or None")
    path = check_path("restore", restore).absolute()
    own = checkpoints.latest() if checkpoints else None
    if restore == "latest":
        return own
    if own is None:
        return _named(path)
    if path.parent == own.path.parent and path != own.path:
        raise ValueError(
            f"restore={str(restore)!r} is older than {own.path.name} in the same run folder, from which a restart would "
            "continue: name a new folder with checkpoint=, or remove the newer ones"
        )
    return own  # the run was started from the named one, and has come further


def _named(path: Path) -> Checkpoint | None:
    """Return the checkpoint at a path: its folder, or the latest one of a run folder."""
    if (path / "checkpoints").is_dir():
        runs = Checkpoints(path / "checkpoints")
        try:
            return runs.latest() or read(path / "checkpoints")
        finally:
            runs.close()
    return read(path)
