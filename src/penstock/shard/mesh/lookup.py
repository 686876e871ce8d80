"""Find the hardware to plan for: by the name that the user gives, or from JAX's default device."""

from __future__ import annotations

import difflib
import re

from penstock._arguments import brief
from penstock.shard.mesh.calibration import THIS_MACHINE, this_machine
from penstock.shard.mesh.datasheets import DATASHEETS
from penstock.shard.mesh.hardware import Hardware


def find_hardware(which: str | Hardware) -> Hardware:
    """Find hardware by its name.

    Args:
      which: "tpu-v5e" or "v5e", "h100", …; "this machine" for the devices of this process, measured; or a `Hardware`, which
        is returned as it is.

    Raises:
      TypeError: it is neither a name nor a `Hardware`.
      ValueError: no hardware has this name; the message has the nearest names.

    Examples:
      >>> find_hardware("tpu-v5e").link_bandwidth
      50000000000.0
    """
    if isinstance(which, Hardware):
        return which
    if not isinstance(which, str):
        raise TypeError(f"hardware={brief(which)} is neither a name, such as 'tpu-v5e', nor a penstock.shard.Hardware")
    name = which.strip().lower().replace("_", "-").replace(" ", "-")
    if name == THIS_MACHINE.replace(" ", "-"):
        return this_machine()
    listed = DATASHEETS.get(name) or DATASHEETS.get(f"tpu-{name}")
    if listed:
        return listed
    near = difflib.get_close_matches(name, DATASHEETS, n=3, cutoff=0.5)
    raise ValueError(
        f'hardware "{which}" is not known{"; nearest: " if near else ""}{", ".join(near)}. Give one of {", ".join(DATASHEETS)}, '
        f'"{THIS_MACHINE}", or a penstock.shard.Hardware of your own'
    )


_NAME_BY_DEVICE_KIND = (
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
"""Pairs of a word in the `device_kind` of a JAX device and the name of the hardware. The first word that the
`device_kind` contains counts."""


def detect_hardware() -> Hardware:
    """Return the hardware of JAX's default device: from the table of datasheets, or measured if it is not in the table.

    This starts JAX.
    """
    import jax

    kind = jax.devices()[0].device_kind.lower()
    if jax.default_backend() != "cpu":
        for word, name in _NAME_BY_DEVICE_KIND:
            if re.search(rf"\b{word}\b", kind):
                return find_hardware(name)
    return this_machine()
