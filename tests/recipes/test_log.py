import json

import pytest

from penstock.recipes.log import Log, Point, Times


def _point(step: int, seconds: float, validation: float) -> Point:
    return Point(step, 0.5, 0.9, None, Times(10, seconds, 0.1, 0.2, 0.3, validation))


def test_speed_leaves_validation_out():
    times = Times(steps=10, seconds=3.0, wait=0.1, dispatch=0.2, device=0.3, validation=1.0)
    assert times.steps_per_second == 5.0
    assert json.loads(Point(10, 0.5, 0.9, None, times).line())["steps_per_second"] == 5.0


def test_without_a_terminal_there_are_plain_lines_and_the_last_has_the_runs_mean(tmp_path, capsys):
    with Log(tmp_path / "metrics.jsonl", 20, quiet=False) as log:
        log.write(_point(10, 1.0, 0.0))
        log.write(_point(20, 4.0, 1.0))
    assert capsys.readouterr().err.splitlines() == [
        "compile",
        "train 10/20 loss 0.500, accuracy 90.0%, 10 steps/s, wait 10.0%",
        "train 20/20 loss 0.500, accuracy 90.0%, 5 steps/s, wait 4.0%",
    ]


def test_quiet_shows_nothing(tmp_path, capsys):
    with Log(tmp_path / "metrics.jsonl", 10, quiet=True) as log:
        log.write(_point(10, 1.0, 0.0))
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("points", [0, 1])
def test_the_file_comes_with_the_first_point(points, tmp_path):
    path = tmp_path / "metrics.jsonl"
    with Log(path, 10, quiet=True) as log:
        for _ in range(points):
            log.write(_point(10, 1.0, 0.0))
        assert path.exists() == bool(points)
