"""Which dimensions of an operation may be sharded, and what that costs: one small function for each primitive."""

from penstock.shard.rules import contract as contract
from penstock.shard.rules import elementwise as elementwise
from penstock.shard.rules import index as index
from penstock.shard.rules import linalg as linalg
from penstock.shard.rules import random as random
from penstock.shard.rules import reduce as reduce
from penstock.shard.rules import shape as shape
from penstock.shard.rules.rule import RULES as RULES
from penstock.shard.rules.rule import Rule as Rule
from penstock.shard.rules.rule import rule_of as rule_of
