"""What lives where: a plan for any step function, found by a solver and held against the compiler."""

from penstock.shard.check import PlanError as PlanError
from penstock.shard.compiled import CompileError as CompileError
from penstock.shard.hardware import Hardware as Hardware
from penstock.shard.plan import plan as plan
from penstock.shard.planned import Plan as Plan
