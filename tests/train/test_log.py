"""Each logger writes what it is given, in a form that its readers take, and continues after a restart without doubles."""

import json
import os
import re
import subprocess
import sys

import pytest
from tests.extras import require

import penstock as ps
from penstock.train.goodput import Goodput

GOODPUT = Goodput(20, 1, 10.0, {"step": 9.0, "compile": 1.0}, 0)


def run(log, begin, end, step=10):
    """Give a logger the points of an attempt."""
    log(ps.Point("begin", begin, 40))
    for number in range(begin + step, end + 1, step):
        log(ps.Point("train", number, 40, {"loss": 1 / number}, speed=100.0, input_wait=0.25))
    log(ps.Point("evaluation", end, 40, {"val_loss": 2.0}))
    log(ps.Point("end", end, 40, text="input: keeps up", goodput=GOODPUT))


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_jsonl_has_a_line_for_each_point(tmp_path):
    run(ps.log.jsonl(tmp_path / "deep/metrics.jsonl"), 0, 20)
    assert lines(tmp_path / "deep/metrics.jsonl") == [
        {"step": 10, "loss": 0.1, "steps_per_second": 100.0, "input_wait": 0.25},
        {"step": 20, "loss": 0.05, "steps_per_second": 100.0, "input_wait": 0.25},
        {"step": 20, "val_loss": 2.0},
    ]


def test_jsonl_drops_what_comes_again_after_a_restart(tmp_path):
    path = tmp_path / "metrics.jsonl"
    run(ps.log.jsonl(path), 0, 30)
    with path.open("a") as file:
        file.write('{"step": 40, "lo')  # the process was killed here
    run(ps.log.jsonl(path), 15, 35)
    assert [line["step"] for line in lines(path)] == [10, 25, 35, 35]


def test_jsonl_writes_null_for_values_that_json_has_not(tmp_path):
    log = ps.log.jsonl(tmp_path / "m.jsonl")
    log(ps.Point("train", 1, None, {"a": float("nan"), "b": float("inf")}))
    log(ps.Point("end", 1, None))
    assert lines(tmp_path / "m.jsonl") == [{"step": 1, "a": None, "b": None}]


def test_jsonl_tells_evaluations_from_training_metrics_that_are_called_alike(tmp_path):
    path = tmp_path / "m.jsonl"
    for begin in (0, 10):
        log = ps.log.jsonl(path)
        log(ps.Point("begin", begin, 20))
        log(ps.Point("train", 10, 20, {"val_loss": 3.0}, speed=1.0, input_wait=0.0))  # after the restart, what was pending
        log(ps.Point("evaluation", 10, 20, {"val_accuracy": 0.5}))
        log(ps.Point("end", 10, 20))
    assert [sorted(line) for line in lines(path)] == [
        ["input_wait", "step", "steps_per_second", "val_loss"],
        ["step", "val_accuracy"],
    ]


def test_jsonl_drops_lines_that_are_no_text(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 10, "loss": 1.0}\n\xff\xfe\n{"step": 5, "\xed\xa0\x80": 1}\n{"step": 1%s}\n' % (b"0" * 400))
    run(ps.log.jsonl(path), 10, 20)
    assert [line["step"] for line in lines(path)] == [10, 20, 20]


def test_progress_prints_lines_where_there_is_no_terminal(capsys):
    run(ps.log.progress(), 10, 40, 30)
    shown = capsys.readouterr().err.splitlines()
    assert shown[:2] == ["compile (continued from step 10)", "train 40/40 loss 0.025, 100 steps/s, input wait 25.0%"]
    assert shown[2] == "train 40/40 loss 0.025, val_loss 2, 100 steps/s, input wait 25.0%"
    assert shown[3].startswith("goodput: 90.0 % of 10.0 s went into steps")
    assert shown[4:] == ["input: keeps up"]


@pytest.mark.parametrize(
    ("points", "last"),
    [
        (
            [("train", 10), ("evaluation", 10), ("train", 20)],
            "train 20/40 a 20, val_a 10 (step 10), 100 steps/s, input wait 25.0%",
        ),
        ([("train", 10), ("evaluation", 20)], "train 20/40 a 10 (step 10), val_a 20, 100 steps/s, input wait 25.0%"),
        ([("evaluation", 40)], "train 40/40 val_a 40"),
        (
            [("train", 39), ("evaluation", 39), ("train", 40), ("evaluation", 40)],
            "train 40/40 a 40, val_a 40, 100 steps/s, input wait 25.0%",
        ),
    ],
)
def test_last_line_has_the_newest_of_everything_and_the_step_of_what_is_older(capsys, points, last):
    log = ps.log.progress()
    log(ps.Point("begin", 0, 40))
    for kind, step in points:
        train = kind == "train"
        speeds = {"speed": 100.0, "input_wait": 0.25} if train else {}
        log(ps.Point(kind, step, 40, {"a" if train else "val_a": float(step)}, **speeds))
    log(ps.Point("end", points[-1][1], 40))  # after an error, there is no text
    assert capsys.readouterr().err.splitlines()[-1] == last


