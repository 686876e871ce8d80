"""A plan of a small step, some of whose leaves have to be sharded."""

from jax.sharding import PartitionSpec as P

import penstock as ps

MESH = {"data": 2, "model": 4}


CONSTRAINTS = {"batch/*": P("data"), "in": P("model", "data")}


def plan_of(step, *args, **options):
    return ps.plan(step, *args, **{"mesh": MESH, "hardware": "tpu-v5e", "check": False, "constraints": CONSTRAINTS, **options})
