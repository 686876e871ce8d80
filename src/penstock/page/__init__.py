"""Build HTML pages that load nothing from the network, for plans and for runs of the benchmark.

`tag` builds an element and escapes all content that is not `Markup`. `table` builds a table. `html_page` builds the page, with
the CSS and the JavaScript that all pages share.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import TypeAlias

Attribute: TypeAlias = str | float | bool | None
Content: TypeAlias = "str | Iterable[Content] | None"

_VOID = {"meta", "link", "br", "wbr"}

# A browser unescapes nothing inside of a script element, and "</script>" ends the element also inside of a string.
_IN_SCRIPT = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


class Markup(str):
    """A text that is HTML, and is not escaped again. Never make one of the text of a document."""

    __slots__ = ()


def tag(name: str, /, *content: Content, **attributes: Attribute) -> Markup:
    """Build an element. Underscores in attribute names become hyphens, and attributes that are None or False are left out.

    >>> tag("p", "1 < 2", tag("b", "!"), class_="so", aria_label='"', hidden=True)
    '<p class="so" aria-label="&quot;" hidden>1 &lt; 2<b>!</b></p>'
    """
    written = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{_escape(str(value))}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    return Markup(f"<{name}{written}>" if name in _VOID else f"<{name}{written}>{_escaped(content)}</{name}>")


def _escaped(content: Content) -> str:
    """Join content, and escape all of it that is not markup."""
    if content is None or isinstance(content, Markup):
        return content or ""
    return _escape(content) if isinstance(content, str) else "".join(map(_escaped, content))


def _escape(text: str) -> str:
    # The output of a process may hold bytes that are not text. They are decoded to surrogates, which cannot be written to a file.
    return html.escape(text.encode("utf-8", "replace").decode())


@dataclass(frozen=True)
class Column:
    """The header of a column, and whether its cells are numbers."""

    name: str
    numeric: bool = True


@dataclass(frozen=True)
class Cell:
    """A cell, with the key by which its column sorts: a number or a text; None is last."""

    content: Content
    key: float | str | None


def of_text(text: str) -> Cell:
    """Return a cell that shows a text and is sorted by it."""
    return Cell(text, text)


def table(caption: str, columns: Sequence[Column], rows: Sequence[Sequence[Cell]], sortable: bool = False) -> Markup:
    """Build a table in a box that scrolls sideways. The first cell of a row is its header."""
    kinds = ["number" if column.numeric else None for column in columns]
    head = [
        tag("th", tag("button", column.name, type="button") if sortable else column.name, scope="col", class_=kind)
        for column, kind in zip(columns, kinds, strict=True)
    ]
    body = [
        tag(
            "tr",
            [
                tag("td" if at else "th", cell.content, scope=None if at else "row", class_=kind, data_key=cell.key)
                for at, (cell, kind) in enumerate(zip(row, kinds, strict=True))
            ],
        )
        for row in rows
    ]
    element = tag(
        "table",
        tag("caption", tag("span", caption)),
        tag("thead", tag("tr", head)),
        tag("tbody", body),
        class_="sortable" if sortable else None,
    )
    return tag("div", element, class_="scroll", tabindex="0", role="region", aria_label=caption)


def html_page(
    title: str, *body: Content, buttons: Content = None, style: str = "", script: str = "", data: str | None = None
) -> str:
    """Build a page. Its content security policy allows no loading, and no script but its own.

    Args:
      title: title of the window.
      body: content of the page. A table of the class "sortable" can be sorted by the buttons in its header.
      buttons: buttons beside the one that switches between light and dark colours.
      style: CSS, appended to the common CSS of all pages.
      script: JavaScript, appended to the common JavaScript of all pages.
      data: JSON for the script, in the element with the id "data"; None for no such element.

    Returns:
      The HTML text.
    """
    style, script = asset(__name__, "style.css") + style, asset(__name__, "script.js") + script
    policy = (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        # Without this element, a browser requests an icon from the server.
        tag("link", rel="icon", href="data:,"),
        tag("title", title),
        tag("style", Markup(style)),
    )
    theme = tag("button", "Dark colours", type="button", id="theme")
    scripts = [tag("script", Markup(script))]
    if data is not None:
        scripts.insert(0, tag("script", Markup(data.translate(_IN_SCRIPT)), type="application/json", id="data"))
    tools = tag("div", theme, buttons, class_="tools", hidden=True)
    return f"<!doctype html>\n{tag('html', head, tag('body', tools, body, scripts), lang='en')}\n"


def asset(package: str, name: str) -> str:
    """Return the text of a file inside of a package."""
    return (files(package) / name).read_text("utf-8")


def _digest(text: str) -> str:
    """Return the hash by which a content security policy allows an inline style or script."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
