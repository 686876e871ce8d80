"""`penstock launch`: real processes, with real signals and pipes."""

import os
import re
import signal
import threading
import time

import pytest
from tests.train.ranks import BARE, ended, finish, launch, read_until, start

from penstock.cli import main


def pids(text):
    return [int(number) for number in re.findall(r"pid (\d+)", text)]


def wait_for_end(processes):
    """Wait until processes are gone. The timeout of the test is the limit."""
    while not all(ended(each) for each in processes):
        time.sleep(0.05)


def test_each_line_has_its_rank_and_arguments_are_passed_on(tmp_path):
    script = """
        import os, sys
        print("hello", sys.argv[1:], os.environ["PENSTOCK_PROCESS_INDEX"], os.environ["PENSTOCK_PROCESS_COUNT"])
        print("to stderr", file=sys.stderr)
        sys.stdout.write("no line feed")
    """
    done = launch(tmp_path, script, count=3, arguments=("-n", "7", "--", "--grace=x"))
    assert done.code == 0, done.err
    for rank in range(3):
        assert done.lines(rank) == [f"hello ['-n', '7', '--', '--grace=x'] {rank} 3", "no line feed"]
    assert sorted(done.err.splitlines()) == ["[0] to stderr", "[1] to stderr", "[2] to stderr"]


def test_a_module_runs_as_with_python(tmp_path, monkeypatch):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "tool.py").write_text("import sys; print(__name__, sys.argv[1:])")
    monkeypatch.chdir(tmp_path)
    done = launch(tmp_path, "", "-m", "package.tool", "a", "-n", "3", count=2)
    assert done.code == 0, done.err
    assert done.lines(1)[0].startswith("__main__ ['a', '-n', '3'")


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        ("sys.exit(3)", 3, "rank 1 exited with 3"),
        ("os.kill(os.getpid(), 9)", 137, "rank 1 was ended by SIGKILL"),
    ],
)
def test_the_first_failure_ends_all_and_keeps_its_exit_code(tmp_path, end, code, words):
    script = f"""
        import os, sys, threading
        print("pid", os.getpid())
        if os.environ["PENSTOCK_PROCESS_INDEX"] == "1":
            {end}
        threading.Event().wait()
    """
    done = launch(tmp_path, script, count=3)
    assert done.code == code
    assert words in done.err
    wait_for_end(pids(done.out))


def test_a_rank_that_ends_well_ends_no_other(tmp_path):
    script = """
        import os, sys
        if os.environ["PENSTOCK_PROCESS_INDEX"] == "0":
            sys.exit()
        while os.getppid() == int(os.environ["PENSTOCK_LAUNCHER"]) and not os.path.exists(sys.argv[1]):
            pass
        print("done")
    """
    launcher = start(tmp_path, script, arguments=(str(tmp_path / "go"),))
    (tmp_path / "go").touch()
    done = finish(launcher)
    assert (done.code, done.lines(1)) == (0, ["done"])


def test_a_rank_that_ignores_sigterm_is_killed_with_all_that_it_started(tmp_path):
    script = """
        import os, signal, subprocess, sys, threading
        if os.environ["PENSTOCK_PROCESS_INDEX"] == "0":
            ignore = "import signal, threading; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); "
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            child = subprocess.Popen([sys.executable, "-c", ignore + "threading.Event().wait()"], stdout=subprocess.PIPE)
            child.stdout.readline()
            print("pid", os.getpid(), "pid", child.pid)
            open(sys.argv[1], "w").close()
        else:
            while not os.path.exists(sys.argv[1]):
                pass
            sys.exit(5)
        threading.Event().wait()
    """
    done = launch(tmp_path, script, "--grace", "0.5", arguments=(str(tmp_path / "ready"),))
    assert done.code == 5
    assert len(pids(done.out)) == 2
    wait_for_end(pids(done.out))


def test_what_a_rank_leaves_behind_ends_after_it(tmp_path):
    script = """
        import subprocess, sys
        child = subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"])
        print("pid", child.pid)
    """
    done = launch(tmp_path, script, "--grace", "1")
    assert done.code == 0
    assert len(pids(done.out)) == 2
    wait_for_end(pids(done.out))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 4)])
