"""Turn a step function into a flat program, with its state, its fingerprint, its FLOPs and its sharding rules."""
