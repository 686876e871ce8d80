"""Read a step function: its jaxpr as a flat program, its state, its FLOPs, and the sharding rule of each primitive."""
