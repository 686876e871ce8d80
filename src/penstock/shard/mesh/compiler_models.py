"""Model how the compilers of TPUs, GPUs and CPUs fuse operations and use memory, as far as a plan needs it.

The rules are from XLA's sources where these are open, and were read from compiled programs where they are not (TPU).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class CompilerModel:
    """The behaviour of a compiler: how it fuses, places arrays in memory, and schedules collectives.

    Attributes:
      name: "tpu", "gpu" or "cpu".
      computes_again: whether an elementwise operation of any cost may be computed again for each reader, if that saves memory.
        Otherwise only cheap operations are.
      fuses_products: whether elementwise operations are fused into the products that read them, and the operations that read a
        product into the product.
      rounds_products: whether products of the default precision read float32 operands as bfloat16, so that an operand that only
        products read is stored in half of its bytes.
      combines: for each kind of collective that it combines if none depends on another, the bytes up to which it does. The
        operands of combined all-reduces are live at the same time. XLA's default for GPUs is 30 MiB
        (`xla_gpu_all_reduce_combine_threshold_bytes`); for CPUs it has no limit. In TPU programs of 45 steps, no combined
        all-reduce was above 120 MiB, and all gradients of the 35 steps whose gradients take less together were in one. FSDP of
        a DiT has 24 reduce-scatters and 24 all-gathers: two and 22 of them are left on a TPU, and one of each on a GPU.
      moves_sums: whether it moves all-reduces out of loops that only add them up (`graph/scheduling.py`).
      joins_sums: whether it adds partial results to each other before it sums them over devices (`graph/scheduling.py`).
      breadth_first: whether it runs each operation as soon as its operands exist (`BFScheduler`), not as late as its memory is
        needed.
      writes_dense: the primitives that it writes as operations of larger dense arrays: ragged products, and the gradients of
        max-pools (`graph/live_ranges.py`). It computes a ragged product for the weights of all groups.
      copies_layouts: whether the result of a product keeps the order of dimensions in which it is computed. State that is
        updated with a transpose of the result is then copied into that order (`graph/live_ranges.py`).
      hides: the kinds of collectives that it runs behind products that do not depend on them, and for each the part of the
        hidden time that this saves.
      split_from: bytes of a partial result on one device from which it splits the product into parts, and sends the sums of
        one while it computes the next (windowed einsum; Wang et al., ASPLOS 2023). The TPU compiler does it for all
        weights of layouts by hand from 16 MiB on; XLA's default for others is 100 GB, which is never.
      slices_sums: whether it makes no reduce-scatters: each device has the full sum in memory, and takes a slice of it. In bytes
        sent, such a sum counts as a reduce-scatter all the same, here and in compiled programs, because the CPU compiler stands
        for the compilers of accelerators.
      scatters: the most devices over which it scatters a sum. Over more, each device has the full sum and takes its slice, which
        sends twice as much: seen for FSDP over 64 TPUs, and not over 32.
      scatters_over_network: whether it scatters a sum over devices of several domains (`Hardware.domain`). Between slices of
        TPUs, the Megascale runtime has no reduce-scatter: each has the full sum.
      tiles: whether arrays are stored in tiles of 8 × 128 elements.
      packing: the ratio of the memory for temporary arrays to the bytes that are live at the peak. The compiler places arrays at
        fixed offsets, which leaves gaps.
      reserve: bytes of temporary memory that a program takes for each of its operations.

    `packing`, `reserve` and the part of a TPU's vector memory that holds temporary arrays (`CostModel.memory`) are measured: on
    17 steps of the zoo (`penstock bench shard`) in two layouts each.
    """

    name: str
    computes_again: bool
    fuses_products: bool
    rounds_products: bool
    combines: Mapping[str, float]
    moves_sums: bool
    joins_sums: bool
    breadth_first: bool
    writes_dense: tuple[str, ...]
    copies_layouts: bool
    slices_sums: bool
    hides: Mapping[str, float]
    tiles: bool
    packing: float = 1.05
    reserve: int = 0
    split_from: float = math.inf
    scatters: float = math.inf
    scatters_over_network: bool = True

    def rounds(self, dtype: Any) -> bool:
        """Return whether products of the default precision read operands of a dtype as bfloat16."""
        return self.rounds_products and str(dtype) == "float32"


_SAVED = 0.25
"""The part of the time of a hidden collective that is saved: a cautious value, because bytes that are not sent cannot be late.

