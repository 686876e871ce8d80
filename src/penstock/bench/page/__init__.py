"""Make a run one HTML page that needs no network: words, plots, tables, and the run's JSON itself.

The page is a function of the JSON alone, so that a page can be made again from what was saved.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from penstock.bench.page._sections import body, title
from penstock.page import asset, html_page, tag

__all__ = ["as_html"]


def as_html(document: Mapping[str, Any]) -> str:
    """Return the page of a run.

    Args:
      document: the run as `penstock bench --json` writes it.

    Raises:
      ValueError: the document holds a number that JSON has none for: NaN or an infinity.
    """
    data = json.dumps(dict(document), allow_nan=False)
    return html_page(
        title(document),
        body(document),
        buttons=tag("button", "Download JSON", type="button", id="download"),
        style=asset(__name__, "style.css"),
        script=asset(__name__, "script.js"),
        data=data,
    )
