"""Read a compiled program: its collectives, FLOPs and memory.

In: a jitted step, or the HLO text of a compiled one. Out: `Measured`, the compiler's figures. The program may be for devices that
are not present: virtual CPU devices, or a TPU topology.
"""
