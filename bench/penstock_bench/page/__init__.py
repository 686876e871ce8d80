"""Make one HTML page of a run, which needs no network: text, plots, tables, and the run's JSON.

The page is a function of the JSON alone, so it can be made again from a saved JSON file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from penstock.page import asset, html_page, tag
from penstock_bench.page._sections import body, title

__all__ = ["as_html"]


def as_html(document: Mapping[str, Any]) -> str:
    """Return the page of a run.

    Args:
      document: the run as `penstock bench --json` writes it.

    Raises:
      ValueError: the document holds NaN or an infinity, which JSON cannot represent.
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