@pytest.mark.parametrize("steps", [200, 1_000_000, None])
@pytest.mark.parametrize("columns", [120, 80, 60, 40])
def test_bar_keeps_its_step_and_drops_the_least_important_numbers(monkeypatch, capsys, columns, steps):
    for name, value in {"FORCE_COLOR": "1", "TTY_COMPATIBLE": "1", "COLUMNS": str(columns), "LINES": "24"}.items():
        monkeypatch.setenv(name, value)
    metrics = {"accuracy": 0.9753, "gradient norm": 123.4, "loss": 0.001234, "rate": 3e-4}
    log = ps.log.progress()
    log(ps.Point("begin", 0, steps))
    log(ps.Point("train", 120, steps, metrics, speed=0.025, input_wait=0.25))
    log(ps.Point("evaluation", 120, steps, {f"val_{name}": value for name, value in metrics.items()}))
    log(ps.Point("end", 120, steps))
    *_, bar, last = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err).splitlines()
    bar = bar.rpartition("\r")[2].rstrip()
    assert len(bar) <= columns
    assert re.match(r"train [━╸╺]{10} +120/" + re.escape(str(steps or "?")), bar)
    wanted = ["loss 0.00123", "0.025 steps/s", {200: "53:20 left", 1_000_000: "11109:46:40 left", None: ""}[steps]]
    shown = [text in bar for text in filter(None, wanted)]
    assert shown == sorted(shown, reverse=True)
    assert all(shown) or columns < 80
    assert ("accuracy 0.975" in bar) <= all(shown)
    assert last.startswith(f"train 120/{steps or '?'} accuracy 0.975, ")  # the end shows what the bar has no room for
    assert "val_rate 0.0003" in last


def test_progress_without_summary(capsys):
    run(ps.log.progress(summary=False), 0, 40, 40)
    assert "goodput" not in capsys.readouterr().err


def test_bar_on_a_terminal_is_ended_and_leaves_the_cursor(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    run(ps.log.progress(), 0, 40)
    shown = capsys.readouterr().err
    assert "40/40" in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")


def test_tensorboard_has_all_scalars_and_continues(tmp_path):
    proto = require("tensorboardX.proto")
    run(ps.log.tensorboard(tmp_path), 0, 20)
    run(ps.log.tensorboard(tmp_path), 20, 40)
    found = {}
    for path in sorted(tmp_path.glob("events*")):
        content = path.read_bytes()
        while content:
            size = int.from_bytes(content[:8], "little")
            event = proto.event_pb2.Event.FromString(content[12 : 12 + size])
            content = content[16 + size :]
            for value in event.summary.value:
                found[value.tag, event.step] = value.simple_value
    assert {step for tag, step in found if tag == "loss"} == {10, 20, 30, 40}
    assert found["val_loss", 40] == 2.0
    assert found["steps_per_second", 10] == 100.0


@pytest.mark.slow
def test_wandb_works_offline(tmp_path):
    require("wandb")
    script = """
import penstock as ps
from tests.train.test_log import run
run(ps.log.wandb(project="p", mode="offline", dir="."), 0, 20)
print("done")
"""
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "JAX_PLATFORMS": "cpu", "WANDB_SILENT": "true"}
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.endswith("done\n")
    (written,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert b"val_loss" in written.read_bytes()


@pytest.mark.parametrize(("name", "module"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_missing_library_is_named(monkeypatch, name, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=f"pip install {module}"):
        getattr(ps.log, name)(*(["x"] if name == "tensorboard" else []))


def test_jsonl_keeps_the_step_if_a_metric_has_that_name(tmp_path):
    log = ps.log.jsonl(tmp_path / "m.jsonl")
    log(ps.Point("train", 7, None, {"step": 3.5}))
    log(ps.Point("end", 7, None))
    assert lines(tmp_path / "m.jsonl") == [{"step": 7}]


def test_jsonl_has_an_evaluation_once_though_each_restart_repeats_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for _ in range(3):
        logger = ps.log.jsonl(path)
        logger(ps.Point("begin", 20, 20))
        logger(ps.Point("evaluation", 20, 20, {"val_loss": 0.5}))
        logger(ps.Point("end", 20, 20))
    assert lines(path) == [{"step": 20, "val_loss": 0.5}]
