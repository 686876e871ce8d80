"""Docstrings are sentences: that of a function begins with a verb, and no sentence begins with a word that leaves a fragment."""

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("src", "bench/penstock_bench", "bench/scripts", "examples", ".ci")
OF_TESTS = ("tests", "bench/tests")
VERBS = frozenset(
    """
    accept account add adopt align allocate allow alternate answer append apply arrange ask assemble assert assign attach attend
    average back begin bind blend block bound break bring build cache calibrate call cancel capture cast check choose cite claim
    classify clean clear close collect colour combine compare compile complete compose compute configure connect consume
    continue contract convert copy correct count cover create crop cut decide decode decrease deduplicate defer define delete
    deliver derive descend describe deserialise deserialize detach detect determine disable discard dispatch divide do double
    download draw drop dump eliminate embed empty emulate enable encode end enforce ensure enter enumerate escape estimate
    evaluate examine exchange execute exit expand explain export extend extract fail feed fetch fill filter find finish fit fix
    flatten flush fold follow forget format forward free freeze gather generate get give go group guess handle hash hide hint
    hold import improve index infer initialise initialize insert inspect install interpolate interrupt invoke iterate join judge
    keep kill label launch lay leave lend let limit list load locate lock log look lower make map mark match mean measure merge
    mimic minimise minimize mix model multiply name normalise normalize note number offer open order own pack pad parse
    partition pass patch pause peek permute pick pickle place plan plot pop predict prefetch prepare present press price print
    produce project propagate prove prune publish pull push put quantise quantize quote raise rank rate re-run reach read rebind
    rebuild record reduce refine refuse register reject release remember remove rename render repeat replace replay report
    request require reset reshape reshard resize resolve restore resume retry return reverse rotate round run sample save say
    scale scan schedule score search seed select send separate serialise serialize serve set shard share shift shorten show
    shuffle shut simulate sketch skip sleep slice smooth solve sort sow span spawn split spread stack start state step stop
    store stream strip subclass substitute subtract sum summarize surround swap switch take tell test time touch trace train
    transform translate transpose traverse treat trigger trim try tune turn undo unfold uninstall unpack unwrap update use
    validate vary verify view visit wait wake walk warm warn watch weigh widen word work wrap write yield zip
    """.split()  # noqa: SIM905
)
FRAGMENT = re.compile(r"(?:\A|(?<=[.!?:]\s)|(?<=\n\n))\s*(?:Of|What|Which|That of)\b[^\n]*")


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


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


def without_verb(source: str) -> list[str]:
    found = []
    for node in functions(ast.parse(source)):
        text = ast.get_docstring(node)
        first = re.match(r"[A-Za-z]+", text or "")
        if text and (first is None or first[0].lower() not in VERBS):
            found.append(f"{node.lineno}: {text.splitlines()[0]}")
    return found


def faults_of(folders: tuple[str, ...], *checks: Callable[[str], list[str]]) -> dict[Path, list[str]]:
    found = {}
    for file in (file for folder in folders for file in (ROOT / folder).rglob("*.py")):
        source = file.read_text()
        found[file.relative_to(ROOT)] = [fault for check in checks for fault in check(source)]
    return {file: faults for file, faults in found.items() if faults}


def test_docstrings_are_sentences():
    assert faults_of(FOLDERS, without_verb, fragments) == {}


def test_no_sentence_of_the_tests_is_a_fragment():
    assert faults_of(OF_TESTS, fragments) == {}


def test_the_check_finds_what_it_is_for():
    source = 'def f():\n    """Of a step."""\n\n\ndef g():\n    """Return it. What is kept stays."""\n'
    assert without_verb(source) == ["1: Of a step."]
    assert len(fragments(source)) == 2
    assert fragments("# Which of them is taken\n# is said here\nx = 1\n") == ["1: Which of them is taken is said here"]
    assert fragments('"""Read it, which of them there are. One of those."""\n') == []
