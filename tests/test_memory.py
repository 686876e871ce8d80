"""Freed arrays are kept for the next ones, on the main thread and on others."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys

import pytest

from penstock import _memory

# Rounds in which a thread holds several arrays of 12 MB at once. Eight are more than one heap of a thread, which has 64 MB; the
# main thread keeps up to 64 MB.
ROUNDS = """
import json, resource, runpy, threading
import numpy as np

if {keep}:
    runpy.run_path({path!r})["keep_freed_memory"]()  # the module alone, as importing the package takes a second
faults = []

def work():
    for _ in range(6):
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        arrays = [np.ones(12 << 20, np.uint8) for _ in range(8 if {on_thread} else 4)]
        del arrays
        faults.append(resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before)

if {on_thread}:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
else:
    work()
print(json.dumps(faults))
"""


def faults(keep, on_thread, **environment):
    """Return the page faults of each round in a new process."""
    code = ROUNDS.format(keep=keep, on_thread=on_thread, path=_memory.__file__)
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, check=True, timeout=120
    )
    return json.loads(done.stdout)


pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the memory of no other C library is touched")


@pytest.mark.parametrize("on_thread", [False, True])
def test_freed_arrays_are_kept(on_thread):
    first, _, *later = faults(keep=True, on_thread=on_thread)
    assert sum(later) < first / 2
    first, _, *later = faults(keep=False, on_thread=on_thread)
    assert sum(later) > first, "arrays are kept without it too, so this test shows nothing"


@pytest.mark.parametrize("setting", [{"MALLOC_TOP_PAD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.top_pad=131072"}])
def test_settings_of_the_user_stay(setting):
    first, _, *later = faults(keep=True, on_thread=True, **setting)
    assert sum(later) > first
