"""A signal at any moment ends the process with status 0 and a line that says how to continue."""

import os
import signal
import subprocess
import sys
import textwrap
import threading

import pytest

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
    import ctypes, sys
    libc = ctypes.CDLL(None)
    libc.on_exit(getattr(libc, "raise"), None)  # called with the exit status, after all of Python
    import penstock
    sys.exit(int(signal.SIGTERM))
    """
    assert run(script, PENSTOCK_GRACE="30").returncode == signal.SIGTERM
    assert run(script).returncode == -signal.SIGTERM


def test_wrong_grace_period_is_told():
    for text in ("soon", "-5", "nan", "inf"):
        assert f"PENSTOCK_GRACE={text}: needs seconds >= 0" in run("import penstock", PENSTOCK_GRACE=text).stderr


FIT = """
import sys
sys.path.insert(0, {tests!r})
import jax, penstock as ps
from tests.train import models
def fit(data=None, **settings):
    settings = {{"log": [], **settings}}
    ps.fit(models.step, models.init, models.loader() if data is None else data, steps=60, checkpoint={folder!r}, **settings)
"""


def fit_script(tmp_path, rest):
    return FIT.format(tests=os.getcwd(), folder=str(tmp_path / "run")) + textwrap.dedent(rest)


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


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_signal_during_training_saves(tmp_path, name):
    script = f"""
    def batch(number):
        if number == 20:
            os.kill(os.getpid(), signal.{name})
        return models.loader()[number]
    fit(data=ps.Steps(batch), save_every=7)
    print("not reached")
    """
    ended = run(fit_script(tmp_path, script))
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr
    assert f"penstock: {name}: saved at step " in ended.stderr


def test_signal_during_the_last_save_ends_after_it(tmp_path):
    script = """
    import penstock.train.checkpoints
    def write(self, step, *rest):
        if step == 60:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)
        original(self, step, *rest)
    original, penstock.train.checkpoints.Checkpoints._write = penstock.train.checkpoints.Checkpoints._write, write
    fit()
    print("not reached")
    """
    ended = run(fit_script(tmp_path, script))
    assert (ended.returncode, ended.stdout) == (0, ""), ended.stderr
    assert "SIGTERM: saved at step 60" in ended.stderr


def test_signal_during_an_evaluation_saves_and_the_evaluation_comes_after_the_restart(tmp_path):
    script = """
    points = []
    def batches():
        for number in range(5):
            if number == 2 and not os.path.exists("{flag}"):
                open("{flag}", "w").close()
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.5)
            yield ps.Loader(models.data(40), 8)[number]
    opened = []
    def evaluation():
        opened.append(len(opened))  # fit looks at the first batch before it trains
        return batches() if len(opened) > 1 else iter([ps.Loader(models.data(40), 8)[0]])
    def log(point):
        if point.kind == "evaluation": print(point.step, flush=True)
    ps.fit(models.step, models.init, models.loader(), steps=20, checkpoint={folder!r}, log=[log],
           evaluate=ps.Evaluation(models.evaluate, evaluation, every=10))
    """.replace("{flag}", str(tmp_path / "flag")).replace("{folder!r}", repr(str(tmp_path / "run")))
    first, second = run(fit_script(tmp_path, script)), run(fit_script(tmp_path, script))
    assert (first.returncode, first.stdout) == (0, ""), first.stderr
    assert "SIGTERM: saved at step 10" in first.stderr
    assert second.stdout.split() == ["10", "20"]


def test_stuck_loop_is_ended_within_the_grace_period_and_the_last_checkpoint_is_kept(tmp_path):
    script = """
    def log(point):
        if point.step == 30:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(100)
    fit(log=[log], save_every=10, grace=3)
    """
    ended = run(fit_script(tmp_path, script))
    assert ended.returncode == 0, ended.stderr
    assert "is kept; to continue" in ended.stderr


def test_slow_input_does_not_hold_a_stop_back(tmp_path):
    script = """
    import threading
    def batch(number):
        if number == 12:
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait(100)
        return models.loader()[number]
    fit(data=ps.Steps(batch), save_every=50)
    """
    ended = run(fit_script(tmp_path, script))
    assert ended.returncode == 0, ended.stderr
    assert "SIGTERM: saved at step " in ended.stderr


def test_second_ctrl_c_ends_at_once(tmp_path):
    script = """
    stopping = ps._stopping.Stopping(100)
    with stopping:
        stopping.loops, stopping.at_stake = 1, True
        os.kill(os.getpid(), signal.SIGINT)
        while not stopping.requested: time.sleep(0.01)
        time.sleep(0.6)  # longer than one key press
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
    """
    assert run("import penstock as ps\n" + textwrap.dedent(script)).returncode == -signal.SIGINT


def test_ctrl_c_during_a_long_call_of_c_is_one_ctrl_c():
    script = """
    import hashlib, threading
    stopping = ps._stopping.Stopping(100)
    with stopping:
        stopping.loops, stopping.at_stake = 1, True
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 10_000_000)  # seconds in which Python calls no handler
        print(stopping.requested)
    """
    ended = run("import penstock as ps\n" + textwrap.dedent(script))
    assert (ended.returncode, ended.stdout) == (0, "SIGINT\n"), ended.stderr


def test_second_ctrl_c_ends_a_long_call_of_c(tmp_path):
    script = """
    import hashlib, threading
    stopping = ps._stopping.Stopping(100)
    def again():
        os.kill(os.getpid(), signal.SIGINT)
        while not stopping.requested: time.sleep(0.01)
        time.sleep(0.6)  # longer than one key press
        os.kill(os.getpid(), signal.SIGINT)
    with stopping:
        stopping.loops, stopping.at_stake = 1, True
        threading.Thread(target=again).start()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 500_000_000)
    """
    ended = run("import penstock as ps\n" + textwrap.dedent(script))
    assert ended.returncode == 128 + signal.SIGINT
    assert "penstock: SIGINT again: nothing was done yet" in ended.stderr


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
