"""What JAX keeps for each thread, and all of a compiled program. The only place that looks at private parts of JAX.

Settings such as `jax.default_device`, `jax.set_mesh` or `jax.default_matmul_precision` hold for the thread that entered
them, and decide where arrays go and what is compiled. A thread may do the work of another only where both have the same.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

try:
    from jax._src.config import trace_context as _trace_context
    from jax._src.core import trace_state_clean as _trace_state_clean
except ImportError:  # another version of JAX: no two threads are known to be alike
    _trace_context = _trace_state_clean = None  # type: ignore[assignment]  # functions, where they are there
try:
    from jax._src.lib import hlo as _hlo  # type: ignore[attr-defined]
except ImportError:  # likewise: programs are printed as JAX prints them
    _hlo = None

try:
    from jax._src.interpreters.partial_eval import convert_constvars_jaxpr as _convert
except ImportError:  # likewise: a jaxpr with constants is refused by whoever wants one without
    _convert = None  # type: ignore[assignment]

_MANY = 1 << 20


def thread_settings() -> Any:
    """All settings of this thread, to be compared; None while a function is traced on it, and where they are not known."""
    if _trace_context is None or not _trace_state_clean():
        return None
    return _trace_context()


def program_text(compiled: Any) -> str:
    """The HLO text of a `jax.stages.Compiled`, with its constants where they have no more than 2²⁰ elements in all.

    `as_text` leaves out the elements of those of more than ten. From 16 devices on, the tables are among them by which each
    device finds its part of an array.
    """
    text = compiled.as_text()
    left_out = re.findall(r" = \w+\[([\d,]+)\]\S* constant\(\{\.\.\.\}\)", text)
    many = sum(math.prod(map(int, sizes.split(","))) for sizes in left_out)
    if not left_out or many > _MANY or not hasattr(_hlo, "HloPrintOptions"):
        return text
    options = _hlo.HloPrintOptions()
    options.print_large_constants = True
    return "\n\n".join(module.to_string(options) for module in compiled.runtime_executable().hlo_modules())


def constants_as_arguments(jaxpr: Any) -> Any:
    """An open jaxpr that takes the values of its constants as its first arguments."""
    return _convert(jaxpr) if jaxpr.constvars and _convert is not None else jaxpr


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many operands of a `scan` are constants and how many are carried, from the parameters of its equation.

    JAX 0.12 replaced the numbers by a tree of operands: constants, carries, slices.
    """
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carries, _ = params["ft_in"].unpack()
    return len(consts), len(carries)
