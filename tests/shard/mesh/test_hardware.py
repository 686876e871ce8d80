"""Hardware by name, its peaks, and this machine measured once."""

import dataclasses
import json
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from penstock.shard.mesh import calibration
from penstock.shard.mesh.calibration import this_machine
from penstock.shard.mesh.hardware import Hardware
from penstock.shard.mesh.lookup import find_hardware

NAMES = ["tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e", "a100", "h100", "h200", "b200", "l4"]


@pytest.mark.parametrize("name", NAMES)
def test_each_has_what_a_cost_needs(name):
    found = find_hardware(name)
    assert found.name == name
    assert found.source
    assert found.peak("float32") <= found.peak("bfloat16") <= found.peak("int8")
    assert 1e10 < found.link_bandwidth < found.memory_bandwidth < found.peak("float32")
    assert found.memory >= 16 * 10**9
    assert 0 < found.link_latency < 1e-4


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
def test_figures_of_the_datasheets(name, bfloat16, memory_bandwidth, link):
    found = find_hardware(name)
    assert (found.peak("bfloat16"), found.memory_bandwidth, found.link_bandwidth) == (bfloat16, memory_bandwidth, link)


@pytest.mark.parametrize("name", ["v5e", "TPU-v5e", "tpu v5e", "tpu_v5e", " tpu-v5e "])
def test_names_are_taken_as_people_write_them(name):
    assert find_hardware(name) is find_hardware("tpu-v5e")


def test_hardware_is_itself():
    own = Hardware("own", {"float32": 1.0}, 1, 1.0, 1.0, 1.0, "")
    assert find_hardware(own) is own


def test_an_unknown_name_tells_the_nearest():
    with pytest.raises(ValueError, match=r'"tpu-v5" is not known; nearest: tpu-v5[ep], tpu-v5[ep]'):
        find_hardware("tpu-v5")
    with pytest.raises(ValueError, match="h100") as raised:
        find_hardware("abacus")
    assert all(str(raised.value).count(name) == 1 for name in NAMES)


@pytest.mark.parametrize("which", [5, None, ["h100"], Hardware])
def test_what_is_no_name_is_refused(which):
    with pytest.raises(TypeError, match=r"hardware=.* is neither a name, such as 'tpu-v5e', nor a .*Hardware"):
        find_hardware(which)


@pytest.mark.parametrize("number", [0, -1.0, float("nan"), "1 GB", None, True])
@pytest.mark.parametrize("name", ["memory", "memory_bandwidth", "link_bandwidth", "flops", "axis_bandwidth"])
def test_speeds_and_sizes_are_above_zero(name, number):
    mapping = {"flops": "float32", "axis_bandwidth": "data"}.get(name)
    said = rf"Hardware 'tpu-v5e': {name}.*={number!r}"
    with pytest.raises((TypeError, ValueError), match=said):
        dataclasses.replace(find_hardware("v5e"), **{name: {mapping: number} if mapping else number})


@pytest.mark.parametrize("number", [-1e-6, float("nan"), float("inf"), "1 us"])
def test_latencies_are_times(number):
    for changed in ({"link_latency": number}, {"axis_latency": {"data": number}}):
        with pytest.raises((TypeError, ValueError), match=rf"{next(iter(changed))}.*={number!r}"):
            dataclasses.replace(find_hardware("v5e"), **changed)


def test_what_a_device_does_at_once_takes_no_time():
    fast = dataclasses.replace(find_hardware("v5e"), link_latency=0, memory_bandwidth=float("inf"), axis_latency={"data": 0.0})
    assert fast.latency(["data"]) == 0
    with pytest.raises(ValueError, match="memory=inf: it has to be above 0, and finite"):
        dataclasses.replace(fast, memory=float("inf"))


def test_peaks_and_axes_are_dicts():
    with pytest.raises(TypeError, match="flops=1 is no dict by dtype"):
        dataclasses.replace(find_hardware("v5e"), flops=1)
    with pytest.raises(TypeError, match="axis_bandwidth=None is no dict by mesh axis"):
        dataclasses.replace(find_hardware("v5e"), axis_bandwidth=None)


