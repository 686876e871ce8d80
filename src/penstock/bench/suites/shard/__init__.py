"""The sharding planner: its plans against layouts by hand and another planner, scored by the compiled program."""

from penstock.bench.suites.shard.command import add_arguments as add_arguments
from penstock.bench.suites.shard.command import run as run
from penstock.bench.suites.shard.workload import WORKLOADS as WORKLOADS
from penstock.bench.suites.shard.workload import find as find
