"""Files of a store are listed completely and read exactly, or an error says which file, what was tried, and what to do."""

import hashlib
import os
import pickle
import sys
import threading
import traceback
from pathlib import Path

import pytest
from tests.extras import require

import penstock as ps
from penstock.data.remote.store import Patience, _version
from penstock.data.remote.url import file_name, is_pattern, is_url, shown

CONTENT = bytes(range(256)) * 20_000  # 5 MB, which is several parts


def content(url, **options):
    with open(ps.local(url, **options), "rb") as file:
        return file.read()


def test_the_files_of_a_pattern_are_sorted_and_complete(bucket):
    url, options, filesystem = bucket
    for name in ("b.bin", "a.bin", "deep/c.bin", "deep/er/d.bin", "e.txt"):
        filesystem.pipe_file(f"{url}/data/{name}", name.encode())
    wanted = {
        "data/*.bin": ["a.bin", "b.bin"],
        "data/?.bin": ["a.bin", "b.bin"],
        "data/[b-z].bin": ["b.bin"],
        "data/*/*.bin": ["c.bin"],
        "da*/deep/*.bin": ["c.bin"],
        "data/**/*.bin": ["a.bin", "b.bin", "c.bin", "d.bin"],
    }
    for pattern, names in wanted.items():
        files = ps.remote(f"{url}/{pattern}", storage_options=options)
        assert [file_name(each) for each in files.urls] == names, pattern
        assert [files.read_bytes(i).decode().rpartition("/")[2] for i in range(len(files))] == names


def test_the_marker_of_a_folder_is_not_a_file(bucket):
    url, options, filesystem = bucket
    for name in ("data/", "data/sub/", "data/sub/x.bin"):
        filesystem.call_s3("put_object", Bucket=url.removeprefix("s3://"), Key=name, Body=b"")
    assert ps.remote(f"{url}/**", storage_options=options).urls == [f"{url}/data/sub/x.bin"]


def test_a_list_of_urls_keeps_its_order(bucket):
    url, options, filesystem = bucket
    for name in "abc":
        filesystem.pipe_file(f"{url}/{name}", name.encode())
    files = ps.remote([f"{url}/{name}" for name in "cab"], storage_options=options)
    assert [files.read_bytes(i) for i in range(3)] == [b"c", b"a", b"b"]


def test_a_large_file_of_s3_is_read_in_parts(bucket):
    url, options, filesystem = bucket
    filesystem.pipe_file(f"{url}/x", CONTENT)
    assert content(f"{url}/x", storage_options=options) == CONTENT


def test_an_empty_file_is_read(bucket, site):
    url, options, filesystem = bucket
    filesystem.pipe_file(f"{url}/x", b"")
    assert content(f"{url}/x", storage_options=options) == b""
    site.files["/x"] = b""
    assert content(f"{site.url}/x") == b""


@pytest.mark.parametrize("ranges", [True, False])
def test_a_file_of_http_is_read_with_and_without_ranges(site, ranges):
    site.ranges, site.files["/x"] = ranges, CONTENT
    assert content(f"{site.url}/x") == CONTENT


@pytest.mark.parametrize(("failure", "ranges"), [("truncate", True), ("fail", True), ("truncate", False)])
def test_a_download_that_fails_a_few_times_is_right(site, ranges, failure):
    site.ranges, site.files["/x"] = ranges, CONTENT
    setattr(site, failure, 2)
    assert content(f"{site.url}/x") == CONTENT


@pytest.mark.parametrize("ranges", [True, False])
def test_a_download_that_is_always_truncated_is_refused_and_never_read(site, cache, ranges):
    site.ranges, site.files["/x"], site.truncate = ranges, CONTENT[:100], 10**9
    with pytest.raises(ConnectionError, match=rf"cannot read {site.url}/x .*Tried [1-9] times in .* s\. Check the network"):
        ps.local(f"{site.url}/x")
    assert list((cache / "files").iterdir()) == list((cache / "partial").iterdir()) == []


def test_a_server_that_stalls_is_given_up_within_the_timeout(site, cache):
    site.files["/x"], site.stalled = CONTENT, True
    with pytest.raises(TimeoutError, match=rf"cannot read {site.url}/x .*Tried"):
        ps.local(f"{site.url}/x", timeout=0.5)
    assert list((cache / "files").iterdir()) == list((cache / "partial").iterdir()) == []


