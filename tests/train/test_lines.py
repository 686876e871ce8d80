"""Lines get their rank, whatever the chunks in which they come."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.train.launch.ranks import LinePrefixer


def chunks(data, cuts):
    points = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[start:end] for start, end in itertools.pairwise(points)]


@given(st.binary(max_size=60).map(lambda data: data.replace(b"\r", b"")), st.lists(st.integers(0, 60), max_size=5))
def test_lines_do_not_depend_on_how_they_were_cut(data, cuts):
    lines = LinePrefixer(3)
    got = b"".join(lines.add(chunk, 0.0) for chunk in chunks(data, cuts)) + lines.end()
    whole = data if data.endswith(b"\n") or not data else data + b"\n"
    assert got == b"".join(b"[3] " + line + b"\n" for line in whole.split(b"\n")[:-1])


@given(st.text("a \r\n", max_size=30), st.lists(st.integers(0, 30), max_size=5), st.floats(0, 10))
def test_every_line_has_a_prefix_and_no_carriage_return(text, cuts, pause):
    lines = LinePrefixer(0)
    got = b"".join(lines.add(chunk, i * pause) for i, chunk in enumerate(chunks(text.encode(), cuts))) + lines.end()
    assert b"\r" not in got
    assert all(line.startswith(b"[0] ") for line in got.split(b"\n")[:-1])
    assert not got or got.endswith(b"\n")


def test_windows_line_ends_are_line_ends():
    data = b"one\r\ntwo\r\n"
    for cut in range(len(data) + 1):
        lines = LinePrefixer(0)
        assert lines.add(data[:cut], 0.0) + lines.add(data[cut:], 0.0) == b"[0] one\n[0] two\n"


def test_a_progress_bar_is_a_line_now_and_then_and_at_its_end():
    lines, got = LinePrefixer(0), []
    for percent in range(101):
        if line := lines.add(b"\r%d%%" % percent, percent / 5):
            got.append(line)
    got.append(lines.add(b"\nnext\n", 21.0))
    assert got[-1] == b"[0] 100%\n[0] next\n"
    assert 3 <= len(got) <= 6
    assert all(line.count(b"\n") == 1 for line in got[:-1])


def test_the_last_frame_is_written_once():
    lines = LinePrefixer(0)
    assert lines.add(b"100%\r", 100.0) == b"[0] 100%\n"
    assert lines.add(b"\nnext\n", 100.0) == b"[0] next\n"


def test_a_line_without_an_end_is_broken(monkeypatch):
    monkeypatch.setattr("penstock.train.launch.ranks._LONGEST", 10)
    lines = LinePrefixer(0)
    assert lines.add(b"x" * 11, 0.0) == b"[0] " + b"x" * 11 + b"\n"
    assert lines.end() == b""


@pytest.mark.parametrize("rank", [0, 3, 17])
def test_lines_of_gloo_that_tell_of_a_connection_are_shown_on_request(rank):
    connected = b"[Gloo] Rank %d is connected to 1 peer ranks. Expected number of connected peer ranks is : 1\n" % rank
    kept = b"[Gloo] Rank 0 lost its peer\nloss 1 [Gloo] Rank 0 is connected to 1 peer ranks. Expected number of\n"
    for cut in (0, 10, len(connected)):
        lines = LinePrefixer(rank)
        got = lines.add(connected[:cut], 0.0) + lines.add(connected[cut:] + kept, 0.0) + lines.end()
        assert [line.partition(b"] ")[2] for line in got.splitlines()] == kept.splitlines()
    assert LinePrefixer(rank, verbose=True).add(connected, 0.0) == b"[%d] " % rank + connected
