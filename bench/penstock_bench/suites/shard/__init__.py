"""The sharding planner: its plans against layouts by hand and another planner, scored by the compiled program."""

from penstock_bench.suites.shard.arguments import add_arguments as add_arguments
from penstock_bench.suites.shard.arguments import choose as choose
from penstock_bench.suites.shard.arguments import find as find
from penstock_bench.suites.shard.workload import SMALL

WORKLOADS = (SMALL,)
