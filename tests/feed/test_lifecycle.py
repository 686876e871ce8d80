"""However a feed ends, it leaves no thread, file descriptor or memory behind, and nothing hangs."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import jax
import numpy as np
import psutil
import pytest

import penstock as ps

X = {"x": np.arange(64)}


def penstock_threads(prefix="penstock-"):
    """Return the threads that read and place batches. A thread that watches the last step ends with that step."""
    return [thread for thread in threading.enumerate() if thread.name.startswith(prefix)]


def wait_for_no_threads():
    """Wait up to a minute for threads that end by themselves."""
    deadline = time.monotonic() + 60
    for thread in penstock_threads("penstock"):
        thread.join(max(0.0, deadline - time.monotonic()))
    assert penstock_threads("penstock") == []


@pytest.fixture(autouse=True)
def _leaves_no_thread():
    yield
    wait_for_no_threads()


def endless():
    while True:
        yield np.zeros(4)


def test_leaving_the_with_ends_the_threads():
    with ps.feed(endless()) as feed:
        next(feed)
        assert penstock_threads()
    assert penstock_threads() == []


def test_exhaustion_ends_the_threads():
    feed = ps.feed(ps.Loader(X, 8, epochs=1))
    list(feed)
    assert penstock_threads() == []


def test_an_error_in_the_consumers_loop_ends_the_threads():
    with pytest.raises(ZeroDivisionError), ps.feed(endless()) as feed:
        for _ in feed:
            raise ZeroDivisionError
    assert penstock_threads() == []


def test_an_error_of_the_source_ends_the_threads():
    feed = ps.feed(x for x in [np.zeros(1), "no array", {}])
    with pytest.raises(TypeError):
        list(feed)
    assert penstock_threads() == []


def test_feeds_that_are_abandoned_end_their_threads_by_garbage_collection():
    for _ in ps.feed(endless()):
        break
    feed = ps.feed(endless())
    next(feed)
    del feed
    gc.collect()
    wait_for_no_threads()


@pytest.mark.parametrize("state", ["before the first batch", "while the consumer waits"])
def test_close_returns_although_a_read_is_blocked(state):
    blocked, reading, closed = threading.Event(), threading.Event(), threading.Event()

    def batches():
        yield np.zeros(1)
        reading.set()
        blocked.wait()
        yield np.zeros(1)

    feed = ps.feed(batches())
    next(feed)
    outcome = []

    def consume():
        with pytest.raises(RuntimeError) as caught:
            next(feed)
        outcome.append(str(caught.value))

    consumer = threading.Thread(target=consume)
    if state == "while the consumer waits":
        consumer.start()
    assert reading.wait(60)
    closer = threading.Thread(target=lambda: (feed.close(), closed.set()))
    closer.start()
    try:
        assert closed.wait(60)
        if consumer.ident:
            consumer.join(60)
            assert "closed while batch 1" in outcome[0]
        assert penstock_threads()  # the read is blocked still
    finally:
        blocked.set()
        closer.join()


def test_close_frees_the_buffered_device_arrays():
    before = len(jax.live_arrays())
    with ps.feed([np.zeros(7)] * 100, device_buffer=8) as feed:
        batch = next(feed)
        del batch
    gc.collect()
    assert len(jax.live_arrays()) <= before


# A background process of a shell ignores SIGINT, and its children inherit this.
PREAMBLE = """
import itertools, signal, threading, time
import jax, jax.numpy as jnp, numpy as np, penstock as ps
signal.signal(signal.SIGINT, signal.default_int_handler)
blocked = threading.Event()

def threads_left():
    deadline = time.monotonic() + 60
    ours = [thread for thread in threading.enumerate() if thread.name.startswith("penstock")]
    for thread in ours:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [thread.name for thread in ours if thread.is_alive()]
"""


def run(script, *, interrupt=False):
    """Run a script, interrupt it with Ctrl-C after its first line if asked, and return exit code and output."""
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-c", PREAMBLE + textwrap.dedent(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
        try:
            if interrupt:
                process.stdout.readline()
                process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=120)
        finally:
            process.kill()  # has no effect if it has ended
    return process.returncode, out, err


BLOCKED = """
def batches():
    yield np.zeros(1)
    blocked.wait()
