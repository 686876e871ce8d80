"""No sentence of a docstring or comment is a fragment. Ruff checks that functions are described by a verb (D401)."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "bench", "examples", ".ci", "tests")
FRAGMENT = re.compile(r"(?:\A|(?<=[.!?:]\s)|(?<=\n\n))\s*(?:Of|What|Which|That of)\b[^\n]*")


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield the docstrings and the comments, the latter joined over adjacent lines, with their line."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
    block: list[tuple[int, str]] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if block and token.start[0] != block[-1][0] + 1:
                yield block[0][0], " ".join(text for _, text in block)
                block = []
            block.append((token.start[0], token.string.lstrip("#: ")))
    if block:
        yield block[0][0], " ".join(text for _, text in block)


def fragments(source: str) -> list[str]:
    return [f"{line}: {found.strip()}" for line, text in texts(source) for found in FRAGMENT.findall(text)]


def test_no_sentence_is_a_fragment():
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]
    found = {str(file.relative_to(ROOT)): fragments(file.read_text()) for file in files}
    assert {file: lines for file, lines in found.items() if lines} == {}


def test_the_check_finds_what_it_is_for():
    assert fragments('def f():\n    """Return it. What is kept stays."""\n') == ["2: What is kept stays."]
    assert fragments("# Which of them is taken\n# is said here\nx = 1\n") == ["1: Which of them is taken is said here"]
    assert fragments('"""Read it, which of them there are. One of those."""\n') == []