def test_signals_go_to_all_ranks_which_decide_the_exit_code(tmp_path, number, code):
    script = """
        import os, signal, sys, threading
        event = threading.Event()
        def note(number, frame):
            print("got", number)
            event.set()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, note)
        print("ready")
        event.wait()
        sys.exit(int(sys.argv[1]))
    """
    launcher = start(tmp_path, script, "--restarts", "3", arguments=(str(code),))
    read_until(launcher, "ready", 2)
    os.kill(launcher.pid, number)
    done = finish(launcher)
    assert done.code == code, done.err
    assert (done.lines(0), done.lines(1)) == ([f"got {int(number)}"], [f"got {int(number)}"])
    assert "restart" not in done.err


def test_a_third_ctrl_c_kills(tmp_path):
    script = """
        import os, signal
        signal.signal(signal.SIGINT, lambda *_: print("again"))
        print("ready", "pid", os.getpid())
        while True:
            signal.pause()
    """
    launcher = start(tmp_path, script, "--grace", "1000")
    read_until(launcher, "ready", 2)
    for _ in range(2):
        os.kill(launcher.pid, signal.SIGINT)
        read_until(launcher, "again", 2)
    os.kill(launcher.pid, signal.SIGINT)
    assert finish(launcher).code == 137


def test_nothing_survives_a_launcher_that_is_killed(tmp_path):
    script = """
        import os, subprocess, sys, threading
        child = subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"])
        print("pid", os.getpid(), "pid", child.pid)
        threading.Event().wait()
    """
    launcher = start(tmp_path, script, "--grace", "0.5")
    lines = [launcher.stdout.readline().decode() for _ in range(2)]
    launcher.kill()
    finish(launcher)
    assert len(pids("".join(lines))) == 4
    wait_for_end(pids("".join(lines)))


def test_ten_megabytes_of_lines_come_whole_and_in_order(tmp_path):
    script = """
        import os, sys
        stream = (sys.stdout, sys.stderr)[int(os.environ["PENSTOCK_PROCESS_INDEX"])]
        with open(stream.fileno(), "w", 1 << 20) as fast:
            for number in range(100_000):
                print(f"{number:099}", file=fast)
    """
    done = launch(tmp_path, script)
    assert done.code == 0
    assert done.out == "".join(f"[0] {number:099}\n" for number in range(100_000))
    assert done.err == "".join(f"[1] {number:099}\n" for number in range(100_000))


def test_a_long_line_and_bytes_that_are_no_text_pass(tmp_path):
    script = """
        import os
        os.write(1, bytes(set(range(256)) - {10, 13}) + b"\\n")
        data = b"x" * 10_000_000 + b"\\n"
        while data:
            data = data[os.write(1, data):]
    """
    launcher = start(tmp_path, script)
    out, err = launcher.communicate(timeout=200)
    assert (launcher.returncode, err) == (0, b"")
    for prefix in (b"[0] ", b"[1] "):
        for line in (bytes(set(range(256)) - {10, 13}), b"x" * 10_000_000):
            assert out.count(prefix + line + b"\n") == 1


def test_a_rank_may_close_its_output_and_go_on(tmp_path):
    script = """
        import os, sys
        os.close(1)
        os.close(2)
        open(os.path.join(sys.argv[1], os.environ["PENSTOCK_PROCESS_INDEX"]), "w").close()
        os._exit(6)
    """
    assert launch(tmp_path, script, arguments=(str(tmp_path),)).code == 6


def test_a_reader_that_leaves_ends_the_ranks(tmp_path):
    script = """
        import os
        print("pid", os.getpid())
        while True:
            print("more")
    """
    launcher = start(tmp_path, script)
    lines = launcher.stdout.readline().decode()
    launcher.stdout.close()
    assert launcher.wait(timeout=200) == 141
    assert b"nobody reads" in launcher.stderr.read()
    launcher.stderr.close()
    wait_for_end(pids(lines))