@pytest.mark.parametrize("ranges", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_slow_download_is_complete_though_it_takes_longer_than_the_timeout(site, ranges):
    site.ranges, site.files["/x"], site.slow = ranges, CONTENT, 0.05
    assert content(f"{site.url}/x", timeout=0.5) == CONTENT


def test_a_download_continues_where_it_was_cut(site):
    site.files["/x"], site.truncate = CONTENT, 1
    assert content(f"{site.url}/x") == CONTENT
    first, second = (part for method, _, part in site.requests if method == "GET")
    assert first is None
    assert int(second.removeprefix("bytes=").removesuffix("-")) > 0


def test_a_store_that_gives_large_parts_too_slowly_is_asked_for_smaller_ones():
    """Its client does not tell that bytes come."""
    memory, ended, asked = require("fsspec.implementations.memory").MemoryFileSystem, threading.Event(), []

    class SlowFilesystem(memory):
        protocol = "slow"

        @classmethod
        def _strip_protocol(cls, path):
            return super()._strip_protocol(path.replace("slow://", "memory://"))

        def cat_file(self, path, start=None, end=None, **kwargs):
            data = super().cat_file(path, start, end, **kwargs)
            asked.append(len(data))
            if len(data) > 300_000:
                ended.wait()
            return data

    require("fsspec").register_implementation("slow", SlowFilesystem, clobber=True)
    SlowFilesystem().pipe_file("/slow-file", CONTENT[:1_500_000])
    assert content("slow://slow-file", timeout=0.25) == CONTENT[:1_500_000]
    ended.set()
    assert asked[0] > 300_000


@pytest.mark.parametrize("size", [10, 10_000_000])
def test_a_file_that_changed_its_size_is_not_tried_again(site, size):
    site.files["/x"] = b"1" * 1_000_000
    files = ps.remote(f"{site.url}/x")
    site.files["/x"] = b"2" * size
    with pytest.raises(OSError, match=rf"{site.url}/x changed.* 1,000,000 bytes .* {size:,}"):
        files.read_bytes(0)
    assert site.gets("/x") == 1


def test_a_download_of_a_file_without_version_begins_anew(site):
    site.etags, site.files["/x"], site.truncate = False, CONTENT, 1
    with pytest.warns(UserWarning, match="downloaded again"):
        assert content(f"{site.url}/x") == CONTENT
    assert [part for method, _, part in site.requests if method == "GET"] == [None, None]


@pytest.mark.parametrize("url", ["s3://", "s3:///", "https://"])
def test_a_url_of_nothing_is_refused(url):
    with pytest.raises(ValueError, match=f"'{url}' names neither a bucket nor a host: write it as"):
        ps.remote(url)


def test_a_circle_of_redirects_is_named_with_the_remedy(site):
    with pytest.raises(OSError, match=rf"{site.url}/circle .*redirects.*Tried once .*give the"):
        ps.local(f"{site.url}/circle")


def test_the_last_error_of_the_client_is_told_when_the_time_is_over():
    patience = Patience("https://host/x", 0.1)
    patience.failed(ConnectionResetError("cut https://host/x?sig=secret off"))
    never = threading.Event()
    with pytest.raises(TimeoutError) as caught:
        patience.insist(never.wait)
    never.set()
    assert "no answer within timeout=0.1 s; the attempt before it failed with ConnectionResetError: cut" in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(("status", "error"), [(404, FileNotFoundError), (403, PermissionError), (401, PermissionError)])
def test_a_refusal_is_not_tried_again(site, status, error):
    site.files["/x"], site.fail, site.status = CONTENT, 10**9, status
    with pytest.raises(error, match=rf"{site.url}/x .*({status}|NotFound).*Tried once"):
        ps.local(f"{site.url}/x")


def test_a_host_that_refuses_connections_is_named(site):
    with pytest.raises(ConnectionError, match=r"cannot read http://127.0.0.1:9/x .*Tried \d times .*Check the network"):
        ps.local("http://127.0.0.1:9/x")


def test_a_missing_bucket_or_file_is_named_with_the_remedy(bucket):
    url, options, filesystem = bucket
    filesystem.pipe_file(f"{url}/data/x", b"x")
    for missing in ("s3://no-such-bucket/x", "s3://no-such-bucket/*.parquet", f"{url}/no", f"{url}/no/*"):
        with pytest.raises(FileNotFoundError, match=r"does not exist .*Tried once .*Check the bucket") as caught:
            ps.remote(missing, storage_options=options)
        assert missing in str(caught.value)
    with pytest.raises(FileNotFoundError, match=rf"no file matches {url}/data/\*\.bin"):
        ps.remote(f"{url}/data/*.bin", storage_options=options)
    with pytest.raises(IsADirectoryError, match=rf"{url}/data is a folder: give a pattern such as {url}/data/\*"):
        ps.remote(f"{url}/data", storage_options=options)


def test_missing_credentials_are_named_with_the_remedy(bucket, monkeypatch):
    url, options, _ = bucket
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(PermissionError, match=rf"access to {url}/x was denied .*Set AWS_ACCESS_KEY_ID"):
        ps.remote(f"{url}/x", storage_options={"endpoint_url": options["endpoint_url"]})


def test_credentials_and_endpoint_come_from_the_environment(bucket, monkeypatch):
    url, options, filesystem = bucket
    filesystem.pipe_file(f"{url}/x", b"x")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    monkeypatch.setenv("AWS_ENDPOINT_URL", options["endpoint_url"])
    assert content(f"{url}/x") == b"x"


def test_a_file_that_changes_after_it_was_listed_is_refused(bucket, site):
    url, options, filesystem = bucket
    filesystem.pipe_file(f"{url}/x", b"old")
    files = ps.remote(f"{url}/x", storage_options=options)
    filesystem.pipe_file(f"{url}/x", b"new")
    with pytest.raises(OSError, match=rf"{url}/x changed.* 3 bytes and ETag=\w+, and has 3"):
        files.read_bytes(0)


def test_a_file_that_changed_is_downloaded_anew(site):
    site.files["/x"] = b"old"
    assert content(f"{site.url}/x") == b"old"
    site.files["/x"] = b"new"
    assert content(f"{site.url}/x") == b"new"


def test_a_file_without_version_is_downloaded_each_time_that_it_is_listed(site):
    site.etags, site.files["/x"] = False, b"old"
    with pytest.warns(UserWarning, match=rf"neither an ETag nor .* of {site.url}/x, .*downloaded again each time"):
        files = ps.remote(f"{site.url}/x")
    assert [files.read_bytes(0) for _ in range(2)] == [b"old"] * 2
    assert pickle.loads(pickle.dumps(files)).read_bytes(0) == b"old"
    assert site.gets("/x") == 1
    site.files["/x"] = b"new"
    with pytest.warns(UserWarning, match="downloaded again"):
        again = ps.remote(f"{site.url}/x")
    assert again.read_bytes(0) == b"new"
    assert again.describe() == files.describe()  # so that states can be restored


def test_a_local_file_that_changed_is_read_anew(tmp_path):
    require("fsspec")
    url = f"file://{tmp_path}/x"
    (tmp_path / "x").write_bytes(b"old")
    assert content(url) == b"old"
    (tmp_path / "x").write_bytes(b"new")
    os.utime(tmp_path / "x", (1, 1))
    assert content(url) == b"new"


def test_the_user_that_owns_a_file_is_not_its_version():
    assert _version({"uid": 1000, "mtime": 5.0}) == "mtime=5.000"


def test_a_file_is_downloaded_once(site):
    site.files["/x"] = b"content"
    assert [content(f"{site.url}/x") for _ in range(3)] == [b"content"] * 3
    assert site.gets("/x") == 1


def test_a_checksum_of_the_store_is_compared(site, monkeypatch):
    from penstock.data.remote import store

    site.files["/x"] = b"content"
    monkeypatch.setattr(store, "_checksum", lambda info: ("md5", hashlib.md5(b"other").hexdigest()))
    with pytest.raises(OSError, match="arrived damaged: its md5 is"):
        ps.local(f"{site.url}/x")


@pytest.mark.parametrize("timeout", [0, "60", True, float("inf")])
def test_a_timeout_is_a_positive_number(timeout):
    with pytest.raises(ValueError, match="timeout="):
        ps.remote("memory://x", timeout=timeout)


@pytest.mark.parametrize("urls", ["x.parquet", [], ["s3://bucket/x", "y"], [1]])
def test_paths_are_not_urls(urls):
    with pytest.raises(ValueError, match="remote needs URLs"):
        ps.remote(urls)


def test_an_unknown_protocol_and_a_missing_package_are_named():
    require("fsspec")
    with pytest.raises(ValueError, match="Protocol not known: nothing"):
        ps.remote("nothing://x")
    with pytest.raises(ModuleNotFoundError, match=r"abfs.*pip install \"penstock\[remote\]\""):
        ps.remote("abfs://container/x")


def test_an_unknown_storage_option_is_an_error_that_names_the_file(bucket, site):
    url, options, _ = bucket
    for file, its_options in ((f"{url}/x", options), (f"{site.url}/x", {})):
        with pytest.raises(TypeError, match=rf"{file}.*storage_options .*'nonsense'"):
            ps.remote(file, storage_options={**its_options, "nonsense": 1})


def test_secrets_in_an_address_are_not_shown(site):
    assert shown("https://me:secret@host:1/x?Signature=secret") == "https://host:1/x?…"
    with pytest.raises(FileNotFoundError) as caught:
        ps.local(f"{site.url}/x?Signature=secret")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("https://me:pass@word@host/x", "https://host/x"),
        ("s3://key:secret@bucket/x@2", "s3://bucket/x@2"),
        ("simplecache::https://me:secret@host/x?sig=secret", "simplecache::https://host/x?…"),
        ("HTTPS://host/x?sig=secret", "HTTPS://host/x?…"),
        (
            "403, url='https://me:secret@h/x?sig=(secret)' and https://h/y?sig=secret end",
            "403, url='https://h/x?… and https://h/y?… end",
        ),
        ("hf://gpt2@main/x", "hf://gpt2@main/x"),
        ("write to me@host or ask? yes", "write to me@host or ask? yes"),
    ],
)
def test_a_text_is_shown_without_its_secrets(text, wanted):
    assert shown(text) == wanted


