"""List the image files below a folder, and label them.

Paths are written with "/" and sorted by code points, so their order is the same on each machine. A hash of its path assigns an
image to a split.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import Any, NamedTuple, Protocol

import numpy as np

from penstock._bytes import counted
from penstock.data.remote.files import RemoteFiles, remote
from penstock.data.remote.url import address, escape, is_http, is_url, shown

ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff")
_SPLITS = {"train", "training", "val", "valid", "validation", "test", "testing", "eval"}


class Labelled(NamedTuple):
    """Paths of images, relative to their folder, with their classes."""

    paths: list[str]
    labels: np.ndarray | None  # of each path, int32 [N]
    classes: tuple[str, ...]  # the name of each label; empty if labels are numbers of the user, or None

    def fingerprint(self) -> str:
        """Return eight hexadecimal digits that change if a path, its place or its label does."""
        digest = hashlib.blake2b("\0".join(self.paths).encode("utf-8", "surrogateescape"), digest_size=4)
        if self.labels is not None:
            digest.update(self.labels.tobytes())
        return digest.hexdigest()


class Folder(Protocol):
    """A folder with files, wherever it is."""

    name: str  # path or URL, for messages

    def list(self) -> tuple[list[str], list[str]]:
        """Return the relative paths of all files in it and below, and the names of the folders in it, in any order."""

    def read(self, path: str) -> bytes:
        """Return the contents of a file, by its relative path."""

    def full(self, path: str) -> str:
        """Return the path or URL of a file, for messages."""


class LocalFolder:
    """A folder of this machine."""

    def __init__(self, path: str):
        self.name = path
        if os.path.isdir(path):
            return
        if os.path.exists(path):
            raise NotADirectoryError(
                f"{path!r} is a file, and ps.images reads the images of a folder: give {os.path.dirname(path) or '.'!r}, or "
                "decode one image with ps.decode_image(pathlib.Path(path).read_bytes(), size)"
            )
        where = f"{path!r} (relative to {os.getcwd()!r})"
        raise FileNotFoundError(f"no such folder: {where}. ps.images needs a folder that exists, or a URL")

    def list(self) -> tuple[list[str], list[str]]:
        """Return its files and folders. Links are followed, except to a folder that they lie in."""
        with os.scandir(self.name) as entries:
            folders = [entry.name for entry in entries if entry.is_dir()]
        return list(_walk(self.name, "", ())), folders

    def read(self, path: str) -> bytes:
        with open(self.full(path), "rb", buffering=0) as file:
            return file.read()

    def full(self, path: str) -> str:
        return os.path.join(self.name, path)


class RemoteFolder:
    """The folder in a store that files were listed in. They are read through the local cache."""

    def __init__(self, files: RemoteFiles):
        self._files = files
        addresses = [address(url) for url in files.urls]
        folder = _common([address(root) for root in files.roots])
        if folder and not all(each.startswith(f"{folder}/") for each in addresses):  # the store may write it in another way
            folder = _common([each.rpartition("/")[0] for each in addresses])
        self.name = shown(f"{files.urls[0].partition('://')[0]}://{folder}")
        self._index: dict[str, int] = {}
        for index, each in enumerate(addresses):
            first = self._index.setdefault(each.removeprefix(folder).strip("/"), index)
            if files.urls[first] != files.urls[index]:
                raise ValueError(
                    f"two files are called {files.names[first]!r}, and only their queries differ, which are no part of a name: "
                    "give one of them, or read the images with a transform and ps.decode_image"
                )

    def list(self) -> tuple[list[str], list[str]]:
        return list(self._index), list({path.partition("/")[0] for path in self._index if "/" in path})

    def read(self, path: str) -> bytes:
        return self._files.read_bytes(self._index[path])

    def full(self, path: str) -> str:
        return self._files.names[self._index[path]]


def _common(folders: Sequence[str]) -> str:
    """Return the deepest folder that all of these are, or lie in."""
    names = zip(*(folder.split("/") for folder in folders), strict=False)
    return "/".join(each[0] for each in takewhile(lambda each: len(set(each)) == 1, names))


def open_folder(folder: Any) -> Folder:
    """Open a folder: a path, a URL, or the files that `ps.remote` listed."""
    if isinstance(folder, RemoteFiles):
        return RemoteFolder(folder)
    if not is_url(folder):
        return LocalFolder(os.path.expanduser(os.fspath(folder)))
    if is_http(folder) and "?" in folder:
        raise ValueError(
            f"{shown(folder)!r} has a query, and cannot be listed as a folder: give the URLs of its files, as "
            "ps.images(ps.remote([...]), ...)"
        )
    return RemoteFolder(remote(escape(folder.rstrip("/")) + "/**"))


def list_images(folder: Folder) -> tuple[list[str], list[str]]:
    """Return the sorted relative paths of the images in a folder and below, and the sorted names of the folders in it.

    Names that begin with a dot are left out, and `__MACOSX`, which archives from macOS have.
    """
    files, folders = folder.list()
    paths = sorted(path for path in files if not any(map(_is_hidden, path.split("/"))))
    images = [path for path in paths if path.lower().endswith(ENDINGS)]
    if not images:
        endings = Counter(os.path.splitext(path)[1] or "no ending" for path in paths)
        held = ", ".join(f"{count:,} with {ending}" for ending, count in endings.most_common(5)) or "none"
        raise ValueError(f"no image in {folder.name!r} or its folders: looked for {', '.join(ENDINGS)}; files there: {held}")
    return images, sorted(name for name in folders if not _is_hidden(name))


def _walk(folder: str, prefix: str, above: tuple[tuple[int, int], ...]) -> Iterator[str]:
    """Yield the relative paths of all files below a folder; `above` identifies the folders that it lies in."""
    status = os.stat(folder)
    identity = (status.st_dev, status.st_ino)
    if identity in above:
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            if _is_hidden(entry.name):
                continue
            if entry.is_dir():
                yield from _walk(entry.path, f"{prefix}{entry.name}/", (*above, identity))
            elif entry.is_file():  # not a broken link, a pipe or a socket
                yield prefix + entry.name


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"


def label_by_folder(folder: str, paths: list[str], folders: list[str], classes: Sequence[str] | None) -> Labelled:
    """Label each image with the folder in `folder` that it lies in. Without such folders, there are no labels.

    Args:
      paths: relative paths of its images.
      folders: names of the folders in it.
      classes: names of the folders to read, in the order of their labels; None for all.

    Raises:
      ValueError: some images lie in no class; a class has no folder or no image; the folders are splits of a data set.
    """
    counts = Counter(path.partition("/")[0] for path in paths if "/" in path)
    if classes is not None:
        classes = check_classes(classes)
        if missing := [name for name in classes if name not in folders]:
            raise ValueError(f"no folder for the class {missing[0]!r} in {folder!r}; its folders are {_some(folders)}")
        paths = [path for path in paths if "/" in path and path.partition("/")[0] in set(classes)]
        if not paths:
            raise ValueError(f"no image in the folders {_some(classes)} of {folder!r}")
    elif not counts:
        return Labelled(paths, None, ())
    else:
        classes = tuple(folders)
        _check_folders(folder, paths, classes, counts)
    numbers = {name: number for number, name in enumerate(classes)}
    return Labelled(paths, np.array([numbers[path.partition("/")[0]] for path in paths], np.int32), tuple(classes))


def _check_folders(folder: str, paths: list[str], classes: tuple[str, ...], counts: Counter[str]) -> None:
    splits = [name for name in classes if name.lower() in _SPLITS]
    if len(splits) >= min(2, len(classes)):
        raise ValueError(
            f"{folder!r} holds the folders {_some(classes)}: {_some(splits)} are splits, and not classes. Give one of them, such "
            f"as ps.images({os.path.join(folder, splits[-1])!r}, ...). If they are classes, name them: classes={list(classes)!r}"
        )
    if loose := [path for path in paths if "/" not in path]:
        raise ValueError(
            f"no class for {counted(len(loose), 'image')} in {folder!r} itself, such as {loose[0]!r}, beside the folders "
            f"{_some(classes)}: move them, or give labels=None to read all images without labels"
        )
    if empty := [name for name in classes if name not in counts]:
        raise ValueError(
            f"no image in the folder {empty[0]!r} of {folder!r}: if it is not a class, name those that are, with classes=[...]; "
            "a class without images is named there, too"
        )


def label_by_function(paths: list[str], function: Callable[[str], Any], classes: Sequence[str] | None) -> Labelled:
    """Label each image with a function of its relative path, which returns the name of a class or a number."""
    found = [function(path) for path in paths]
    if all(isinstance(label, str) for label in found):
        classes = tuple(sorted(set(found))) if classes is None else check_classes(classes)
        numbers = {name: number for number, name in enumerate(classes)}
        if unknown := [(path, name) for path, name in zip(paths, found, strict=True) if name not in numbers]:
            path, name = unknown[0]
            raise ValueError(f"the label of {path!r} is {name!r}, which is not among the classes {_some(classes)}")
        return Labelled(paths, np.array([numbers[name] for name in found], np.int32), tuple(classes))
    for path, label in zip(paths, found, strict=True):
        if isinstance(label, bool) or not isinstance(label, (int, np.integer)):
            raise TypeError(f"the label of {path!r} is {label!r}: labels(path) needs to return a name or an integer for each")
    if classes is not None:
        raise ValueError("classes= names the labels that are names; labels(path) returned numbers")
    for path, label in zip(paths, found, strict=True):
        if not -(2**31) <= label < 2**31:
            raise ValueError(f"the label of {path!r} is {label}, which is not an int32")
    return Labelled(paths, np.array(found, np.int32), ())


def check_classes(classes: Sequence[str]) -> tuple[str, ...]:
    """Return the names as a tuple of different strings."""
    names = () if isinstance(classes, str) else tuple(classes)
    if not names or len(set(names)) < len(names) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"classes={classes!r}: needs a list of different names")
    return names


def choose_split(images: Labelled, split: str, validation: float, seed: int) -> Labelled:
    """Return the images of "train" or "validation", which has this fraction of all images, on average.

    A hash of the path and the seed chooses the split, so files that are added later do not move others.
    """
    if split not in ("train", "validation"):
        raise ValueError(f"split={split!r}: choose from train, validation")
    if isinstance(validation, bool) or not isinstance(validation, (int, float)) or not 0 < validation < 1:
        raise ValueError(f"validation={validation!r}: needs a fraction between 0 and 1")
    limit = int(validation * 2**64)
    chosen = [i for i, path in enumerate(images.paths) if (_hash(path, seed) < limit) == (split == "validation")]
    if not chosen:
        raise ValueError(
            f"split={split!r} with validation={validation} has none of {counted(len(images.paths), 'image')}: "
            "each image is drawn by itself; use another fraction or another seed"
        )
    labels = None if images.labels is None else images.labels[chosen]
    return Labelled([images.paths[i] for i in chosen], labels, images.classes)


def _hash(path: str, seed: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/{path}".encode("utf-8", "surrogateescape"), digest_size=8).digest(), "big")


def _some(names: Sequence[str]) -> str:
    """Write the first names of many."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
