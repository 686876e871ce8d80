"""The settings that are chosen, and what they do in a real program."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from penstock import run_command
from penstock._jaxlib_faults import CASES, YNNPACK, fails_with_ynnpack
from penstock.cli import main
from penstock.run_command import Choice, Setting, choose, describe, shell_lines

ALLOCATOR = {"MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_ARENA_MAX"}
INSTALLED = [name for name in run_command.OTHERS if run_command.preload(name)]
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


OF_USERS = ("MALLOC_", "TCMALLOC_", "LD_PRELOAD", "GLIBC_TUNABLES", "XLA_FLAGS")
AS_IT_COMES = {name: value for name, value in os.environ.items() if not name.startswith(OF_USERS)} | {"JAX_PLATFORMS": "cpu"}


@pytest.fixture
def cpu(monkeypatch):
    monkeypatch.setattr(run_command, "nvidia_gpu", lambda: False)
    monkeypatch.setattr(run_command, "installed", lambda name: "0.12.0.1")
    monkeypatch.setattr(run_command, "preload", lambda name: ())


@glibc
def test_glibc_is_told_to_keep_what_is_freed(cpu):
    choice = choose({})
    assert {setting.name for setting in choice.settings} == ALLOCATOR
    assert all(setting.why for setting in choice.settings)
    assert not choice.left


@glibc
def test_the_first_other_allocator_that_is_installed_is_loaded(cpu, monkeypatch):
    monkeypatch.setattr(
        run_command, "preload", lambda name: () if name == "tcmalloc_minimal" else (Setting("LD_PRELOAD", name, "why"),)
    )
    assert choose({}).variables == {"LD_PRELOAD": "tcmalloc"}


@glibc
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MALLOC_ARENA_MAX", "2"),
        ("TCMALLOC_RELEASE_RATE", "0"),
        ("LD_PRELOAD", "libjemalloc.so.2"),
        ("GLIBC_TUNABLES", "glibc.malloc.arena_max=2:glibc.malloc.hugetlb=1"),
    ],
)
def test_what_a_user_has_chosen_stays(cpu, name, value):
    choice = choose({name: value})
    assert choice.settings == ()
    (reason,) = choice.left
    assert name in reason


@pytest.mark.parametrize("tunables", ["glibc.rtld.optional_static_tls=512", "glibc.malloc.hugetlb=1"])
def test_other_tunables_do_not_matter(cpu, tunables):
    assert choose({"GLIBC_TUNABLES": tunables}) == choose({})


@glibc
def test_nothing_is_set_where_it_would_not_help(cpu, monkeypatch):
    monkeypatch.setattr(run_command, "nvidia_gpu", lambda: True)
    assert choose({}).settings == ()
    assert "GPU" in choose({}).left[0]
    assert {setting.name for setting in choose({"JAX_PLATFORMS": "cpu"}).settings} == ALLOCATOR
    monkeypatch.setattr(run_command, "nvidia_gpu", lambda: False)
    monkeypatch.setattr(run_command.platform, "libc_ver", lambda: ("", ""))
    assert "another C library" in choose({}).left[0]


def run(*args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock", "run", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=AS_IT_COMES | variables)


@glibc
def test_a_program_gets_the_settings_its_arguments_and_its_exit_status():
    code = "import json, os, sys; print(json.dumps([dict(os.environ), sys.argv[1:]])); sys.exit(7)"
    assert run("--", sys.executable, "-c", "").stderr == ""
    done = run("-v", "--", sys.executable, "-c", code, "--steps", "3", "--", "x")
    assert done.returncode == 7
    environment, argv = json.loads(done.stdout)
    assert argv == ["--steps", "3", "--", "x"]
    assert ("LD_PRELOAD=" if INSTALLED else "MALLOC_MMAP_MAX_=0 (") in done.stderr
    set_by_penstock = set(choose(AS_IT_COMES).variables)
    assert {name for name in environment if AS_IT_COMES.get(name) != environment[name]} - {"LC_CTYPE"} == set_by_penstock
    assert "LD_PRELOAD" in set_by_penstock or set_by_penstock >= ALLOCATOR


@pytest.mark.skipif(os.name == "nt", reason="signals of Unix")
def test_a_program_does_not_inherit_the_signals_that_python_ignores():
    done = run("--quiet", "--", "sh", "-c", "kill -PIPE $$; echo still there")
    assert done.returncode == -signal.SIGPIPE
    assert done.stdout == ""


def faults(*command: str, **variables: str) -> float:
    """Return the page faults of a step in a process that is started by a command."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True, env=AS_IT_COMES | variables)
    assert done.stderr == ""
    return statistics.median(json.loads(done.stdout)[-10:])


@pytest.fixture(scope="module")
def faults_as_it_comes() -> float:
    without = faults(sys.executable, "-c", FAULTS)
    assert without > 10_000
    return without


# The heap still grows now and then, when a block is asked for before another thread has freed the last one.
FEW = 0.01


@pytest.mark.slow
@glibc
def test_a_step_has_few_page_faults_with_them(faults_as_it_comes):
    started = faults(sys.executable, "-m", "penstock", "run", "--quiet", "--", sys.executable, "-c", FAULTS)
    assert started < FEW * faults_as_it_comes


@pytest.mark.slow
@glibc
@pytest.mark.parametrize("other", [True, False])
def test_a_step_has_few_page_faults_where_a_command_applies_them_to_itself(faults_as_it_comes, other):
    """It starts again for another allocator."""
    within = "from penstock import run_command; import jax; "
    without = "" if other else "run_command.preload = lambda name: (); "
    applied = faults(sys.executable, "-c", f"{within}{without}run_command.apply(run_command.choose())\n{FAULTS}")
    assert applied < FEW * faults_as_it_comes


