"""Find the user's cache folder."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path | None:
    """Return penstock's folder in the user's cache folder; None for a user without a home, as in some containers."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock"
    except RuntimeError:
        return None
