"""Break a training on purpose, and see that nothing is lost: kills, signals, damaged checkpoints, full disks, other devices.

Counts of runs go in; a table of what was tried, and how many ended as they should, comes out.
"""