In TPU programs of the zoo, 44 % to 66 % of the gathered bytes of weights are asynchronous. In layouts by hand for 16 to 64 chips,
60 % to 97 % are (docs/plan.md). A gather that runs behind a product also takes memory bandwidth from it. The TPU compiler
runs all-reduces and all-to-alls synchronously, and most reduce-scatters. XLA's runtime for CPUs waits for every collective. There
are no measurements for GPUs, whose compiler runs all three kinds asynchronously.
"""

CPU = CompilerModel(
    "cpu",
    computes_again=False,
    fuses_products=False,
    rounds_products=False,
    combines={"all-reduce": math.inf},
    moves_sums=False,
    joins_sums=False,
    breadth_first=True,
    writes_dense=("ragged_dot_general", "select_and_scatter_add"),
    copies_layouts=False,
    slices_sums=True,
    hides={},
    tiles=False,
)
GPU = replace(
    CPU,
    name="gpu",
    combines=dict.fromkeys(("all-reduce", "reduce-scatter", "all-gather"), 30 << 20),
    moves_sums=True,
    joins_sums=True,
    breadth_first=False,
    writes_dense=("ragged_dot_general",),
    slices_sums=False,
    hides=dict.fromkeys(("all-gather", "reduce-scatter", "all-reduce"), _SAVED),
)
TPU = CompilerModel(
    "tpu",
    computes_again=True,
    fuses_products=True,
    rounds_products=True,
    combines=dict.fromkeys(("all-reduce", "reduce-scatter"), 120 << 20),
    moves_sums=True,
    joins_sums=True,
    breadth_first=False,
    writes_dense=(),
    copies_layouts=True,
    slices_sums=False,
    hides={"all-gather": _SAVED},
    tiles=True,
    reserve=2400,
    split_from=16 << 20,
    scatters=32,
    scatters_over_network=False,
)

COMPILER_MODELS = {each.name: each for each in (TPU, GPU, CPU)}
"""The models by platform."""


# The memory of a TPU stores arrays in tiles of 8 × 128 elements. The layout of an argument is the one with the least padding: any
# two dimensions may be the tiled ones. These rules were read from the programs of the TPU compiler, whose sums of the bytes of
# arguments they give exactly.

LANES, SUBLANES = 128, 8
"""Elements of a row of a tile, and its rows."""
_LONGEST_ROW = 1024  # elements of the largest tile of a vector


@functools.lru_cache(maxsize=1 << 16)
def tiled_bytes(shape: tuple[int, ...], element_bytes: int) -> int:
    """Return the bytes that an array takes in the memory of a TPU.

    Args:
      shape: the shape of the array on one device.

    >>> tiled_bytes((1024, 256), 4) == 1024 * 256 * 4
    True
    >>> tiled_bytes((3, 3, 32, 32), 4) // (3 * 3 * 32 * 32 * 4)  # rows of 32 are padded to 128
    4
    """
    if 0 in shape:
        return 0
    if len(shape) < 2:
        length = math.prod(shape)
        tile = min(_LONGEST_ROW, max(LANES, 1 << (length - 1).bit_length()))
        return _round_up(length, tile) * element_bytes
    return element_bytes * min(_padded(math.prod(shape), *tiled) for tiled in itertools.permutations(shape, 2))


def keeps_order(shape: tuple[int, ...]) -> bool:
    """Return whether an array of this shape on one device is stored with its last two dimensions as the tiled ones.

    >>> keeps_order((512, 1024)), keeps_order((512, 8)), keeps_order((512,))
    (True, False, True)
    """
    return 0 in shape or len(shape) < 2 or _padded(math.prod(shape), *shape[-2:]) <= tiled_bytes(shape, 1)


def padded_elements(shape: tuple[int, ...]) -> int:
    """Return the elements of an array of this shape on one device, with the padding of tiles of its last two dimensions.

    >>> padded_elements((512, 16)) // (512 * 16)
    8
    """
    return math.prod(shape) if len(shape) < 2 else _padded(math.prod(shape), *shape[-2:])


def _padded(elements: int, rows: int, columns: int) -> int:
    """Return the number of elements beside the tiled dimensions, times the padded tiled dimensions."""
    tile = _round_up(rows, min(SUBLANES, 1 << (rows - 1).bit_length())) * _round_up(columns, LANES)
    return elements // (rows * columns) * tile


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