def test_a_reader_that_has_stopped_does_not_keep_signals_from_the_ranks(tmp_path):
    script = """
        import os, signal, sys
        def leave(*_):
            open(os.path.join(sys.argv[1], os.environ["PENSTOCK_PROCESS_INDEX"]), "w").close()
            os._exit(0)
        signal.signal(signal.SIGTERM, leave)
        print("ready")
        while True:
            print("x" * 1000)
    """
    launcher = start(tmp_path, script, arguments=(str(tmp_path),))
    seen: set[bytes] = set()
    while len(seen) < 2:
        line = launcher.stdout.readline()
        if b"ready" in line:
            seen.add(line[:3])
    os.kill(launcher.pid, signal.SIGTERM)
    while not ((tmp_path / "0").exists() and (tmp_path / "1").exists()):
        time.sleep(0.05)
    assert finish(launcher).code == 0


def test_failures_are_followed_by_as_many_restarts_as_were_asked_for(tmp_path):
    script = """
        import os, sys
        print("port", os.environ["PENSTOCK_COORDINATOR"])
        if os.environ["PENSTOCK_PROCESS_INDEX"] == "1":
            path = os.path.join(sys.argv[1], "attempts")
            attempts = os.path.getsize(path) if os.path.exists(path) else 0
            with open(path, "a") as file:
                file.write("x")
            sys.exit(0 if attempts == int(sys.argv[2]) else 3)
    """
    for after, code in ((1, 0), (9, 3)):
        (tmp_path / "attempts").unlink(missing_ok=True)
        done = launch(tmp_path, script, "--restarts", "2", "--grace", "5", arguments=(str(tmp_path), str(after)))
        assert done.code == code
        ports = done.lines(1)
        assert len(ports) == len(set(ports)) == (2 if code == 0 else 3)
        assert done.err.count("all processes start again after rank 1 exited with 3: restart 1 of 2") == 1
        assert done.err.count("restart 2 of 2") == (code == 3)


STALL = f"""{BARE}
import os, threading
from penstock import _heartbeat

def stuck_here():
    threading.Event().wait()

for step in range(1000, 1010):
    if step == 1005 and os.environ["PENSTOCK_PROCESS_INDEX"] == "1":
        stuck_here()
    _heartbeat.beat(step)
threading.Event().wait()
"""


def test_a_stall_names_the_rank_with_the_fewest_steps_and_shows_its_stacks(tmp_path):
    done = launch(tmp_path, STALL, "--stall", "1", "--grace", "1", "--restarts", "1", count=3)
    assert done.code == 124
    assert done.err.count("rank 1 has made the fewest steps, and the others wait for it") == 2  # once more after a restart
    assert "rank 0: step 1009 (10 made here, 0 batches), silent for" in done.err
    assert "rank 1: step 1004 (5 made here, 0 batches), silent for" in done.err
    stacks = done.err.partition("stacks of rank 1")[2].partition("penstock launch:")[0]
    assert "in stuck_here" in stacks
    assert "stacks of rank 0" not in done.err


def test_a_rank_without_penstock_is_said_to_have_no_stacks(tmp_path):
    from penstock.train.launch import stall

    watched = stall.Progress(tmp_path, 2, 1.0, 0.0)
    report = watched.report({0: 1, 1: 1}, 7.0)
    assert report.count("has not imported penstock") == 2
    assert "no step for 7 s" in report
    assert "no step yet" in report


def test_silence_counts_from_two_steps_of_all_ranks_on(tmp_path):
    from penstock import _heartbeat
    from penstock.train.launch import stall

    watched = stall.Progress(tmp_path, 2, 10.0, 0.0)
    first, second = (rank.words for rank in watched._ranks)

    def stalled(until, excused=False):
        return any(watched.stalled([0, 1], float(now), excused) for now in range(int(watched._looked) + 1, until + 1))

    first[_heartbeat.BATCHES] = 2
    assert not stalled(1000)  # the second one imports and compiles
    second[_heartbeat.STEPS] = 2
    assert not stalled(1011)  # the first one waited for it until 1001
    first[_heartbeat.BATCHES] = 3
    assert stalled(1012)  # the second one has been silent since 1001
    assert watched.behind([0, 1]) == [0]
    second[_heartbeat.STEPS] = 3
    assert not stalled(1022)
    assert not stalled(1100, excused=True)  # the reader of the output had stopped
    assert not watched.stalled([0, 1], 2000.0, False)  # the launcher itself had
    assert stalled(2011)
    never = stall.Progress(tmp_path, 2, 10.0, 0.0)
    assert not any(never.stalled([0, 1], float(now), False) for now in range(1800))
    assert never.stalled([0, 1], 1801.0, False)


