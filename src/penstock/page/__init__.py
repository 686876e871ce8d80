"""Pages of one file that need no network: what a run of the benchmark and a plan have in common."""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files

from penstock.page.markup import Content as Content
from penstock.page.markup import Markup as Markup
from penstock.page.markup import raw as raw
from penstock.page.markup import tag as tag

# In a script element nothing is unescaped, and "</script>" ends it wherever it stands.
_IN_SCRIPT = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def html_page(
    title: str, *body: Content, buttons: Content = None, style: str = "", script: str = "", data: str | None = None
) -> str:
    """A whole page. It may load nothing, and run nothing but its own script.

    Args:
      title: of the window.
      body: what stands on it. A table of the class "sortable" is sorted by the buttons in its header.
      buttons: beside the one that switches between light and dark colours.
      style: CSS, after that of all pages.
      script: JavaScript, after that of all pages.
      data: JSON for the script, in the element "data".
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
        # Without it a browser asks the server for an icon.
        tag("link", rel="icon", href="data:,"),
        tag("title", title),
        tag("style", raw(style)),
    )
    theme = tag("button", "Dark colours", type="button", id="theme")
    scripts = [tag("script", raw(script))]
    if data is not None:
        scripts.insert(0, tag("script", raw(data.translate(_IN_SCRIPT)), type="application/json", id="data"))
    tools = tag("div", theme, buttons, class_="tools", hidden=True)
    return f"<!doctype html>\n{tag('html', head, tag('body', tools, body, scripts), lang='en')}\n"


def asset(package: str, name: str) -> str:
    """The text of a file that lies in a package."""
    return (files(package) / name).read_text("utf-8")


def _digest(text: str) -> str:
    """What a content security policy knows an inline style or script by."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
