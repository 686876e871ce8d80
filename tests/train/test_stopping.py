"""A signal at any moment ends the process with status 0 and a line that says how to continue."""

import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest
from tests.train import models
from tests.train.ranks import BARE
from tests.train.training import Points, fit

import penstock as ps
from penstock import _stopping
from penstock._stopping import Stopping

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="sends signals")


@pytest.fixture(autouse=True)
def _python_handles_ctrl_c():
    """Set the default handler: a background process of a shell ignores Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def run(script, **variables):
    """Run a script, which sends signals to itself."""
    source = "import os, signal, time\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n" + textwrap.dedent(script)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path]), **variables}
    return subprocess.run([sys.executable, "-c", source], env=environment, capture_output=True, text=True, timeout=120)


def run_bare(script, **variables):
    """Run a script that needs no JAX."""
    return run(
        f"{BARE}\nimport ctypes\nfrom penstock._stopping import Stopping, listen_from_the_start\n" + textwrap.dedent(script),
        **variables,
    )


def test_signal_during_import_ends_well_if_it_is_asked_for():
    script = """
    import importlib.abc, sys
    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if name == "jax":
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(60)
    sys.meta_path.insert(0, Finder())
    import penstock
    """
    ended = run(script, PENSTOCK_GRACE="30")
    assert (ended.returncode, ended.stdout) == (0, "")
    assert ended.stderr.startswith("penstock: SIGTERM: nothing was done yet; to continue, run the same program again")


@pytest.mark.skipif(sys.platform != "linux", reason="on_exit is of Linux")
def test_signal_while_the_interpreter_ends_changes_nothing():
    script = """
    libc = ctypes.CDLL(None)
    libc.on_exit(getattr(libc, "raise"), None)  # called with the exit status, after all of Python
    listen_from_the_start()
    sys.exit(int(signal.SIGTERM))
    """
    assert run_bare(script, PENSTOCK_GRACE="30").returncode == signal.SIGTERM
    assert run_bare(script).returncode == -signal.SIGTERM


@pytest.mark.parametrize("text", ["soon", "-5", "nan", "inf"])
def test_wrong_grace_period_is_told(text, monkeypatch, capsys):
    monkeypatch.setenv("PENSTOCK_GRACE", text)
    _stopping.listen_from_the_start()
    assert f"PENSTOCK_GRACE={text}: needs seconds >= 0" in capsys.readouterr().err
    assert Stopping.current is None


def test_signal_before_the_first_step_ends_a_busy_process_soon():
    script = """
    with Stopping(100) as stopping:
        stopping.loops = 1
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)  # as a compilation
    """
    ended = run_bare(script)
    assert ended.returncode == 0
    assert ended.stderr.startswith("penstock: SIGTERM: nothing was done yet; to continue")


def test_stuck_loop_is_ended_within_the_grace_period():
    script = """
    with Stopping(2.5) as stopping:
        stopping.loops, stopping.has_steps_to_save = 1, True
        stopping.last_line = lambda: "the checkpoint of step 20 is kept"
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    """
    ended = run_bare(script)
    assert (ended.returncode, ended.stderr) == (0, "penstock: SIGTERM: the checkpoint of step 20 is kept\n")


FIT = """
import sys
sys.path.insert(0, {tests!r})
import jax, penstock as ps
from tests.train import models
def fit(data=None, **settings):
    settings = {{"log": [], **settings}}
    ps.fit(models.step, models.init, models.loader() if data is None else data, steps=40, checkpoint={folder!r}, **settings)
