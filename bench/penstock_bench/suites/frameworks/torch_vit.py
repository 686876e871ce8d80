"""Define the ViT in PyTorch."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import Tensor, nn

from penstock_bench.suites.frameworks.experiment import LAYER_NORM_EPSILON, Geometry
from penstock_bench.suites.frameworks.weights import Weights


class ViT(nn.Module):
    """Images [B, 3, H, W] → logits [B, classes], float32.

    Under autocast, matrix products take and return bfloat16. The residual stream, the softmax and the logits for the loss stay
    float32. The code casts them explicitly, because autocast does so on CUDA, but not on a CPU.
    """

    def __init__(self, geometry: Geometry, fused: bool):
        super().__init__()
        width, self._patch = geometry.width, geometry.patch
        self.patch = nn.Linear(3 * geometry.patch**2, width)  # the same as a convolution whose stride equals its width
        self.cls = nn.Parameter(torch.empty(width))
        self.position = nn.Parameter(torch.empty(geometry.tokens, width))
        self.blocks = nn.ModuleList([Block(width, geometry.heads, fused) for _ in range(geometry.depth)])
        self.norm = nn.LayerNorm(width, eps=LAYER_NORM_EPSILON)
        self.head = nn.Linear(width, geometry.classes)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patch(_patches(images, self._patch))
        cls = self.cls.expand(images.shape[0], 1, -1)
        tokens = torch.cat([cls, patches.to(cls.dtype)], dim=1) + self.position
        rows = tokens.flatten(0, 1)  # faster in XLA, see `flax_vit`; PyTorch's own kernels are as fast with either
        for block in self.blocks:
            rows = block(rows, images.shape[0])
        # Norm and head only need the class token, so it is selected first.
        return self.head(self.norm(rows.view_as(tokens)[:, 0])).float()


class Block(nn.Module):
    """Tokens of all images [B · T, D], B → the same."""

    def __init__(self, width: int, heads: int, fused: bool):
        super().__init__()
        self.heads, self.fused = heads, fused
        self.norm1 = nn.LayerNorm(width, eps=LAYER_NORM_EPSILON)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width, eps=LAYER_NORM_EPSILON)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, tokens: Tensor, images: int) -> Tensor:
        tokens = tokens + self.out(self.attend(self.qkv(self.norm1(tokens)), images))
        return tokens + self.narrow(F.gelu(self.widen(self.norm2(tokens))))

    def attend(self, qkv: Tensor, images: int) -> Tensor:
        rows, width = qkv.shape[0], qkv.shape[1] // 3
        query, key, value = qkv.view(images, -1, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        if self.fused:
            mixed = F.scaled_dot_product_attention(query, key, value)
        else:
            # The scale is a power of two in all geometries, so it causes no rounding, wherever it is applied.
            scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1)
            mixed = scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype) @ value
        return mixed.transpose(1, 2).reshape(rows, width)


def _patches(images: Tensor, patch: int) -> Tensor:
    """Cut images into patches: [B, 3, H, W] → [B, H/patch · W/patch, 3 · patch · patch]."""
    batch, channels, height, width = images.shape
    grid = images.reshape(batch, channels, height // patch, patch, width // patch, patch)
    return grid.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * patch * patch)


def load(model: nn.Module, weights: Weights) -> None:
    """Give the model canonical weights."""
    with torch.no_grad():
        for name, parameter in _canonical(model):
            parameter.copy_(torch.from_numpy(np.ascontiguousarray(_to_torch(name, weights[name]))))


def canonical(model: nn.Module) -> dict[str, np.ndarray]:
    """Return the model's weights by their canonical names, in canonical layout."""
    return {name: _from_torch(name, parameter.detach().cpu().numpy()).copy() for name, parameter in _canonical(model)}


def _canonical(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for path, parameter in model.named_parameters():
        *module, leaf = path.split(".")
        if leaf == "weight":
            leaf = "scale" if "norm" in module[-1] else "kernel"
        yield "/".join([*module, leaf]), parameter


def _to_torch(name: str, value: np.ndarray) -> np.ndarray:
    if name == "patch/kernel":
        # [height, width, channels, D] → [D, channels · height · width]
        return value.transpose(3, 2, 0, 1).reshape(value.shape[-1], -1)
    return value.T if name.endswith("/kernel") else value


def _from_torch(name: str, value: np.ndarray) -> np.ndarray:
    if name == "patch/kernel":
        side = math.isqrt(value.shape[1] // 3)
        return value.reshape(-1, 3, side, side).transpose(2, 3, 1, 0)
    return value.T if name.endswith("/kernel") else value
