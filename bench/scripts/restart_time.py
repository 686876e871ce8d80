"""Measure how long a stop and a restart take: `penstock train digits` gets SIGTERM, and the same command continues it.

python bench/scripts/restart_time.py --rounds 5 --json out.json

*stop*: from the signal to the end of the process. *restart*: from the start of the new process to its first new line in
metrics.jsonl, two intervals of five steps later; `compile` of it is the time of tracing and compiling, from a cache of programs
on disk.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

COMMAND = [sys.executable, "-m", "penstock", "train", "digits", "--quiet", "--steps", "100000"]


def last_step(folder: Path) -> int:
    """Return the step of the last line of metrics.jsonl."""
    try:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        return max((json.loads(line)["step"] for line in lines), default=0)
    except (FileNotFoundError, ValueError):
        return 0


def wait_for_step(folder: Path, step: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until a later step than `step` is logged."""
    while last_step(folder) <= step:
        if process.poll() is not None:
            raise RuntimeError(f"the training ended with {process.returncode}")
        time.sleep(0.02)


def main() -> None:
    """Print the medians, and write all values as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    values: dict[str, list[float]] = {"stop": [], "restart": [], "compile": [], "restart without compile": []}
    with tempfile.TemporaryDirectory() as name:
        folder, step = Path(name) / "run", 0
        for number in range(args.rounds + 1):
            begin = time.perf_counter()
            process = subprocess.Popen([*COMMAND, "--out", str(folder)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            wait_for_step(folder, step, process)
            restart = time.perf_counter() - begin
            wait_for_step(folder, last_step(folder) + 20, process)
            begin = time.perf_counter()
            process.send_signal(signal.SIGTERM)
            if process.wait():
                raise RuntimeError(f"the training ended with {process.returncode}")
            stop, step = time.perf_counter() - begin, last_step(folder)
            compiled = json.loads((folder / "goodput.json").read_text())["attempts"][-1]["parts"]["compile"]
            if number:  # the first one is no restart
                for key, value in zip(values, (stop, restart, compiled, restart - compiled), strict=True):
                    values[key].append(value)
                print({key: round(each[-1], 2) for key, each in values.items()}, flush=True)
    print({key: round(statistics.median(each), 2) for key, each in values.items()}, "medians, in seconds")
    if args.json:
        args.json.write_text(json.dumps(values, indent=1))


if __name__ == "__main__":
    main()
