"""A folder of images is a source: its order, labels and splits, its pictures, and what it says of files that it cannot read."""

import os
import pickle
import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.image.pictures import encode, folder_of, natural
from tests.extras import require

import penstock as ps
from penstock.data.image import decoding
from penstock.data.image.files import Labelled, choose_split

require("PIL")

NAMES = ["b/2.jpg", "b/10.jpg", "a/deep/er/x.jpg", "a/y.JPEG", "c/z.jpg"]


def all_of(source, batch_size=1, **options):
    loader = ps.Loader(source, batch_size, epochs=1, remainder="keep", **options)
    return {key: np.concatenate([batch[key] for batch in loader]) for key in loader[0]}


def test_folders_are_the_classes_and_names_the_order(tmp_path):
    source = ps.images(folder_of(tmp_path, NAMES), 16)
    assert source.paths == ["a/deep/er/x.jpg", "a/y.JPEG", "b/10.jpg", "b/2.jpg", "c/z.jpg"]
    assert source.classes == ("a", "b", "c")
    assert isinstance(source, ps.Source)
    batch = source.read(np.array([3, 0, 3]))
    assert batch["label"].tolist() == [1, 0, 1]
    assert batch["label"].dtype == np.int32
    assert batch["image"].dtype == np.uint8
    assert batch["image"].shape == (3, 16, 16, 3)
    assert np.array_equal(batch["image"][1], ps.decode_image((tmp_path / "a/deep/er/x.jpg").read_bytes(), 16))


def test_height_and_width_fit_and_decoder_reach_the_decoder(tmp_path):
    folder = folder_of(tmp_path, ["a/1.jpg"])
    data = (tmp_path / "a/1.jpg").read_bytes()
    for fit in ("crop", "stretch", "pad"):
        for decoder in ("auto", "pil"):
            got = ps.images(folder, (20, 12), fit=fit, decoder=decoder).read(np.array([0]))["image"][0]
            assert np.array_equal(got, ps.decode_image(data, (20, 12), fit=fit, decoder=decoder))


def test_a_folder_without_folders_has_no_labels(tmp_path):
    source = ps.images(folder_of(tmp_path, ["2.jpg", "1.jpg"]), 8)
    assert source.paths == ["1.jpg", "2.jpg"]
    assert source.classes == ()
    assert set(source.read(np.array([0]))) == {"image"}


def test_one_class_and_labels_none(tmp_path):
    folder = folder_of(tmp_path, ["a/1.jpg", "a/2.jpg"])
    assert ps.images(folder, 8).read(np.arange(2))["label"].tolist() == [0, 0]
    assert set(ps.images(folder, 8, labels=None).read(np.arange(2))) == {"image"}


def test_classes_select_folders_and_fix_their_labels(tmp_path):
    folder = folder_of(tmp_path, NAMES)
    source = ps.images(folder, 8, classes=["c", "a"])
    assert source.paths == ["a/deep/er/x.jpg", "a/y.JPEG", "c/z.jpg"]
    assert source.labels.tolist() == [1, 1, 0]
    (tmp_path / "d").mkdir()
    assert ps.images(folder, 8, classes=["a", "b", "c", "d"]).labels.tolist() == [0, 0, 1, 1, 2]


def test_a_function_finds_the_label_in_the_path(tmp_path):
    folder = folder_of(tmp_path, ["cat_1.jpg", "dog_1.jpg", "more/cat_2.jpg"])
    source = ps.images(folder, 8, labels=lambda path: path.rpartition("/")[2].partition("_")[0])
    assert source.classes == ("cat", "dog")
    assert source.labels.tolist() == [0, 1, 0]
    assert pickle.loads(pickle.dumps(source)).labels.tolist() == [0, 1, 0]
    numbers = ps.images(folder, 8, labels=lambda path: 7 + path.count("/"))
    assert numbers.labels.tolist() == [7, 7, 8]
    assert numbers.classes == ()


def test_pictures_of_all_formats_are_read_and_other_files_left_out(tmp_path):
    pixels = natural(20, 20)
    for format, ending in [("PNG", "png"), ("WEBP", "webp"), ("GIF", "gif"), ("BMP", "bmp"), ("TIFF", "tif"), ("JPEG", "jpg")]:
        (tmp_path / f"x.{ending}").write_bytes(encode(pixels, format))
    (tmp_path / "labels.csv").write_text("x")
    (tmp_path / ".hidden.jpg").write_bytes(b"no image")
    (tmp_path / ".thumbnails").mkdir()
    (tmp_path / ".thumbnails" / "x.jpg").write_bytes(b"no image")
    (tmp_path / "__MACOSX").mkdir()
    source = ps.images(tmp_path, 20)
    assert source.paths == ["x.bmp", "x.gif", "x.jpg", "x.png", "x.tif", "x.webp"]
    for image in source.read(np.arange(6))["image"]:
        assert np.abs(image.astype(int) - pixels).mean() < 12  # GIF has 256 colours


