"""Recipes started as commands, and the metrics that they leave."""

import json
import os
import subprocess
import sys
from pathlib import Path


def start(recipe: str, *flags: str, **variables: str) -> subprocess.Popen[str]:
    # A background process of a shell ignores SIGINT, and its children inherit this.
    program = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    program += "from penstock.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "train", recipe, *flags]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""} | variables
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
