"""Workloads on the way from storage to the device: throughput, overlap, overhead, memory and restoring."""

from penstock.bench.suites.feed import images, memory, overhead, overlap, restore, tokens

WORKLOADS = (
    images.WORKLOAD,
    tokens.WORKLOAD,
    overlap.WORKLOAD,
    overhead.WORKLOAD,
    memory.WORKLOAD,
    restore.WORKLOAD,
)
