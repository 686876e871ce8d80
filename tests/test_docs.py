"""The examples of the README and the documentation run as they stand."""

import argparse
import re
from pathlib import Path

import pytest

from penstock.bench import command

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_examples_of_a_page_run(page):
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    scope = {"__name__": page.stem}
    for block in blocks:
        exec(compile(block, str(page), "exec"), scope)


def test_the_readme_shows_both_commands():
    commands = re.findall(r"```sh\n(.*?)\n```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert commands[:2] == ['pip install -e ".[train]" && penstock train digits', 'pip install -e ".[test]" && pytest']


def test_benchmark_commands_of_the_pages_are_ones_that_can_be_typed():
    lines = [line for page in PAGES for line in re.findall(r"^penstock bench .*$", page.read_text(), re.MULTILINE)]
    assert len(lines) >= 6
    for line in lines:
        arguments = line.partition("#")[0].split()[2:]
        parser = argparse.ArgumentParser()
        command.add_arguments(parser)
        parser.parse_args(arguments)


def test_links_of_the_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\((?!http)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
