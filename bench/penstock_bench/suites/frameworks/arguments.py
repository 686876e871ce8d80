"""Declare the flags of `penstock bench frameworks`, and return the workloads that they choose."""

from __future__ import annotations

import argparse
import itertools
from dataclasses import replace
from typing import Any

from penstock.run_command import nvidia_gpu
from penstock_bench.model import Workload
from penstock_bench.suites.frameworks.experiment import CHOICES, Experiment
from penstock_bench.suites.frameworks.workload import AT_BEST, workload_of

_HELP = {
    "model": "sizes of the ViT",
    "batch": "records in a batch",
    "precision": "of matrix products",
    "attention": "eager: product, softmax, product; fused: each framework's own",
    "optimizer": "optimizers",
    "data": "random: made as it is loaded; jpeg: decoded from files",
}


def defaults() -> dict[str, tuple[str, ...]]:
    """Return the default of each flag. It depends on the machine, so that a step takes a reasonable time on each."""
    common = {"attention": ("eager",), "optimizer": ("sgd",), "data": ("random",)}
    if nvidia_gpu():
        return {"model": ("base",), "batch": ("32", "256"), "precision": ("tf32", "bf16"), **common}
    return {"model": ("tiny", "small"), "batch": ("8", "32"), "precision": ("fp32",), **common}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for flag, default in defaults().items():
        choices = f": {', '.join(CHOICES[flag])}" if flag in CHOICES else ""
        parser.add_argument(
            f"--{flag}",
            metavar="A,B",
            default=",".join(default),
            help=f"{_HELP[flag]}{choices}; several with commas between (default: %(default)s)",
        )
    parser.add_argument(
        "--at-best", action="store_true", help="JAX and Keras also as `penstock run` starts them; takes half as long again"
    )


def choose(args: argparse.Namespace) -> tuple[Workload, ...]:
    """Return a workload for each combination of the flags' values.

    Raises:
      ValueError: a value is not one of the choices, or this machine cannot run a combination.
    """
    chosen: dict[str, list[Any]] = {flag: _split(flag, getattr(args, flag)) for flag in defaults()}
    chosen["batch"] = list(dict.fromkeys(map(_batch, chosen["batch"])))  # 8 and 08 are the same
    if "tf32" in chosen["precision"] and not nvidia_gpu():
        raise ValueError("--precision tf32 is what NVIDIA GPUs multiply with, and there is none here: choose fp32 or bf16")
    combinations = itertools.product(*chosen.values())
    experiments = [Experiment(**dict(zip(chosen, combination, strict=True))) for combination in combinations]
    wanted = args.variant if getattr(args, "variant", None) else ()
    at_best = args.at_best or any(name.endswith(AT_BEST) for name in wanted)
    return tuple(_without_at_best(workload_of(experiment), at_best) for experiment in experiments)


def _without_at_best(workload: Workload, at_best: bool) -> Workload:
    """Return the workload with frameworks at their defaults only, unless they are also requested at their best."""
    if at_best:
        return workload
    variants = tuple(variant for variant in workload.variants if not variant.name.endswith(AT_BEST))
    names = {variant.name for variant in variants}
    return replace(workload, variants=variants, targets=tuple(one for one in workload.targets if one.variant in names))


def _split(flag: str, text: str) -> list[str]:
    words = list(dict.fromkeys(word.strip() for word in text.split(",")))
    for word in words:
        if flag in CHOICES and word not in CHOICES[flag]:
            raise ValueError(f"--{flag} {word!r} is unknown: choose from {', '.join(CHOICES[flag])}")
    return words


def _batch(word: str) -> int:
    try:
        batch = int(word)
    except ValueError:
        batch = 0
    if batch < 1:
        raise ValueError(f"--batch {word!r} is not a number of records, at least 1")
    return batch
