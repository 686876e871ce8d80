"""Declare the arguments that the suites of `penstock bench` have in common."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from penstock_bench.model import Workload

PRECISE_MINUTES = 60.0  # the time limit of --until-precise, unless --minutes gives one


def add_timing(suite: argparse.ArgumentParser, rounds: int, minutes: float | None, fewest: int) -> None:
    """Add the arguments that say how long to measure.

    Args:
      suite: the parser of the suite.
      rounds, minutes: the suite's defaults, for the help texts.
      fewest: the number of rounds below which nothing is judged.
    """
    limit = f" (default: {minutes:g})" if minutes else ""
    add_quick(suite)
    add_budget(
        suite,
        rounds=f"how often each variant is started (default: {rounds}, or 1 with --quick); fewer than {fewest} prove nothing",
        minutes=f"begin no round that would end later{limit}",
    )


def add_quick(suite: argparse.ArgumentParser) -> None:
    """Add the argument that chooses the quick sizes."""
    suite.add_argument("--quick", action="store_true", help="one round of small sizes: shows that all works, not how fast")


def add_budget(parser: argparse.ArgumentParser, rounds: str, minutes: str) -> None:
    """Add --rounds, --until-precise and --minutes, with the help texts of two of them."""
    parser.add_argument("--rounds", type=_positive(int), metavar="N", help=rounds)
    parser.add_argument(
        "--until-precise",
        type=_share,
        metavar="SHARE",
        help=f"go on until each 95 %% interval is within ± this share of its ratio, as 1%%; for {PRECISE_MINUTES:g} minutes",
    )
    parser.add_argument("--minutes", type=_positive(float), metavar="N", help=minutes)


def add_variant(suite: argparse.ArgumentParser, workloads: Sequence[Workload]) -> None:
    """Add the argument that chooses variants."""
    suite.add_argument(
        "--variant",
        action="append",
        metavar="VARIANT",
        help=f"run this one only, of {', '.join(variant_names(workloads))}; may be given several times",
    )


def add_reports(suite: argparse.ArgumentParser) -> None:
    """Add the arguments that name the files of the report."""
    suite.add_argument("--json", type=Path, metavar="PATH", help="write all samples, how they were taken, and what they say")
    suite.add_argument("--markdown", type=Path, metavar="PATH", help="write the tables, for a pull request")
    suite.add_argument("--html", type=Path, metavar="PATH", help="write the report as one page, with plots and the data")


def add_only(suite: argparse.ArgumentParser, names: Iterable[str]) -> None:
    """Add the argument that chooses workloads; `names` are the choices."""
    suite.add_argument(
        "--only",
        action="append",
        choices=list(names),
        metavar="WORKLOAD",
        help="run this workload; may be given several times",
    )


def variant_names(workloads: Iterable[Workload]) -> list[str]:
    """Return the name of each variant once, in the workloads' order."""
    return list(dict.fromkeys(variant.name for workload in workloads for variant in workload.variants))


def _positive(kind: type[int] | type[float]):  # type: ignore[no-untyped-def]  # the function that argparse calls
    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = kind(0)
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"{text}: needs {'an integer >= 1' if kind is int else 'a number > 0'}")
        return value

    return parse


def _share(text: str) -> float:
    """Return the number for a share that is written as 0.01 or as 1%."""
    try:
        percent = text.rstrip().removesuffix("%")
        value = float(percent) / 100 if percent != text.rstrip() else float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text}: needs a share such as 1% or 0.01, more than 0 and less than 1")
    return value
