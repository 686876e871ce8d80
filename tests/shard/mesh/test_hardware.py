"""A device's figures are checked, and its peaks and links are looked up by dtype and mesh axis."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from penstock.shard.mesh.hardware import Hardware, find_hardware


@pytest.mark.parametrize("number", [0, -1.0, float("nan"), "1 GB", None, True])
@pytest.mark.parametrize("name", ["memory", "memory_bandwidth", "link_bandwidth", "flops", "axis_bandwidth"])
def test_speeds_and_sizes_are_above_zero(name, number):
    mapping = {"flops": "float32", "axis_bandwidth": "data"}.get(name)
    message = rf"Hardware 'tpu-v5e': {name}.*={number!r}"
    with pytest.raises((TypeError, ValueError), match=message):
        dataclasses.replace(find_hardware("v5e"), **{name: {mapping: number} if mapping else number})


@pytest.mark.parametrize("number", [-1e-6, float("nan"), float("inf"), "1 us"])
def test_latencies_are_finite_and_not_negative(number):
    for changed in ({"link_latency": number}, {"axis_latency": {"data": number}}):
        with pytest.raises((TypeError, ValueError), match=rf"{next(iter(changed))}.*={number!r}"):
            dataclasses.replace(find_hardware("v5e"), **changed)


@pytest.mark.parametrize("number", [0, 1.5, float("nan"), "2"])
def test_sizes_of_axes_are_whole_numbers(number):
    with pytest.raises((TypeError, ValueError), match=rf"axis_size.*={number!r}"):
        dataclasses.replace(find_hardware("v5e"), axis_size={"node": number})


def test_zero_latency_and_infinite_bandwidth_are_allowed():
    fast = dataclasses.replace(find_hardware("v5e"), link_latency=0, memory_bandwidth=float("inf"), axis_latency={"data": 0.0})
    assert fast.latency(["data"]) == 0
    with pytest.raises(ValueError, match="memory=inf: it has to be above 0, and finite"):
        dataclasses.replace(fast, memory=float("inf"))


def test_peaks_and_axes_are_dicts():
    with pytest.raises(TypeError, match="flops=1 is not a dict by dtype"):
        dataclasses.replace(find_hardware("v5e"), flops=1)
    with pytest.raises(TypeError, match="axis_bandwidth=None is not a dict by mesh axis"):
        dataclasses.replace(find_hardware("v5e"), axis_bandwidth=None)


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


def test_a_collective_over_several_axes_has_the_speed_of_the_slowest():
    mixed = Hardware("mixed", {}, 1, 1.0, 100.0, 1e-6, "", axis_bandwidth={"nodes": 10.0}, axis_latency={"nodes": 1e-5})
    assert [mixed.bandwidth(axes) for axes in [("model",), ("nodes",), ("model", "nodes"), ()]] == [100, 10, 10, 10]
    assert [mixed.latency(axes) for axes in [("model",), ("nodes",), ("model", "nodes"), ()]] == [1e-6, 1e-5, 1e-5, 1e-5]
