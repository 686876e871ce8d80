"""The road from storage to the device: throughput, overlap, overhead, memory and restoring."""

from penstock.bench.suites.feed import memory, overhead, overlap, restore, seed002, tokens

WORKLOADS = (
    seed002.WORKLOAD,
    tokens.WORKLOAD,
    overlap.WORKLOAD,
    overhead.WORKLOAD,
    memory.WORKLOAD,
    restore.WORKLOAD,
)
