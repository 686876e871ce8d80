"""Make batches of sequences of several lengths, with the names that transformers gives to their leaves."""

from __future__ import annotations

import numpy as np

Batch = dict[str, np.ndarray]
IGNORED = -100  # a label that does not count


def causal_text(seed: int, batch: int, length: int, vocabulary: int) -> Batch:
    """Return tokens [B, T] int32 that fill their rows, with themselves as labels."""
    ones = np.ones((batch, length), np.int32)
    tokens = _tokens(np.random.default_rng(seed), batch, length, vocabulary)
    return {"input_ids": tokens, "attention_mask": ones, "labels": tokens}


def masked_text(seed: int, batch: int, length: int, vocabulary: int, mask: int, masked: float = 0.15) -> Batch:
    """Return tokens [B, T] int32 of which some are replaced by a mask, to be found again (Devlin et al. 2019).

    Args:
      mask: the token that replaces others.
      masked: how many are replaced, as a fraction.
    """
    rng = np.random.default_rng(seed)
    tokens, attention = _tokens(rng, batch, length, vocabulary), _attention(rng, batch, length)
    chosen = (rng.random((batch, length)) < masked) & (attention == 1)
    return {
        "input_ids": np.where(chosen, mask, tokens * attention).astype(np.int32),
        "attention_mask": attention,
        "labels": np.where(chosen, tokens, IGNORED).astype(np.int32),
    }


def text_pairs(seed: int, batch: int, source: int, target: int, vocabulary: int, start: int) -> Batch:
    """Return sources [B, S] and targets [B, T] int32, and what the decoder reads: the targets after a start token."""
    rng = np.random.default_rng(seed)
    attention = _attention(rng, batch, source)
    return {
        "input_ids": _tokens(rng, batch, source, vocabulary) * attention,
        "attention_mask": attention,
        **decoder_text(rng, batch, target, vocabulary, start),
    }


def decoder_text(rng: np.random.Generator, batch: int, length: int, vocabulary: int, start: int) -> Batch:
    """Return the labels [B, T] of a decoder and its inputs: the labels after a start token."""
    tokens, attention = _tokens(rng, batch, length, vocabulary), _attention(rng, batch, length)
    first = np.full((batch, 1), start, np.int32)
    return {
        "decoder_input_ids": np.concatenate([first, tokens[:, :-1]], axis=1),
        "decoder_attention_mask": attention,
        "labels": np.where(attention == 1, tokens, IGNORED).astype(np.int32),
    }


def _tokens(rng: np.random.Generator, batch: int, length: int, vocabulary: int) -> np.ndarray:
    """Return tokens [B, T] int32, some much more frequent than others."""
    return (vocabulary * rng.random((batch, length)) ** 4).astype(np.int32)


def _attention(rng: np.random.Generator, batch: int, length: int) -> np.ndarray:
    """Return masks [B, T] int32 of rows that are at least half full, and end with padding."""
    lengths = rng.integers(length // 2, length + 1, size=(batch, 1))
    return (np.arange(length) < lengths).astype(np.int32)
