"""Define an experiment: all choices of a training step that the frameworks must have in common.

An *experiment* is one training step with all its options except the framework. Its *geometry* is the size of the images and of
the model. A *size* is a geometry with the number of files.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, fields
from typing import Any

CHOICES = {
    "model": ("tiny", "small", "base"),
    "precision": ("fp32", "tf32", "bf16"),
    "attention": ("eager", "fused"),
    "optimizer": ("sgd", "adamw"),
    "data": ("random", "jpeg"),
}
LAYER_NORM_EPSILON = 1e-6
LEARNING_RATE = 1e-3
BETAS = (0.9, 0.999)
# Much larger than the usual 1e-8. With 1e-8, an update is nearly the sign of the gradient. The sign of a gradient close to 0
# depends on rounding, so two correct programs differ in it. Epsilon is added to the root of the bias-corrected second moment, as
# in PyTorch and Optax. Its value does not change the time of a step.
ADAMW_EPSILON = 1e-4
WEIGHT_DECAY = 0.01
PARITY_STEPS = 5
PARITY_BATCH = 8


@dataclass(frozen=True)
class Geometry:
    """Sizes of a ViT (Dosovitskiy et al. 2021, arXiv:2010.11929) and its images.

    Attributes:
      image: height and width of an image, a multiple of `patch`.
      width: channels of a token, a multiple of `heads`.
    """

    width: int
    depth: int
    heads: int
    image: int = 224
    patch: int = 16
    classes: int = 1000

    @property
    def tokens(self) -> int:
        """Count the patches and the class token."""
        return (self.image // self.patch) ** 2 + 1

    def step_flops(self, batch: int) -> float:
        """Return the FLOPs of a training step: 6 for each token and parameter of the blocks' kernels (Kaplan et al. 2020,
        arXiv:2001.08361).
        """
        return 6 * 12 * self.depth * self.width**2 * self.tokens * batch


GEOMETRIES = {
    "tiny": Geometry(width=192, depth=12, heads=3),
    "small": Geometry(width=384, depth=12, heads=6),
    "base": Geometry(width=768, depth=12, heads=12),
}
QUICK = Geometry(width=32, depth=2, heads=2, image=32, patch=16)


@dataclass(frozen=True)
class Size:
    """A geometry, and the number of JPEG files in the folder."""

    geometry: Geometry
    files: int


@dataclass(frozen=True)
class Experiment:
    """One training step; each field but `batch` is one of `CHOICES`."""

    model: str
    batch: int
    precision: str
    attention: str
    optimizer: str
    data: str

    def __post_init__(self) -> None:
        for field in fields(self):
            _check(field.name, getattr(self, field.name))

    @property
    def name(self) -> str:
        model, batch, *rest = astuple(self)
        return "-".join([f"vit-{model}-b{batch}", *rest])

    @classmethod
    def parse(cls, name: str) -> Experiment:
        """Return the experiment of this name, such as "vit-tiny-b8-fp32-eager-sgd-random"."""
        try:
            vit, model, batch, precision, attention, optimizer, data = name.split("-")
            if vit != "vit" or batch[:1] != "b":
                raise ValueError
            return cls(model, int(batch[1:]), precision, attention, optimizer, data)
        except ValueError as error:
            example = "vit-tiny-b8-fp32-eager-sgd-random"
            raise ValueError(f"no workload is called {name!r}: a name is like {example!r}. {error}") from None

    @property
    def parity_batch(self) -> int:
        """Return the number of records in the batches on which the variants' outputs are compared."""
        return min(self.batch, PARITY_BATCH)

    @property
    def loader_workers(self) -> int:
        """Return the number of loader workers: 0 for random data, which is cheap, and 2 for JPEGs, which must be decoded."""
        return 2 if self.data == "jpeg" else 0


def _check(field: str, value: Any) -> None:
    if field == "batch":
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"batch {value!r} is not a number of records, at least 1")
    elif value not in CHOICES[field]:
        raise ValueError(f"{field} {value!r} is unknown: choose from {', '.join(CHOICES[field])}")
