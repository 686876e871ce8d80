"""Start a variant of a benchmark as `penstock run` starts a program."""

from __future__ import annotations

import importlib.util

from penstock.run_command import choose


def variables_of_run() -> tuple[dict[str, str], str]:
    """Return the environment variables that `penstock run` would set.

    Returns:
      The variables by name, and the reason why the allocator would be the other variants' own; empty if it is another one.
      Nothing in an interpreter without JAX, which runs variants of other libraries.
    """
    if importlib.util.find_spec("jaxlib") is None:
        return {}, ""
    choice = choose()
    return choice.variables, choice.same_allocator
