"""Arrays on their way to another process: files go by path, and the memory of views goes once."""

import os
import pickle

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as ps
from penstock.data import ArraySource
from penstock.data.array_pickling import from_picklable, to_picklable

X = np.arange(120, dtype=np.int32)


def send(arrays):
    """Return the arrays as another process gets them, and the bytes of each buffer that is sent."""
    buffers = []
    pickled = pickle.dumps(to_picklable(arrays), protocol=5, buffer_callback=buffers.append)
    sizes = [buffer.raw().nbytes for buffer in buffers]
    assert len(pickled) < 3000
    return from_picklable(pickle.loads(pickled, buffers=[bytes(buffer.raw()) for buffer in buffers])), sizes


VIEWS = {
    "windows": lambda x: np.lib.stride_tricks.sliding_window_view(x, 20),
    "windows of a part": lambda x: np.lib.stride_tricks.sliding_window_view(x[10:90:2], 20),
    "backwards": lambda x: np.lib.stride_tricks.sliding_window_view(x[::-1], 20),
    "windows of windows": lambda x: np.lib.stride_tricks.sliding_window_view(
        np.lib.stride_tricks.sliding_window_view(x, 20), 3, 0
    ),
    "broadcast": lambda x: np.broadcast_to(x, (7, 120)),
    "of a transposed array": lambda x: np.lib.stride_tricks.sliding_window_view(np.asfortranarray(x.reshape(30, 4)), 9, 0),
    "of bfloat16": lambda x: np.lib.stride_tricks.sliding_window_view(x.astype(ml_dtypes.bfloat16), 20),
    "of bytes": lambda x: np.lib.stride_tricks.sliding_window_view(np.frombuffer(x.tobytes(), np.int32), 20),
    "of times": lambda x: np.lib.stride_tricks.sliding_window_view(x.astype("datetime64[s]"), 20),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_view_larger_than_its_memory_sends_that_memory_alone(view):
    sent = view(X)
    got, sizes = send(sent)
    assert sum(sizes) <= X.astype(np.int64).nbytes
    assert sum(sizes) < sent.nbytes
    assert got.dtype == sent.dtype
    assert np.array_equal(got, sent)


def test_views_of_one_array_send_it_once():
    views = {"inputs": X[:-1], "targets": X[1:], "all": X}
    got, sizes = send(views)
    assert sizes == [X.nbytes]
    assert all(np.array_equal(got[name], views[name]) for name in views)


def test_a_small_part_of_an_array_is_sent_without_the_rest():
    got, sizes = send({"x": X[:10], "y": X[::6]})
    assert sizes == [40, 80]
    assert np.array_equal(got["y"], X[::6])


def test_an_array_without_elements_survives():
    got, _ = send({"x": X[:0], "y": np.zeros((3, 0))})
    assert got["x"].shape == (0,)
    assert got["y"].shape == (3, 0)


@pytest.mark.parametrize("view", [*list(VIEWS.values())[:5], lambda x: x[3::7], lambda x: x[10:20]])
def test_any_view_of_a_memmap_is_sent_by_path(view, tmp_path):
    np.save(tmp_path / "x.npy", X)
    sent = view(np.load(tmp_path / "x.npy", mmap_mode="r"))
    got, sizes = send(sent)
    assert sizes == []
    assert np.array_equal(got, sent)
    again, sizes = send(got)
    assert sizes == []
    assert np.array_equal(again, sent)


def test_a_view_of_a_copy_on_write_memmap_has_its_changes(tmp_path):
    np.save(tmp_path / "x.npy", X)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="c")
    mapped += 1
    got, sizes = send(np.lib.stride_tricks.sliding_window_view(mapped, 20))
    assert np.array_equal(got, np.lib.stride_tricks.sliding_window_view(X + 1, 20))
    assert sizes == [X.nbytes]


@given(st.data())
def test_every_slice_of_an_array_comes_out_as_it_went_in(data):
    x = np.arange(6 * 5 * 4).reshape(6, 5, 4)
    x = x.transpose(data.draw(st.permutations(range(3))))
    for axis in range(3):
        cut = data.draw(st.slices(x.shape[axis]))
        x = x[(slice(None),) * axis + (cut,)]
    if x.shape[0] > 1:
        x = np.lib.stride_tricks.sliding_window_view(x, 2, axis=0)
    assert np.array_equal(send(x)[0], x)


def test_a_source_of_windows_is_sent_as_small_as_its_array():
    source = ArraySource(np.lib.stride_tricks.sliding_window_view(X, 20))
    pickled = pickle.dumps(source)
    assert len(pickled) < 2 * X.nbytes
    indices = np.array([100, 0, 7])
    assert np.array_equal(pickle.loads(pickled).read(indices), source.read(indices))


def h5(path, values):
    import h5py

    with h5py.File(path, "w") as file:
        file["x"] = values


def opened(path, kind):
    if kind == "h5py":
        import h5py

        return h5py.File(path, "r")["x"]
    return np.load(path, mmap_mode=kind)


def write(path, kind, values):
    h5(path, values) if kind == "h5py" else np.save(path, values)


@pytest.mark.parametrize("kind", ["r", "r+", "h5py"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_file_that_was_replaced_is_not_read_in_place_of_the_other(kind, when, tmp_path):
    path, new = tmp_path / "x.npy", tmp_path / "new.npy"
    write(path, kind, X)
    write(new, kind, X + 1)
    array = opened(path, kind)
    pickled = pickle.dumps(to_picklable(array)) if when == "after" else b""
    os.replace(new, path)
    with pytest.raises(OSError, match=r"x\.npy' has changed since its array was opened.*open the array again"):
        from_picklable(pickle.loads(pickled or pickle.dumps(to_picklable(array))))
    again = opened(path, kind)
    assert np.array_equal(from_picklable(pickle.loads(pickle.dumps(to_picklable(again)))), X + 1)


def test_a_file_that_was_cut_is_told(tmp_path):
    np.save(tmp_path / "x.npy", X)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    pickled = pickle.dumps(to_picklable(mapped))
    os.truncate(tmp_path / "x.npy", 200)
    with pytest.raises(OSError, match="has changed"):
        from_picklable(pickle.loads(pickled))


def test_a_file_may_be_written_to_by_its_own_map_and_marked_as_used(tmp_path):
    path = tmp_path / "x.npy"
    np.save(path, X)
    mapped = np.load(path, mmap_mode="r+")
    pickled = pickle.dumps(to_picklable(mapped))
    mapped[0] = 77
    mapped.flush()
    os.utime(path, ns=(2, 2))
    assert from_picklable(pickle.loads(pickled))[0] == 77


def test_a_file_that_is_gone_is_told_at_once(tmp_path):
    np.save(tmp_path / "x.npy", X)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    (tmp_path / "x.npy").unlink()
    with pytest.raises(FileNotFoundError, match="keep it until the run ends"):
        ps.Loader(mapped, 4, workers="process:1")


def test_worker_processes_refuse_a_file_that_was_replaced(tmp_path):
    np.save(tmp_path / "x.npy", X)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    loader = ps.Loader(mapped, 4, workers="process:1", epochs=1)
    np.save(tmp_path / "new.npy", X + 1)
    os.replace(tmp_path / "new.npy", tmp_path / "x.npy")
    with ps.feed(loader) as feed, pytest.raises(OSError, match="has changed since its array was opened"):
        next(feed)
