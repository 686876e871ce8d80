"""Read a compiled program: its collectives, FLOPs and memory, for devices that are here or not."""
