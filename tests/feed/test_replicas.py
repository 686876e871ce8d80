"""Processes that bring the rows of a replicated batch compare them, and learn when another one ends."""

import pytest
from tests.feed.process_group import run

LEAVES = """
mesh = mesh_of((2, 4), ("node", "gpu"))
to = {"own": NamedSharding(mesh, P("node")), "same": NamedSharding(mesh, P())}

def batches(same, steps=3, dtype=np.int32):
    return [{"own": np.full((4, 2), 10 * step + index), "same": np.full((3,), same(step), dtype)} for step in range(steps)]

def told(given, to=to):
    try:
        with ps.feed(given, to=to, replicated="check") as feed:
            return list(feed)
    except ValueError as error:
        return str(error)

# Only the replicated leaf needs the same rows.
got = told(batches(lambda step: step))
assert [int(np.asarray(b["same"])[0]) for b in got] == [0, 1, 2]
for step, batch in enumerate(got):
    assert np.unique([np.asarray(s.data) for s in batch["own"].addressable_shards]).tolist() == [10 * step + index]

error = told(batches(lambda step: step + (index if step == 2 else 0)))
assert "leaf 'same' of batch 2 differs between processes" in error and "other values in int32[3]" in error, error
error = told(batches(lambda step: 0, dtype=[np.int16, np.int32][index]))
assert "it is int" in error and "here, and int" in error, error
extra = [{"x": np.ones(2), **({"y": np.ones(1)} if index else {})}]
error = told(extra, to["same"])  # both processes are told
assert "leaf 'y' of batch 0" in error and "absent" in error, error
"""

GROUPS = """
# Four processes with two devices each: rows are the same in pairs, which differ from leaf to leaf.
mesh = mesh_of((2, 2, 2), ("a", "b", "gpu"))
to = {"x": NamedSharding(mesh, P("a")), "y": NamedSharding(mesh, P("b")), "z": NamedSharding(mesh, P(("a", "b")))}
a, b = divmod(index, 2)

def outcome(wrong=None):
    def batch(step):
        x = a + (7 if wrong == index and step == 1 else 0)
        return {"x": np.full((2,), x), "y": np.full((2,), 10 + b), "z": np.full((2,), index)}
    try:
        with ps.feed([batch(step) for step in range(3)], to=to, replicated="check") as feed:
            return len(list(feed))
    except ValueError as error:
        return str(error)

assert outcome() == 3
error = outcome(wrong=3)
if a == 1:
    assert "leaf 'x' of batch 1 differs between processes" in error, error
else:  # the others have the right rows, and learn of the end of those that have not
    assert f"process {b + 2} has no batch 2" in error and "leaf 'x' of batch 1 differs" in error, error
print("all right")
"""

ENDS = """
import gc, time
mesh = mesh_of((2, 4), ("node", "gpu"))
to = NamedSharding(mesh, P())
batch = {"x": np.arange(6)}

def batches(steps, fails=False):
    for _ in range(steps):
        yield batch
    if fails:
        raise OSError("disk gone")

def after(steps, fails=False, closed_after=None, dropped=False, within=None):
    '''Return what process 1 is told that goes on, and how many batches it has had.'''
    feed = ps.feed(batches(steps if index == 0 else 9, fails and index == 0), to=to, replicated="check")
    had = 0
    try:
        with feed if not dropped else __import__("contextlib").nullcontext():
            for _ in feed:
                had += 1
                if index == 0 and had == closed_after:
                    if within:
                        raise within
                    break
    except (OSError, ZeroDivisionError):
        assert index == 0
    except ValueError as error:
        return had, str(error)
    del feed
    gc.collect()
    return had, ""

begin = time.monotonic()
had, error = after(3)
assert had == 3, had
assert index == 0 or "process 0 has no batch 3" in error and "it was exhausted" in error and "same number" in error, error
had, error = after(2, fails=True)
assert had == 2, had
assert index == 0 or "it failed with OSError: disk gone" in error, error
had, error = after(0)
assert index == 0 or "process 0 has no batch 0" in error, error
# A feed reads ahead, so the other process may get some batches more than were taken.
had, error = after(9, closed_after=2)
assert index == 0 or (2 <= had < 9 and "it was closed" in error), (had, error)
had, error = after(9, closed_after=2, within=ZeroDivisionError("loss"))
assert index == 0 or "it was closed by ZeroDivisionError: loss" in error, error
had, error = after(9, closed_after=2, dropped=True)
assert index == 0 or "it was dropped" in error, error

# A loop that ends at the same step in all processes has no error, although both have read ahead.
with ps.feed(itertools.repeat(batch), to=to, replicated="check") as feed:
    assert len(list(itertools.islice(feed, 5))) == 5

# Batches are counted from the restored step on.
given = [{"x": np.array([step + (index if step == 4 else 0)])} for step in range(6)]
feed = ps.feed(given, to=to, replicated="check")
with feed:
    feed.restore({**feed.state(), "step": 3})
    try:
        list(feed)
    except ValueError as error:
        told = str(error)
assert "leaf 'x' of batch 4 differs" in told, told
feed = ps.feed(given, to=to, replicated="check")
with feed:
    feed.restore({**feed.state(), "step": index})
    try:
        next(feed)
    except ValueError as error:
        told = str(error)
assert "restore the feeds of all processes to the state of the same step" in told, told

# The program of process 0 ends with a feed that nobody closed.
last = ps.feed(itertools.repeat(batch), to=to, replicated="check")
next(last)
if index == 1:
    try:
        for _ in last:
            pass
    except ValueError as error:
        told = str(error)
    assert "its program ended" in told, told
assert time.monotonic() - begin < 200, "a process waited for hashes that never came"
print("all right")
"""

ELSEWHERE = """
x = {"x": np.arange(8)}
there = Mesh(np.array([d for d in jax.devices() if d.process_index == 0]), ("gpu",))
for to in (NamedSharding(there, P("gpu")), there.devices[0], {"x": NamedSharding(there, P())}):
    for batches in ([x], ps.Loader(x, 8, epochs=1)):
        told = ""
        try:
            with ps.feed(batches, to=to, replicated="check") as feed:
                assert len(list(feed)) == 1
        except ValueError as error:
            told = str(error)
        assert (index == 0) == (not told), told
        assert index == 0 or ("no device of process 1" in told and "jax.local_devices()" in told), told
print("all right")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("script", "count"), [(LEAVES + "\nprint('all right')", 2), (GROUPS, 4), (ENDS, 2), (ELSEWHERE, 2)])
def test_processes_compare_what_they_hold_in_common(script, count):
    assert all("all right" in out for out in run(script, count))
