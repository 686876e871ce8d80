"""Worker processes: their batches, errors, memory and end."""

import gc
import multiprocessing
import os
import pickle
import resource
import signal
import subprocess
import sys
import textwrap
import threading
from multiprocessing.shared_memory import SharedMemory

import numpy as np
import pytest

import penstock as ps
from penstock.errors import WorkerDiedError

X = np.arange(60)


def where(batch):
    return {"x": batch["x"], "pid": np.full(len(batch["x"]), os.getpid())}


def fail_at_30(record):
    if record["x"] == 30:
        raise LookupError("no such word")
    return record


@ps.per_record
def double(record):
    return {"x": record["x"] * 2}


class Holder:
    @ps.per_record
    def negate(record):  # noqa: N805 - a function in a namespace
        return {"x": -record["x"]}


def plain(record):
    return {"x": record["x"] + 1}


wrapped = ps.per_record(plain)


def die_at_30(batch):
    if 30 in batch["x"]:
        os.kill(os.getpid(), signal.SIGKILL)
    return batch


class Unpicklable(Exception):
    def __init__(self, a, b):
        super().__init__(a)


def fail_unpicklably(batch):
    raise Unpicklable("what happened", 2)


def grow(batch):
    return {"x": np.repeat(batch["x"][:, None], 10 ** (int(batch["x"][0]) % 5), axis=1)}


def test_work_is_done_in_other_processes():
    pids = {pid for batch in ps.Loader({"x": X}, 6, epochs=1, transform=where, workers="process:2") for pid in batch["pid"]}
    assert os.getpid() not in pids
    assert len(pids) == 2


def test_an_error_comes_after_the_good_batches_with_the_workers_traceback():
    seen = []
    loader = ps.Loader({"x": X}, 4, epochs=1, transform=ps.per_record(fail_at_30), workers="process:1")
    with pytest.raises(LookupError, match="no such word") as caught:
        for batch in loader:
            seen += batch["x"].tolist()
    assert seen == list(range(28))
    notes = "".join(caught.value.__notes__)
    assert "fail_at_30" in notes
    assert "batch 7" in notes


def test_an_error_that_does_not_pickle_keeps_its_words():
    with pytest.raises(RuntimeError) as caught:
        list(ps.Loader({"x": X}, 4, epochs=1, transform=fail_unpicklably, workers="process:1"))
    assert str(caught.value) == "Unpicklable: what happened"


def test_a_killed_worker_is_an_error_and_no_hang():
    with pytest.raises(WorkerDiedError, match=r"batch 7 ended with exit code -9"):
        list(ps.Loader({"x": X}, 4, epochs=1, transform=die_at_30, workers="process:1"))


def test_batches_of_growing_size_are_whole():
    got = list(ps.Loader({"x": X}, 1, epochs=1, transform=grow, workers="process:1"))
    assert [b["x"].shape[1] for b in got] == [10 ** (i % 5) for i in range(60)]
    assert all((b["x"] == i).all() for i, b in enumerate(got))
    got[4]["x"][:] = 77  # each batch is memory of its own
    assert all((b["x"] == i).all() for i, b in enumerate(got) if i != 4)


def test_nothing_is_left_when_a_loop_is_left(monkeypatch):
    segments = []

    def create(*args, **options):
        segments.append(SharedMemory(*args, **options))
        return segments[-1]

    monkeypatch.setattr("penstock.data.worker_processes.SharedMemory", create)
    threads = threading.active_count()
    for _ in ps.Loader({"x": X}, 4, transform=where, workers="process:1"):
        break
    gc.collect()
    assert multiprocessing.active_children() == []
    assert threading.active_count() == threads
    assert segments
    assert not {segment.name for segment in segments} & set(os.listdir("/dev/shm"))


def test_a_script_without_a_guarded_entry_is_told_of_it(tmp_path):
    script = tmp_path / "unguarded.py"
    script.write_text(
        textwrap.dedent("""
            import numpy as np, penstock as ps
            next(iter(ps.Loader({"x": np.arange(8)}, 4, workers="process:1")))
        """)
    )
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert ended.returncode != 0
    assert "__name__ == '__main__'" in ended.stderr


def widen(batch):
    return {"x": np.zeros((len(batch["x"]), 4_000_000), np.float32)}


@pytest.mark.parametrize("large", ["data", "batch"])
def test_a_dev_shm_that_is_too_small_is_an_error_that_says_so(large):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20, before[1]))  # this limit holds for shared memory too
    try:
        data = np.zeros((4, 4_000_000 if large == "data" else 1), np.float32)
        with pytest.raises(MemoryError, match=r"64,000,000 more bytes.*--shm-size"):
            next(iter(ps.Loader({"x": data}, 4, transform=widen, workers="process:1")))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(("transform", "wanted"), [(double, [0, 2, 4]), (Holder.negate, [0, -1, -2]), (wrapped, [1, 2, 3])])
def test_per_record_may_be_a_decorator(transform, wanted):
    assert pickle.loads(pickle.dumps(transform)).fn({"x": 1}) == transform.fn({"x": 1})
    loader = ps.Loader({"x": X}, 3, transform=transform, workers="process:1")
    batches = iter(loader)
    assert next(batches)["x"].tolist() == wanted
    batches.close()


def test_a_local_function_is_still_refused():
    @ps.per_record
    def local(record):
        return record

    with pytest.raises(ValueError, match=r"its transform does not pickle .*define functions at the top of a module"):
        ps.Loader({"x": X}, 3, transform=local, workers="process:1")
