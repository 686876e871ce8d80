"""What JAX keeps for each thread. The only place that looks at private parts of JAX.

Settings such as `jax.default_device`, `jax.set_mesh` or `jax.default_matmul_precision` hold for the thread that entered
them, and decide where arrays go and what is compiled. A thread may do the work of another only where both have the same.
"""

from __future__ import annotations

from typing import Any

try:
    from jax._src.config import trace_context as _trace_context
    from jax._src.core import trace_state_clean as _trace_state_clean
except ImportError:  # another version of JAX: no two threads are known to be alike
    _trace_context = _trace_state_clean = None  # type: ignore[assignment]  # functions, where they are there


def thread_settings() -> Any:
    """All settings of this thread, to be compared; None while a function is traced on it, and where they are not known."""
    if _trace_context is None or not _trace_state_clean():
        return None
    return _trace_context()
