"""HTML and SVG with escaped text: only `tag` and `raw` make `Markup`, and `tag` escapes all content that is not `Markup`."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import TypeAlias

Attribute: TypeAlias = str | float | bool | None
Content: TypeAlias = "str | Iterable[Content] | None"

_VOID = {"meta", "link", "br", "wbr"}


class Markup(str):
    """A text that is HTML, and is not escaped again."""

    __slots__ = ()


def tag(name: str, /, *content: Content, **attributes: Attribute) -> Markup:
    """Build an element. Underscores in the names of attributes become hyphens. Attributes that are None or False are left out.

    >>> tag("p", "1 < 2", tag("b", "!"), class_="so", aria_label='"', hidden=True)
    '<p class="so" aria-label="&quot;" hidden>1 &lt; 2<b>!</b></p>'
    """
    written = "".join(_attribute(key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items())
    if name in _VOID:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{escaped(content)}</{name}>")


def raw(text: str) -> Markup:
    """Return a text as markup, without escaping it. Never use it for text from a document."""
    return Markup(text)


def escaped(content: Content) -> Markup:
    """Join content, and escape all of it that is not markup."""
    if content is None:
        return Markup()
    if isinstance(content, Markup):
        return content
    if isinstance(content, str):
        return Markup(_escape(content))
    return Markup("".join(map(escaped, content)))


def _attribute(name: str, value: Attribute) -> str:
    if value is None or value is False:
        return ""
    return f" {name}" if value is True else f' {name}="{_escape(str(value))}"'


def _escape(text: str) -> str:
    # The output of a process may hold bytes that are not text. They are decoded to surrogates, which cannot be written to a file.
    return html.escape(text.encode("utf-8", "replace").decode())
