"""Find the rows that several processes hold under a sharding, and raise an error if the processes bring different ones."""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import itertools
import json
import threading
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding

from penstock._jax import process_messages, wait_for_message
from penstock.data.order.rows import shard_coordinates
from penstock.data.tree import describe_array, is_key

_PATIENCE = 300.0  # seconds that one process waits for the hashes of another
_LOOK = 0.5  # seconds between two checks whether this feed has ended

_numbers = itertools.count()  # of the comparisons; equal in all processes, which make their feeds in the same order

# From the name of a leaf to its description, its hash, and the processes that hold the same rows of it.
_Leaves = dict[str, tuple[str, str, Sequence[int]]]


@functools.lru_cache(256)
def replicas(sharding: Sharding) -> tuple[int, ...]:
    """Return the processes that hold the same shards as this process, this one included; () if there is no other.

    Raises:
      ValueError: another process holds some shards of this one, but not the same, so their rows cannot be compared.
    """
    here = jax.process_index()
    if sharding.is_fully_addressable:
        return ()
    if not isinstance(sharding, NamedSharding):
        devices: Any = sharding.device_set if sharding.is_fully_replicated else ()
        return tuple(sorted({device.process_index for device in devices}))
    shards = shard_coordinates(sharding)
    together = [process for process, held in shards.items() if held & shards[here]]
    for process in together:
        if shards[process] != shards[here]:
            raise ValueError(
                f"processes {here} and {process} hold some shards of {sharding.spec} on this mesh together, and others "
                "not, so the rows that each brings cannot fit: feed a ps.Loader, which reads what each process needs"
            )
    return tuple(sorted(together)) if len(together) > 1 else ()


class ReplicaCheck:
    """A comparison of each leaf between the processes that hold the same rows of it, by a hash of all bytes.

    The coordination service of `jax.distributed` carries the hashes. No device takes part, so the collectives of a training
    step cannot get out of order. At its end, a feed sends a notice in place of its next hashes, so no process waits for them.

    Args:
      shardings: the shardings of all leaves.

    Attributes:
      first: number of the first batch, for errors.
    """

    def __init__(self, shardings: Sequence[Sharding]):
        self._here = jax.process_index()
        self._peers = sorted({process for sharding in shardings for process in replicas(sharding)} - {self._here})
        self._name = f"penstock/replicated/{next(_numbers)}"
        self._messages = process_messages()
        self._sent, self.first = 0, 0
        self._ended = False
        self._lock = threading.RLock()  # a garbage collection in any place may end the feed
        # Before the exit function of `jax.distributed`, which waits for the other processes.
        atexit.register(self.end, "its program ended")

    def __call__(self, leaves: Sequence[tuple[str, Sharding, Any]]) -> None:
        """Compare a host batch, given as the name, the sharding and the rows of each leaf.

        Raises:
          ValueError: another process has other rows, or its feed has ended.
          TimeoutError: another process has not come to this batch for 5 minutes.
        """
        own: _Leaves = {
            name: (describe_array(leaf), _hash(leaf), group) for name, sharding, leaf in leaves if (group := replicas(sharding))
        }
        with self._lock:
            if self._ended:
                return  # the batch will not be handed over
            number, self._sent = self._sent, self._sent + 1
            self._send(number, {"batch": self.first + number, "leaves": own})
        for process in self._peers:
            message = self._receive(process, number)
            if message is None:
                return
            self._compare(process, self.first + number, own, message)
        if number:
            # The others have sent the hashes of this batch, so they have read the ones of the batch before.
            self._messages.key_value_delete(self._key(number - 1, self._here))

    def end(self, why: str) -> None:
        """Tell the other processes why no batch follows, such as "it was closed". It may be called again."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            atexit.unregister(self.end)
            with contextlib.suppress(Exception):  # the service may have ended before
                self._send(self._sent, {"ended": why[:500]})

    def _compare(self, process: int, number: int, own: _Leaves, message: dict[str, Any]) -> None:
        """Raise ValueError if the message of another process does not fit."""
        if "ended" in message:
            raise ValueError(
                f"process {process} has no batch {number} to compare with (replicated='check'), because its feed ended before "
                f"that: {message['ended']}. Every process needs the same number of batches: end the loop at the same step in "
                "all of them, and look at the output of that process if it failed"
            )
        if message["batch"] != number:
            raise ValueError(
                f"this is batch {number}, and process {process} is at batch {message['batch']}: restore the feeds of all "
                "processes to the state of the same step"
            )
        theirs: _Leaves = message["leaves"]
        absent: tuple[str, str, Sequence[int]] = ("absent", "", ())
        for name in {**own, **theirs}:
            what, digest, group = own.get(name, absent)
            other, other_digest, other_group = theirs.get(name, absent)
            if (process in group or self._here in other_group) and (what, digest) != (other, other_digest):
                difference = f"it has other values in {what}" if what == other else f"it is {what} here, and {other} there"
                raise ValueError(
                    f"leaf {name!r} of batch {number} differs between processes {self._here} and {process}, which hold the same "
                    f"rows of it under `to`: {difference}. Both have to bring the same rows in the same order: look for a seed, "
                    "an order of files or a random number that depends on the process"
                )

    def _key(self, number: int, process: int) -> str:
        return f"{self._name}/{number}/{process}"

    def _send(self, number: int, message: dict[str, Any]) -> None:
        self._messages.key_value_set(self._key(number, self._here), json.dumps(message))

    def _receive(self, process: int, number: int) -> dict[str, Any] | None:
        """Return the message of another process for a batch; None if this feed ends first."""
        deadline = time.monotonic() + _PATIENCE
        while not self._ended:
            message = wait_for_message(self._messages, self._key(number, process), _LOOK)
            if message is not None:
                return dict(json.loads(message))
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"process {process} has not brought batch {self.first + number} for {_PATIENCE:.0f} s, and process "
                    f"{self._here} waits to compare it (replicated='check'): it may be stuck, or its loop has ended without "
                    "closing the feed. Every process needs the same number of batches"
                )
        return None


def _hash(leaf: Any) -> str:
    array: Any = np.ascontiguousarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)
    return hashlib.blake2b(array.reshape(-1).view(np.uint8).data if array.size else b"", digest_size=16).hexdigest()
