"""A device's figures are checked, and its peaks are looked up by dtype."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shard.mesh.hardware import Hardware, find_hardware


@pytest.mark.parametrize("number", [0, -1.0, float("nan"), "1 GB", None, True])
@pytest.mark.parametrize("name", ["memory", "memory_bandwidth", "link_bandwidth", "flops"])
def test_speeds_and_sizes_are_above_zero(name, number):
    message = rf"Hardware 'tpu-v5e': {name}.*={number!r}"
    with pytest.raises((TypeError, ValueError), match=message):
        dataclasses.replace(find_hardware("v5e"), **{name: {"float32": number} if name == "flops" else number})


@pytest.mark.parametrize("number", [-1e-6, float("nan"), float("inf"), "1 us"])
@pytest.mark.parametrize("name", ["link_latency", "network_latency", "network_bandwidth", "domain"])
def test_latencies_and_the_network_are_finite_and_not_negative(name, number):
    with pytest.raises((TypeError, ValueError), match=rf"{name}={number!r}"):
        dataclasses.replace(find_hardware("v5e"), **{name: number})


def test_domains_are_whole_numbers_of_devices_with_a_network():
    with pytest.raises(ValueError, match=r"domain=1.5: it is a number of devices"):
        dataclasses.replace(find_hardware("h100"), domain=1.5)
    with pytest.raises(ValueError, match=r"domain=8 has no network to others: give network_bandwidth"):
        dataclasses.replace(find_hardware("h100"), network_bandwidth=0)


@given(st.integers(1, 5000), st.integers(0, 100))
def test_domains_are_as_few_and_equal_as_the_devices_allow(devices, most):
    domain = dataclasses.replace(find_hardware("h100"), domain=most).domain_of(devices)
    if not most or devices <= most:
        assert domain == 0
    else:
        assert devices % domain == 0
        assert not any(devices % larger == 0 for larger in range(domain + 1, most + 1))


def test_zero_latency_and_infinite_bandwidth_are_allowed():
    fast = dataclasses.replace(find_hardware("v5e"), link_latency=0, memory_bandwidth=float("inf"))
    with pytest.raises(ValueError, match="memory=inf: it has to be above 0, and finite"):
        dataclasses.replace(fast, memory=float("inf"))


def test_peaks_are_a_dict():
    with pytest.raises(TypeError, match="flops=1 is not a dict by dtype"):
        dataclasses.replace(find_hardware("v5e"), flops=1)


@pytest.mark.parametrize("dtype", ["bfloat16", jnp.bfloat16, jnp.dtype("bfloat16"), "float16", np.float16])
def test_a_dtype_may_be_a_name_or_an_object(dtype):
    assert find_hardware("h100").peak(dtype) == 989.4e12


def test_a_dtype_that_is_not_listed_has_the_peak_of_one_that_holds_it():
    own = Hardware("own", {"float32": 1.0, "bfloat16": 2.0}, 1, 1.0, 1.0, 1.0, "")
    assert [own.peak(name) for name in ("float8_e4m3fn", "int8", "float16", "float64", "int32")] == [2, 2, 2, 1, 1]
    assert find_hardware("h100").peak("float8_e4m3fn") == find_hardware("h100").flops["float8"]
    assert find_hardware("v5e").peak("uint8") == 393e12
    with pytest.raises(ValueError, match="nothing has no peak for float32"):
        Hardware("nothing", {}, 1, 1.0, 1.0, 1.0, "").peak("float32")