"""


def fit_script(tmp_path, rest):
    return FIT.format(tests=os.getcwd(), folder=str(tmp_path / "run")) + textwrap.dedent(rest)


@pytest.mark.parametrize(
    ("name", "status"), [("SIGTERM", 0), pytest.param("SIGINT", 0, marks=pytest.mark.slow), ("SIGKILL", -signal.SIGKILL)]
)
def test_run_that_a_signal_ended_continues_bit_for_bit(tmp_path, straight, name, status):
    script = f"""
    def batch(number):
        if number == 20:
            os.kill(os.getpid(), signal.{name})
        return models.loader()[number]
    fit(data=ps.Steps(batch, name="batches"), save_every=7)
    print("not reached")
    """
    ended = run(fit_script(tmp_path, script), JAX_DISABLE_MOST_OPTIMIZATIONS="true")
    assert (ended.returncode, ended.stdout) == (status, ""), ended.stderr
    assert ended.stderr.startswith(f"penstock: {name}: saved at step " if status == 0 else "")
    points = Points()
    feed = ps.Steps(lambda number: models.loader()[number], name="batches")
    assert models.equal(fit(40, tmp_path / "run", feed, log=[points], save_every=7), straight)
    assert points[0].step > 0


@pytest.mark.slow
def test_signal_during_compilation_ends_at_once(tmp_path):
    script = """
    import jax.monitoring
    def interrupt(event, *_, **__):
        if "mlir" in event and not done and ps._stopping.Stopping.current and ps._stopping.Stopping.current.loops:
            done.append(event)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)  # the main thread looks at nothing for a minute
    done = []
    jax.monitoring.register_event_duration_secs_listener(interrupt)
    fit()
    """
    ended = run(fit_script(tmp_path, script))
    assert ended.returncode == 0, ended.stderr
    assert "SIGTERM: nothing was saved yet; to continue" in ended.stderr


def request_stop():
    """Request a stop as a signal does."""
    Stopping.current.request("SIGTERM")


def test_stop_during_the_last_save_comes_after_it(tmp_path, monkeypatch, capsys):
    from penstock.train.checkpoint import Checkpoints

    def write(self, step, *rest):
        if step == 20:
            request_stop()
        original(self, step, *rest)

    original = Checkpoints._write
    monkeypatch.setattr(Checkpoints, "_write", write)
    with pytest.raises(ps.Stopped) as stopped:
        fit(20, tmp_path)
    assert stopped.value.step == 20
    assert "SIGTERM: saved at step 20" in capsys.readouterr().err


def test_stop_during_an_evaluation_saves_and_the_evaluation_comes_after_the_restart(tmp_path):
    opened, points = [], Points()

    def evaluation():
        opened.append(None)  # fit looks at the first batch before it trains
        for number in range(5):
            if len(opened) == 2 and number == 2:
                request_stop()
            yield models.evaluation(10).batches[number]

    settings = {"log": [points], "evaluate": ps.Evaluation(models.evaluate, evaluation, every=10)}
    with pytest.raises(ps.Stopped) as stopped:
        fit(20, tmp_path, **settings)
    assert stopped.value.step == 10
    assert not points.of("evaluation")
    fit(20, tmp_path, **settings)
    assert [point.step for point in points.of("evaluation")] == [10, 20]


def test_slow_input_does_not_hold_a_stop_back(tmp_path):
    come = threading.Event()

    def batch(number):
        if number == 12:
            request_stop()
            come.wait()
        return models.loader()[number]

    try:
        with pytest.raises(ps.Stopped):
            fit(60, tmp_path, ps.Steps(batch))
    finally:
        come.set()


@pytest.mark.slow
def test_sigterm_that_comes_again_after_the_stop_is_ignored(tmp_path):
    script = """
    def log(point):
        if point.kind == "train" and point.step == 10:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGTERM)
    try:
        fit(log=[log], log_every=10)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
        sum(range(10**6))
    """
    ended = run(fit_script(tmp_path, script))
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.startswith("penstock: SIGTERM: saved at step ")
    assert len(ended.stderr.splitlines()) == 1


def test_sigterm_that_comes_again_after_a_stop_is_ignored():
    script = """
    from penstock._stopping import Stopped
    try:
        with Stopping(100) as stopping:
            os.kill(os.getpid(), signal.SIGTERM)
            while not stopping.requested: pass
            raise Stopped(10)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
        sum(range(10**6))
    """
    assert run_bare(script).returncode == 0


def test_second_ctrl_c_ends_at_once():
    script = """
    with Stopping(100) as stopping:
        stopping.loops, stopping.has_steps_to_save = 1, True
        os.kill(os.getpid(), signal.SIGINT)
        while not stopping.requested: time.sleep(0.01)
        time.sleep(0.6)  # longer than one key press
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    """
    assert run_bare(script).returncode == -signal.SIGINT


def test_ctrl_c_during_a_long_call_of_c_is_one_ctrl_c():
    script = """
    import hashlib, threading
    with Stopping(100) as stopping:
        stopping.loops, stopping.has_steps_to_save = 1, True
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 3_000_000)  # seconds in which Python calls no handler
        print(stopping.requested)
    """
    ended = run_bare(script)
    assert (ended.returncode, ended.stdout) == (0, "SIGINT\n"), ended.stderr


def test_second_ctrl_c_ends_a_long_call_of_c():
    script = """
    import hashlib, threading
    def again():
        os.kill(os.getpid(), signal.SIGINT)
        while not stopping.requested: time.sleep(0.01)
        time.sleep(0.6)  # longer than one key press
        os.kill(os.getpid(), signal.SIGINT)
    with Stopping(100) as stopping:
        stopping.loops, stopping.has_steps_to_save = 1, True
        threading.Thread(target=again).start()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 500_000_000)
    """
    ended = run_bare(script)
    assert ended.returncode == 128 + signal.SIGINT
    assert "penstock: SIGINT again: nothing was done yet" in ended.stderr


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with Stopping(30):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert Stopping.current is None


def test_ignored_ctrl_c_stays_ignored():
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Stopping(30):
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_other_threads_hear_nothing_say_so_and_work(caplog):
    seen = []

    def work():
        with Stopping(30) as stopping:
            seen.append((Stopping.current, stopping.requested))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(None, None)]
    assert "this thread is not the main one" in caplog.text


def test_inner_one_is_the_outer_one():
    with Stopping(30) as outer, Stopping(5) as inner:
        assert inner is outer
        assert outer.grace == 5
