"""The cache has complete files only, within its bound, whatever happens to the processes that use it."""

import errno
import hashlib
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import filelock
import pytest

import penstock as ps
from penstock.data.remote.cache import Cache

MB = 1_000_000
READ = """
import hashlib, sys
import penstock as ps
with open(ps.local(sys.argv[1]), "rb") as file:
    print(hashlib.sha256(file.read()).hexdigest(), flush=True)
sys.stdin.readline()
"""


def reader(url):
    return subprocess.Popen([sys.executable, "-c", READ, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def digest(content):
    return hashlib.sha256(content).hexdigest()


def names(cache, part="files"):
    return sorted(path.name.partition("-")[2] or path.name for path in (cache / part).iterdir())


def put(cache, name, size, limit, fill=None):
    return cache.fetch(name, size, limit, fill or (lambda file: file.write(b"x" * size)), 60, name)


def aged(path, seconds):
    os.utime(path, (os.stat(path).st_mtime - seconds,) * 2)


def test_a_process_that_is_killed_in_the_middle_of_a_download_leaves_nothing_that_is_read(site, cache):
    site.files.update({"/x": os.urandom(3 * MB), "/y": b"2" * MB})
    site.stalled = True
    process = reader(f"{site.url}/x")
    assert site.halfway.wait(60)
    process.kill()
    process.wait()
    process.stdin.close(), process.stdout.close()
    assert names(cache) == []
    assert names(cache, "partial") == ["x"]
    site.stalled = False
    site.resume.set()
    ps.local(f"{site.url}/y")
    assert names(cache) == ["y"]
    assert names(cache, "partial") == []  # the next process has removed it
    assert len(names(cache, "users")) == 1
    assert Path(ps.local(f"{site.url}/x")).read_bytes() == site.files["/x"]


def test_two_processes_that_need_a_file_download_it_once(site):
    site.files["/x"] = content = os.urandom(MB // 2)
    site.stalled = True
    process = reader(f"{site.url}/x")
    here = []
    thread = threading.Thread(target=lambda: here.append(ps.local(f"{site.url}/x")))
    assert site.halfway.wait(60)
    thread.start()
    site.wait_for("HEAD", 2)  # the second one has listed the file
    site.resume.set()
    assert process.stdout.readline().strip() == digest(content)
    thread.join()
    assert Path(*here).read_bytes() == content
    assert site.gets("/x") == 1
    process.communicate("\n")


def test_threads_that_need_a_file_download_it_once(site):
    site.files["/x"] = b"x" * 1000
    files = ps.remote([f"{site.url}/x"] * 20)
    assert len(set(files.paths())) == 1
    assert site.gets("/x") == 1


def test_the_least_recently_used_files_go_first(tmp_path):
    cache = Cache(str(tmp_path))
    for age, name in enumerate(["a", "b", "c"]):
        aged(put(cache, name, 100, 300), 1000 - 300 * age)
        cache.release(name)
    cache.open("a", 100).close()  # used just now
    put(cache, "d", 150, 300)
    assert names(tmp_path) == ["a", "d"]
    assert cache.open("b", 100) is None


def test_files_in_use_by_this_process_are_not_removed(tmp_path):
    cache = Cache(str(tmp_path))
    path = put(cache, "a", 100, 150)
    with pytest.raises(OSError, match=r"b \(100 B\) does not fit.*150 B of cache_bytes, 100 B") as caught:
        put(cache, "b", 100, 150)
    assert caught.value.errno == errno.ENOSPC
    assert type(caught.value) is OSError
    assert os.path.exists(path)
    cache.release("a")
    put(cache, "b", 100, 150)
    assert not os.path.exists(path)


def test_files_in_use_by_another_live_process_are_not_removed(site, cache):
    site.files.update({"/x": b"1" * 1000, "/y": b"2" * 1000})
    process = reader(f"{site.url}/x")
    assert process.stdout.readline()
    with pytest.raises(OSError, match="does not fit"):
        ps.local(f"{site.url}/y", cache_bytes=1500)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdin.close(), process.stdout.close()
    ps.local(f"{site.url}/y", cache_bytes=1500)
    assert names(cache) == ["y"]


def test_files_that_an_object_uses_stay_as_long_as_it_exists(site, cache):
    site.files.update({"/x": b"1" * 1000, "/y": b"2" * 1000})
    files = ps.remote(f"{site.url}/x", cache_bytes=1500)
    assert files.paths() == files.paths()
    with pytest.raises(OSError, match="does not fit"):
        ps.local(f"{site.url}/y", cache_bytes=1500)
    del files
    ps.local(f"{site.url}/y", cache_bytes=1500)
    assert names(cache) == ["y"]


def test_files_that_cannot_fit_together_are_refused_before_any_is_downloaded(site):
    site.files.update({"/x": b"1" * 1000, "/y": b"2" * 1000})
    files = ps.remote([f"{site.url}/x", f"{site.url}/y"], cache_bytes=1500)
    with pytest.raises(ValueError, match=r"cache_bytes=1.46 KiB.*1.95 KiB.*cache_bytes=2000"):
        files.paths()
    assert site.gets("/x") == site.gets("/y") == 0
    assert [files.read_bytes(i)[:1] for i in (0, 1, 0)] == [b"1", b"2", b"1"]  # one after the other they fit


def test_the_bound_holds_for_many_files(tmp_path):
    cache = Cache(str(tmp_path))
    for i in range(100):
        put(cache, str(i), 10 + i % 7, 100)
        cache.release(str(i))
        assert sum(path.stat().st_size for path in (tmp_path / "files").iterdir()) <= 100


def test_a_file_that_was_changed_in_the_cache_is_downloaded_again(site, cache):
    site.files["/x"] = b"content"
    path = ps.local(f"{site.url}/x")
    os.truncate(path, 3)
    assert Path(ps.local(f"{site.url}/x")).read_bytes() == b"content"


def test_a_cache_may_be_deleted_between_runs(site, cache):
    import shutil

    site.files["/x"] = b"content"
    ps.local(f"{site.url}/x")
    shutil.rmtree(cache / "files")
    os.mkdir(cache / "files")
    assert Path(ps.local(f"{site.url}/x")).read_bytes() == b"content"


def test_a_download_that_comes_short_is_not_kept(tmp_path):
    cache = Cache(str(tmp_path))
    with pytest.raises(OSError, match="x came with 5 bytes, and not with the 10"):
        put(cache, "x", 10, 100, lambda file: file.write(b"12345"))
    assert names(tmp_path) == names(tmp_path, "partial") == []


def test_a_failed_download_gives_its_room_back(tmp_path):
    cache = Cache(str(tmp_path))

    def fail(file):
        raise RuntimeError("broken")

    for _ in range(5):
        with pytest.raises(RuntimeError, match="broken"):
            put(cache, "x", 60, 100, fail)
    put(cache, "y", 60, 100)
    assert names(tmp_path) == ["y"]


def test_a_download_by_a_stopped_process_is_not_waited_for_for_ever(tmp_path):
    cache, begun, end = Cache(str(tmp_path)), threading.Event(), threading.Event()

    def fill(file):
        begun.set()
        assert end.wait(60)
        file.write(b"x" * 10)

    thread = threading.Thread(target=put, args=(cache, "x", 10, 100, fill))
    thread.start()
    assert begun.wait(60)
    with pytest.raises(TimeoutError, match=r"another process downloads x into .*got no byte"):
        cache.fetch("x", 10, 100, fill, 0.1, "x")
    end.set()
    thread.join()
    assert names(tmp_path) == ["x"]


def test_a_lock_that_a_stopped_process_holds_is_named(tmp_path, monkeypatch):
    cache = Cache(str(tmp_path))
    monkeypatch.setattr("penstock.data.remote.cache._HELD_TOO_LONG", 0.1)
    with filelock.FileLock(tmp_path / "lock"), pytest.raises(TimeoutError, match=r"has held the lock '.*lock'.* is it stopped\?"):
        put(cache, "a", 10, 100)


def test_a_filesystem_without_locks_is_named_with_the_remedy(tmp_path, monkeypatch):
    def fail(*given):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("filelock.FileLock.acquire", fail)
    with pytest.raises(OSError, match=r"has no locks \(No locks available\): give a folder on a local disk"):
        Cache(str(tmp_path))


def test_a_file_above_the_limit_of_the_process_is_told_from_a_full_disk(site, cache):
    site.files["/x"] = b"x" * MB
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(OSError, match=r"/x \(977 KiB\) is larger than .*this process may write.*\(ulimit -f\)"):
            ps.local(f"{site.url}/x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert names(cache) == names(cache, "partial") == []


def test_a_full_disk_is_named_with_the_file_and_the_remedy(tmp_path):
    def fill(file):
        file.write(b"x" * 5)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match=r"no space for a \(10 B\).*another disk"):
        put(Cache(str(tmp_path)), "a", 10, 100, fill)
    assert names(tmp_path) == names(tmp_path, "partial") == []


def test_a_folder_that_cannot_be_written_is_named(site, tmp_path):
    site.files["/x"] = b"x"
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OSError, match=r"file/cache' as the cache .*can be written to"):
        ps.local(f"{site.url}/x", cache=tmp_path / "file" / "cache")


def test_files_are_pickled_and_downloaded_once(site, cache):
    site.files["/x"] = b"content"
    files = ps.remote(f"{site.url}/x")
    assert pickle.loads(pickle.dumps(files)).read_bytes(0) == files.read_bytes(0) == b"content"
    assert site.gets("/x") == 1


@pytest.mark.parametrize("cache_bytes", [0, -1, "many", "1XB"])
def test_a_bound_is_a_positive_number_of_bytes(cache_bytes):
    with pytest.raises(ValueError, match="cache_bytes="):
        ps.remote("memory://x", cache_bytes=cache_bytes)


@pytest.mark.parametrize("folder", ["/proc/nothing", "/dev/null", "file"])
def test_a_cache_that_cannot_be_made_is_named_with_the_remedy(tmp_path, folder):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"cannot use '.*' as the cache .*cache="):
        ps.remote("memory://x", cache=tmp_path / folder)