def test_a_png_that_is_named_jpg_is_read(tmp_path):
    (tmp_path / "x.jpg").write_bytes(encode(natural(8, 8), "PNG"))
    assert np.array_equal(ps.images(tmp_path, 8).read(np.array([0]))["image"][0], natural(8, 8))


@pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege there")
def test_links_are_followed_but_not_around_in_circles(tmp_path):
    folder = folder_of(tmp_path / "data", ["a/1.jpg", "b/2.jpg"])
    other = folder_of(tmp_path / "other", ["3.jpg"])
    (folder / "a" / "up").symlink_to(folder)
    (folder / "a" / "self").symlink_to(folder / "a")
    (folder / "c").symlink_to(other)
    (folder / "b" / "broken.jpg").symlink_to(tmp_path / "nowhere.jpg")
    assert ps.images(folder, 8).paths == ["a/1.jpg", "b/2.jpg", "c/3.jpg"]


@settings(max_examples=30)
@given(st.sets(st.text("aB1é /._", min_size=1, max_size=8), min_size=1), st.floats(0.01, 0.99), st.integers(0, 5))
def test_splits_are_disjoint_and_complete_and_new_files_move_no_others(names, validation, seed):
    def parts(paths):
        found = Labelled(sorted(paths), np.arange(len(paths), dtype=np.int32), ())
        chosen = {}
        for split in ("train", "validation"):
            try:
                part = choose_split(found, split, validation, seed)
                assert [found.paths[i] for i in part.labels] == part.paths
                chosen[split] = part.paths
            except ValueError:
                chosen[split] = []
        return chosen

    some, more = parts(names), parts(names | {"a new file", "another"})
    assert sorted(some["train"] + some["validation"]) == sorted(names)
    for split, paths in some.items():
        assert set(paths) <= set(more[split])


def test_a_split_holds_about_its_fraction_of_each_class_and_has_all_classes():
    paths = [f"{name}/{i}.jpg" for name in "abc" for i in range(2000)]
    images = Labelled(paths, np.repeat(np.arange(3, dtype=np.int32), 2000), ("a", "b", "c"))
    part = choose_split(images, "validation", 0.1, 0)
    assert np.abs(np.bincount(part.labels) - 200).max() < 50
    assert part.classes == images.classes
    assert choose_split(images, "validation", 0.1, 1).paths != part.paths


_LIST = "import sys, penstock as ps; s = ps.images(sys.argv[1], 8, split='train', validation=0.5); print(s.paths, s.describe())"


@pytest.mark.slow
def test_order_and_split_are_the_same_in_every_process(tmp_path):
    names = [f"{name}/{i}.jpg" for name in ("a", "B", "é", "z z") for i in range(4)]
    folder = folder_of(tmp_path, names, size=(8, 8))
    here = ps.images(folder, 8, split="train", validation=0.5)
    for seed, language in [("0", "C"), ("1", "de_DE.UTF-8")]:
        variables = {**os.environ, "PYTHONHASHSEED": seed, "LC_ALL": language, "PYTHONUTF8": "1"}
        shown = subprocess.run(
            [sys.executable, "-c", _LIST, str(folder)],
            env=variables,
            capture_output=True,
            text=True,
            check=True,
            encoding="utf-8",
        )
        assert shown.stdout.strip() == f"{here.paths} {here.describe()}"


@pytest.mark.parametrize("workers", [None, 2, pytest.param("process:2", marks=pytest.mark.slow)])
def test_batches_do_not_depend_on_workers(tmp_path, workers):
    folder = folder_of(tmp_path, [f"{name}/{i}.jpg" for name in "ab" for i in range(6)])
    source = ps.images(folder, 16)
    got = all_of(source, 4, shuffle=True, seed=3, workers=workers)
    expected = all_of(source, 12, shuffle=True, seed=3)
    assert np.array_equal(got["image"], expected["image"])
    assert np.array_equal(got["label"], expected["label"])


def _augment(record, rng):
    return {**record, "image": ps.decode_image(record["image"], 16, rng=rng)}


