"""The parts that recipes share: options and their checks, the run folder, and the call of `ps.fit` in it."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

import penstock as ps
from penstock._cache_folder import user_cache
from penstock._jaxlib_faults import warn_of_known_faults
from penstock._stopping import DEFAULT_GRACE, Stopping
from penstock.errors import CannotStartError
from penstock.run_command import say_what_was_applied

_LARGEST_SEED = 2**32 - 1  # JAX keeps 32 bits of a seed
_RUN = "run.json"  # is in the folder of a run
_SAVE_EVERY = 100  # steps


def add_integer(parser: argparse.ArgumentParser, option: str, default: int, help_text: str) -> None:
    """Add an option with an integer and a default."""
    parser.add_argument(option, type=int, default=default, metavar="N", help=f"{help_text} (default: %(default)s)")


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


def check_installed(names: Sequence[str]) -> None:
    """Raise CannotStartError if one of these modules is not installed."""
    if missing := [name for name in names if find_spec(name) is None]:
        raise CannotStartError(f'{", ".join(missing)} not installed: pip install "penstock[train]"')


def check_at_least_one(**values: int) -> None:
    """Raise CannotStartError if the value of an option, given by its name, is below 1."""
    for name, value in values.items():
        if value < 1:
            raise CannotStartError(f"--{name.replace('_', '-')} {value}: needs an integer >= 1")


def check_seed(seed: int) -> None:
    """Raise CannotStartError if JAX does not take a seed."""
    if not 0 <= seed <= _LARGEST_SEED:
        raise CannotStartError(f"--seed {seed}: needs an integer from 0 to {_LARGEST_SEED}")


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


def choose_folder(recipe: str, out: str | Path | None, resume: bool = False) -> Path:
    """Return the run folder of the options --out and --resume. It exists, and can be written to.

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


def _unused_folder(recipe: str) -> Path:
    name = f"{recipe}-{datetime.now():%Y%m%d-%H%M%S}"
    names = itertools.chain([name], (f"{name}-{n}" for n in itertools.count(2)))
    return next(folder for folder in (Path("runs") / name for name in names) if not folder.exists())


@contextlib.contextmanager
def stoppable(folder: Path) -> Iterator[None]:
    """Stop by signals inside of the `with`, after the messages and the settings with which a recipe starts."""
    if jax.process_index() == 0:
        warn_of_known_faults()
        say_what_was_applied()
    _keep_compiled_programs()
    with Stopping(DEFAULT_GRACE):
        say_how_to_continue(folder)
        yield


def say_how_to_continue(folder: Path) -> None:
    """Let a stop by a signal print the command that continues this run."""
    if Stopping.current is None or Stopping.current.command is not None:
        return
    arguments = [argument for argument in sys.argv[1:] if argument != "--resume"]
    named = any(argument == "--out" or argument.startswith("--out=") for argument in arguments)
    Stopping.current.command = shlex.join(["penstock", *arguments, *([] if named else ["--out", str(folder)])])


def _keep_compiled_programs() -> None:
    """Let JAX keep compiled programs, for runs that continue, in JAX_COMPILATION_CACHE_DIR or the user's cache folder."""
    cache = user_cache()
    if jax.config.jax_compilation_cache_dir is None and cache is not None:
        jax.config.update("jax_compilation_cache_dir", str(cache / "programs"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


def fit_in(folder: Path, step: Any, state: Any, batches: ps.Feed, *, quiet: bool, **settings: Any) -> tuple[Any, ps.Point | None]:
    """Call `ps.fit` in a run folder, with metrics.jsonl and a progress bar.

    Returns:
      The state, and the last point, which only the first process has.

    Raises:
      CannotStartError: the folder belongs to another run.
    """
    points: list[ps.Point] = []
    progress = [] if quiet else [ps.log.progress(summary=False)]
    log = [points.append, ps.log.jsonl(folder / "metrics.jsonl"), *progress]
    try:
        trained = ps.fit(step, state, batches, checkpoint=folder, save_every=_SAVE_EVERY, log=log, **settings)
    except ps.OtherRunError as error:
        raise CannotStartError(f"--out {folder}: {error}") from error
    return trained, points[-1] if points else None


def data_mesh() -> Mesh:
    """Return a mesh of all devices with the axis "data". The compiler chooses the shardings between inputs and outputs."""
    return jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))


def validation_batch_size(about: int, devices: int) -> int:
    """Return about so many records, in a multiple of the number of devices."""
    return -(-about // devices) * devices


def read_lines(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics.jsonl; none if the run ended before the first log point."""
    try:
        return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    except FileNotFoundError:
        return []
