"""The examples of the README and the documentation run as they stand, and the site says what the code and the reports say."""

import importlib
import inspect
import pydoc
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from tests.extras import require

import penstock as ps
from penstock import cli

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
REPORTS = ROOT / "bench" / "results"


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_examples_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # for the run folders of examples
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    scope = {"__name__": page.stem}
    for block in blocks:
        try:
            exec(compile(block, str(page), "exec"), scope)
        except ModuleNotFoundError as missing:
            require(missing.name)
            raise


def test_the_readme_shows_both_commands():
    commands = re.findall(r"```sh\n(.*?)\n```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert commands[:2] == ['pip install -e ".[train]" && penstock train digits', 'pip install -e ".[test]" && pytest']


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_of_a_page_lead_somewhere(page):
    for target in re.findall(r"\]\((?!http)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize(("package", "library"), [("", ""), (".keras", "keras"), (".ray", "ray"), (".shard", "")])
def test_every_public_name_is_in_the_api_reference(package, library):
    if library:
        require(library)
    package = importlib.import_module(f"penstock{package}")
    written = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    shown = set(re.findall(r"^::: penstock(?:\.\w+)*\.(\w+)$", written, re.MULTILINE))
    if "::: penstock.errors\n" in written:
        shown |= vars(ps.errors).keys()
    public = {name for name, each in vars(package).items() if callable(each) and not name.startswith("_")}
    assert public - shown == set()


def test_every_member_of_the_api_reference_exists():
    written = "\n".join(page.read_text() for page in sorted((ROOT / "docs" / "api").glob("*.md")))
    listed = re.findall(r"^::: (penstock\.\S+)\n    options:\n(?:      .*\n)*?      members: \[(.*)\]$", written, re.MULTILINE)
    assert len(listed) >= 5
    for path, members in listed:
        documented = pydoc.locate(path)
        assert [name for name in members.split(", ") if not hasattr(documented, name)] == [], path


@pytest.mark.parametrize("arguments", ["train digits", "train text", "plan", "launch", "doctor"])
def test_the_page_of_the_command_line_has_every_option(arguments, capsys):
    with pytest.raises(SystemExit):
        cli.main([*arguments.split(), "--help"])
    written = (ROOT / "docs" / "api" / "command-line.md").read_text()
    section = re.search(rf"^## penstock {arguments}\n(.*?)(?=^## |\Z)", written, re.MULTILINE | re.DOTALL)
    options = set(re.findall(r"^  (?:-\w(?: \w)?, )?(--[a-z-]+)", capsys.readouterr().out, re.MULTILINE)) - {"--help"}
    assert options == set(re.findall(r"^\| `(--[a-z-]+)", section[1], re.MULTILINE))


def test_the_page_of_the_feed_has_every_field_of_its_statistics():
    with ps.feed([]) as batches:
        names = [field.name for field in fields(batches.stats())]
    names += [name for name, each in inspect.getmembers(type(batches.stats())) if isinstance(each, property)]
    written = (ROOT / "docs" / "feed.md").read_text()
    assert [name for name in names if f"| `{name}` |" not in written] == []


def section(report: str, anchor: str) -> str:
    """Return the section of a report whose heading has the anchor, with its tables; all of the report without one."""
    for heading, text in re.findall(r"^#+ (.*)\n((?:(?!#).*\n)*)", report, re.MULTILINE) if anchor else ():
        if re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") == anchor:
            return text
    assert not anchor, f"no heading has the anchor {anchor}"
    return report


def figures() -> Iterator[tuple[str, set[float]]]:
    """Yield each figure that the home page or the README shows as a result, with the numbers of the report it links to."""
    home = (ROOT / "docs" / "index.md").read_text().partition('class="measured"')[2]
    readme = (ROOT / "README.md").read_text().partition("## Figures")[2].partition("\n## ")[0]
    for part in [each for each in home.split("\n\n") if "{ .figure }" in each] + readme.split("\n- ")[1:]:
        [(name, anchor)] = re.findall(r"results/([\w-]+\.md)(?:#([\w-]+))?", part)
        report = section((REPORTS / name).read_text(), anchor)
        numbers = {float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*(?:\.\d+)?", report)}
        text = re.sub(r"\]\([^)]*\)|95 %", "", part)
        yield from ((figure, numbers) for figure in re.findall(r"(?<![\w×])\d[\d,]*(?:\.\d+)?(?![\w])", text))


def test_figures_of_the_home_page_and_the_readme_are_in_the_reports():
    found = list(figures())
    assert len(found) > 15
    for figure, numbers in found:
        plain = figure.replace(",", "")
        digits = len(plain.replace(".", "").lstrip("0"))
        assert any(float(f"{number:.{digits}g}") == float(plain) for number in numbers), f"{figure} is in no report"


def test_the_files_of_the_map_exist_and_its_roads_are_short():
    text = (ROOT / "docs" / "architecture.md").read_text()
    package = ROOT / "src" / "penstock"
    folders = [ROOT, package, package / "shard", ROOT / "bench" / "penstock_bench", package / "shard" / "hlo"]
    named = set(re.findall(r"`((?:[\w-]+/)*[\w-]+(?:\.py|/))`", text))
    assert len(named) > 50
    assert [each for each in sorted(named) if not any((folder / each).exists() for folder in folders)] == []
    batch, plan, *_ = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    assert [int(number) for number in re.findall(r"^\| (\d+) ", batch, re.MULTILINE)][-1] <= 7
    assert [int(number) for number in re.findall(r"^\| (\d+) ", plan, re.MULTILINE)][-1] <= 15
