"""The commands and options of benchmarks that the pages of the documentation show."""

import argparse
import pydoc
import re
from pathlib import Path

import pytest

from penstock import cli
from penstock_bench import command
from penstock_bench.suites import is_file

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_benchmark_commands_of_the_pages_are_ones_that_can_be_typed():
    lines = [line for page in PAGES for line in re.findall(r"^penstock bench .*$", page.read_text(), re.MULTILINE)]
    assert len(lines) >= 6
    for line in lines:
        arguments = line.partition("#")[0].split()[2:]
        parser = argparse.ArgumentParser()
        file = next((word for word in arguments[:1] if is_file(word)), None)
        # A file of a reader is not here; the recipe's stands for it.
        command.add_arguments(parser, [str(ROOT / "examples/recipes/own_benchmark.py")] if file else [])
        parser.parse_args([str(ROOT / "examples/recipes/own_benchmark.py") if file else arguments[0], *arguments[1:]])


def test_the_page_of_the_command_line_has_every_option(capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", "feed", "--help"])
    written = (ROOT / "docs" / "api" / "command-line.md").read_text()
    section = re.search(r"^## penstock bench\n(.*?)(?=^## |\Z)", written, re.MULTILINE | re.DOTALL)
    options = set(re.findall(r"^  (?:-\w(?: \w)?, )?(--[a-z-]+)", capsys.readouterr().out, re.MULTILINE)) - {"--help"}
    assert options == set(re.findall(r"^\| `(--[a-z-]+)", section[1], re.MULTILINE))


def test_every_member_of_the_api_reference_exists():
    written = (ROOT / "docs" / "api" / "bench.md").read_text()
    listed = re.findall(
        r"^::: (penstock_bench\.\S+)\n    options:\n(?:      .*\n)*?      members: \[(.*)\]$", written, re.MULTILINE
    )
    assert listed
    for path, members in listed:
        documented = pydoc.locate(path)
        assert [name for name in members.split(", ") if not hasattr(documented, name)] == [], path
