"""Which dimensions of an operation may be sharded, and what that costs: one small function for each primitive."""

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
