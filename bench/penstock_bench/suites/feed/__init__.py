"""Workloads on the way from storage to the device: speed, overlap, overhead, memory, restoring, and data of many kinds."""

from penstock_bench.suites.feed import (
    images,
    jpeg_folder,
    memory,
    mixture,
    overhead,
    overlap,
    packing,
    plain_loop,
    remote,
    restore,
    tokens,
    verdict_cost,
    verdicts,
    windows,
)

WORKLOADS = (
    images.WORKLOAD,
    jpeg_folder.WORKLOAD,
    tokens.WORKLOAD,
    overlap.WORKLOAD,
    overhead.WORKLOAD,
    plain_loop.WORKLOAD,
    memory.WORKLOAD,
    restore.WORKLOAD,
    packing.WORKLOAD,
    packing.STEPS,
    windows.WORKLOAD,
    mixture.WORKLOAD,
    remote.WORKLOAD,
    verdicts.WORKLOAD,
    verdict_cost.WORKLOAD,
)
