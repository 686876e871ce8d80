"""Define what is trained and how: everything that the frameworks must have in common.

Words: an *experiment* is one training step in all its choices but for the framework; its *geometry* is how large the images and
the model are; a *size* is a geometry and how long to time it.
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
# Much above the usual 1e-8. With that, an update is nearly the gradient's sign, and the sign of a gradient close to 0 is one of
# rounding: no two correct programs have it alike. Epsilon is added to the root of the bias-corrected second moment, as PyTorch
# and Optax do. Its value does not change the time of a step.
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
    """A geometry, and how long to time its steps.

    Attributes:
      least, most: steps to time, of each kind.
      compute_seconds, together_seconds, loading_seconds: steps are added until so much was timed.
      files: JPEGs in the folder.
    """

    geometry: Geometry
    least: int
    most: int
    compute_seconds: float
    together_seconds: float
    loading_seconds: float
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
        """Return the number of records in a batch on which variants are compared."""
        return min(self.batch, PARITY_BATCH)

    @property
    def loader_workers(self) -> int:
        """Return the number of loader workers: none for random data, which costs little to make, and two for JPEGs, which they
        decode.
        """
        return 2 if self.data == "jpeg" else 0


def _check(field: str, value: Any) -> None:
    if field == "batch":
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"batch {value!r} is no number of records, at least 1")
    elif value not in CHOICES[field]:
        raise ValueError(f"{field} {value!r} is unknown: choose from {', '.join(CHOICES[field])}")
