"""Wrap the private parts of JAX that penstock needs. No other module uses private names of JAX.

Each part is looked up when it is used. If the installed JAX lacks it, the use raises `UnsupportedVersionError` where a result
would be wrong. It warns where only speed is lost. `tests/test_private.py` fails on such a version first.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.extend.core.primitives import remat_p

from penstock._versions import JAX
from penstock.errors import UnsupportedVersionError

TRACE_CONTEXT = ("jax._src.config", "trace_context")
TRACE_STATE_CLEAN = ("jax._src.core", "trace_state_clean")
PRINT_OPTIONS = ("jax._src.lib", "hlo.HloPrintOptions", "_jax.HloPrintOptions")  # the second name until JAX 0.10.1
CONVERT_CONSTANTS = ("jax._src.interpreters.partial_eval", "convert_constvars_jaxpr")
LOWER_JAXPR = ("jax._src.interpreters.partial_eval", "lower_jaxpr2")  # from JAX 0.12 on
DISTRIBUTED = ("jax._src.distributed", "global_state")
USER_FRAMES = ("jax._src.source_info_util", "user_frames")
USER_CONTEXT = ("jax._src.source_info_util", "user_context")
BACKENDS_STARTED = ("jax._src.xla_bridge", "backends_are_initialized")
CLUSTERS = ("jax._src.clusters", "ClusterEnv._cluster_types")
PARTS = (
    TRACE_CONTEXT,
    TRACE_STATE_CLEAN,
    PRINT_OPTIONS,
    CONVERT_CONSTANTS,
    DISTRIBUTED,
    USER_FRAMES,
    USER_CONTEXT,
    BACKENDS_STARTED,
    CLUSTERS,
)
"""All private parts of JAX that are used: for each, its module and its names in JAX's releases, newest first."""

ClosedJaxpr = Any
"""A jaxpr with the values of its constants. JAX 0.12 has one class for open and closed jaxprs; earlier releases have two."""

_MANY = 1 << 20
"""The most elements of constants that `program_text` prints."""


def part(module: str, *names: str) -> Any:
    """Return a private part of JAX, by the first of its dotted names that the installed JAX has.

    Raises:
      UnsupportedVersionError: the installed JAX has none of them.
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
    """Return all JAX settings of this thread, for comparison; None while a function is traced on this thread.

    Settings such as `jax.default_device`, `jax.set_mesh` or `jax.default_matmul_precision` hold for the thread that entered them.
    They decide where arrays are placed and what is compiled. So a thread may do the work of another only if both have equal
    settings. If the installed JAX does not expose them, this returns None and warns once. Then no thread does another's work.
    """
    context, is_clean = _settings()
    return context() if is_clean() else None


@functools.cache
def _settings() -> tuple[Callable[[], Any], Callable[[], bool]]:
    """Return two functions: one returns the settings of this thread, the other whether nothing is traced on it."""
    try:
        return part(*TRACE_CONTEXT), part(*TRACE_STATE_CLEAN)
    except UnsupportedVersionError as error:
        warnings.warn(f"feeds are slower by a hand-over between threads for each batch: {error}", RuntimeWarning, stacklevel=2)
        return (lambda: None), (lambda: False)


def program_text(compiled: Any) -> str:
    """Return the HLO text of a `jax.stages.Compiled`, with its constants if they have at most 2²⁰ elements in total.

    `as_text` leaves out the elements of constants with more than ten. From 16 devices on, this includes the tables from which
    each device reads the offset of its shard. If they are left out here too, `hlo.collectives` marks the collectives that it has
    to guess.
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
    """Return an open jaxpr that takes the values of its constants as its first arguments."""
    return part(*CONVERT_CONSTANTS)(jaxpr) if jaxpr.constvars else jaxpr


def lowered(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Return a closed jaxpr with the equations that high-level primitives stand for, as JAX lowers it before it compiles.

    From JAX 0.12 on, functions such as `jnp.searchsorted` and `jax.lax.custom_root` are such primitives.
    """
    return part(*LOWER_JAXPR)(closed) if getattr(closed, "is_high", False) else closed


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many operands of a `scan` are constants and how many are carries, from the parameters of its equation.

    JAX 0.12 replaced the two numbers by a tree of the operands: constants, carries, slices.
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


def source_frames(source_info: Any) -> list[tuple[str, int, str]]:
    """Return the frames outside of JAX from which an equation was traced: file, line and function, the innermost first.

    There are none if the equation has no source, or if the installed JAX does not tell it.
    """
    try:
        frames = part(*USER_FRAMES)(source_info.traceback)
    except UnsupportedVersionError:
        return []
    return [(frame.file_name, frame.start_line, frame.function_name) for frame in frames]


@contextlib.contextmanager
def checkpoints(kept: bool) -> Iterator[None]:
    """Trace functions in a `with` block of this thread with their calls of `jax.checkpoint`, or as if these were not there."""
    if kept:
        yield
        return
    with _LOCK:
        ignored = _ignoring_checkpoints()
    with ignored(True):
        yield


_LOCK = threading.Lock()


@functools.cache
def _ignoring_checkpoints() -> Any:
    """Return a context whose value is whether `jax.checkpoint` is ignored. JAX keeps what it traced by the values of contexts."""
    ignored, bind = jax.make_user_context(False), remat_p.bind

    def bind_or_inline(*args: Any, jaxpr: Any, **params: Any) -> Any:
        if ignored.value:
            return jax.core.eval_jaxpr(jaxpr, (), *args)
        return bind(*args, jaxpr=jaxpr, **params)  # type: ignore[no-untyped-call]  # JAX declares no types for it

    remat_p.bind = bind_or_inline  # type: ignore[method-assign]  # no option of JAX ignores jax.checkpoint
    return ignored


@contextlib.contextmanager
def from_source(equation: Any) -> Iterator[None]:
    """Trace equations as if they came from the source of another equation, on its mesh."""
    try:
        context = part(*USER_CONTEXT)(equation.source_info.traceback, name_stack=equation.source_info.name_stack)
    except UnsupportedVersionError:
        context = contextlib.nullcontext()
    with context, equation.ctx.manager:
        yield


def process_messages() -> Any:
    """Return the client of the coordination service of `jax.distributed`, by which processes exchange short texts.

    Raises:
      RuntimeError: `jax.distributed` was not initialised.
    """
    client = part(*DISTRIBUTED).client
    if client is None:
        raise RuntimeError("processes cannot exchange messages: call jax.distributed.initialize() first")
    return client


def wait_for_message(messages: Any, key: str, seconds: float) -> str | None:
    """Return the text that another process has sent by `process_messages` under a key; None if it does not come in time."""
    try:
        return str(messages.blocking_key_value_get(key, int(seconds * 1e3)))
    except Exception as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        return None


def backends_started() -> bool:
    """Return whether JAX has started its devices, after which it cannot join other processes."""
    return bool(part(*BACKENDS_STARTED)())


def joined_processes() -> tuple[int, int] | None:
    """Return the index of this process and the number of processes; None before `jax.distributed.initialize`.

    `jax.process_index()` would start the devices.
    """
    state = part(*DISTRIBUTED)
    return None if state.client is None else (state.process_id, state.num_processes)


def clusters() -> tuple[Any, ...]:
    """Return the classes by which `jax.distributed.initialize` finds a cluster without being asked for one, in its order.

    Each has `name`, `is_env_present()`, `get_coordinator_address(timeout_secs, override_coordinator_port)`,
    `get_process_count()` and `get_process_id()`.
    """
    return tuple(each for each in part(*CLUSTERS) if not each.opt_in_only_method)
