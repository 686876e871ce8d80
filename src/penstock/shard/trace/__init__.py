"""The trace room: a step function as a flat program, with its state, its fingerprint, its FLOPs and its sharding rules."""
