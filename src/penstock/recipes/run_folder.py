"""The parts that recipes share: the run folder that the options name, checks of options, and the cache of compiled programs.

The call of `fit` that recipes share: a step, a state and batches go in; the trained state and the last point come out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax

import penstock as ps
from penstock._stopping import Stopping
from penstock.errors import CannotStartError

LARGEST_SEED = 2**32 - 1  # JAX keeps 32 bits of a seed
_RUN = "run.json"  # is in the folder of a run


def add_run_arguments(parser: argparse.ArgumentParser, recipe: str) -> None:
    """Add the options of the run folder, which all recipes have."""
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help=f"run folder: new, empty, or of this run, which then continues (default: runs/{recipe}-<date-time>)",
    )
    parser.add_argument("--resume", action="store_true", help="continue the run in --out, or the newest one in runs/")
    parser.add_argument("--quiet", action="store_true", help="no progress bar, only the result")


def choose_folder(recipe: str, out: str | Path | None, resume: bool = False) -> Path:
    """Return the run folder. It exists, and can be written to.

    Args:
      recipe: the name of the recipe, for a new folder.
      out: the folder that was named.
      resume: whether there must be a run to continue.

    Raises:
      CannotStartError: it cannot be made or written, holds something else, or there is no run to continue.
    """
    if resume and out is None:
        runs = sorted(path.parent for path in Path("runs").glob(f"{recipe}-*/{_RUN}"))
        if not runs:
            raise CannotStartError(f"--resume: there is no run in runs/{recipe}-*; name its folder with --out")
        return max(runs, key=lambda folder: (folder / _RUN).stat().st_mtime)
    folder = _unused_folder(recipe) if out is None else Path(out)
    if resume and not (folder / _RUN).is_file():
        raise CannotStartError(f"--out {folder}: there is no run to continue; leave out --resume to begin one")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        occupied = not (folder / _RUN).is_file() and any(folder.iterdir())
        tempfile.TemporaryFile(dir=folder).close()  # fails now, and not at the first log point, if the folder is not writable
    except OSError as error:
        raise CannotStartError(f"--out {folder}: no folder to write to ({error.strerror}); name another one") from error
    if occupied:
        raise CannotStartError(f"--out {folder}: holds files already; name a folder that does not exist yet, or empty it")
    return folder


def say_how_to_continue(folder: Path) -> None:
    """Let a stop by a signal print the command that continues this run."""
    if Stopping.current is None or Stopping.current.command is not None:
        return
    arguments = [argument for argument in sys.argv[1:] if argument != "--resume"]
    named = any(argument == "--out" or argument.startswith("--out=") for argument in arguments)
    Stopping.current.command = shlex.join(["penstock", *arguments, *([] if named else ["--out", str(folder)])])


def read_lines(folder: Path) -> list[dict[str, Any]]:
    """Return what metrics.jsonl of a run has; nothing if the run ended before the first log point."""
    try:
        return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    except FileNotFoundError:
        return []


def check_installed(names: Sequence[str]) -> None:
    """Raise CannotStartError if one of these modules is not installed."""
    if missing := [name for name in names if find_spec(name) is None]:
        raise CannotStartError(f'{", ".join(missing)} not installed: pip install "penstock[train]"')


def check_at_least_one(**values: int) -> None:
    """Raise CannotStartError if the value of an option is below 1. The names of arguments are those of options."""
    for name, value in values.items():
        if value < 1:
            raise CannotStartError(f"--{name.replace('_', '-')} {value}: needs an integer >= 1")


def check_seed(seed: int) -> None:
    """Raise CannotStartError if JAX does not take a seed."""
    if not 0 <= seed <= LARGEST_SEED:
        raise CannotStartError(f"--seed {seed}: needs an integer from 0 to {LARGEST_SEED}")


def check_divides_over_devices(batch_size: int) -> None:
    """Raise CannotStartError if a batch does not divide over the devices, or there are none."""
    try:
        devices = jax.device_count()
    except RuntimeError as error:  # its first line has the reason
        raise CannotStartError(f"JAX finds no device: {str(error).splitlines()[0]}") from error
    if batch_size % devices:
        nearest = max(1, batch_size // devices) * devices
        raise CannotStartError(
            f"--batch-size {batch_size}: does not divide over {devices} devices; use a multiple, such as {nearest}"
        )


def keep_compiled_programs() -> None:
    """Let JAX keep compiled programs on disk, so that a run which continues does not compile again.

    They go to XDG_CACHE_HOME/penstock/programs, unless JAX_COMPILATION_CACHE_DIR names a folder.
    """
    if jax.config.jax_compilation_cache_dir is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock" / "programs"
        jax.config.update("jax_compilation_cache_dir", str(cache))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def _unused_folder(recipe: str) -> Path:
    name = f"{recipe}-{datetime.now():%Y%m%d-%H%M%S}"
    names = itertools.chain([name], (f"{name}-{n}" for n in itertools.count(2)))
    return next(folder for folder in (Path("runs") / name for name in names) if not folder.exists())


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
