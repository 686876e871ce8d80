"""Compare the same training step on several releases of JAX, with and without XLA's YNNPACK fusions, in results and speed.

    python bench/scripts/jaxlibs.py old=.venv311/bin/python new=.venv312/bin/python --json jaxlibs.json

Every interpreter needs JAX, Flax and Optax. First each computes what `penstock bench frameworks` compares frameworks by (logits,
losses of five steps, and what those did to each weight), and the largest relative difference to float64 is shown; run this with
the newest JAX, which computes the float64. Then the step is timed, in a fresh process each time, in rounds over all interpreters.
Every second round has the reverse order. Ratios are of one round, and their intervals over rounds, as in `penstock bench`. The
first interpreter is timed twice in each round, as the A/A control.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from penstock_bench import machine
from penstock_bench.environment import Environment
from penstock_bench.model import Outputs, Workload
from penstock_bench.parity import compare_outputs
from penstock_bench.process import run_variant
from penstock_bench.statistics import FEWEST_PAIRS, compare
from penstock_bench.suites import find

_MODULE = "penstock_bench.suites.frameworks"
_OFF = "--xla_cpu_experimental_ynn_fusion_type="


@dataclass(frozen=True)
class Setting(Environment):
    """An interpreter, and the XLA flags that it runs with."""

    interpreter: Path = Path(sys.executable)
    flags: str = ""

    @property
    def python(self) -> Path:
        return self.interpreter


def settings_of(named: list[str]) -> list[Setting]:
    """Return two settings for each NAME=PYTHON: with its defaults, and without YNNPACK fusions."""
    found = []
    for text in named:
        name, _, path = text.partition("=")
        python = Path(path).absolute()
        version = "import jax, jaxlib; print(jax.__version__, jaxlib.__version__)"
        versions = subprocess.run([python, "-c", version], capture_output=True, text=True, check=True).stdout.split()
        label = f"{name}: JAX {versions[0]}"
        found += [Setting(label, (), python), Setting(f"{label}, YNNPACK off", (), python, _OFF)]
    return found


def run(setting: Setting, workload: Workload, cache: Path, outputs: Path | None = None) -> dict:
    """Measure the step of a setting, or write its outputs."""
    variant = replace(workload.variant("JAX"), environment=setting)
    flags = {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {setting.flags}".strip()} if setting.flags else {}
    before = dict(os.environ)
    os.environ.update(flags)
    try:
        finished = run_variant(_MODULE, workload, variant, "full", cache, outputs)
    finally:
        os.environ.clear()
        os.environ.update(before)
    if finished.reason:
        raise RuntimeError(f"{setting.name}: {finished.reason}\n{finished.output}")
    return dict(finished.result or {})


def parity(settings: list[Setting], workload: Workload, cache: Path) -> dict[str, dict[str, float]]:
    """Return the largest relative difference to float64, by setting and quantity."""
    assert workload.agreement is not None
    reference: Outputs = workload.agreement.reference.outputs(workload.sizes["full"])
    found = {}
    for setting in settings:
        path = cache / "outputs.npz"
        run(setting, workload, cache, path)
        with np.load(path, allow_pickle=False) as outputs:
            rows = compare_outputs(setting.name, dict(outputs), reference, workload.agreement)
        found[setting.name] = {row.quantity: row.difference for row in rows}
        said = ", ".join(f"{row.quantity} {row.difference:.1e} (at most {row.tolerance:.0e})" for row in rows)
        print(f"{setting.name}: {said}", flush=True)
    return found


def speed(settings: list[Setting], workload: Workload, rounds: int, cache: Path) -> dict[str, list[float]]:
    """Return milliseconds a step by setting, one number a round; "control" is the first setting again."""
    order = random.Random(0)
    taken: dict[str, list[float]] = {name: [] for name in [*(setting.name for setting in settings), "control"]}
    turns = [*((setting.name, setting) for setting in settings), ("control", settings[0])]
    for number in range(rounds):
        if number % 2 == 0:
            order.shuffle(turns)
        for name, setting in turns if number % 2 == 0 else turns[::-1]:
            taken[name].append(float(np.mean(run(setting, workload, cache)["steps"]["compute"])))
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", nargs="+", metavar="NAME=PYTHON", help="interpreters to compare; the first is the baseline")
    parser.add_argument("--rounds", type=int, default=10, help=f"at least {FEWEST_PAIRS} (default: 10)")
    parser.add_argument("--workload", default="vit-tiny-b8-fp32-eager-sgd-random", help="as `penstock bench frameworks` names it")
    parser.add_argument("--json", type=Path, metavar="PATH")
    args = parser.parse_args()
    if args.rounds < FEWEST_PAIRS:
        parser.error(f"--rounds {args.rounds}: fewer than {FEWEST_PAIRS} give no interval")
    settings, workload = settings_of(args.python), find(_MODULE, args.workload)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        found = parity(settings, workload, Path(folder))
        taken = speed(settings, workload, args.rounds, Path(folder))
    baseline = taken[settings[0].name]
    compared = {name: compare(times, baseline) for name, times in taken.items() if name != settings[0].name}
    for name, one in compared.items():
        print(f"{name}: {one.ratio:.3f}x the step of {settings[0].name} ({one.low:.3f} to {one.high:.3f})")
    if args.json:
        everything = {
            "machine": machine.describe(),
            "workload": workload.name,
            "rounds": args.rounds,
            "parity": found,
            "ms": taken,
            "ratios": {name: asdict(one) for name, one in compared.items()},
        }
        args.json.write_text(json.dumps(everything, indent=1) + "\n")


if __name__ == "__main__":
    main()
