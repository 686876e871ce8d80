"""Load JPEG files with a torch `Dataset` and `DataLoader`, at the top of a module so that spawned workers can import them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch.utils.data import DataLoader, Dataset

from penstock_bench.suites.feed.torch_image_loader import shuffled


class Photos(Dataset):
    def __init__(self, folder: Path, size: int):
        self._files, self._size = sorted(folder.glob("*/*.jpg")), size

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        file = self._files[index]
        with Image.open(file) as image:
            pixels = np.array(ImageOps.fit(image.convert("RGB"), (self._size, self._size), Image.Resampling.BILINEAR))
        return torch.from_numpy(pixels), int(file.parent.name.removeprefix("class-"))


def data_loader(folder: Path, size: int, batch_size: int, seed: int, workers: int) -> DataLoader:
    """Yield shuffled batches (images uint8 [B, size, size, 3], labels int64 [B]), without the remainder."""
    return shuffled(Photos(folder, size), batch_size, seed, workers)
