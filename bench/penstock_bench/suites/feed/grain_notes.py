"""Define the notes on Grain's threads, which all workloads of the suite share."""

GRAIN_DEFAULT = "its default ReadOptions: 16 threads"
GRAIN_IN_MEMORY = "ReadOptions(num_threads=0), which Grain advises for data in memory"
