"""Convert the state of an iterator to a value for JSON, and back."""

from __future__ import annotations

import base64
import copy
from typing import Any

import jax
import numpy as np


def encode_state(state: Any) -> Any:
    """Return a state as a value for JSON: numbers of NumPy become numbers of Python, and bytes become text."""
    if not isinstance(state, bytes):
        return jax.tree.map(lambda x: x.item() if isinstance(x, np.generic) else x, copy.deepcopy(state))
    try:
        return {"utf8": state.decode()}
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(state).decode()}


def decode_state(value: Any) -> Any:
    """Return the state that `encode_state` has converted."""
    if isinstance(value, dict) and value.keys() == {"utf8"}:
        return value["utf8"].encode()
    if isinstance(value, dict) and value.keys() == {"base64"}:
        return base64.b64decode(value["base64"])
    return value
