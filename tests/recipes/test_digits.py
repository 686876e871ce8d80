import os
import signal
import sys
import time
from importlib.metadata import version
from pathlib import Path

import jax
import numpy as np
import pytest
from tests.recipes.commands import metrics, start

from penstock._jaxlib_faults import fails_with_ynnpack
from penstock.recipes import digits
from penstock.recipes.run_folder import choose_folder

_KEYS = {"step", "loss", "accuracy", "steps_per_second", "input_wait"}
_PNG = b"\x89PNG\r\n\x1a\n"


def _losses(folder: Path) -> list[float]:
    return [line["loss"] for line in metrics(folder) if "loss" in line]


def _accuracies(folder: Path) -> dict[int, float]:
    return {line["step"]: line["val_accuracy"] for line in metrics(folder) if "val_accuracy" in line}


@pytest.fixture(scope="module")
def short(tmp_path_factory) -> digits.Result:
    return digits.train(steps=55, batch_size=64, seed=3, out=tmp_path_factory.mktemp("runs") / "a", quiet=True)


@pytest.mark.slow
def test_training_leaves_a_line_for_each_log_point(short):
    lines = [line for line in metrics(short.out) if "loss" in line]
    assert [line["step"] for line in lines] == list(range(5, 56, 5))
    for line in lines:
        assert set(line) == _KEYS
        assert line["loss"] > 0
        assert 0 <= line["accuracy"] <= 1
        assert line["steps_per_second"] > 0
        assert 0 <= line["input_wait"] <= 1


@pytest.mark.slow
def test_training_evaluates_some_points_and_always_the_last(short):
    assert list(_accuracies(short.out)) == [50, 55]
    assert short.val_accuracy == _accuracies(short.out)[55]


@pytest.mark.slow
def test_validation_counts_each_image_once(short):
    images_right = short.val_accuracy * len(digits.load().validation["label"])
    assert images_right == pytest.approx(round(images_right), abs=1e-3)


@pytest.mark.slow
def test_the_last_seed_is_usable(tmp_path):
    digits.train(1, 8, seed=2**32 - 1, out=tmp_path, quiet=True)
    assert len(_losses(tmp_path)) == 1


@pytest.mark.slow
def test_training_draws_a_png(short):
    assert (short.out / "training.png").read_bytes().startswith(_PNG)


@pytest.mark.slow
def test_a_seed_fixes_the_losses_and_another_changes_them(short, tmp_path):
    def losses(seed: int) -> list[float]:
        digits.train(55, 64, seed, tmp_path / str(seed), quiet=True)
        return _losses(tmp_path / str(seed))

    assert losses(3) == _losses(short.out)
    assert losses(4) != _losses(short.out)


