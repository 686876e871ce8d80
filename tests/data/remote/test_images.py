"""Folders of images in a store give the same batches as on this machine."""

import io
import pickle

import numpy as np
import pytest
from tests.extras import require

import penstock as ps

Image = require("PIL.Image")
fsspec = require("fsspec")


@pytest.fixture
def folders(bucket, tmp_path):
    """Give a folder of two classes here, and the same in a bucket: (path, url, storage_options, filesystem)."""
    url, options, filesystem = bucket
    random = np.random.default_rng(0)
    for name in ("cat/1.jpg", "cat/2.JPG", "dog/deep/1.png", "dog/.hidden.jpg", "readme.txt"):
        file = io.BytesIO()
        if not name.endswith("txt"):
            Image.fromarray(random.integers(0, 255, (40, 50, 3), np.uint8)).save(file, "PNG" if "png" in name else "JPEG")
        path = tmp_path / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(file.getvalue())
        filesystem.pipe_file(f"{url}/images/{name}", file.getvalue())
    return tmp_path / "images", f"{url}/images", options, filesystem


def test_batches_are_those_of_the_local_folder(folders, monkeypatch):
    path, url, options, _ = folders
    here = ps.images(path, 24)
    there = ps.images(ps.remote(f"{url}/**", storage_options=options), 24)
    assert there.paths == here.paths == ["cat/1.jpg", "cat/2.JPG", "dog/deep/1.png"]
    assert there.classes == here.classes == ("cat", "dog")
    assert there.describe() == here.describe()
    loaders = [ps.Loader(source, 2, shuffle=True, epochs=2, workers=2) for source in (here, pickle.loads(pickle.dumps(there)))]
    for one, other in zip(*loaders, strict=True):
        assert (one["image"] == other["image"]).all()
        assert (one["label"] == other["label"]).all()


def test_a_url_is_listed_with_all_folders_in_it():
    memory = fsspec.filesystem("memory")
    file = io.BytesIO()
    Image.new("RGB", (8, 8), (200, 0, 0)).save(file, "PNG")
    for name in ("only/1.png", "only/2.png"):
        memory.pipe_file(f"/remote-images/{name}", file.getvalue())
    source = ps.images("memory://remote-images/", 8)
    assert source.classes == ("only",)
    assert ps.Loader(source, 2)[0]["image"][0, 0, 0].tolist() == [200, 0, 0]
    with pytest.raises(FileNotFoundError, match="does not exist"):
        ps.images("memory://remote-nothing", 8)


def test_folders_without_a_common_one_are_classes():
    memory = fsspec.filesystem("memory")
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "PNG")
    for name in ("cats", "dogs"):
        memory.pipe_file(f"/{name}/1.png", file.getvalue())
    source = ps.images(ps.remote(["memory://cats/*.png", "memory://dogs/*.png"]), 8)
    assert source.classes == ("cats", "dogs")
    assert source.paths == ["cats/1.png", "dogs/1.png"]
    assert source.read(np.array([1]))["label"].tolist() == [1]


def test_a_damaged_image_names_its_url(folders):
    _, url, options, filesystem = folders
    filesystem.pipe_file(f"{url}/cat/1.jpg", b"\xff\xd8\xff\xe0 cut")
    source = ps.images(ps.remote(f"{url}/**", storage_options=options), 24)
    with pytest.raises(ValueError, match=r"cat/1\.jpg' \(8 bytes\) is not a complete image"):
        source.read(np.array([0]))


def put_images(prefix, *names):
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "PNG")
    for name in names:
        fsspec.filesystem("memory").pipe_file(f"/{prefix}/{name}", file.getvalue())
    return file.getvalue()


@pytest.mark.parametrize("pattern", ["**", "*/*.png", "c*/1.png"])
def test_the_fixed_part_of_a_pattern_is_the_folder(pattern):
    put_images("one-class", "cats/1.png")
    source = ps.images(ps.remote(f"memory://one-class/{pattern}"), 8)
    assert source.classes == ps.images("memory://one-class", 8).classes == ("cats",)
    assert source.paths == ["cats/1.png"]
    assert ps.images(ps.remote("memory://one-class/cats/*.png"), 8).labels is None


def test_a_folder_whose_name_has_the_characters_of_a_pattern_is_read():
    put_images("odd[1]*", "ä b?/1.png", "c/[2].png")
    put_images("odd1", "other/1.png")
    source = ps.images("memory://odd[1]*", 8)
    assert source.paths == ["c/[2].png", "ä b?/1.png"]
    assert len(source.read(np.arange(2))["image"]) == 2


def test_signed_urls_are_images_whose_secrets_are_not_shown(site):
    site.files["/my%20cats/1.png"] = site.files["/my%20dogs/1.png"] = put_images("x", "1.png")
    urls = [f"{site.url}/{name}/1.png?X-Amz-Signature=secret" for name in ("my%20cats", "my%20dogs")]
    source = ps.images(ps.remote(urls), 8)
    assert source.classes == ("my cats", "my dogs")
    assert source.paths == ["my cats/1.png", "my dogs/1.png"]
    site.files["/my%20dogs/1.png"] = b"\xff\xd8 cut"
    with pytest.raises(ValueError, match=r"my%20dogs/1.png\?…' \(6 bytes\) is not a complete image") as damaged:
        ps.images(ps.remote(urls), 8).read(np.array([1]))
    site.files["/x.csv"] = b""
    with pytest.raises(ValueError, match=r"no image in .*files there: 1 with \.csv") as none:
        ps.images(ps.remote(f"{site.url}/x.csv?X-Amz-Signature=secret"), 8)
    assert "secret" not in f"{source!r}{damaged.value}{none.value}"


def test_a_page_of_links_is_a_folder(site):
    page = '<a href="?C=N;O=D">Name</a> <a href="?C=M;O=A">Date</a> <a href="/">Parent Directory</a> '
    site.files["/d"] = f'{page}<a href="my%20cats/">cats</a> <a href="dogs/">dogs</a>'.encode()
    for folder in ("my%20cats", "dogs"):
        site.files[f"/d/{folder}"] = f'{page}<a href="1%5Ba%5D.png">1</a>'.encode()
        site.files[f"/d/{folder}/1%5Ba%5D.png"] = put_images("x", "1.png")
    source = ps.images(f"{site.url}/d/", 8)
    assert source.classes == ("dogs", "my cats")
    assert source.paths == ["dogs/1[a].png", "my cats/1[a].png"]
    assert len(source.read(np.arange(2))["image"]) == 2
    assert ps.images(f"{site.url}/d/my%20cats", 8).paths == ["1[a].png"]


def test_a_folder_with_a_query_is_refused():
    with pytest.raises(ValueError, match=r"'https://host/x\?…' has a query, .*ps.remote\(\[") as caught:
        ps.images("https://host/x?sig=secret", 8)
    assert "secret" not in str(caught.value)


def test_files_that_only_their_query_tells_apart_are_refused(site):
    site.files["/1.png"] = b"x"
    with pytest.raises(ValueError, match=r"two files are called .*1\.png\?…'"):
        ps.images(ps.remote([f"{site.url}/1.png?id=1", f"{site.url}/1.png?id=2"]), 8)
