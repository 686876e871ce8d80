"""Self-contained HTML pages, for runs of the benchmark and for plans.

Markup, CSS, JavaScript and JSON data go in, the text of one HTML file comes out. It loads nothing from the network.
"""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files

from penstock.page.markup import Content as Content
from penstock.page.markup import Markup as Markup
from penstock.page.markup import raw as raw
from penstock.page.markup import tag as tag

# A browser unescapes nothing inside of a script element, and "</script>" ends the element also inside of a string.
_IN_SCRIPT = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


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
        tag("style", raw(style)),
    )
    theme = tag("button", "Dark colours", type="button", id="theme")
    scripts = [tag("script", raw(script))]
    if data is not None:
        scripts.insert(0, tag("script", raw(data.translate(_IN_SCRIPT)), type="application/json", id="data"))
    tools = tag("div", theme, buttons, class_="tools", hidden=True)
    return f"<!doctype html>\n{tag('html', head, tag('body', tools, body, scripts), lang='en')}\n"


def asset(package: str, name: str) -> str:
    """Return the text of a file inside of a package."""
    return (files(package) / name).read_text("utf-8")


def _digest(text: str) -> str:
    """Return the hash by which a content security policy allows an inline style or script."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
