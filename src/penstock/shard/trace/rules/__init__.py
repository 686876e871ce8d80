"""The sharding rules: for each JAX primitive, one small function that tells which of its dimensions may be sharded.

To add a primitive, write a function with `@rule_for("primitive")` in the module of its kind. The docstring of each function
gives its rule as an einsum, in which `.` is a dimension that must be replicated, and `..` are several of them.
"""

from penstock.shard.trace.rules import contract as contract
from penstock.shard.trace.rules import elementwise as elementwise
from penstock.shard.trace.rules import index as index
from penstock.shard.trace.rules import linalg as linalg
from penstock.shard.trace.rules import random as random
from penstock.shard.trace.rules import reduce as reduce
from penstock.shard.trace.rules import shape as shape
from penstock.shard.trace.rules.rule import RULES as RULES
from penstock.shard.trace.rules.rule import Rule as Rule
from penstock.shard.trace.rules.rule import find_rule as find_rule
