"""Names of TPU topologies that work are found and listed."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shard.hlo.topologies import CHIPS, default_topology, find_topology, topologies_of


@pytest.mark.parametrize(
    ("name", "chip", "devices"),
    [("v5e:2x4", "v5e", 8), ("TPU v5e:4x4", "v5e", 16), ("v4:2x2x2", "v4", 8), ("V3:2x2", "v3", 8), ("tpu7x:2x2x1", "tpu7x", 8)],
)
def test_a_name_gives_chip_and_devices(name, chip, devices):
    found = find_topology(name)
    assert (found.chip, found.devices, found.hardware) == (chip, devices, f"tpu-{chip}")


@pytest.mark.parametrize("name", ["v5e:3x3", "v5e:2x0", "v5e:2x2x2", "v99:2x4", "v5e", "v5e:8", "2x4", "v4-8", "", "v5e:2x"])
def test_a_topology_that_does_not_exist_is_refused_in_a_line_with_names_that_work(name):
    with pytest.raises(ValueError, match="there is no TPU topology") as refused:
        find_topology(name)
    message = str(refused.value)
    assert "\n" not in message
    listed = re.findall(r"\w+:\d+(?:x\d+)+", message.replace(repr(name), ""))
    assert listed
    assert all(find_topology(each) for each in listed)


@given(st.sampled_from(sorted(CHIPS)), st.integers(1, 4096))
def test_a_default_topology_has_the_devices(chip, devices):
    found = default_topology(chip, devices)
    if found is not None:
        assert find_topology(found.name) == found
        assert found.devices == devices
    else:
        assert devices & (devices - 1) or devices == 1, "every power of two has a topology"


def test_no_chip_has_a_topology_of_its_own_number_only():
    assert topologies_of(8)[0] == "v2:2x2"
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

# As in test_compile_exported.py.
if importlib.util.find_spec("libtpu"):

    def test_the_tpu_compiler_accepts_the_names_and_refuses_others():
        names = [name for devices in (1, 2, 4, 6, 8, 12, 16, 64, 256) for name in topologies_of(devices)]
        others = ["v5e:3x3", "v5e:2x3", "v4:2x3x2", "v99:2x4"]
        environment = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
        run = [sys.executable, "-c", _ASK, *names, *others]
        done = subprocess.run(run, env=os.environ | environment, capture_output=True, text=True, check=True, timeout=200)
        wanted = [find_topology(name).devices for name in names] + [0] * len(others)
        assert [int(line) for line in done.stdout.splitlines()[-len(wanted) :]] == wanted