def test_an_error_and_its_traceback_have_no_secrets(site):
    site.files["/x"], site.fail, site.status = b"x", 10**9, 403
    secret = "hunter" + "2"  # the traceback shows this line
    with pytest.raises(PermissionError) as caught:
        ps.local(f"{site.url.replace('://', f'://me:{secret}@')}/x?X-Amz-Signature={secret}")
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))


def test_two_signatures_of_a_file_share_one_copy(site, cache):
    site.files["/x"] = b"content"
    for signature in ("secret1", "secret2"):
        assert content(f"{site.url}/x?X-Amz-Date=1&X-Amz-Signature={signature}") == b"content"
    (copy,) = (cache / "files").iterdir()
    assert "secret" not in copy.name
    content(f"{site.url}/x?id=2")  # may be another file
    assert len(list((cache / "files").iterdir())) == 2


@pytest.mark.parametrize(
    "call",
    [ps.local, ps.remote, ps.jsonl, ps.webdataset, lambda x: require("PIL") and ps.images(x, 8), lambda x: ps.Loader(x, 1)],
)
def test_a_url_as_a_path_is_refused(call):
    with pytest.raises(ValueError, match=r"Path\('s3:/bucket/x'\).*give it as text"):
        call(Path("s3://bucket/x"))


def test_a_file_whose_name_has_the_characters_of_a_pattern_is_read(bucket):
    url, options, filesystem = bucket
    for name in ("a[1].bin", "a1.bin", "b*.bin", "b2.bin", "c?.bin"):
        filesystem.pipe_file(f"{url}/{name}", name.encode())
    for name in ("a[1].bin", "b*.bin", "c?.bin"):
        assert content(f"{url}/{name}", storage_options=options) == name.encode()
    assert len(ps.remote(f"{url}/[ab][12].bin", storage_options=options)) == 2


def test_urls_and_patterns_are_told_from_paths():
    assert all(map(is_url, ["s3://b/x", "hf://datasets/a/b", "https://h/x", "memory://x"]))
    assert not any(map(is_url, ["x.parquet", "/a/b", "C:\\data", "C:/data", 3]))
    assert not is_pattern("https://host/x?y=[1]")
    assert is_pattern("https://host/*.parquet")
    assert is_pattern("s3://b/x?.parquet")


def test_a_missing_extra_names_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ModuleNotFoundError, match=r"reading s3:// needs more packages .*pip install \"penstock\[remote\]\""):
        ps.Loader("s3://bucket/x.parquet", 2)
