"""Define the data as torch `Dataset`s, channels first, at the top of a module so that spawned workers can import them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.utils.data import DataLoader, Dataset

from penstock_bench.suites.frameworks import jpeg, random_images
from penstock_bench.suites.frameworks.experiment import Experiment, Geometry, Size


class RandomImages(Dataset):
    """The article's `FakeDataset`, with another random number generator."""

    def __init__(self, geometry: Geometry):
        self._shape, self._classes = (3, geometry.image, geometry.image), geometry.classes

    def __len__(self) -> int:
        return random_images.RECORDS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.from_numpy(random_images.normal(index, self._shape)), index % self._classes


class Jpegs(Dataset):
    def __init__(self, paths: list[str], geometry: Geometry):
        self._paths, self._image, self._classes = paths, geometry.image, geometry.classes

    def __len__(self) -> int:
        return jpeg.RECORDS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        pixels = torch.from_numpy(jpeg.decode(self._paths[index % len(self._paths)], self._image))
        return pixels.permute(2, 0, 1).contiguous(), index % self._classes


@contextlib.contextmanager
def data_loader(experiment: Experiment, size: Size, pin_memory: bool) -> Iterator[DataLoader]:
    """Return batches on the host: images float32 [B, 3, H, W], labels int64 [B]."""
    with contextlib.ExitStack() as stack:
        dataset: Dataset = RandomImages(size.geometry)
        if experiment.data == "jpeg":
            dataset = Jpegs(stack.enter_context(jpeg.folder(size.files)), size.geometry)
        workers = experiment.loader_workers
        yield DataLoader(
            dataset,
            batch_size=experiment.batch,
            num_workers=workers,
            pin_memory=pin_memory,
            # Forks of a process whose framework has started its threads may hang.
            multiprocessing_context="spawn" if workers else None,
        )
