"""Documents in a list column of an Arrow table: in memory, in files, or inside of a Hugging Face dataset.

The source of a table and the name of a column go in; a reader of documents comes out. Chunks are viewed where they lie, as one
array of tokens (see `penstock.data.columns.Rows`), so no Python code runs for each document, and nothing is copied.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.data.arrow import ArrowSource
from penstock.data.columns import Rows
from penstock.data.row_blocks import span


def arrow_documents(source: ArrowSource, leaf: str | None) -> ArrowDocuments | None:
    """Return a reader of the lists of numbers in one column.

    Args:
      source: the table.
      leaf: name of the column; None for the only list column.

    Returns:
      None if the column is not a list of numbers, or has nulls in rows that are not used.

    Raises:
      ValueError: there is no such column, or there are several list columns.
    """
    lists = source.ragged_columns()
    if leaf is None and len(lists) > 1:
        raise ValueError(
            f"ps.pack: the table has several columns of lists, {list(lists)}: say which holds the tokens, leaf='name'"
        )
    name = next(iter(lists), None) if leaf is None else leaf
    return None if name not in lists else ArrowDocuments(source.select(name), name)


class ArrowDocuments:
    """Documents in the only column of an `ArrowSource`."""

    knows_lengths = True

    def __init__(self, source: ArrowSource, name: str):
        self._source, self._name = source, name
        blocks = source.ragged_columns()[name]
        offsets = [block[0] for block in blocks]
        self._begins = Rows([at[:-1] for at in offsets])
        self._ends = Rows([at[1:] for at in offsets])
        filled = [len(values) > 0 for _, values in blocks]
        tokens = [values for _, values in blocks if len(values)] or [blocks[0][1]]
        self._tokens, starts = span(tokens) or (np.concatenate(tokens), np.cumsum([0, *map(len, tokens[:-1])]))
        self._chunk_starts = np.zeros(len(blocks), np.int64)  # of the chunks in `_tokens`
        self._chunk_starts[filled] = starts[: sum(filled)]

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self._source)

    def scan(self) -> tuple[np.ndarray, np.dtype]:
        """Return the number of tokens of each document, int64 [N], and the dtype of the tokens."""
        return self.lengths_of(np.arange(len(self))), self._tokens.dtype

    def lengths_of(self, documents: np.ndarray) -> np.ndarray:
        """Return the number of tokens of some documents, int64 [n]."""
        rows = self._source.table_rows(documents)
        return self._ends.take(rows).astype(np.int64) - self._begins.take(rows)

    def gather(self, documents: np.ndarray, begins: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Find pieces of documents. See `penstock.data.packs.documents.PieceReader`."""
        rows = self._source.table_rows(documents)
        return self._tokens, self._chunk_starts[self._begins.block_of(rows)] + self._begins.take(rows) + begins

    def describe(self) -> str:
        """Return the name and the Arrow type of the column."""
        return self._source.describe()

    def __reduce__(self) -> Any:
        return ArrowDocuments, (self._source, self._name)
