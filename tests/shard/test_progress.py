"""Progress is shown on a terminal, for what takes long."""

import pytest

from penstock.shard import compiler
from penstock.shard.compiler import shown


@pytest.fixture
def terminal(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # Rich then takes any stream for a terminal
    monkeypatch.setenv("TERM", "xterm")


def shown_while_waiting(seconds, monkeypatch):
    """Show progress until the display has started, or for no time at all if it is not to start."""
    from rich.progress import Progress

    monkeypatch.setattr(compiler, "_SHOWN_FROM", seconds)
    started = []
    start = Progress.start
    monkeypatch.setattr(Progress, "start", lambda self: (start(self), started.append(self)))
    with shown("compiling [v5e]"):
        while seconds == 0 and not started:
            pass


def test_what_takes_long_is_shown_on_standard_error(terminal, monkeypatch, capsys):
    shown_while_waiting(0, monkeypatch)
    printed = capsys.readouterr()
    assert "compiling [v5e]" in printed.err
    assert printed.out == ""


def test_what_is_fast_is_not_shown(terminal, monkeypatch, capsys):
    shown_while_waiting(60, monkeypatch)
    assert capsys.readouterr().err == ""


def test_nothing_is_shown_where_there_is_no_terminal(monkeypatch, capsys):
    monkeypatch.setattr(compiler, "_SHOWN_FROM", 0)
    with shown("compiling"):
        pass
    assert capsys.readouterr().err == ""


def test_errors_pass_through(terminal):
    with pytest.raises(ZeroDivisionError), shown("compiling"):
        _ = 1 / 0
