"""Names of TPU topologies that work are found and listed."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shard.hlo.topologies import CHIPS, OWN_HARDWARE, default_topology, find_topology, topologies_of


@pytest.mark.parametrize(
    ("name", "chip", "devices"),
    [("v5e:2x4", "v5e", 8), ("TPU v5e:4x4", "v5e", 16), ("v4:2x2x2", "v4", 8), ("V3:2x2", "v3", 8), ("tpu7x:2x2x1", "tpu7x", 8)],
)
def test_a_name_gives_chip_and_devices(name, chip, devices):
    found = find_topology(name)
    assert (found.chip, found.devices) == (chip, devices)
    assert found.hardware == (None if chip in ("v3", "tpu7x") else f"tpu-{chip}")


WRONG = ["v5e:3x3", "v5e:2x0", "v5e:2x2x2", "v99:2x4", "v5e", "v5e:8", "2x4", "v4-8", "", "v5e:2x", "v3:3x3"]
TOO_LARGE = ["v5e:32x32", "v6e:16x32", "v6e:1x256", "v2:16x32", "v3:64x32", "v4:16x16x32", "v4:2x2x1024", "v5p:16x24x28"]
WITHOUT_ROUTES = ["v5e:2x16", "v5e:10x8", "v5e:14x16"]


@pytest.mark.parametrize("name", [*WRONG, *TOO_LARGE, *WITHOUT_ROUTES])
def test_a_topology_that_does_not_exist_is_refused_in_a_line_with_names_that_work(name):
    with pytest.raises(ValueError, match="there is no TPU topology") as refused:
        find_topology(name)
    message = str(refused.value)
    assert "\n" not in message
    listed = re.findall(r"\w+:\d+(?:x\d+)+", message.replace(repr(name), ""))
    assert listed
    assert all(find_topology(each) for each in listed)
    assert all(find_topology(each).hardware for each in listed) or OWN_HARDWARE in message


@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("v5e:16x16", 256),
        ("v6e:16x16", 256),
        ("v2:16x16", 512),
        ("v3:32x32", 2048),
        ("v4:16x16x16", 4096),
        ("v5p:16x20x28", 8960),
    ],
)
def test_a_whole_pod_is_a_topology(name, devices):
    assert find_topology(name).devices == devices


def test_a_topology_larger_than_a_pod_is_refused_with_the_size_of_a_pod():
    with pytest.raises(ValueError, match=r"no TPU topology 'v5e:32x32': v5e has at most 256 chips; of v5e, these work"):
        find_topology("v5e:32x32")


def test_names_that_work_without_a_hardware_of_ones_own_are_listed():
    with pytest.raises(
        ValueError, match=r"v6e:8x8; a plan for v2, v3 or tpu7x needs hardware=penstock.shard.Hardware\(...\) of"
    ) as refused:
        find_topology("v99:2x4")
    assert "v3:" not in str(refused.value)


@given(st.sampled_from(sorted(CHIPS)), st.integers(1, 4096))
def test_a_default_topology_has_the_devices(chip, devices):
    found = default_topology(chip, devices)
    if found is not None:
        assert find_topology(found.name) == found
        assert found.devices == devices
    else:
        in_a_pod = devices <= CHIPS[chip].most * CHIPS[chip].cores
        assert devices & (devices - 1) or devices == 1 or not in_a_pod, "every power of two in a pod has a topology"


def test_no_chip_has_a_topology_of_its_own_number_only():
    assert topologies_of(8)[0] == "v4:2x2x2"
    assert default_topology("h100", 8) is None


_ASK = """
import sys
from jax.experimental import topologies
for name in sys.argv[1:]:
    chips = {"chip_config_name": "megacore"} if name.startswith("v4") else {}
    try:
        print(len(topologies.get_topology_desc(platform="tpu", topology_name=name, **chips).devices))
    except RuntimeError:
        print(0)
"""

# As in test_compile_worker.py.
if importlib.util.find_spec("libtpu"):

    def test_the_tpu_compiler_accepts_the_names_and_refuses_others():
        names = [name for devices in (1, 2, 4, 6, 8, 12, 16, 64, 256) for name in topologies_of(devices)]
        others = ["v5e:3x3", "v5e:2x3", "v4:2x3x2", "v99:2x4"]
        environment = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
        run = [sys.executable, "-c", _ASK, *names, *others]
        done = subprocess.run(run, env=os.environ | environment, capture_output=True, text=True, check=True, timeout=200)
        wanted = [find_topology(name).devices for name in names] + [0] * len(others)
        assert [int(line) for line in done.stdout.splitlines()[-len(wanted) :]] == wanted
