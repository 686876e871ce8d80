"""The devices of this process are measured once, and their figures kept in a file."""

import dataclasses
import json
import types

import jax
import pytest

from penstock.shard.mesh import hardware
from penstock.shard.mesh.hardware import Hardware, device_memory, find_hardware, measure_devices, this_machine


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "penstock" / "hardware.json"


def test_this_machine_is_measured_once(cache, monkeypatch):
    first = this_machine()
    assert first.name == "this machine"
    assert not first.reduce_scatters  # these are CPUs
    assert "unknown" not in first.source
    assert min(first.peak("float32"), first.memory, first.memory_bandwidth, first.link_bandwidth, first.link_latency) > 0
    monkeypatch.setattr(hardware, "measure_devices", lambda devices: pytest.fail("measured again"))
    assert find_hardware("this machine") == first
    assert list(cache.parent.iterdir()) == [cache]


def test_the_links_of_a_single_device_are_reported_as_unknown():
    assert "the links are unknown" in measure_devices(jax.devices()[:1]).source


def test_an_accelerator_without_a_memory_limit_is_an_error():
    device = types.SimpleNamespace(device_kind="Chip 9", platform="chip", memory_stats=lambda: None)
    with pytest.raises(ValueError, match="Chip 9 does not tell how much memory it has: give hardware= one of tpu-v4"):
        device_memory(device, 1)
    device.memory_stats = lambda: {"bytes_limit": 7}
    assert device_memory(device, 1) == 7


@pytest.mark.parametrize("folder", ["no home", "not writable"])
def test_a_machine_whose_figures_cannot_be_kept_is_measured_all_the_same(folder, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(hardware, "user_cache", lambda: None if folder == "no home" else tmp_path / "file")
    measured = Hardware("this machine", {"float32": 1.0}, 1, 1.0, 1.0, 1.0, "")
    monkeypatch.setattr(hardware, "measure_devices", lambda devices: measured)
    assert this_machine() == measured


@pytest.mark.parametrize("content", ["{", "[]", '{"other": {}}'])
def test_an_unusable_cache_is_replaced(cache, content, monkeypatch):
    cache.parent.mkdir()
    cache.write_text(content)
    measured = Hardware("this machine", {"float32": 1.0}, 1, 1.0, 1.0, 1.0, "")
    monkeypatch.setattr(hardware, "measure_devices", lambda devices: measured)
    assert this_machine() == measured
    kept = json.loads(cache.read_text())
    assert len(kept) == 1 + ("other" in content)
    # An entry of an earlier version under the same key, and an entry with an impossible figure.
    for unusable in ({"speed": 1}, {**dataclasses.asdict(measured), "link_bandwidth": 0.0}):
        cache.write_text(json.dumps(dict.fromkeys(kept, unusable)))
        assert this_machine() == measured
