import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from penstock.recipes import digits, images

_KEYS = {"step", "loss", "accuracy", "val_accuracy", "steps_per_second", "input_wait"}
_PNG = b"\x89PNG\r\n\x1a\n"


def _metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def short(tmp_path_factory) -> digits.Result:
    return digits.train(steps=55, batch_size=64, seed=3, out=tmp_path_factory.mktemp("runs") / "a", quiet=True)


@pytest.mark.slow
def test_training_leaves_a_line_for_each_log_point(short):
    lines = _metrics(short.out)
    assert [line["step"] for line in lines] == list(range(5, 56, 5))
    for line in lines:
        assert set(line) == _KEYS
        assert line["loss"] > 0
        assert 0 <= line["accuracy"] <= 1
        assert line["steps_per_second"] > 0
        assert 0 <= line["input_wait"] <= 1


@pytest.mark.slow
def test_training_evaluates_some_points_and_always_the_last(short):
    accuracies = [line["val_accuracy"] for line in _metrics(short.out)]
    assert [k for k, accuracy in enumerate(accuracies) if accuracy is not None] == [9, 10]
    assert short.val_accuracy == accuracies[-1]


@pytest.mark.slow
def test_validation_counts_each_image_once(short):
    images_right = short.val_accuracy * len(images.load().validation["label"])
    assert images_right == pytest.approx(round(images_right), abs=1e-3)


@pytest.mark.slow
def test_the_last_seed_is_usable(tmp_path):
    digits.train(1, 8, seed=2**32 - 1, out=tmp_path, quiet=True)
    assert len(_metrics(tmp_path)) == 1


@pytest.mark.slow
def test_training_draws_a_png(short):
    assert (short.out / "training.png").read_bytes().startswith(_PNG)


@pytest.mark.slow
def test_a_seed_fixes_the_losses_and_another_changes_them(short, tmp_path):
    def losses(seed: int) -> list[float]:
        digits.train(55, 64, seed, tmp_path / str(seed), quiet=True)
        return [line["loss"] for line in _metrics(tmp_path / str(seed))]

    first = [line["loss"] for line in _metrics(short.out)]
    assert losses(3) == first
    assert losses(4) != first


@pytest.mark.slow
def test_one_step_is_a_run(tmp_path):
    result = digits.train(1, 8, out=tmp_path, quiet=True)
    (line,) = _metrics(result.out)
    assert line["step"] == 1
    assert line["val_accuracy"] == result.val_accuracy
    assert (tmp_path / "training.png").exists()


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_measured(tmp_path, monkeypatch):
    validate = digits._validate

    def interrupted(*args):
        if "again" in seen:
            raise KeyboardInterrupt
        seen.append("again")
        return validate(*args)

    seen: list[str] = []
    monkeypatch.setattr(digits, "_validate", interrupted)
    with pytest.raises(KeyboardInterrupt, match=r"up to step 10 are in"):
        digits.train(11, 64, out=tmp_path, quiet=True)
    assert [line["step"] for line in _metrics(tmp_path)] == list(range(1, 11))
    assert (tmp_path / "training.png").read_bytes().startswith(_PNG)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
def test_ctrl_c_ends_the_command_with_130_and_no_traceback(tmp_path):
    out = tmp_path / "run"
    process = _command("--steps", "100000", "--quiet", "--out", str(out))
    deadline = time.monotonic() + 120
    try:
        while not (out / "metrics.jsonl").exists() or len(_metrics(out)) < 2:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()  # has no effect if it has ended
    assert process.returncode == 130
    assert errors.startswith("penstock: interrupted; metrics.jsonl and training.png up to step")
    assert "Traceback" not in errors
    assert len(_metrics(out)) >= 2
    assert (out / "training.png").exists()


