"""What lives where: a plan for any step function, found by a solver and held against the compiler."""

from penstock.shard.memory_check import PlanError as PlanError
from penstock.shard.hlo.analysis import CompileError as CompileError
from penstock.shard.mesh.hardware import Hardware as Hardware
from penstock.shard._plan import plan as plan
from penstock.shard._planned import Plan as Plan
