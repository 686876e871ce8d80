"""Say in the notes of all workloads what a reader must know of Grain's threads."""

GRAIN_DEFAULT = "its default ReadOptions: 16 threads"
GRAIN_IN_MEMORY = "ReadOptions(num_threads=0), which Grain advises for data in memory"
