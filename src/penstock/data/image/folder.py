"""Read the images of a folder as batches of pixels and labels: `images`.

The folders in it are the classes, as in Keras, torchvision and Hugging Face.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import numpy as np

from penstock._arguments import at_least
from penstock._bytes import counted
from penstock.data.image.decoding import Decoder, Fit, Size, UnreadableImageError, check_options, check_size, decode_into
from penstock.data.image.files import Folder, Labelled, choose_split, label_by_folder, label_by_function, list_images, open_folder
from penstock.data.remote.files import RemoteFiles
from penstock.data.tree import Batch, Record


def images(
    folder: str | os.PathLike[str] | RemoteFiles,
    size: int | tuple[int, int] | None,
    *,
    fit: Fit = "crop",
    labels: Literal["folder"] | Callable[[str], str | int] | None = "folder",
    classes: Sequence[str] | None = None,
    split: Literal["train", "validation"] | None = None,
    validation: float | None = None,
    seed: int = 0,
    decoder: Decoder = "auto",
) -> ImageFolder:
    """Open a folder of images as a source for `ps.Loader`.

    JPEG is decoded by simplejpeg and resized by OpenCV where `penstock[images]` is installed, and by Pillow otherwise. Pillow
    decodes PNG, WebP, GIF, BMP and TIFF. `workers=2` decodes two batches at once, without holding the interpreter lock.

    Args:
      folder: a path, a URL such as "s3://bucket/train", or `ps.remote("s3://bucket/train/**", ...)`. Its images, and the images
        in its folders, are read in the order of their names. Names that begin with a dot are left out.
      size: (height, width) of the images in pixels, or one number for both. None gives the contents of the files, for
        `transform=ps.per_record(fn)` with `ps.decode_image`.
      fit: how an image gets this size, see `ps.decode_image`.
      labels: "folder" takes the folders in `folder` as classes, with labels in the order of their names; there are no labels if
        it has no folders. A function gets the path of an image relative to `folder`, such as "cats/1.jpg", and returns the name
        of its class, or a number. None gives no labels.
      classes: the names of the classes in the order of their labels, for example `train.classes`. Other folders are left out.
      split: "train" or "validation" takes one part of the images, and needs `validation`.
      validation: the fraction of the images in "validation", on average. The path of an image decides, relative to `folder`, so
        files that are added later do not move others between the parts.
      seed: selects another division into parts, >= 0.
      decoder: "auto", or "pil" to decode with Pillow alone. Photographs differ by a grey level or two on average,
        and single pixels of noise and sharp edges by far more.

    Returns:
      A source of {"image": uint8 [n, height, width, 3], "label": int32 [n]}, without "label" where there are none. With
      `size=None`, of records {"image": bytes, "label": int32}.

    Raises:
      FileNotFoundError: there is no such folder.
      NotADirectoryError: `folder` is a file.
      ValueError: the folder has no image, some images have no class, the folders in it are splits, or an argument is not allowed.
      OSError: a store cannot be read, see `ps.remote`.
      ModuleNotFoundError: Pillow is not installed.

    Examples:
      >>> import tempfile
      >>> from pathlib import Path
      >>> from PIL import Image
      >>> folder = Path(tempfile.mkdtemp())
      >>> for name in ("cat", "dog"):
      ...     (folder / name).mkdir()
      ...     for i in range(8):
      ...         Image.new("RGB", (500, 375), (i, 0, 0)).save(folder / name / f"{i}.jpg")
      >>> train = ps.images(folder, 224, split="train", validation=0.25)
      >>> held_out = ps.images(folder, 224, split="validation", validation=0.25)
      >>> train.classes, len(train) + len(held_out)
      (('cat', 'dog'), 16)
      >>> batch = ps.Loader(train, 4, shuffle=True, workers=2)[0]
      >>> batch["image"].shape, batch["label"].shape
      ((4, 224, 224, 3), (4,))
    """
    check_options(fit, decoder)
    height_and_width = None if size is None else check_size(size)
    seed = at_least(0, "seed", seed)
    if (split is None) != (validation is None):
        raise ValueError(f"split={split!r} with validation={validation!r}: give both, such as split='train', validation=0.1")
    opened = open_folder(folder)
    paths, folders = list_images(opened)
    if isinstance(labels, str) and labels == "folder":
        found = label_by_folder(opened.name, paths, folders, classes)
    elif callable(labels):
        found = label_by_function(paths, labels, classes)
    elif labels is None and classes is None:
        found = Labelled(paths, None, ())
    else:
        needed = "labels is 'folder', a function of a path, or None (no classes)"
        raise ValueError(f"labels={labels!r} with classes={classes!r}: {needed}")
    if split is not None and validation is not None:
        found = choose_split(found, split, validation, seed)
    return ImageFolder(opened, found, height_and_width, fit, decoder)


class ImageFolder:
    """A source over image files; `penstock.images` makes it. It is safe to read from several threads, and it pickles.

    Attributes:
      classes: the name of each label; empty if the labels are numbers of your own, or there are none.
      labels: the label of each image, int32 [N], or None.
      paths: the path of each image, relative to the folder.
    """

    def __init__(self, folder: Folder, images: Labelled, size: Size | None, fit: Fit, decoder: Decoder):
        self.classes = images.classes
        self.labels = images.labels
        self.paths = images.paths
        self._folder, self._size, self._fit, self._decoder = folder, size, fit, decoder
        self._fingerprint = images.fingerprint()

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.paths)

    def __repr__(self) -> str:
        classes = counted(len(self.classes), "class", "classes")
        return f"ImageFolder({counted(len(self), 'image')} of {self._folder.name!r}, {classes})"

    def describe(self) -> str:
        """Return size and policy, and a fingerprint of paths and labels."""
        how = "encoded" if self._size is None else f"{self._size[0]}x{self._size[1]} {self._fit}"
        return f"images {how}, files {self._fingerprint}"

    def read(self, indices: np.ndarray) -> Batch | list[Record]:
        """Read the images at int64 [n].

        Returns:
          {"image": uint8 [n, height, width, 3], "label": int32 [n]}. Without a size, n records {"image": bytes, "label": int32}.

        Raises:
          ValueError: an image is damaged.
          FileNotFoundError: a file is gone.
        """
        if self._size is None:
            return [self._encoded(index) for index in indices.tolist()]
        pixels = np.empty((len(indices), *self._size, 3), np.uint8)
        for row, index in enumerate(indices.tolist()):
            self._decode(index, pixels[row])
        return {"image": pixels} if self.labels is None else {"image": pixels, "label": self.labels[indices]}

    def damaged(self) -> Iterator[str]:
        """Decode all images, for example before a long run, and yield an error message for each that cannot be read.

        Raises:
          ValueError: the source was made with `size=None`, so that it decodes nothing.
        """
        if self._size is None:
            raise ValueError("size=None decodes nothing: give a size to look for damaged images")
        pixels = np.empty((*self._size, 3), np.uint8)
        for index in range(len(self)):
            try:
                self._decode(index, pixels)
            except (ValueError, OSError) as error:
                yield str(error)

    def _encoded(self, index: int) -> Record:
        data = self._read_file(index)
        return {"image": data} if self.labels is None else {"image": data, "label": self.labels[index]}

    def _decode(self, index: int, out: np.ndarray) -> None:
        data = self._read_file(index)
        try:
            decode_into(data, out, self._fit, self._decoder)
        except UnreadableImageError as error:
            path = self._folder.full(self.paths[index])
            raise ValueError(
                f"{path!r} ({len(data):,} bytes) {error}. Make the source anew after a change; list(source.damaged()) finds all "
                "such files"
            ) from error

    def _read_file(self, index: int) -> bytes:
        try:
            return self._folder.read(self.paths[index])
        except FileNotFoundError as error:
            path = self._folder.full(self.paths[index])
            why = "is gone: it was there when the folder was listed. Put it back, or make the source anew"
            raise FileNotFoundError(f"{path!r} {why}") from error
