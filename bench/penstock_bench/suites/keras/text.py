"""Collect documents to tokenise: the docstrings of Python's standard library, which every machine has."""

from __future__ import annotations

import ast
import contextlib
import json
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock_bench.suites.keras.cache import made_once

VOCABULARY = 8000
PAD = 0
_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
_SHORTEST = 100  # characters
_OTHERS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}


@dataclass(frozen=True)
class Corpus:
    """Documents, and a WordPiece tokenizer (a `tokenizers.Tokenizer`) whose vocabulary is theirs."""

    documents: list[str]
    tokenizer: Any

    def token_ids(self, first: int, records: int, length: int) -> np.ndarray:
        """Return the tokens of `records` documents from `first` on, int32 [records, length], padded with `PAD`.

        After the last document, the first one follows.
        """
        chosen = [self.documents[number % len(self.documents)] for number in range(first, first + records)]
        self.tokenizer.enable_truncation(length)
        self.tokenizer.enable_padding(length=length, pad_id=PAD, pad_token=_SPECIAL[PAD])
        return np.array([encoding.ids for encoding in self.tokenizer.encode_batch(chosen)], np.int32)


def corpus() -> Corpus:
    """Return the documents and their tokenizer, made once for all runs; see `cache`."""
    from tokenizers import Tokenizer

    made = json.loads(made_once("docstrings.json", _write).read_text(encoding="utf-8"))
    return Corpus(made["documents"], Tokenizer.from_str(made["tokenizer"]))


def _write(path: Path) -> None:
    documents = list(_docstrings())
    path.write_text(json.dumps({"documents": documents, "tokenizer": _trained(documents).to_str()}), encoding="utf-8")


def _docstrings() -> Iterator[str]:
    root = Path(sysconfig.get_path("stdlib"))
    seen = set()
    for path in sorted(root.rglob("*.py")):
        if _OTHERS & set(path.relative_to(root).parts):
            continue
        for text in _in_module(path):
            if len(text) >= _SHORTEST and text not in seen:
                seen.add(text)
                yield text


def _in_module(path: Path) -> Iterator[str]:
    with contextlib.suppress(SyntaxError, ValueError, OSError), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings about the library's own code
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                yield ast.get_docstring(node) or ""


def _trained(documents: list[str]) -> Any:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

    tokenizer: Any = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=VOCABULARY, special_tokens=_SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(documents, trainer)
    ends = [(token, tokenizer.token_to_id(token)) for token in ("[SEP]", "[CLS]")]
    tokenizer.post_processor = processors.BertProcessing(*ends)
    return tokenizer
