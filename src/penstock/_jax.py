"""The private parts of JAX that penstock needs, all of them. Nothing else in the package looks behind JAX's public names.

Each part is looked up when it is used. Where a version of JAX has none, the use says so: it is an error where a result would
be wrong or a number a guess, and a warning where only speed is lost. `tests/test_private.py` fails on such a version first.
"""

from __future__ import annotations

import functools
import importlib
import math
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax

from penstock._versions import JAX, UnsupportedVersionError

TRACE_CONTEXT = ("jax._src.config", "trace_context")
TRACE_STATE_CLEAN = ("jax._src.core", "trace_state_clean")
PRINT_OPTIONS = ("jax._src.lib", "hlo.HloPrintOptions", "_jax.HloPrintOptions")  # the second until JAX 0.10.1
CONVERT_CONSTANTS = ("jax._src.interpreters.partial_eval", "convert_constvars_jaxpr")
PARTS = (TRACE_CONTEXT, TRACE_STATE_CLEAN, PRINT_OPTIONS, CONVERT_CONSTANTS)
"""All that is imported of JAX's private modules: a module, and the names that its releases have for one part, newest first."""

ClosedJaxpr = Any
"""A jaxpr with the values of its constants. JAX 0.12 has one class for open and closed ones; earlier releases have two."""

_MANY = 1 << 20


def part(module: str, *names: str) -> Any:
    """Return a private part of JAX, by the first of its names that this JAX has.

    Raises:
      UnsupportedVersionError: this JAX has none of them.
    """
    for name in names:
        try:
            return functools.reduce(getattr, name.split("."), importlib.import_module(module))
        except (ImportError, AttributeError):
            continue
    raise UnsupportedVersionError(
        f"penstock uses {module}.{names[0]}, which JAX {jax.__version__} does not have; it was last seen in JAX "
        f"{JAX.tested[-1]}: {JAX.install}"
    )


def thread_settings() -> Any:
    """Return all of JAX's settings of this thread, to be compared; None while a function is traced on it.

    Settings such as `jax.default_device`, `jax.set_mesh` or `jax.default_matmul_precision` hold for the thread that entered
    them, and decide where arrays go and what is compiled. A thread may do the work of another only where both have the same.
    Where this JAX does not tell them, None as well, with one warning: no thread then helps another.
    """
    context, is_clean = _settings()
    return context() if is_clean() else None


@functools.cache
def _settings() -> tuple[Callable[[], Any], Callable[[], bool]]:
    """The functions that return a thread's settings, and whether nothing is traced on it."""
    try:
        return part(*TRACE_CONTEXT), part(*TRACE_STATE_CLEAN)
    except UnsupportedVersionError as error:
        warnings.warn(f"feeds are slower by a hand-over between threads for each batch: {error}", RuntimeWarning, stacklevel=2)
        return (lambda: None), (lambda: False)


def program_text(compiled: Any) -> str:
    """Return the HLO text of a `jax.stages.Compiled`, with its constants where they have no more than 2²⁰ elements in all.

    `as_text` leaves out the elements of those of more than ten. From 16 devices on, the tables are among them by which each
    device finds its part of an array. Where they stay out, `hlo.collectives` says which of its numbers are guesses.

    Raises:
      UnsupportedVersionError: constants were left out, and this JAX cannot print them.
    """
    text = compiled.as_text()
    left_out = re.findall(r" = \w+\[([\d,]+)\]\S* constant\(\{\.\.\.\}\)", text)
    many = sum(math.prod(map(int, sizes.split(","))) for sizes in left_out)
    if not left_out or many > _MANY:
        return text
    options = part(*PRINT_OPTIONS)()
    options.print_large_constants = True
    return "\n\n".join(module.to_string(options) for module in compiled.runtime_executable().hlo_modules())


def constants_as_arguments(jaxpr: Any) -> Any:
    """Return an open jaxpr that takes the values of its constants as its first arguments.

    Raises:
      UnsupportedVersionError: it has constants, and this JAX cannot turn them into arguments.
    """
    return part(*CONVERT_CONSTANTS)(jaxpr) if jaxpr.constvars else jaxpr


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many operands of a `scan` are constants and how many are carried, from the parameters of its equation.

    JAX 0.12 replaced the two numbers by a tree of the operands: constants, carries, slices.

    Raises:
      UnsupportedVersionError: this JAX describes a scan in another way.
    """
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    if "ft_in" not in params:
        raise UnsupportedVersionError(
            f"JAX {jax.__version__} describes the operands of a scan by {', '.join(sorted(params))}, and penstock reads "
            f"num_consts and num_carry, or ft_in, last seen in JAX {JAX.tested[-1]}: {JAX.install}"
        )
    consts, carries, _ = params["ft_in"].unpack()
    return len(consts), len(carries)
