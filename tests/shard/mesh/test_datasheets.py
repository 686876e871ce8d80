"""The figures of the devices in the table of datasheets."""

import pytest

from penstock.shard.mesh.hardware import find_hardware

NAMES = ["tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e", "a100", "h100", "h200", "b200", "l4"]


@pytest.mark.parametrize("name", NAMES)
def test_each_device_has_the_figures_that_a_cost_needs(name):
    hardware = find_hardware(name)
    assert hardware.name == name
    assert hardware.source
    assert hardware.peak("float32") <= hardware.peak("bfloat16") <= hardware.peak("int8")
    assert 1e10 < hardware.link_bandwidth < hardware.memory_bandwidth < hardware.peak("float32")
    assert hardware.memory >= 16 * 10**9
    assert 0 < hardware.link_latency < 1e-4


@pytest.mark.parametrize(
    ("name", "bfloat16", "memory_bandwidth", "link"),
    [
        ("tpu-v4", 275e12, 1228e9, 50e9),
        ("tpu-v5e", 197e12, 819e9, 50e9),
        ("tpu-v5p", 459e12, 2765e9, 100e9),
        ("tpu-v6e", 918e12, 1600e9, 100e9),
        ("a100", 312e12, 2039e9, 300e9),
        ("h100", 989.4e12, 3350e9, 450e9),
        ("h200", 989.4e12, 4800e9, 450e9),
        ("b200", 2250e12, 8000e9, 900e9),
        ("l4", 121e12, 300e9, 32e9),
    ],
)
def test_figures_are_those_of_the_datasheets(name, bfloat16, memory_bandwidth, link):
    hardware = find_hardware(name)
    assert (hardware.peak("bfloat16"), hardware.memory_bandwidth, hardware.link_bandwidth) == (bfloat16, memory_bandwidth, link)
