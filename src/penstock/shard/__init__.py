"""Plan the sharding of a train step: find it by a search, and check it with the compiler.

The subpackages, in the order of their imports: `mesh/`, `trace/`, `graph/`, `search/`, `apply/`, `hlo/`, `present/`.
"""

from penstock.shard.hlo.analysis import Measured as Measured
from penstock.shard.hlo.collectives import Collective as Collective
from penstock.shard.mesh.hardware import Hardware as Hardware
from penstock.shard.mesh.hardware import find_hardware as find_hardware
from penstock.shard.plan import Plan as Plan
from penstock.shard.record import LeafLayout as LeafLayout
from penstock.shard.search.costs import Cost as Cost
from penstock.shard.search.costs import Memory as Memory
from penstock.shard.search.costs import PlannedCollective as PlannedCollective
from penstock.shard.verify import Verified as Verified