PSUM_STALL = """
    import threading
    import numpy as np
    import penstock as ps
    me = ps.distributed(timeout=100)
    import jax
    from jax.sharding import NamedSharding, PartitionSpec as P
    mesh = jax.make_mesh((jax.device_count(),), ("x",))
    add = jax.jit(jax.shard_map(lambda x: jax.lax.psum(x, "x"), mesh=mesh, in_specs=P("x"), out_specs=P()))

    class Source:
        def __len__(self):
            return 800
        def describe(self):
            return "a source that gets stuck"
        def read(self, indices):
            if indices[0] >= 80 and me.index == 1:
                never_comes()
            return {"x": indices.astype(np.float32)}

    def never_comes():
        threading.Event().wait()

    with ps.feed(ps.Loader(Source(), batch_size=8, workers=1), to=NamedSharding(mesh, P("x"))) as batches:
        for batch in batches:
            print(float(add(batch["x"])[0]))
"""


@pytest.mark.slow
def test_a_stall_is_found_while_another_rank_waits_in_a_collective(tmp_path):
    done = launch(tmp_path, PSUM_STALL, "--stall", "5", "--grace", "1", "--devices-per-process", "4")
    assert done.code == 124, done.err
    assert "rank 1 has made the fewest steps" in done.err
    assert "rank 0: 11 batches" in done.err
    assert "rank 1: 10 batches" in done.err
    assert "in never_comes" in done.err


def test_a_forked_or_started_process_counts_nothing_for_its_rank(tmp_path):
    script = f"""{BARE}
import os, subprocess
from penstock import _heartbeat
assert _heartbeat._words is not None
started = {BARE!r} + "from penstock import _heartbeat as h; assert h._words is None and not h.is_launched()"
subprocess.run([sys.executable, "-c", started], check=True)
child = os.fork()
_heartbeat.beat(1)
_heartbeat.batch()
if not child:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert _heartbeat._words.tolist() == [1, 1, 1, 1]
"""
    done = launch(tmp_path, script, "--stall", "100")
    assert done.code == 0, done.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-n", "0", "x.py"], ["-n", "0: needs an integer from 1 to 256"]),
        (["-n", "two", "x.py"], ["two: needs an integer"]),
        (["x.py", "-n", "2"], ["-n/--processes", "required"]),
        (["-n", "2"], ["a script is missing"]),
        (["-n", "2", "--"], ["a script is missing"]),
        (["-n", "2", "no/such.py"], ["there is no script 'no/such.py'"]),
        (["-n", "2", "-m", "no_such_module.train"], ["there is no module 'no_such_module.train'"]),
        (["-n", "2", "--restarts", "-1", "x.py"], ["--restarts", "-1: needs an integer >= 0"]),
        (["-n", "2", "--stall", "0", "x.py"], ["--stall", "0: needs seconds > 0"]),
        (["-n", "2", "--grace", "long", "x.py"], ["--grace", "long: needs seconds"]),
        (["-n", "2", "--frobnicate", "x.py"], ["--frobnicate"]),
        (["-n", "2", "."], ["is a folder without __main__.py"]),
    ],
)
def test_bad_arguments_exit_with_2_and_one_line(arguments, words, capsys):
    try:
        code = main(["launch", *arguments])
    except SystemExit as end:
        code = end.code
    printed = capsys.readouterr()
    assert (code, printed.out) == (2, "")
    assert printed.err.count("\n") == 1
    assert [word for word in [*words, "see penstock"] if word not in printed.err] == []


def test_help_has_an_example(capsys):
    with pytest.raises(SystemExit) as end:
        main(["launch", "--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert [each for each in ("penstock launch -n 2", "--stall") if each not in out] == []


def test_signal_handlers_are_put_back():
    from penstock.train.launch.ranks import signal_pipe

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)
    before = [signal.getsignal(number) for number in numbers]
    assert threading.current_thread() is threading.main_thread()
    with signal_pipe() as signals:
        assert signals.read() == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert signals.read() == [signal.SIGTERM]
    assert [signal.getsignal(number) for number in numbers] == before
