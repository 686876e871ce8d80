"""The settings that are chosen, and what they do in a real program."""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from penstock._doctor.jaxlib_faults import CASES, YNNPACK
from penstock._launcher import settings
from penstock._launcher.command import said, shell_lines
from penstock._launcher.settings import Choice, Setting, choose
from penstock.cli import main

ALLOCATOR = {"MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_ARENA_MAX"}
glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are glibc's")

# Faults of a step after the first ones, whose temporaries are larger than any block that glibc keeps by itself.
FAULTS = """
import json, resource
import jax, jax.numpy as jnp

@jax.jit
def step(x):
    return jnp.roll(jnp.cumsum(x), 1).sum() + jnp.sort(x[: len(x) // 64]).sum()

x = jnp.ones(16 << 20, jnp.float32)
faults = []
for _ in range(20):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step(x).block_until_ready()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(json.dumps(faults))
"""


@pytest.fixture
def cpu(monkeypatch):
    monkeypatch.setattr(settings, "nvidia_gpu", lambda: False)
    monkeypatch.setattr(settings, "installed", lambda name: None)


@glibc
def test_glibc_is_told_to_keep_what_is_freed(cpu):
    choice = choose({})
    assert {setting.name for setting in choice.settings} == ALLOCATOR
    assert all(setting.why for setting in choice.settings)
    assert not choice.left


@glibc
@pytest.mark.parametrize(
    ("name", "value"),
    [("MALLOC_ARENA_MAX", "2"), ("LD_PRELOAD", "libjemalloc.so.2"), ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")],
)
def test_what_a_user_has_chosen_stays(cpu, name, value):
    choice = choose({name: value})
    assert choice.settings == ()
    (reason,) = choice.left
    assert name in reason


def test_other_tunables_do_not_matter(cpu):
    assert choose({"GLIBC_TUNABLES": "glibc.rtld.optional_static_tls=512"}) == choose({})


def test_nothing_is_set_where_it_would_not_help(monkeypatch):
    monkeypatch.setattr(settings, "nvidia_gpu", lambda: True)
    assert choose({}).settings == ()
    assert "GPU" in choose({}).left[0]
    monkeypatch.setattr(settings, "nvidia_gpu", lambda: False)
    monkeypatch.setattr(settings.platform, "libc_ver", lambda: ("", ""))
    assert "another C library" in choose({}).left[0]


def run(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock", "run", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


@glibc
def test_a_program_gets_the_settings_its_arguments_and_its_exit_status(cpu):
    code = "import json, os, sys; print(json.dumps([dict(os.environ), sys.argv[1:]])); sys.exit(7)"
    done = run("--", sys.executable, "-c", code, "--steps", "3", "--", "x")
    assert done.returncode == 7
    environment, argv = json.loads(done.stdout)
    assert set(environment) >= ALLOCATOR
    assert argv == ["--steps", "3", "--", "x"]
    assert "MALLOC_MMAP_MAX_=0 (" in done.stderr


@glibc
def test_a_step_has_few_page_faults_with_them():
    without = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, timeout=200, check=True)
    with_them = run("--quiet", "--", sys.executable, "-c", FAULTS)
    assert with_them.stderr == ""
    # The heap still grows now and then, when a block is asked for before another thread has freed the last one.
    before, after = (statistics.median(json.loads(done.stdout)[-10:]) for done in (without, with_them))
    assert before > 10_000
    assert after < 0.01 * before


def test_settings_are_shown_as_commands_of_a_shell(cpu, capsys):
    assert main(["run", "--show"]) == 0
    printed = capsys.readouterr().out
    done = subprocess.run(["sh", "-c", printed + "env"], capture_output=True, text=True, check=True)
    assert all(f"{setting.name}={setting.value}" in done.stdout for setting in choose().settings)


def test_a_program_that_is_none_is_an_error(capsys):
    assert main(["run", "--"]) == 2
    assert "no program to start" in capsys.readouterr().err
    assert main(["run", "--", "no-such-program"]) == 127
    assert "'no-such-program' is not a program" in capsys.readouterr().err


def test_a_reason_is_printed_where_something_is_left():
    choice = Choice((Setting("A", "1 2", "because"),), ("B is left as it is: why",))
    assert said(choice) == ["A=1 2 (because)", "B is left as it is: why"]
    assert shell_lines(choice) == ["export A='1 2'  # because", "# B is left as it is: why"]


@pytest.mark.parametrize(
    ("flags", "set_to"),
    [
        ("", f"{YNNPACK}="),
        ("--xla_force_host_platform_device_count=8", f"--xla_force_host_platform_device_count=8 {YNNPACK}="),
        (f"{YNNPACK}=LIBRARY_FUSION_TYPE_DOT", None),
    ],
)
def test_ynnpack_is_turned_off_in_a_jaxlib_with_faults(cpu, monkeypatch, flags, set_to):
    monkeypatch.setattr(settings, "installed", lambda name: "0.10.2")
    found = {setting.name: setting.value for setting in choose({"XLA_FLAGS": flags}).settings}
    assert found.get("XLA_FLAGS") == set_to
    monkeypatch.setattr(settings, "installed", lambda name: "0.10.0")
    assert "XLA_FLAGS" not in {setting.name for setting in choose({"XLA_FLAGS": flags}).settings}


def test_flags_of_xla_are_left_to_a_program_of_another_python(cpu, monkeypatch):
    monkeypatch.setattr(settings, "installed", lambda name: "0.10.2")
    choice = choose({}, "/bin/sh")
    assert "XLA_FLAGS" not in {setting.name for setting in choice.settings}
    assert "/bin/sh is not in the folder of penstock's Python" in choice.left[-1]
    for name in (sys.executable, Path(sys.executable).name):
        found = choose({"PATH": str(Path(sys.executable).parent)}, name)
        assert "XLA_FLAGS" in {setting.name for setting in found.settings}


@pytest.mark.slow
def test_a_program_computes_right_what_this_jaxlib_computes_wrong(cpu):
    case = CASES[0].program + "\nassert np.allclose(got, expected), 'wrong'"
    code = "import jax, jax.numpy as jnp, numpy as np\n" + case
    done = run("--quiet", "--", sys.executable, "-c", code)
    assert (done.returncode, done.stderr) == (0, "")