# JAX calls listeners during a compilation; this one runs between lowering and compilation by the backend.
_INTERRUPT_COMPILATION = """
import jax.monitoring
interrupted = []
def interrupt(event, *_, **__):
    if "mlir" in event and not interrupted:
        interrupted.append(event)
        signal.raise_signal(signal.SIGINT)
        print("the compilation goes on")
jax.monitoring.register_event_duration_secs_listener(interrupt)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
def test_ctrl_c_while_it_compiles_ends_the_command_with_130_and_leaves_an_empty_folder(tmp_path):
    process = _command("--quiet", "--out", str(tmp_path), first=_INTERRUPT_COMPILATION)
    printed, errors = process.communicate(timeout=120)
    assert printed == "the compilation goes on\n"  # otherwise jaxlib may crash at exit
    assert (process.returncode, errors) == (130, "penstock: interrupted before the first log point: nothing was measured\n")
    assert list(tmp_path.iterdir()) == []  # so that the same command can run again


@pytest.mark.slow
def test_a_failed_run_leaves_an_empty_folder(tmp_path, monkeypatch):
    def broken():
        raise RuntimeError("no digits")

    monkeypatch.setattr(images, "load", broken)
    with pytest.raises(RuntimeError, match="no digits"):
        digits.train(out=tmp_path, quiet=True)
    assert list(tmp_path.iterdir()) == []


def test_no_device_is_told_in_one_line(tmp_path):
    process = _command("--out", str(tmp_path / "never"), JAX_PLATFORMS="no_such_platform")
    printed, errors = process.communicate(timeout=60)
    assert (process.returncode, printed) == (2, "")
    assert errors.startswith("penstock train digits: error: JAX finds no device: ")
    assert "no_such_platform" in errors
    assert errors.count("\n") == 1


def test_help_is_ascii():
    process = _command("--help", PYTHONIOENCODING="ascii")
    printed, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert printed.isascii()


@pytest.mark.slow
def test_default_training_reaches_97_percent_on_one_device(tmp_path):
    process = _command("--quiet", "--out", str(tmp_path))
    printed, errors = process.communicate(timeout=280)
    assert process.returncode == 0, errors
    assert _metrics(tmp_path)[-1]["val_accuracy"] >= 0.97
    assert printed.startswith("validation accuracy 9")
    assert "of its time" in printed or "input-bound" in printed
    assert str(tmp_path / "training.png") in printed


def _command(*flags: str, first: str = "", **variables: str) -> subprocess.Popen[str]:
    # A background process of a shell ignores SIGINT, and its children inherit this.
    start = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    start += first + "\nfrom penstock.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", start, "train", "digits", *flags]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""} | variables
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 0}, r"--steps 0: needs an integer >= 1"),
        ({"steps": -5}, r"--steps -5: needs an integer >= 1"),
        ({"batch_size": 0}, r"--batch-size 0: needs an integer >= 1"),
        ({"seed": -1}, r"--seed -1: needs an integer from 0 to 4294967295"),
        ({"seed": 2**32}, r"--seed 4294967296: needs an integer from 0 to 4294967295"),
        ({"seed": 2**63}, r"--seed 9223372036854775808: needs an integer from 0 to 4294967295"),
        ({"batch_size": 1440}, r"--batch-size 1440: there are 1437 training images; use at most as many"),
        ({"batch_size": 100}, r"--batch-size 100: does not divide over 8 devices; use a multiple, such as 96"),
        ({"batch_size": 3}, r"--batch-size 3: does not divide over 8 devices; use a multiple, such as 8"),
    ],
)
def test_unusable_arguments_are_named_with_a_way_out(arguments, message, tmp_path):
    assert jax.device_count() == 8
    with pytest.raises(digits.CannotStartError, match=message):
        digits.train(**arguments, out=tmp_path / "never")
    assert not (tmp_path / "never").exists()


def test_a_folder_with_files_is_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(digits.CannotStartError, match="holds files already; name a folder that does not exist yet"):
        digits.train(out=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(digits.CannotStartError, match=r"file: no folder to write to \(File exists\); name another one"):
        digits.train(out=tmp_path / "file")


@pytest.mark.skipif(sys.platform == "win32", reason="gives up the rights of root")
def test_a_folder_that_cannot_be_written_to_is_told_before_the_run(tmp_path, monkeypatch):
    folder = tmp_path / "read-only"
    folder.mkdir(mode=0o555)
    monkeypatch.chdir(folder)  # users other than root cannot reach it by its path
    before = os.geteuid()
    os.seteuid(before or 65534)  # root may write anywhere
    try:
        with pytest.raises(digits.CannotStartError, match=r"no folder to write to \(Permission denied\); name another one"):
            digits._new_folder(".")
    finally:
        os.seteuid(before)


def test_missing_libraries_are_named_with_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "flax", None)
    with pytest.raises(digits.CannotStartError, match=r'^flax not installed: pip install "penstock\[train\]"$'):
        digits.train(out=tmp_path)


def test_default_folders_do_not_exist_yet(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    folders = [digits._new_folder(None) for _ in range(3)]
    assert len(set(folders)) == 3
    assert all(folder.parent == Path("runs") and folder.name.startswith("digits-2") for folder in folders)


def test_split_is_fixed_and_has_all_digits_once():
    first, second = images.load(), images.load()
    assert len(first.training["label"]) == images.TRAINING_IMAGES
    assert len(first.validation["label"]) == 360
    assert first.training["image"].dtype == np.uint8
    for part, again in zip(first, second, strict=True):
        assert np.array_equal(part["image"], again["image"])
        assert set(part["label"]) == set(range(10))


def test_shift_moves_each_image_by_at_most_one_pixel():
    image = np.zeros((64, 8, 8, 1), np.uint8)
    image[:, 4, 3] = 7
    shifted = images.shift({"image": image, "label": np.arange(64)}, np.random.default_rng(0))
    places = np.argwhere(shifted["image"][..., 0] == 7)
    assert np.array_equal(places[:, 0], np.arange(64))
    assert np.array_equal(shifted["label"], np.arange(64))
    moves = {(int(row) - 4, int(column) - 3) for _, row, column in places}
    assert moves == {(row, column) for row in (-1, 0, 1) for column in (-1, 0, 1)}


def test_shift_fills_with_background():
    shifted = images.shift({"image": np.full((9, 8, 8, 1), 16, np.uint8)}, np.random.default_rng(1))["image"]
    assert set(np.unique(shifted)) == {0, 16}
    assert shifted.shape == (9, 8, 8, 1)
