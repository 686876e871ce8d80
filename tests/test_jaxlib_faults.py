"""Known faults of jaxlib: running the programs, the warnings, and the outcomes on disk."""

from __future__ import annotations

import signal
from importlib.metadata import version

import pytest

from penstock import _jaxlib_faults
from penstock._jaxlib_faults import CASES, Case, Outcome, known, run, warning


def number(outcome: Case | Outcome) -> str:
    return outcome.link.rpartition("/")[2]


def case(program: str) -> Case:
    return Case("a case", "https://example.org/1", program, "do this")


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def runs(monkeypatch):
    """The cases of each run; their programs are their verdicts."""
    asked: list[list[str]] = []

    def end(cases):
        asked.append([each.program for each in cases])
        return [Outcome(each.name, each.link, each.remedy, each.program, "") for each in cases]

    monkeypatch.setattr(_jaxlib_faults, "run", end)
    return asked


def test_this_jaxlib_ends_as_its_release_is_known_to():
    expected = {number(each): dict(each.fails).get(version("jaxlib"), "right") for each in CASES}
    assert {number(outcome): outcome.verdict for outcome in run(seconds=120)} == expected


def test_a_reproduction_is_three_lines_with_a_link():
    for each in CASES:
        assert len(each.program.splitlines()) == 3
        assert each.link.startswith("https://github.com/jax-ml/jax/issues/")


def test_how_cases_end():
    expected = {
        "got, expected = jnp.ones(3), np.ones(3)": ("right", "0"),
        "got, expected = jnp.array([1, np.nan]), np.ones(2)": ("wrong", "inf"),
        "import os; os.kill(os.getpid(), 11)": ("crash", f"signal {int(signal.SIGSEGV)}"),
        "raise ValueError('no such option')": ("unknown", "ValueError: no such option"),
    }
    for outcome, (verdict, detail) in zip(
        run([case(program) for program in expected], seconds=120), expected.values(), strict=True
    ):
        assert (outcome.verdict, outcome.fails) == (verdict, verdict in ("wrong", "crash"))
        assert detail in outcome.detail


def test_a_case_without_end_is_unknown_and_its_process_is_gone():
    (outcome,) = run([case("while True: pass")], seconds=0.2)
    assert outcome.verdict == "unknown"
    assert "no end within 0.2 s" in outcome.detail
    assert not outcome.fails


def test_what_was_found_is_not_run_again(own_cache, runs):
    first = known([case("wrong")])
    _jaxlib_faults._found.clear()  # as in another process
    assert known([case("wrong")]) == first
    assert first[0].verdict == "wrong"
    assert len(runs) == 1


def test_other_flags_other_cases_and_what_is_no_record_are_run_again(own_cache, runs, monkeypatch):
    known([case("right")])
    known([case("right")])
    assert len(runs) == 1
    known([case("right"), case("wrong")])
    assert len(runs) == 2
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_experimental_ynn_fusion_type=")
    known([case("right")])
    assert len(runs) == 3
    for path in own_cache.rglob("*.json"):
        path.write_text('{"not": "a list"}')
    _jaxlib_faults._found.clear()
    known([case("right")])
    assert len(runs) == 4


def test_what_is_unknown_is_not_kept_on_disk_nor_asked_twice(own_cache, runs):
    (first,) = known([case("unknown")])
    assert not list(own_cache.rglob("*.json"))
    assert known([case("unknown")]) == [first]
    assert len(runs) == 1


def test_a_user_without_a_home_is_no_error(runs, monkeypatch):
    monkeypatch.setattr(_jaxlib_faults, "user_cache", lambda: None)
    assert known([case("right")])[0].verdict == "right"


def test_a_folder_that_cannot_be_written_to_is_no_error(tmp_path, runs, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert known([case("right")])[0].verdict == "right"


def test_a_warning_is_one_line_with_a_remedy():
    outcomes = [Outcome(each.name, each.link, each.remedy, "wrong", "") for each in CASES]
    line = warning(outcomes)
    assert line is not None
    assert "\n" not in line
    for word in (version("jaxlib"), "jax#39103 wrong", 'pip install "jax>=0.10,<0.13,!=0.10.2,!=0.11.0"', "penstock doctor"):
        assert word in line
    assert warning([Outcome(each.name, each.link, each.remedy, "right", "") for each in CASES]) is None
    unknown = warning([Outcome(each.name, each.link, each.remedy, "unknown", "Unknown flag in XLA_FLAGS") for each in CASES])
    assert unknown is not None
    assert "is unknown: Unknown flag in XLA_FLAGS" in unknown


def test_a_command_warns_once_of_a_jaxlib_that_fails(own_cache, monkeypatch, capsys, tmp_path):
    from penstock.cli import main

    (tmp_path / "steps.py").write_text(
        "import jax\ndef job():\n    w = jax.ShapeDtypeStruct((8, 8), 'float32')\n    return lambda w, b: w + b, w, w\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    _jaxlib_faults.keep([Outcome(each.name, each.link, each.remedy, "wrong", "") for each in CASES])
    assert main(["plan", "steps:job", "--devices", "2"]) in (0, 1)
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("penstock: warning:")]
    assert len(warnings) == 1
    assert version("jaxlib") in warnings[0]
