"""Define a batch on the device, as consumers of all variants see it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

Batch = dict[str, Any]

# JAX's own, which has no annotations.
block_until_ready: Callable[[Batch], Batch] = jax.block_until_ready
