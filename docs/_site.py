"""Make the site from this folder, the docstrings, and pages that lie elsewhere in the repository.

Goes in: Markdown whose links lead to files of the repository, as GitHub wants them. Comes out: the same pages with links to
pages of the site, or to GitHub for files that the site does not have. MkDocs loads this file as a hook, and Griffe as an
extension.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from textwrap import indent
from typing import Any

import griffe
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
GITHUB = "https://github.com/penstock/penstock/blob/main"
PAGES = {"bench/README.md": "benchmarks/index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
PAGES |= {str(path.relative_to(ROOT)): str(path.relative_to(ROOT)) for path in ROOT.glob("bench/results/*.md")}
RECIPE = re.compile(r"(?<=\]\(\.\./)(examples/recipes/\w+\.py)(\)\n\n```py\n).*?(?=```\n)", re.DOTALL)
EXAMPLES = re.compile(r"^>>> .*?(?=\n\n(?!>>> )|\Z)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that lie outside of docs/."""
    for path, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Show recipes as a whole, and lead each link to the page that a file of the repository became, or else to GitHub."""
    markdown = RECIPE.sub(lambda found: found[1] + found[2] + (ROOT / found[1]).read_text(), markdown)
    sources = {target: path for path, target in PAGES.items()}
    if page.file.src_uri.startswith("bench/results/"):
        page.meta["search"] = {"boost": 0.1}  # below the guides and the reference
    here = sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")

    def relink(link: re.Match[str]) -> str:
        path = os.path.normpath(os.path.join(os.path.dirname(here), link[1]))
        target = path.removeprefix("docs/") if path.startswith("docs/") else PAGES.get(path)
        return os.path.relpath(target, os.path.dirname(page.file.src_uri)) if target else f"{GITHUB}/{path}"

    return LINK.sub(relink, markdown)


class ExamplesSection(griffe.Extension):
    """A docstring's examples shown as the "Examples:" that Griffe knows."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename the section, or add it where examples stand by themselves."""
        if obj.docstring:
            text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
            obj.docstring.value = EXAMPLES.sub(lambda found: "Examples:\n" + indent(found[0], "    "), text)
