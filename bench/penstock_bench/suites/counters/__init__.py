"""Numbers that are counted and not only timed: bytecodes and memory of a batch, FLOPs, bytes and page faults of a step.

These numbers hardly depend on the load of the machine, so CI judges them; it never judges a time.
"""

from penstock_bench.suites.counters import feeding, programs

WORKLOADS = (feeding.WORKLOAD, programs.WORKLOAD)