def test_encoded_images_go_through_a_transform_with_random_numbers(tmp_path):
    folder = folder_of(tmp_path, [f"{name}/{i}.jpg" for name in "ab" for i in range(4)])
    encoded = ps.images(folder, None)
    assert encoded.read(np.array([1]))[0]["image"] == (folder / "a/1.jpg").read_bytes()
    got = [all_of(encoded, 4, workers=w, seed=5, transform=ps.per_record(_augment)) for w in (None, 2)]
    assert got[0]["image"].shape == (8, 16, 16, 3)
    assert got[0]["label"].dtype == np.int32
    assert got[0]["label"].tolist() == [0] * 4 + [1] * 4
    assert np.array_equal(got[0]["image"], got[1]["image"])
    assert set(ps.images(folder, None, labels=None).read(np.array([1]))[0]) == {"image"}


def test_the_description_tells_other_files_labels_and_sizes_apart(tmp_path):
    folder = folder_of(tmp_path, NAMES)
    described = [
        ps.images(folder, 16).describe(),
        ps.images(folder, 17).describe(),
        ps.images(folder, 16, fit="pad").describe(),
        ps.images(folder, None).describe(),
        ps.images(folder, 16, classes=["a", "b"]).describe(),
        ps.images(folder, 16, classes=["c", "b", "a"]).describe(),
        ps.images(folder, 16, split="train", validation=0.5).describe(),
    ]
    assert len(set(described)) == len(described)
    copy = folder_of(tmp_path / "copy" / "of", NAMES)
    assert ps.images(copy, 16).describe() == described[0]
    assert ps.images(copy, 16, decoder="pil").describe() == described[0]
    assert "5 images" in repr(ps.images(copy, 16))


