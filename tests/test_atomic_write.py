"""A file is replaced as a whole, or not at all."""

import os
import threading

import pytest

from penstock._atomic_write import replace, replacing


@pytest.mark.parametrize("durable", [False, True])
def test_content_is_replaced_and_nothing_else_is_left(tmp_path, durable):
    for text in ("old", "new ü"):
        replace(tmp_path / "file", text, durable=durable)
    assert (tmp_path / "file").read_text(encoding="utf-8") == "new ü"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_failed_write_leaves_the_old_content_alone(tmp_path, error):
    replace(tmp_path / "file", "old")
    with pytest.raises(error), replacing(tmp_path / "file") as part:
        part.write_text("half")
        raise error
    assert (tmp_path / "file").read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_folder_in_the_way_is_an_error_that_leaves_nothing(tmp_path):
    (tmp_path / "file").mkdir()
    with pytest.raises(OSError), replacing(tmp_path / "file") as part:  # noqa: PT011 - the system writes its text
        part.write_text("new")
    assert os.listdir(tmp_path) == ["file"]


def test_writers_at_the_same_time_leave_the_content_of_one(tmp_path):
    texts = [str(number) * 100_000 for number in range(8)]
    threads = [threading.Thread(target=replace, args=(tmp_path / "file", text)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "file").read_text() in texts
    assert os.listdir(tmp_path) == ["file"]


def test_pipe_is_written_to_directly(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=replace, args=(tmp_path / "pipe", "report"))
    writer.start()
    assert (tmp_path / "pipe").read_text() == "report"
    writer.join()
