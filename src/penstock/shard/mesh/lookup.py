"""Find the hardware to plan for: by name, or by the device that JAX finds."""

from __future__ import annotations

import difflib
import re

from penstock.shard.mesh.calibration import THIS_MACHINE, this_machine
from penstock.shard.mesh.datasheets import DATASHEETS
from penstock.shard.mesh.hardware import Hardware


def find_hardware(which: str | Hardware) -> Hardware:
    """Hardware by its name: "tpu-v5e" or "v5e", "h100", …; "this machine" measures what is here (`this_machine`).

    Raises:
      TypeError, ValueError: it is no name, or there is none of that name; it tells the nearest names.

    >>> find_hardware("tpu-v5e").link_bandwidth
    50000000000.0
    """
    if isinstance(which, Hardware):
        return which
    if not isinstance(which, str):
        raise TypeError(f"hardware={which!r} is neither a name, such as 'tpu-v5e', nor a penstock.shard.Hardware")
    name = which.strip().lower().replace("_", "-").replace(" ", "-")
    if name == THIS_MACHINE.replace(" ", "-"):
        return this_machine()
    found = DATASHEETS.get(name) or DATASHEETS.get(f"tpu-{name}")
    if found:
        return found
    near = difflib.get_close_matches(name, DATASHEETS, n=3, cutoff=0.5)
    raise ValueError(
        f'hardware "{which}" is not known{"; nearest: " if near else ""}{", ".join(near)}. Give one of {", ".join(DATASHEETS)}, '
        f'"{THIS_MACHINE}", or a penstock.shard.Hardware of your own'
    )


_KINDS = (
    ("v5 lite", "tpu-v5e"),
    ("v5e", "tpu-v5e"),
    ("v6 lite", "tpu-v6e"),
    ("v6e", "tpu-v6e"),
    ("v5", "tpu-v5p"),
    ("v4", "tpu-v4"),
    ("a100", "a100"),
    ("h100", "h100"),
    ("h200", "h200"),
    ("b200", "b200"),
    ("l4", "l4"),
)
"""What `device_kind` of a JAX device has in it → name; the first that fits."""


def present_hardware() -> Hardware:
    """That of JAX's default device: from the table, if it is in there, else measured. Starts JAX."""
    import jax

    kind = jax.devices()[0].device_kind.lower()
    if jax.default_backend() != "cpu":
        for part, name in _KINDS:
            if re.search(rf"\b{part}\b", kind):
                return find_hardware(name)
    return this_machine()
