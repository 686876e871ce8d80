"""The structure, the dtypes and the shapes of records, by which sources that are read as one are compared.

Sources go in; an error comes out if their records could not share a batch. One record of each source is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from penstock.data.collate import is_list_of_numbers, pad_to
from penstock.data.source import Source
from penstock.data.tree import describe_array, leaf_name, to_numpy


@dataclass(frozen=True)
class RecordSpec:
    """The first record of a source, without its values.

    Attributes:
      source: number and type of the source, as "source 0 (ArraySource)".
      is_record: whether the source reads records one by one, which a function may change before they are stacked.
      structure: the structure of the record.
      leaves: from the name of a leaf to its dtype and shape, such as "uint8[28,28]"; or to its type. A length that is padded is
        left out, as in "int32[*]".
    """

    source: str
    is_record: bool
    structure: Any
    leaves: dict[str, str]


def record_specs(sources: Sequence[Source], pad: pad_to | None = None) -> list[RecordSpec]:
    """Read the first record of each source.

    Args:
      sources: the sources.
      pad: pads records of different lengths; None if they are stacked.
    """
    return [_spec(number, source, pad) for number, source in enumerate(sources)]


def _spec(number: int, source: Source, pad: pad_to | None) -> RecordSpec:
    try:
        data = source.read(np.zeros(1, np.int64))
    except Exception as error:
        error.add_note(f"penstock: while reading the first record of source {number}")
        raise
    is_record = isinstance(data, list)
    paths, structure = jax.tree_util.tree_flatten_with_path(data[0] if is_record else data, is_list_of_numbers)
    leaves = {}
    for path, leaf in paths:
        name = leaf_name(path)
        is_padded = pad is not None and ("" in pad.lengths or name in pad.lengths)
        leaves[name] = _describe(leaf if is_record or not getattr(leaf, "shape", ()) else leaf[0], is_padded)
    return RecordSpec(f"source {number} ({type(source).__name__})", is_record, structure, leaves)


def _describe(leaf: Any, is_padded: bool) -> str:
    if isinstance(leaf, (str, bytes)):
        return type(leaf).__name__
    try:
        array = np.asarray(to_numpy(leaf))
    except (TypeError, ValueError):
        return type(leaf).__name__
    if array.dtype == object:
        return type(leaf).__name__
    if isinstance(leaf, list) and array.size == 0:
        return "list"  # no dtype is known
    what = describe_array(array)
    return what.replace(f"[{len(array)}", "[*", 1) if is_padded and array.ndim else what


def _may_share(one: str, other: str) -> bool:
    return one == other or "list" in (one, other)


def check_alike(specs: Sequence[RecordSpec], function: str) -> None:
    """Raise ValueError if two records differ in structure, dtype or shape.

    Args:
      specs: those of the sources to compare.
      function: what reads the sources as one, for the error.
    """
    for other in specs[1:]:
        first = specs[0]
        names = [
            name
            for name in {**first.leaves, **other.leaves}
            if not _may_share(first.leaves.get(name, ""), other.leaves.get(name, ""))
        ]
        if not names and other.structure == first.structure:
            continue
        listed = ", ".join(
            f"leaf {name!r} of a record is {first.leaves.get(name, 'absent')} and {other.leaves.get(name, 'absent')}"
            for name in names[:4]
        )
        raise ValueError(
            f"{function}: {first.source} and {other.source} have records that differ, so batches would change with the source: "
            f"{listed or f'the structure is {first.structure} and {other.structure}'}. Make them alike where they are stored, "
            "for example by array.astype(dtype); or give sources of records (lists of dicts, datasets), which "
            "transform=ps.per_record(fn) makes alike"
        )
