"""Break a training on purpose, and see that nothing is lost: kills, signals, damaged checkpoints, full disks, other devices.

Run a given number of attempts; print a table of what was tried, and how many ended as they should.
"""
