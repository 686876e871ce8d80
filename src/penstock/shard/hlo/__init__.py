"""Read a compiled program: its collectives, FLOPs and memory (`Measured`).

The program may be for devices that are not present: virtual CPU devices, or a TPU topology.
"""
