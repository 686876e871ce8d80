"""A recipe runs in several processes, of `penstock launch` or of Ray: one run folder, one result, one image."""

import json
import os
import subprocess
import sys

import pytest
from tests.extras import require

from penstock.cli import main


def train(folder, *flags):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "RAY_USAGE_STATS_ENABLED": "0"}
    for name in ("RAY_ADDRESS", "JAX_NUM_CPU_DEVICES"):
        environment.pop(name, None)
    command = [sys.executable, "-m", "penstock", "train", "digits", *flags]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)


@pytest.mark.slow
@pytest.mark.parametrize(("option", "prefix"), [("--processes", "[0] "), ("--ray", "")])
def test_two_processes_train_one_run(tmp_path, option, prefix):
    if option == "--ray":
        require("ray")
    done = train(tmp_path, option, "2", "--steps", "20", "--quiet")
    assert done.returncode == 0, done.stderr
    results = [line for line in done.stdout.splitlines() if "validation accuracy" in line]
    assert len(results) == 1
    assert results[0].startswith(f"{prefix}validation accuracy")
    (folder,) = (tmp_path / "runs").iterdir()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == list(range(2, 21, 2))
    assert (folder / "training.png").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--processes", "0"), "--processes 0: needs an integer >= 1"),
        (("--ray", "0"), "--ray 0: needs an integer >= 1"),
        (("--ray", "2", "--processes", "2"), "not allowed with argument"),
    ],
)
def test_unusable_numbers_are_refused(flags, message, capsys):
    if flags == ("--ray", "0"):
        require("ray")
    try:
        code = main(["train", "digits", *flags])
    except SystemExit as end:
        code = end.code
    assert code == 2
    errors = capsys.readouterr().err
    assert message in errors
    assert errors.count("\n") == 1


@pytest.mark.slow
def test_an_error_before_the_run_is_told_once(tmp_path):
    done = train(tmp_path, "--processes", "2", "--batch-size", "3")
    assert done.returncode == 2
    assert done.stderr.count("--batch-size 3: does not divide over 2 devices; use a multiple, such as 2") == 1
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()
