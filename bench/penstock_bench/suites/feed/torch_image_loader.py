"""Load the images with a torch `Dataset` and `DataLoader`, at the top of a module so that spawned workers can import them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    def __init__(self, images: np.ndarray, labels: np.ndarray):
        self._images, self._labels = images, labels

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return torch.from_numpy(self._images[index]).float() / 255.0, int(self._labels[index])


def data_loader(images: np.ndarray, labels: np.ndarray, batch_size: int, seed: int, workers: int) -> DataLoader:
    """Yield shuffled batches (images float32, labels int64), without the remainder."""
    return shuffled(Images(images, labels), batch_size, seed, workers)


def shuffled(dataset: Dataset, batch_size: int, seed: int, workers: int) -> DataLoader:
    """Yield shuffled batches of a `Dataset`, without the remainder."""
    return DataLoader(
        dataset,
        batch_size=batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        generator=torch.Generator().manual_seed(seed),
        # Forked children of a process in which JAX has started its threads may hang, and JAX warns of it.
        multiprocessing_context="spawn" if workers else None,
        persistent_workers=workers > 0,
    )
