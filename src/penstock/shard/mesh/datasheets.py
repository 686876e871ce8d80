"""List the known devices. Peaks, memory and bandwidths are from the vendors' datasheets, which each entry names."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.shard.mesh.hardware import Hardware

_GB = 10**9
_GIB, _MIB = 2**30, 2**20
_TERA = 1e12

# MiB of vector memory (VMEM) that a program of one device uses: Google, "How to scale your model", part 2.
_VMEM = {"v4": 32, "v5e": 128, "v5p": 64, "v6e": 128}

# Seconds of one step of a ring, as an order of magnitude. No datasheet gives them. A hop over ICI takes about 1 µs (Google,
# "How to scale your model", part 2). NCCL takes some µs for a step over NVLink or PCIe, most of it to start kernels
# (nccl-tests, latency of small sizes divided by the steps). They affect only the choice between collectives of a few kB.
_ICI_LATENCY, _NVLINK_LATENCY, _PCIE_LATENCY = 1e-6, 3e-6, 10e-6


def _tpu(
    version: str, bfloat16: float, int8: float, gib: int, gbps_memory: float, gbps_links: float, links: int, page: str
) -> Hardware:
    """Return the figures of a TPU.

    Args:
      version: such as "v5e".
      bfloat16, int8: peak TFLOP/s and TOP/s.
      gib: GiB of memory.
      gbps_memory: memory bandwidth, GB/s.
      gbps_links: bandwidth of a chip over all its links in one direction, Gbit/s, the unit that Google gives.
      links: number of links of a chip.
      page: the source.
    """
    return Hardware(
        name=f"tpu-{version}",
        flops={"bfloat16": bfloat16 * _TERA, "float32": bfloat16 * _TERA, "int8": int8 * _TERA},
        memory=gib * _GIB,
        memory_bandwidth=gbps_memory * _GB,
        link_bandwidth=gbps_links / 8 / links * _GB,
        link_latency=_ICI_LATENCY,
        source=page,
        platform="tpu",
        fast_memory=_VMEM[version] * _MIB,
    )


def _gpu(
    name: str,
    tera: Mapping[str, float],
    gb: int,
    gbps_memory: float,
    gbps_link: float,
    sheet: str,
    latency: float = _NVLINK_LATENCY,
) -> Hardware:
    """Return the figures of a GPU.

    Args:
      name: such as "h100".
      tera: peak TFLOP/s or TOP/s by dtype.
      gb: GB of memory.
      gbps_memory: memory bandwidth, GB/s.
      gbps_link: bandwidth of all links of a GPU in one direction, GB/s.
      sheet: the source.
      latency: seconds of one step of a ring.
    """
    flops = {dtype: peak * _TERA for dtype, peak in tera.items()}
    return Hardware(name, flops, gb * _GB, gbps_memory * _GB, gbps_link * _GB, latency, sheet)


_HOPPER = {"bfloat16": 989.4, "float32": 494.7, "float8": 1978.9, "int8": 1978.9, "float64": 66.9}

DATASHEETS = {
    device.name: device
    for device in (
        _tpu("v4", 275, 275, 32, 1228, 2400, 6, "Google Cloud, TPU v4; Jouppi et al., ISCA 2023, table 4: 6 links of 50 GB/s"),
        _tpu("v5e", 197, 393, 16, 819, 1600, 4, "Google Cloud, TPU v5e (cloud.google.com/tpu/docs/v5e)"),
        _tpu("v5p", 459, 918, 95, 2765, 4800, 6, "Google Cloud, TPU v5p (cloud.google.com/tpu/docs/v5p)"),
        _tpu("v6e", 918, 1836, 32, 1600, 3200, 4, "Google Cloud, TPU v6e (cloud.google.com/tpu/docs/v6e)"),
        _gpu(
            "a100",
            {"bfloat16": 312, "float32": 156, "int8": 624, "float64": 19.5},
            80,
            2039,
            300,
            "NVIDIA A100 datasheet, 80 GB SXM: NVLink 600 GB/s both ways",
        ),
        _gpu(
            "h100",
            _HOPPER,
            80,
            3350,
            450,
            "NVIDIA H100 datasheet, SXM, half of the peaks with sparsity: NVLink 900 GB/s both ways",
        ),
        _gpu(
            "h200",
            _HOPPER,
            141,
            4800,
            450,
            "NVIDIA H200 datasheet, SXM, half of the peaks with sparsity: NVLink 900 GB/s both ways",
        ),
        _gpu(
            "b200",
            {"bfloat16": 2250, "float32": 1100, "float8": 4500, "int8": 4500, "float64": 40},
            180,
            8000,
            900,
            "NVIDIA Blackwell architecture brief, HGX B200 at 1,000 W, dense: NVLink 1,800 GB/s both ways",
        ),
        _gpu(
            "l4",
            {"bfloat16": 121, "float32": 60, "float8": 242.5, "int8": 242.5},
            24,
            300,
            32,
            "NVIDIA L4 datasheet, half of the peaks with sparsity: PCIe 4.0 ×16, 32 GB/s one way",
            _PCIE_LATENCY,
        ),
    )
}