@pytest.mark.slow
@glibc
def test_a_step_has_few_page_faults_with_each_other_allocator(faults_as_it_comes):
    for name in INSTALLED:
        variables = Choice(run_command.preload(name)).variables
        assert faults(sys.executable, "-c", FAULTS, **variables) < FEW * faults_as_it_comes, name


@pytest.mark.slow
@glibc
@pytest.mark.parametrize(("more", "count"), [(["-v"], 1), (["-v", "--processes", "2"], 1), (["--processes", "2"], 0)])
def test_a_training_by_penstock_says_once_what_it_has_set_if_it_is_asked(tmp_path, more, count):
    command = [sys.executable, "-m", "penstock", "train", "digits", "--steps", "2", "--out", str(tmp_path / "run"), *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True, env=AS_IT_COMES)
    first = "LD_PRELOAD=" if INSTALLED else "MALLOC_MMAP_MAX_=0 "
    assert done.stderr.count(f"started with the settings of penstock run: {first}") == count
    assert ("[Gloo]" in done.stdout + done.stderr) == (more == ["-v", "--processes", "2"])


def test_settings_are_shown_as_commands_of_a_shell(cpu, capsys):
    assert main(["run", "--show"]) == 0
    printed = capsys.readouterr().out
    done = subprocess.run(["sh", "-c", printed + "env"], capture_output=True, text=True, check=True)
    assert all(f"{setting.name}={setting.value}" in done.stdout for setting in choose().settings)


def test_a_program_that_is_none_is_an_error(capsys):
    assert main(["run", "--"]) == 2
    assert "no program to start" in capsys.readouterr().err
    assert main(["run", "--", "no-such-program"]) == 127
    assert "no-such-program is not a program on the search path" in capsys.readouterr().err


@pytest.mark.skipif(os.name == "nt", reason="permissions of Unix")
def test_a_script_that_cannot_be_executed_is_told_how_to_start(tmp_path, capsys):
    script = tmp_path / "train.py"
    script.touch()
    assert main(["run", "--", str(script), "--steps", "3"]) == 126
    assert f"{script} cannot be executed; penstock run -- python {script} --steps 3" in capsys.readouterr().err
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    done = run("--quiet", "--", str(script))
    assert done.returncode == 126
    assert "the interpreter in its first line is missing" in done.stderr


def test_a_reason_is_printed_where_something_is_left():
    choice = Choice((Setting("A", "1 2", "because"),), ("B is left as it is: why",))
    assert describe(choice) == ["A=1 2 (because)", "B is left as it is: why"]
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
    monkeypatch.setattr(run_command, "installed", lambda name: "0.10.2")
    found = {setting.name: setting.value for setting in choose({"XLA_FLAGS": flags}).settings}
    assert found.get("XLA_FLAGS") == set_to
    monkeypatch.setattr(run_command, "installed", lambda name: "0.10.0")
    assert "XLA_FLAGS" not in {setting.name for setting in choose({"XLA_FLAGS": flags}).settings}


def test_flags_of_xla_are_left_to_a_program_of_another_python(cpu, monkeypatch, tmp_path):
    monkeypatch.setattr(run_command, "installed", lambda name: "0.10.2")
    here = Path(sys.executable).parent
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").symlink_to(here)
    scripts = [path for path in here.iterdir() if path.is_file() and path.read_bytes().startswith(b"#!" + os.fsencode(here))]
    own = [sys.executable, Path(sys.executable).name, str(tmp_path / "bin" / Path(sys.executable).name), *map(str, scripts[:1])]
    for name in own:
        found = choose({"PATH": str(here)}, name)
        assert "XLA_FLAGS" in {setting.name for setting in found.settings}, name
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    for name, text in (("python", "itself"), ("other", "#!/bin/sh"), ("elf", "no script")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    for name in ("/bin/sh", str(tmp_path / "other"), str(tmp_path / "elf")):
        choice = choose({}, name)
        assert "XLA_FLAGS" not in {setting.name for setting in choice.settings}
        assert f"{name} is not penstock's Python or a script of it" in choice.left[-1]


def test_a_file_of_flags_is_left_to_the_user(cpu, monkeypatch):
    monkeypatch.setattr(run_command, "installed", lambda name: "0.10.2")
    choice = choose({"XLA_FLAGS": "/home/me/xla.flags"})
    assert {setting.name for setting in choice.settings} == ALLOCATOR
    assert "they name a file" in choice.left[-1]


@pytest.mark.slow
def test_a_program_computes_right_what_this_jaxlib_computes_wrong():
    case = CASES[0].program + "\nassert np.allclose(got, expected), 'wrong'"
    code = "import jax, jax.numpy as jnp, numpy as np\n" + case
    flag = f"{YNNPACK}=" if fails_with_ynnpack(importlib.metadata.version("jaxlib")) else ""
    done = run("--quiet", "--", sys.executable, "-c", f"import os; assert os.environ.get('XLA_FLAGS', '') == {flag!r}\n{code}")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_gpu_without_nvidia_smi_is_found_by_its_driver(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(run_command.shutil, "which", lambda program: None)
    monkeypatch.setattr(run_command, "_DRIVER", tmp_path)
    assert not run_command.nvidia_gpu.__wrapped__()
    (tmp_path / "0000:01:00.0").mkdir()
    assert run_command.nvidia_gpu.__wrapped__()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not run_command.nvidia_gpu.__wrapped__()
