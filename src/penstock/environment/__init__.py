"""Examine the environment of a training: versions, devices, faults of jaxlib, memory and threads."""
