"""A run as one HTML page that needs no network: words, plots, tables, and the run's JSON itself.

The page is a function of the JSON alone, so that a page can be made again from what was saved.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from penstock.bench.page._markup import Markup, raw, tag
from penstock.bench.page._sections import body, title

__all__ = ["as_html"]

# In a script element nothing is unescaped, and "</script>" ends it wherever it stands.
_IN_SCRIPT = {ord(character): f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"}


def as_html(document: Mapping[str, Any]) -> str:
    """The page of a run.

    Args:
      document: the run as `penstock bench --json` writes it.

    Raises:
      ValueError: the document holds a number that JSON has none for: NaN or an infinity.
    """
    data = json.dumps(dict(document), allow_nan=False).translate(_IN_SCRIPT)
    style, script = _asset("style.css"), _asset("script.js")
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
        tag("title", title(document)),
        tag("style", raw(style)),
    )
    scripts = [tag("script", raw(data), type="application/json", id="data"), tag("script", raw(script))]
    return f"<!doctype html>\n{tag('html', head, tag('body', body(document), scripts), lang='en')}\n"


def _asset(name: str) -> Markup:
    return raw((files(__name__) / name).read_text("utf-8"))


def _digest(text: str) -> str:
    """What a content security policy knows an inline style or script by."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
