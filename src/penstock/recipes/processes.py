"""Run a recipe in several processes, by the options `--processes` and `--ray`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from penstock._heartbeat import is_launched
from penstock._stopping import Stopping
from penstock.errors import CannotStartError, DistributedError, UnsupportedVersionError
from penstock.recipes.run_folder import choose_folder, find_run, say_how_to_continue


def add_process_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--processes` and `--ray`, of which one may be given."""
    several = parser.add_mutually_exclusive_group()
    several.add_argument("--processes", type=int, metavar="N", help="train in N processes on this machine, by penstock launch")
    several.add_argument(
        "--ray",
        type=int,
        metavar="N",
        help="train in N workers of Ray: of the cluster at RAY_ADDRESS, or on this machine; workers that die start again",
    )


def run_as_processes(count: int | None, verbose: bool) -> None:
    """Replace this process by `penstock launch` of its command line, unless it was started so, or the count is None.

    Raises:
      CannotStartError: the count is below 1.
    """
    if count is None or is_launched():
        return
    if count < 1:
        raise CannotStartError(f"--processes {count}: needs an integer >= 1")
    sys.stdout.flush()
    penstock = [sys.executable, "-m", "penstock"]
    launch = ["launch", "-n", str(count), *["-v"] * verbose, "-m", "penstock"]
    os.execv(sys.executable, [*penstock, *launch, *sys.argv[1:]])


def run_on_ray(recipe: str, train: Callable[..., Any], settings: Mapping[str, Any], workers: int) -> Any:
    """Run a recipe in workers of Ray, and return the result of process 0.

    Args:
      recipe: its name, for a new run folder.
      train: the function of the recipe.
      settings: its arguments, with "out" and "resume".

    Raises:
      CannotStartError: Ray is not installed, has no room for the workers, or `train` cannot start.
    """
    try:
        import penstock.ray as pr
        from penstock.ray._versions import require_ray

        require_ray()
        import ray
    except UnsupportedVersionError as error:
        raise CannotStartError(f"--ray: {error}") from error
    if workers < 1:
        raise CannotStartError(f"--ray {workers}: needs an integer >= 1")
    out = find_run(recipe, settings["out"], settings["resume"]) or settings["out"]
    folder = choose_folder(recipe, out).absolute()
    say_how_to_continue(folder)
    if (stopping := Stopping.current) is not None:
        stopping.last_line = lambda: f"the last checkpoint is kept; {stopping.how_to_continue()}"
    local = not ray.is_initialized() and "RAY_ADDRESS" not in os.environ
    if local:
        ray.init("local", num_cpus=max(workers, os.cpu_count() or 1))
    elif not ray.is_initialized():
        ray.init()
    resources = {"GPU": 1} if "GPU" in ray.cluster_resources() else {"CPU": 1}
    try:
        config = {**settings, "out": str(folder), "resume": False}
        return pr.run(train, config, workers=workers, resources=resources).value
    except DistributedError as error:
        raise CannotStartError(f"--ray {workers}: {error}") from error
    finally:
        if local:
            ray.shutdown()