@pytest.mark.parametrize("dtype", ["bfloat16", jnp.bfloat16, jnp.dtype("bfloat16"), "float16", np.float16])
def test_a_dtype_in_any_form(dtype):
    assert find_hardware("h100").peak(dtype) == 989.4e12


def test_a_dtype_that_is_not_listed_has_the_peak_of_one_that_holds_it():
    own = Hardware("own", {"float32": 1.0, "bfloat16": 2.0}, 1, 1.0, 1.0, 1.0, "")
    assert [own.peak(name) for name in ("float8_e4m3fn", "int8", "float16", "float64", "int32")] == [2, 2, 2, 1, 1]
    assert find_hardware("h100").peak("float8_e4m3fn") == find_hardware("h100").flops["float8"]
    assert find_hardware("v5e").peak("uint8") == 393e12
    with pytest.raises(ValueError, match="nothing has no peak for float32"):
        Hardware("nothing", {}, 1, 1.0, 1.0, 1.0, "").peak("float32")


def test_a_slow_axis_slows_what_spans_it():
    mixed = Hardware("mixed", {}, 1, 1.0, 100.0, 1e-6, "", axis_bandwidth={"nodes": 10.0}, axis_latency={"nodes": 1e-5})
    assert [mixed.bandwidth(axes) for axes in [("model",), ("nodes",), ("model", "nodes"), ()]] == [100, 10, 10, 10]
    assert [mixed.latency(axes) for axes in [("model",), ("nodes",), ("model", "nodes"), ()]] == [1e-6, 1e-5, 1e-5, 1e-5]


def test_looking_up_starts_no_jax():
    script = "import sys; from penstock.shard.mesh.lookup import find_hardware; find_hardware('h100')\n"
    script += "from jax._src import xla_bridge; assert not xla_bridge.backends_are_initialized()"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "penstock" / "hardware.json"


def test_this_machine_is_measured_once(cache, monkeypatch):
    first = this_machine()
    assert first.name == "this machine"
    assert min(first.peak("float32"), first.memory, first.memory_bandwidth, first.link_bandwidth, first.link_latency) > 0
    monkeypatch.setattr(calibration, "_measure", lambda devices: pytest.fail("measured again"))
    assert find_hardware("this machine") == first
    assert list(cache.parent.iterdir()) == [cache]


def test_links_that_one_device_does_not_have_are_said_to_be_unknown():
    devices = jax.devices()
    assert "the links are unknown" in calibration._measure(devices[:1]).source
    assert "unknown" not in calibration._measure(devices).source


def test_an_accelerator_that_does_not_tell_its_memory_is_an_error():
    device = types.SimpleNamespace(device_kind="Chip 9", platform="chip", memory_stats=lambda: None)
    with pytest.raises(ValueError, match="Chip 9 does not tell how much memory it has: give hardware= one of tpu-v4"):
        calibration._memory(device, 1)
    device.memory_stats = lambda: {"bytes_limit": 7}
    assert calibration._memory(device, 1) == 7


@pytest.mark.parametrize("left", ["{", "[]", '{"other": {}}'])
def test_a_cache_that_cannot_be_used_is_replaced(cache, left, monkeypatch):
    cache.parent.mkdir()
    cache.write_text(left)
    measured = Hardware("this machine", {"float32": 1.0}, 1, 1.0, 1.0, 1.0, "")
    monkeypatch.setattr(calibration, "_measure", lambda devices: measured)
    assert this_machine() == measured
    kept = json.loads(cache.read_text())
    assert len(kept) == 1 + ("other" in left)
    # What an earlier version wrote under the same name, and what nobody can have measured.
    for worthless in ({"speed": 1}, {**dataclasses.asdict(measured), "link_bandwidth": 0.0}):
        cache.write_text(json.dumps(dict.fromkeys(kept, worthless)))
        assert this_machine() == measured
