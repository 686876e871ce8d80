"""The parts that recipes share: options and their checks, the run folder, and the call of `ps.fit` in it."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

import penstock as ps
from penstock._atomic_write import replace
from penstock._cache_folder import user_cache
from penstock._jaxlib_faults import warn_of_known_faults
from penstock._stopping import DEFAULT_GRACE, Stopping
from penstock.errors import CannotStartError
from penstock.run_command import say_what_was_applied

_LARGEST_SEED = 2**32 - 1  # JAX keeps 32 bits of a seed
_RUN = "recipe.json"  # in the folder of a run: the recipe and its settings
_MAY_CHANGE = ("steps", "plan", "data")  # settings of a run that continues; other data is refused by its content
_SAVE_EVERY = 100  # steps


def add_integer(parser: argparse.ArgumentParser, option: str, default: int, help_text: str) -> None:
    """Add an option with an integer. It is None if it is not given, so that a run that continues keeps its own."""
    parser.add_argument(option, type=int, metavar="N", help=f"{help_text} (default: {default})")


def add_run_arguments(parser: argparse.ArgumentParser, recipe: str) -> None:
    """Add the options of the run folder, which all recipes have."""
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        help=(
            "run folder: new, empty, or of a run, which then continues with its own options; with more --steps, a finished one "
            f"goes on (default: runs/{recipe}-<date-time>)"
        ),
    )
    parser.add_argument(
        "--resume", action="store_true", help="continue the run in --out, or the newest one of this recipe in runs/"
    )
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument("--quiet", action="store_true", help="no progress bar, only the result")
    amount.add_argument("-v", "--verbose", action="store_true", help="print the settings of penstock run and the whole plan, too")


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


def check_devices() -> None:
    """Raise CannotStartError if JAX finds no device."""
    try:
        jax.device_count()
    except RuntimeError as error:  # its first line has the reason
        raise CannotStartError(f"JAX finds no device: {str(error).splitlines()[0]}") from error


def check_divides_over_devices(batch_size: int) -> None:
    """Raise CannotStartError if a batch does not divide over the devices."""
    devices = jax.device_count()
    if batch_size % devices:
        nearest = max(1, batch_size // devices) * devices
        raise CannotStartError(
            f"--batch-size {batch_size}: does not divide over {devices} devices; use a multiple, such as {nearest}"
        )


def find_run(recipe: str, out: str | Path | None, resume: bool) -> Path | None:
    """Return the folder of the run that the options --out and --resume continue; None for a new run.

    Raises:
      CannotStartError: there is no run to continue, or it is of another recipe.
    """
    if out is None:
        runs = [path for path in Path("runs").glob(f"*/{_RUN}") if _read(path.parent).get("recipe") == recipe] if resume else []
        if resume and not runs:
            raise CannotStartError(f"--resume: there is no run of penstock train {recipe} in runs/; name its folder with --out")
        return max(runs, key=lambda path: path.stat().st_mtime).parent if runs else None
    other = _read(Path(out)).get("recipe")
    if other is None and resume:
        raise CannotStartError(f"--out {out}: there is no run to continue; leave out --resume to begin one")
    if other not in (None, recipe):
        raise CannotStartError(f"--out {out}: holds a run of penstock train {other}; name another folder")
    return None if other is None else Path(out)


def find_settings(run: Path | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that are given, and the others of the run that continues.

    Args:
      run: the folder of the run that continues; None for a new run.
      given: the options by name; None for each that is not given.

    Raises:
      CannotStartError: the run has begun with other settings, which may not change.
    """
    saved = {name: value for name, value in _read(run).get("settings", {}).items() if name in given} if run else {}
    chosen = {name: value for name, value in given.items() if value is not None}
    begun = run is not None and any((run / "checkpoints").glob("*"))
    if other := [name for name in chosen if begun and name not in _MAY_CHANGE and chosen[name] != saved.get(name)]:
        listed = "; ".join(f"{name} was {saved.get(name)!r} and is {chosen[name]!r}" for name in other)
        raise CannotStartError(
            f"--out {run}: belongs to another run: {listed}. Name another folder, or leave out the options that differ"
        )
    return saved | chosen


def _read(folder: Path) -> dict[str, Any]:
    """Return the recipe and the settings of the run in a folder; an empty dict if there is none."""
    try:
        read = json.loads((folder / _RUN).read_text(encoding="utf-8"))
        return {"recipe": str(read["recipe"]), "settings": dict(read["settings"])}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def choose_folder(recipe: str, out: str | Path | None) -> Path:
    """Return the run folder of the option --out. It exists, and can be written to.

    Raises:
      CannotStartError: it cannot be made or written, or holds something else.
    """
    folder = _unused_folder(recipe) if out is None else Path(out)
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
def stoppable(folder: Path, verbose: bool) -> Iterator[None]:
    """Stop by signals inside of the `with`, after the messages and the settings with which a recipe starts."""
    if jax.process_index() == 0:
        warn_of_known_faults()
        if verbose:
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


def fit_in(
    folder: Path, recipe: str, settings: Any, step: Any, state: Any, batches: ps.Feed, *, quiet: bool, **options: Any
) -> tuple[Any, ps.Point | None]:
    """Call `ps.fit` in a run folder, with metrics.jsonl and a progress bar.

    Args:
      recipe, settings: are kept in the folder, for the commands that continue the run. The settings are a dataclass.
      options: of `ps.fit`.

    Returns:
      The state, and the last point, which only the first process has.

    Raises:
      CannotStartError: the folder belongs to another run.
    """

    def write() -> None:
        replace(folder / _RUN, json.dumps({"recipe": recipe, "settings": asdict(settings)}, indent=1))

    def keep(point: ps.Point) -> None:
        points.append(point)
        if point.kind == "begin":  # `ps.fit` has accepted the data
            write()

    points: list[ps.Point] = []
    if jax.process_index() == 0 and not (folder / _RUN).exists():
        write()
    progress = [] if quiet else [ps.log.progress(summary=False)]
    log = [keep, ps.log.jsonl(folder / "metrics.jsonl"), *progress]
    try:
        trained = ps.fit(
            step, state, batches, steps=settings.steps, checkpoint=folder, save_every=_SAVE_EVERY, log=log, **options
        )
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
