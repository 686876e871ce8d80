"""The arrays of a checkpoint on disk, by Orbax: named arrays and a folder go in; the folder, and later the arrays, come out.

Arrays are written by all processes, each its own shards, and are read with any other sharding.
"""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

_NEEDS = 'checkpoints need Orbax: pip install "penstock[train]"'


def require_orbax() -> Any:
    """Import Orbax.

    Raises:
      ImportError: it is not installed; the message says how to install it.
    """
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise ImportError(_NEEDS) from error
    return orbax.checkpoint


class ArrayFiles:
    """Writes and reads folders of arrays. Orbax's threads are those of this object."""

    def __init__(self) -> None:
        self._orbax = require_orbax()
        # With its processes named, Orbax lets them meet through the coordination service. Otherwise it uses a collective, which
        # must not run on another thread than those of the steps: each process could start them in another order.
        # Orbax's API V1 runs such collectives in each save, whatever its options are (0.12.8).
        meeting = self._orbax.options.MultiprocessingOptions(
            primary_host=0, active_processes=set(range(jax.process_count())) if jax.process_count() > 1 else None
        )
        self._checkpointer = self._orbax.AsyncCheckpointer(
            self._orbax.PyTreeCheckpointHandler(multiprocessing_options=meeting), multiprocessing_options=meeting
        )
        logging.getLogger("absl").addFilter(_is_not_of_a_thread)

    def write(self, folder: Path, arrays: Mapping[str, Any]) -> None:
        """Write arrays to a new folder. It appears under its name when it is complete. All processes call this.

        Raises:
          Exception: of Orbax and TensorStore, if an array cannot be written.
        """
        self._checkpointer.save(folder.absolute(), args=self._orbax.args.PyTreeSave(dict(arrays)))
        self._checkpointer.wait_until_finished()

    def read(self, folder: Path, like: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        """Read arrays of the given shapes and dtypes, onto the given shardings. All processes call this.

        Raises:
          Exception: of Orbax and TensorStore, if an array cannot be read.
        """
        target = dict(like)
        arguments = self._orbax.checkpoint_utils.construct_restore_args(target)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Orbax, about shardings in files, which are not used
            return self._checkpointer.restore(
                folder.absolute(), args=self._orbax.args.PyTreeRestore(item=target, restore_args=arguments)
            )

    def close(self) -> None:
        """End the threads."""
        self._checkpointer.close()


def snapshot(arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Copy arrays, so that the next step may reuse their memory. The copy is started, and not waited for.

    On an accelerator it goes to pinned memory of the host, so that it takes no memory of the device.
    """
    groups: dict[frozenset[jax.Device], list[str]] = {}  # one program needs all of its arrays on the same devices
    for name, array in arrays.items():
        groups.setdefault(frozenset(array.sharding.device_set), []).append(name)
    copies: dict[str, jax.Array] = {}
    for devices, names in groups.items():
        group = {name: arrays[name] for name in names}
        if next(iter(devices)).platform == "cpu":
            copies |= _copying(tuple((name, x.sharding) for name, x in group.items()))(group)
        else:
            copies |= jax.device_put(group, {name: x.sharding.with_memory_kind("pinned_host") for name, x in group.items()})
    return copies


@functools.lru_cache(maxsize=4)
def _copying(shardings: tuple[tuple[str, Any], ...]) -> Any:
    return jax.jit(lambda arrays: jax.tree.map(jnp.copy, arrays), out_shardings=dict(shardings))


def _is_not_of_a_thread(record: logging.LogRecord) -> bool:
    """Drop what Orbax logs about an error in one of its threads: the same error is raised."""
    return "_SignalingThread.run() raised" not in str(record.msg)
