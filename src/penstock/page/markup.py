"""HTML and SVG whose text is escaped by construction: only `tag` and `raw` make `Markup`, and `tag` escapes all else."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import TypeAlias

Attribute: TypeAlias = str | float | bool | None
Content: TypeAlias = "str | Iterable[Content] | None"

_VOID = {"meta", "link", "br", "wbr"}


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def tag(name: str, /, *content: Content, **attributes: Attribute) -> Markup:
    """An element. An underscore in an attribute's name is a hyphen; None and False leave the attribute out.

    >>> tag("p", "1 < 2", tag("b", "!"), class_="so", aria_label='"', hidden=True)
    '<p class="so" aria-label="&quot;" hidden>1 &lt; 2<b>!</b></p>'
    """
    written = "".join(_attribute(key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items())
    if name in _VOID:
        return Markup(f"<{name}{written}>")
    return Markup(f"<{name}{written}>{escaped(content)}</{name}>")


def raw(text: str) -> Markup:
    """Text that is taken as it is; never for what comes from a document."""
    return Markup(text)


def escaped(content: Content) -> Markup:
    """The content one after the other, with everything escaped that is not markup."""
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
    # What a process wrote may hold bytes that were no text; alone, a surrogate cannot be written to a file.
    return html.escape(text.encode("utf-8", "replace").decode())