DAMAGE = {
    "half": lambda b: b[: len(b) // 2],
    "empty": lambda b: b"",
    "text": lambda b: b"<html>404</html>" * 30,
}


@pytest.mark.parametrize(
    ("damage", "workers", "decoder"),
    [
        ("half", None, "auto"),
        ("half", 2, "pil"),
        pytest.param("half", "process:2", "auto", marks=pytest.mark.slow),
        ("empty", 2, "auto"),
        ("text", None, "pil"),
    ],
)
def test_a_damaged_file_is_named_with_its_size_and_the_way_out(tmp_path, damage, workers, decoder):
    folder = folder_of(tmp_path, [f"a/{i}.jpg" for i in range(4)])
    path = folder / "a" / "2.jpg"
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    size = f"{path.stat().st_size:,}"
    source = ps.images(folder, 16, decoder=decoder)
    with pytest.raises(ValueError, match=rf"2\.jpg' \({size} bytes\).*Copy it again") as caught:
        all_of(source, 4, workers=workers)
    assert "record 2" in "".join(caught.value.__notes__)
    assert [re.search(r"\d\.jpg", said)[0] for said in source.damaged()] == ["2.jpg"]


def test_a_file_that_vanished_is_named(tmp_path):
    source = ps.images(folder_of(tmp_path, ["a/1.jpg", "a/2.jpg"]), 16)
    (tmp_path / "a" / "2.jpg").unlink()
    with pytest.raises(FileNotFoundError, match=r"2\.jpg' is gone: it was there when the folder was listed"):
        all_of(source, 2)
    assert "2.jpg' is gone" in next(source.damaged())
    with pytest.raises(ValueError, match="size=None decodes nothing"):
        next(ps.images(tmp_path, None).damaged())


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files")
def test_no_file_stays_open(tmp_path):
    source = ps.images(folder_of(tmp_path, ["a/1.jpg", "a/2.jpg"]), 16)
    (tmp_path / "a" / "2.jpg").write_bytes(encode(natural(9, 9), "PNG")[:60])
    before = len(os.listdir("/proc/self/fd"))
    with warnings.catch_warnings(action="error"):
        source.read(np.array([0]))
        with pytest.raises(ValueError, match="not a complete image"):
            source.read(np.array([1]))
    assert len(os.listdir("/proc/self/fd")) == before


def test_without_the_fast_libraries_pillow_reads(tmp_path, monkeypatch):
    folder = folder_of(tmp_path, NAMES)
    monkeypatch.setattr(decoding, "_fast_libraries", lambda: None)
    assert np.array_equal(all_of(ps.images(folder, 16))["image"], all_of(ps.images(folder, 16, decoder="pil"))["image"])


def test_without_pillow_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "penstock\[images\]"'):
        ps.images(folder_of(tmp_path, []), 8)


def test_folders_that_hold_no_images_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no such folder: '.*nowhere'"):
        ps.images(tmp_path / "nowhere", 8)
    with pytest.raises(ValueError, match=r"no image in .* files there: none"):
        ps.images(tmp_path, 8)
    (tmp_path / "x.npy").write_bytes(b"")
    with pytest.raises(ValueError, match=r"looked for \.jpg, .* files there: 1 with \.npy"):
        ps.images(tmp_path, 8)
    with pytest.raises(NotADirectoryError, match=r"x\.npy' is a file, .*a folder: give '.*ps\.decode_image"):
        ps.images(tmp_path / "x.npy", 8)


def test_images_without_a_class_and_classes_without_images_are_told(tmp_path):
    folder = folder_of(tmp_path, ["a/1.jpg", "b/2.jpg"])
    (folder / "notes").mkdir()
    with pytest.raises(ValueError, match=r"no image in the folder 'notes'.*classes="):
        ps.images(folder, 8)
    assert ps.images(folder, 8, classes=["a", "b"]).labels.tolist() == [0, 1]
    folder_of(folder, ["loose.jpg"])
    with pytest.raises(ValueError, match=r"no class for 1 image in .*'loose\.jpg'.*labels=None"):
        ps.images(folder, 8)
    assert len(ps.images(folder, 8, labels=None)) == 3


def test_a_folder_of_splits_is_not_taken_for_classes(tmp_path):
    folder = folder_of(tmp_path, ["train/a/1.jpg", "Validation/a/2.jpg"])
    with pytest.raises(ValueError, match=r"Validation, train are splits, and not classes. Give one of them.*train"):
        ps.images(folder, 8)
    assert ps.images(folder / "train", 8).classes == ("a",)
    folder_of(tmp_path, ["extra/a/1.jpg"])
    with pytest.raises(ValueError, match=r"Validation, extra, train: Validation, train are splits"):
        ps.images(folder, 8)
    assert ps.images(folder, 8, classes=["train"]).classes == ("train",)
    assert len(ps.images(folder, 8, labels=None)) == 3
    vehicles = folder_of(tmp_path / "vehicles", ["car/1.jpg", "train/1.jpg"])
    assert ps.images(vehicles, 8).classes == ("car", "train")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"split": "train"}, ValueError, "give both, such as split='train', validation=0.1"),
        ({"validation": 0.1}, ValueError, "give both"),
        ({"split": "test", "validation": 0.1}, ValueError, "split='test': choose from train, validation"),
        ({"split": "train", "validation": 1.5}, ValueError, "validation=1.5: needs a fraction between 0 and 1"),
        ({"split": "validation", "validation": 1e-9}, ValueError, "has none of 2 images"),
        ({"fit": "cover"}, ValueError, "fit='cover'"),
        ({"decoder": "fast"}, ValueError, "decoder='fast'"),
        ({"size": "224"}, ValueError, "size='224'"),
        ({"seed": -1}, ValueError, "seed=-1"),
        ({"labels": "names"}, ValueError, "labels='names'.*'folder', a function"),
        ({"labels": None, "classes": ["a"]}, ValueError, "labels=None with classes="),
        ({"labels": lambda path: 1.5}, TypeError, r"label of 'a/1\.jpg' is 1\.5"),
        ({"labels": lambda path: 2**40}, ValueError, "not an int32"),
        ({"labels": lambda path: 1, "classes": ["a"]}, ValueError, "returned numbers"),
        ({"labels": lambda path: "x", "classes": ["a"]}, ValueError, r"label of 'a/1\.jpg' is 'x'.*classes a"),
        ({"classes": ["a", "z"]}, ValueError, "no folder for the class 'z'.*its folders are a, b"),
        ({"classes": "ab"}, ValueError, "needs a list of different names"),
        ({"classes": ["a", "a"]}, ValueError, "needs a list of different names"),
    ],
)
def test_arguments_that_cannot_be_are_refused(tmp_path, options, error, message):
    folder = folder_of(tmp_path, ["a/1.jpg", "b/2.jpg"])
    with pytest.raises(error, match=message):
        ps.images(folder, **{"size": 8} | options)


def test_a_folder_given_to_a_loader_names_the_function(tmp_path):
    with pytest.raises(TypeError, match=r"ps\.images\('.*', size=224\).*\*\.parquet.*zarr\.open"):
        ps.Loader(folder_of(tmp_path, NAMES), 2)
    with pytest.raises(TypeError, match=r"ps\.images"):
        ps.Loader(str(tmp_path), 2)


def test_a_folder_may_lie_in_the_folder_of_the_user(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(folder_of(tmp_path, NAMES)))
    assert ps.images("~/b", 8).paths == ["10.jpg", "2.jpg"]
