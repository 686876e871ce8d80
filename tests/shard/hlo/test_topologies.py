"""Names of topologies that work are found and listed, and their compilers take them."""

import dataclasses
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shard.hlo.topologies import (
    CHIPS,
    GPUS,
    OWN_HARDWARE,
    default_topology,
    describe_missing_compiler,
    find_topology,
    topologies_of,
)
from penstock.shard.mesh.hardware import find_hardware


@pytest.mark.parametrize(
    ("name", "chip", "devices"),
    [
        *[
            ("v5e:2x4", "v5e", 8),
            ("TPU v5e:4x4", "v5e", 16),
            ("v4:2x2x2", "v4", 8),
            ("V3:2x2", "v3", 8),
            ("tpu7x:2x2x1", "tpu7x", 8),
        ],
        *[
            ("2xv5e:2x4", "v5e", 16),
            ("3xv4:2x2x1", "v4", 12),
            ("h100:8", "h100", 8),
            ("GPU H200:4x8", "h200", 32),
            ("l4:1", "l4", 1),
        ],
    ],
)
def test_a_name_gives_chip_and_devices(name, chip, devices):
    found = find_topology(name)
    assert (found.chip, found.devices) == (chip, devices)
    assert found.hardware == (None if chip in ("v3", "tpu7x") else chip if chip in GPUS else f"tpu-{chip}")


@pytest.mark.parametrize(
    ("name", "domains"), [("v5e:4x4", 1), ("2xv5e:4x4", 2), ("h100:8", 1), ("h100:4x8", 4), ("b200:2x4", 2), ("1xv5e:2x2", 1)]
)
def test_slices_and_hosts_are_domains_of_the_hardware(name, domains):
    found = find_topology(name)
    assert found.domains == domains
    placed = found.place(find_hardware(found.hardware))
    assert placed.domain_of(found.devices) == (found.devices // domains if domains > 1 else 0)
    alone = dataclasses.replace(placed, name="own", domain=0, network_bandwidth=0.0)
    assert found.place(alone) == alone


WRONG = ["v5e:3x3", "v5e:2x0", "v5e:2x2x2", "v99:2x4", "v5e", "v5e:8", "2x4", "v4-8", "", "v5e:2x", "v3:3x3"]
TOO_LARGE = ["v5e:32x32", "v6e:16x32", "v6e:1x256", "v2:16x32", "v3:64x32", "v4:16x16x32", "v4:2x2x1024", "v5p:16x24x28"]
NO_HOSTS = ["h100:16", "h100:0", "h100:0x8", "h100:2x2x8", "2xh100:8", "h100", "h100:8x", "v100:8", "0xv5e:2x4", "2x3xv5e:2x4"]
WITHOUT_ROUTES = ["v5e:2x16", "v5e:10x8", "v5e:14x16"]


@pytest.mark.parametrize("name", [*WRONG, *TOO_LARGE, *NO_HOSTS, *WITHOUT_ROUTES])
def test_a_topology_that_does_not_exist_is_refused_in_a_line_with_names_that_work(name):
    with pytest.raises(ValueError, match="there is no topology") as refused:
        find_topology(name)
    message = str(refused.value)
    assert "\n" not in message
    listed = re.findall(r"\w+:\d+(?:x\d+)*", message.replace(repr(name), ""))
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
    with pytest.raises(ValueError, match=r"no topology 'v5e:32x32': v5e has at most 256 chips in a slice; of v5e, these work"):
        find_topology("v5e:32x32")


def test_names_that_work_without_a_hardware_of_ones_own_are_listed():
    with pytest.raises(
        ValueError, match=r"l4:8x8; a plan for v2, v3 or tpu7x needs hardware=penstock.shard.Hardware\(...\) of"
    ) as refused:
        find_topology("v99:2x4")
    assert "v3:" not in str(refused.value)


@given(st.sampled_from([*CHIPS, *GPUS]), st.integers(1, 4096))
def test_a_default_topology_has_the_devices(chip, devices):
    found = default_topology(chip, devices)
    if found is not None:
        assert find_topology(found.name) == found
        assert found.devices == devices
    else:
        assert chip in CHIPS, "GPUs come in any number"
        in_a_pod = devices <= CHIPS[chip].most * CHIPS[chip].cores
        assert devices & (devices - 1) or devices == 1 or not in_a_pod, "every power of two in a pod has a topology"


def test_no_chip_has_a_topology_of_its_own_number_only():
    assert topologies_of(8)[0] == "v4:2x2x2"
    assert default_topology("mi300", 8) is None


@pytest.mark.parametrize(
    ("package", "release", "said"),
    [
        ("jax-cuda12-pjrt", None, r'the GPU compiler is not installed: pip install "penstock\[gpu-compiler\]"'),
        ("jax-cuda12-pjrt", "0.1", r"jax-cuda12-pjrt 0.1, and jaxlib is 9.9: .*jax-cuda12-pjrt==9.9 jax-cuda12-plugin==9.9"),
        ("jax-cuda13-pjrt", "9.8", r"jax-cuda13-pjrt 9.8, and jaxlib is 9.9: .*jax-cuda13-pjrt==9.9 jax-cuda13-plugin==9.9"),
        ("jax-cuda13-pjrt", "9.9", "^$"),
    ],
)
def test_a_gpu_compiler_that_is_missing_or_of_another_release_is_told_with_a_command(monkeypatch, package, release, said):
    def version(name):
        if name == "jaxlib":
            return "9.9"
        if name == package and release:
            return release
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert re.search(said, describe_missing_compiler(find_topology("h100:8")))


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
        names = [name for name in names if find_topology(name).platform == "tpu"]
        others = ["v5e:3x3", "v5e:2x3", "v4:2x3x2", "v99:2x4"]
        environment = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
        run = [sys.executable, "-c", _ASK, *names, *others]
        done = subprocess.run(run, env=os.environ | environment, capture_output=True, text=True, check=True, timeout=200)
        wanted = [find_topology(name).devices for name in names] + [0] * len(others)
        assert [int(line) for line in done.stdout.splitlines()[-len(wanted) :]] == wanted
