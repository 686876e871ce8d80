"""Hardware is found by name, and starts no JAX unless it is measured."""

import jax
import pytest

from penstock.shard.mesh.hardware import DATASHEETS, Hardware, find_hardware


@pytest.mark.parametrize("name", ["v5e", "TPU v5e", " tpu_v5e "])
def test_names_may_be_spelled_in_several_ways(name):
    assert find_hardware(name) is find_hardware("tpu-v5e")


def test_a_hardware_object_is_returned_as_it_is():
    own = Hardware("own", {"float32": 1.0}, 1, 1.0, 1.0, 1.0, "")
    assert find_hardware(own) is own


def test_the_error_for_an_unknown_name_has_the_nearest():
    with pytest.raises(ValueError, match=r'"tpu-v5" is not known; nearest: tpu-v5[ep], tpu-v5[ep]'):
        find_hardware("tpu-v5")
    with pytest.raises(ValueError, match="h100") as raised:
        find_hardware("abacus")
    assert all(str(raised.value).count(name) == 1 for name in DATASHEETS)


@pytest.mark.parametrize("which", [None, ["h100"], Hardware])
def test_other_types_are_refused(which):
    with pytest.raises(TypeError, match=r"hardware=.* is neither a name, such as 'tpu-v5e', nor a .*Hardware"):
        find_hardware(which)


def test_looking_up_a_name_starts_no_jax(monkeypatch):
    for name in ("devices", "local_devices", "device_count", "default_backend", "process_count"):
        monkeypatch.setattr(jax, name, lambda *_, name=name: pytest.fail(f"jax.{name} was called"))
    assert find_hardware("h100").name
    with pytest.raises(pytest.fail.Exception, match=r"jax\..* was called"):
        find_hardware("this machine")