@pytest.mark.slow
def test_one_step_is_a_run(tmp_path):
    result = digits.train(1, 8, out=tmp_path, quiet=True)
    assert len(_losses(result.out)) == 1
    assert _accuracies(result.out) == {1: result.val_accuracy}
    assert (tmp_path / "training.png").exists()


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> Path:
    return digits.train(150, out=tmp_path_factory.mktemp("runs") / "straight", quiet=True).out


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="sends signals")
@pytest.mark.skipif(
    fails_with_ynnpack(version("jaxlib")), reason=f"JAX {jax.__version__}: the command turns off kernels that this process uses"
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_saves_the_run_and_its_command_continues_it(tmp_path, number, straight):
    out = tmp_path / "run"
    flags = ("--steps", "150", "--quiet", "--out", str(out))
    process = start("digits", *flags, XLA_FLAGS="--xla_force_host_platform_device_count=8")
    deadline = time.monotonic() + 120
    try:
        while not (out / "metrics.jsonl").exists() or len(metrics(out)) < 2:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()  # has no effect if it has ended
    assert process.returncode == 0
    assert f"penstock: {number.name}: saved at step " in errors
    assert "Traceback" not in errors
    assert (out / "training.png").exists()
    digits.train(150, out=out, quiet=True)
    assert _losses(out)[-1] == _losses(straight)[-1]
    assert _accuracies(out)[150] == _accuracies(straight)[150]


@pytest.mark.slow
def test_finished_run_is_told_and_not_trained_again(short):
    again = digits.train(55, 64, 3, short.out, quiet=True)
    assert again.verdict == "nothing left to train: the run is at step 55"
    assert again.val_accuracy == short.val_accuracy


@pytest.mark.slow
def test_resume_takes_the_newest_run(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    first = digits.train(5, 8, quiet=True)
    second = digits.train(5, 8, quiet=True)
    assert first.out != second.out
    assert digits.train(5, 8, quiet=True, resume=True).out == second.out


@pytest.mark.slow
def test_a_finished_run_goes_on_with_more_steps(tmp_path):
    digits.train(10, 64, 3, tmp_path, quiet=True)
    result = digits.train(15, out=tmp_path, quiet=True)
    assert (result.step, list(_accuracies(tmp_path))) == (15, [10, 15])
    assert digits.train(out=tmp_path, quiet=True, resume=True).step == 15  # its own number, not the default
    assert digits.train(12, out=tmp_path, quiet=True).verdict == "nothing left to train: the run is at step 15"


@pytest.mark.slow
def test_planned_training_has_the_losses_of_data_parallel_training(tmp_path, capsys):
    digits.train(10, 64, 3, tmp_path / "auto", plan="auto")
    printed = capsys.readouterr().err
    assert "plan: 8 × this machine, mesh " in printed
    assert "leaves, the largest first" not in printed
    digits.train(11, out=tmp_path / "auto", verbose=True)  # plans again, as the run did
    assert "leaves, the largest first" in capsys.readouterr().err
    digits.train(10, 64, 3, tmp_path / "data", quiet=True)
    np.testing.assert_allclose(_losses(tmp_path / "auto")[:10], _losses(tmp_path / "data"), rtol=1e-4)


def test_resume_without_a_run_is_refused(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(digits.CannotStartError, match=r"no run of penstock train digits in runs/; name its folder with --out"):
        digits.train(resume=True)
    with pytest.raises(digits.CannotStartError, match="no run to continue"):
        digits.train(out=tmp_path, resume=True)


@pytest.mark.slow
def test_folder_of_another_run_is_refused(short):
    with pytest.raises(digits.CannotStartError, match="seed was 3 and is 4"):
        digits.train(55, 64, 4, short.out, quiet=True)


def test_no_device_is_told_in_one_line(tmp_path):
    process = start("digits", "--out", str(tmp_path / "never"), JAX_PLATFORMS="no_such_platform")
    printed, errors = process.communicate(timeout=60)
    assert (process.returncode, printed) == (2, "")
    assert errors.startswith("penstock train digits: error: JAX finds no device: ")
    assert "no_such_platform" in errors
    assert errors.count("\n") == 1


@pytest.mark.slow
def test_default_training_reaches_97_percent_on_one_device(tmp_path):
    process = start("digits", "--quiet", "--out", str(tmp_path))
    printed, errors = process.communicate(timeout=280)
    assert process.returncode == 0, errors
    assert list(_accuracies(tmp_path).values())[-1] >= 0.97
    assert printed.startswith("validation accuracy 9")
    assert "of its time" in printed or "input-bound" in printed
    assert str(tmp_path / "training.png") in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 0}, r"--steps 0: needs an integer >= 1"),
        ({"batch_size": 0}, r"--batch-size 0: needs an integer >= 1"),
        ({"seed": 2**32}, r"--seed 4294967296: needs an integer from 0 to 4294967295"),
        ({"batch_size": 1440}, r"--batch-size 1440: there are 1437"),
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
            choose_folder("digits", ".")
    finally:
        os.seteuid(before)


def test_missing_libraries_are_named_with_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "flax", None)
    with pytest.raises(digits.CannotStartError, match=r'^flax not installed: pip install "penstock\[train\]"$'):
        digits.train(out=tmp_path)


def test_default_folders_do_not_exist_yet(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    folders = [choose_folder("digits", None) for _ in range(3)]
    assert len(set(folders)) == 3
    assert all(folder.parent == Path("runs") and folder.name.startswith("digits-2") for folder in folders)


def test_split_is_fixed_and_has_all_digits_once():
    first, second = digits.load(), digits.load()
    assert len(first.training["label"]) == digits.TRAINING_IMAGES
    assert len(first.validation["label"]) == 360
    assert first.training["image"].dtype == np.uint8
    for part, again in zip(first, second, strict=True):
        assert np.array_equal(part["image"], again["image"])
        assert set(part["label"]) == set(range(10))


def test_shift_moves_each_image_by_at_most_one_pixel():
    image = np.zeros((64, 8, 8, 1), np.uint8)
    image[:, 4, 3] = 7
    shifted = digits.shift({"image": image, "label": np.arange(64)}, np.random.default_rng(0))
    places = np.argwhere(shifted["image"][..., 0] == 7)
    assert np.array_equal(places[:, 0], np.arange(64))
    assert np.array_equal(shifted["label"], np.arange(64))
    moves = {(int(row) - 4, int(column) - 3) for _, row, column in places}
    assert moves == {(row, column) for row in (-1, 0, 1) for column in (-1, 0, 1)}


def test_shift_fills_with_background():
    shifted = digits.shift({"image": np.full((9, 8, 8, 1), 16, np.uint8)}, np.random.default_rng(1))["image"]
    assert set(np.unique(shifted)) == {0, 16}
    assert shifted.shape == (9, 8, 8, 1)