"""

EXITS = {
    "while prefetching": "one = ps.feed(itertools.repeat(np.zeros((100, 100)))); next(one)",
    "inside of a blocked read": BLOCKED + "two = ps.feed(batches()); next(two)",
    "with a thread that holds the feed": """
three = ps.feed(itertools.repeat(np.zeros(9))); next(three)
def consume():
    try: list(three)
    except RuntimeError: pass  # another thread closes the feed
threading.Thread(target=consume, daemon=True).start()
""",
    "with workers": "four = ps.feed(ps.Loader({'x': np.arange(99)}, 3, workers=3)); next(four)",
    "with worker processes": "five = ps.feed(ps.Loader({'x': np.arange(99)}, 3, workers='process:2')); next(five)",
    "while the last step runs": """
step = jax.jit(lambda x, batch: jax.lax.fori_loop(0, 100, lambda i, x: jnp.cos(x @ x), x + batch[0]))
state = jnp.eye(512)
for batch in ps.feed([np.ones(1, np.float32)] * 2): state = step(state, batch)
""",
    "by an exception": "six = ps.feed(itertools.repeat(np.zeros(9))); next(six); raise SystemExit(0)",
}


def test_the_interpreter_exits_cleanly_in_many_states_at_once():
    """The thread that holds a feed is left out: it belongs to the user, and may itself be inside of JAX when Python ends."""
    scripts = [script for state, script in EXITS.items() if state != "with a thread that holds the feed"]
    assert exits_with("\n".join(scripts)) == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize("script", EXITS.values(), ids=EXITS)
def test_the_interpreter_exits_cleanly(script):
    assert exits_with(script) == (0, "")


def exits_with(script):
    """Run a script as a main module, and return its exit code and what it wrote on stderr."""
    code, _, err = run("if __name__ == '__main__':\n" + textwrap.indent(script, "    "))
    return code, err


INTERRUPTED = {
    "in a blocked read": BLOCKED + "feed = ps.feed(batches())",
    "between batches": "feed = ps.feed(itertools.repeat(np.zeros(9)))",
    "with workers": "feed = ps.feed(ps.Loader({'x': np.arange(99)}, 3, workers=3))",
}


@pytest.mark.slow
@pytest.mark.parametrize("script", INTERRUPTED.values(), ids=INTERRUPTED)
def test_ctrl_c_ends_the_loop_and_the_program(script):
    code, out, err = run(
        script
        + """
try:
    with feed:
        for i, batch in enumerate(feed):
            if i == 0: print('running', flush=True)
except KeyboardInterrupt:
    blocked.set()  # a thread inside of a read of a source cannot be ended
    print('interrupted, threads left:', threads_left())
""",
        interrupt=True,
    )
    assert (code, err) == (0, "")
    assert out == "interrupted, threads left: []\n"


@pytest.mark.slow
def test_ctrl_c_ends_worker_processes_without_noise():
    code, out, err = run(
        """
        if __name__ == "__main__":
            feed = ps.feed(ps.Loader({"x": np.arange(99)}, 3, workers="process:2"))
            try:
                with feed:
                    for i, batch in enumerate(feed):
                        if i == 0: print("running", flush=True)
            except KeyboardInterrupt:
                print("interrupted")
        """,
        interrupt=True,
    )
    assert (code, err) == (0, "")
    assert "interrupted" in out


@pytest.mark.slow
def test_ten_thousand_feeds_leave_nothing_behind():
    process = psutil.Process()
    loader = ps.Loader(X, 8)
    ways = [
        lambda: ps.feed(loader).close(),
        lambda: next(ps.feed(loader)),
        lambda: leave(ps.feed(loader)),
        lambda: leave(ps.feed(endless())),
        lambda: list(ps.feed([X["x"]] * 2)),
    ]

    def leave(feed):
        with feed:
            next(feed)

    def open_and_close(n):
        for k in range(n):
            ways[k % len(ways)]()
        gc.collect()
        wait_for_no_threads()
        return threading.active_count(), process.num_fds(), process.memory_info().rss

    before = open_and_close(1000)
    after = open_and_close(10_000)
    assert after[0] <= before[0]
    assert after[1] <= before[1]
    assert after[2] - before[2] < 20e6, f"{(after[2] - before[2]) / 1e6:.1f} MB more"
