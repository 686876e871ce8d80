"""Memory that the heap reuses without asking the system is told by page faults: 256 for each MB that comes from it."""

import platform
import subprocess
import sys

import pytest

_PROGRAM = """
import ctypes, resource, sys
import numpy as np
from penstock_bench.suites.frameworks import heap

def faults(size):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.empty(size, np.uint8)[:: 4096] = 1
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: no larger pages, of which there would be few
for step in sys.argv[2:]:
    getattr(heap, step)()
faults(int(sys.argv[1]))
print(faults(int(sys.argv[1])))
"""

_MB = 1 << 20
_GIVEN_BACK = 40 * _MB


def again(size: int, *steps: str) -> int:
    """Page faults of the second block of a size, after the first was freed, in a fresh process."""
    command = [sys.executable, "-c", _PROGRAM, str(size), *steps]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the heap of no other C library is touched")


def test_block_is_kept_once_a_larger_one_was_freed():
    assert again(16 * _MB, "free_a_large_block") < 200


def test_large_block_is_kept_by_a_heap_that_was_grown():
    assert again(_GIVEN_BACK, "free_a_large_block") > 200 * 40
    assert again(_GIVEN_BACK, "free_a_large_block", "grow") < 200


def test_grown_heap_takes_no_memory_before_it_is_used():
    program = (
        "import resource\nfrom penstock_bench.suites.frameworks import heap\nheap.free_a_large_block()\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\nheap.grow()\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert int(done.stdout) < 100_000  # kB, of the gigabytes that it may use
