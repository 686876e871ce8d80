"""Choose the settings with which a program trains fastest, apply them to this process, and run the command `penstock run`.

A *setting* is an environment variable. There are two groups of them, both for steps on a CPU.

**The allocator.** XLA asks malloc for the temporaries of a step as one block, in every step, and frees it at the end. glibc gives
a block of this size back to the system, and the next step gets it again page by page: 130,000 page faults in each step of
ViT-tiny at batch 8, 1.4 million in ViT-small at batch 32. An allocator that keeps freed blocks has none. tcmalloc and jemalloc
also have caches for each thread, which XLA's many small blocks gain from. So one of them is loaded before the C library where it
is installed. Elsewhere, glibc is told to keep freed blocks, and to keep them where XLA's threads find them:

- MALLOC_MMAP_MAX_=0: no block comes from mmap, whose memory is given back when it is freed.
- MALLOC_TRIM_THRESHOLD_: the end of the heap is not given back.
- MALLOC_ARENA_MAX=1: one heap for all threads. With several, a block is freed into the heap of one thread and requested by
  another. Heaps of threads have at most 64 MB.

The program then keeps the most memory that it ever used. `bench/scripts/launcher_settings.py` compares these, with and without
huge pages; docs/launcher.md has the figures.

**YNNPACK fusions of XLA.** Some jaxlibs compute wrong values with them, or crash (`penstock._jaxlib_faults`), and a step is
faster without them. So they are turned off in these jaxlibs.

On a GPU the allocator stays as it is. Two of the documented flags made no difference to the step that we measured, and one made
it 3 % faster.
"""

from __future__ import annotations

import argparse
import ctypes
import ctypes.util
import functools
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock._first_import import ENVIRONMENT
from penstock._jaxlib_faults import YNNPACK, fails_with_ynnpack
from penstock._versions import installed

# The beginnings of the names by which users choose or tune an allocator themselves.
_OF_USERS = ("MALLOC_", "TCMALLOC_", "LD_PRELOAD")
_MMAP_MAX = "MALLOC_MMAP_MAX_"
PRELOAD = "LD_PRELOAD"
_TUNABLES = "glibc.malloc."
_HUGE_PAGES = "glibc.malloc.hugetlb="  # works with any other setting
_NEVER = 1 << 36  # bytes: 64 GiB
_SHEBANG = 512  # bytes of a script that name its interpreter; pip writes two lines if the path is long
_DRIVER = Path("/proc/driver/nvidia/gpus")  # has an entry for each GPU


@dataclass(frozen=True)
class Setting:
    """An environment variable, with the reason to set it."""

    name: str
    value: str
    why: str


_KEPT = "freed blocks stay in the process"
_TCMALLOC = (
    Setting("TCMALLOC_RELEASE_RATE", "0", _KEPT),
    Setting("TCMALLOC_LARGE_ALLOC_REPORT_THRESHOLD", str(_NEVER), "it prints no line for each large block"),
)
# The settings of other allocators, by the name of their library. The first one that is installed is used: tcmalloc was as fast as
# jemalloc or faster, and took less memory, as its threads share the large blocks that are free.
OTHERS = {
    "tcmalloc_minimal": _TCMALLOC,
    "tcmalloc": _TCMALLOC,
    "jemalloc": (Setting("MALLOC_CONF", "retain:true,dirty_decay_ms:-1,muzzy_decay_ms:-1", _KEPT),),
}


@dataclass(frozen=True)
class Choice:
    """The settings for a program on this machine.

    Attributes:
      settings: the variables to set; may be empty.
      left: a line for each group of settings that is left as it is, with the reason.
    """

    settings: tuple[Setting, ...]
    left: tuple[str, ...] = ()

    @property
    def variables(self) -> dict[str, str]:
        """Return the values by the names of the variables."""
        return {setting.name: setting.value for setting in self.settings}

    @property
    def same_allocator(self) -> str:
        """Return the reason why the program gets its usual allocator; empty if it gets another one."""
        return "" if {PRELOAD, _MMAP_MAX} & self.variables.keys() else "; ".join(self.left)


def choose(environment: Mapping[str, str] = os.environ, program: str = sys.executable) -> Choice:
    """Return the settings for a program that gets an environment.

    XLA's flags are set only if `program`, a path or a name on the search path, is this Python or a script of it: XLA ends a
    program whose flags it does not know, and another Python may have another version.
    """
    groups = (_allocator_settings(environment), _xla_settings(environment, program))
    return Choice(
        tuple(setting for group in groups if isinstance(group, tuple) for setting in group),
        tuple(group for group in groups if isinstance(group, str)),
    )


@functools.cache  # the search takes a tenth of a second
def preload(name: str) -> tuple[Setting, ...]:
    """Return the settings that load an allocator of `OTHERS` and let it keep freed blocks; none if it is not installed."""
    library = ctypes.util.find_library(name)
    return (Setting(PRELOAD, library, f"{name} takes the place of glibc's malloc"), *OTHERS[name]) if library else ()


def _allocator_settings(environment: Mapping[str, str]) -> tuple[Setting, ...] | str:
    """Return the settings of the allocator, or the reason why it is left as it is."""
    left = "the allocator is left as it is:"
    if nvidia_gpu() and environment.get("JAX_PLATFORMS", "") != "cpu":
        return f"{left} steps run on the GPU, whose memory malloc does not manage"
    if platform.libc_ver()[0] != "glibc":
        return f"{left} its settings are for glibc's malloc, and this system has another C library"
    if by_user := sorted(name for name in environment if name.startswith(_OF_USERS)):
        return f"{left} {', '.join(by_user)} chose it or its settings already"
    tunables = environment.get("GLIBC_TUNABLES", "").split(":")
    if any(each.startswith(_TUNABLES) and not each.startswith(_HUGE_PAGES) for each in tunables):
        return f"{left} GLIBC_TUNABLES has settings of malloc already"
    for name in OTHERS:
        if settings := preload(name):
            return settings
    return (
        Setting(_MMAP_MAX, "0", _KEPT),
        Setting("MALLOC_TRIM_THRESHOLD_", str(_NEVER), "the end of the heap stays, too"),
        Setting("MALLOC_ARENA_MAX", "1", "all threads share what was freed"),
    )


@functools.cache
def nvidia_gpu() -> bool:
    """Return whether there is an NVIDIA GPU that programs may use, without starting a framework."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    if (smi := shutil.which("nvidia-smi")) is None:  # as in some containers
        return _DRIVER.is_dir() and any(_DRIVER.iterdir())
    try:
        listed = subprocess.run([smi, "-L"], check=False, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return False
    return listed.returncode == 0 and "GPU" in listed.stdout


def _xla_settings(environment: Mapping[str, str], program: str) -> tuple[Setting, ...] | str:
    """Return the flags of XLA, or the reason why they are left as they are."""
    version, flags = installed("jaxlib"), environment.get("XLA_FLAGS", "").strip()
    if not fails_with_ynnpack(version) or YNNPACK in flags:
        return ()
    if flags and not flags.startswith("-"):
        return f"XLA_FLAGS are left as they are: they name a file; jaxlib {version} needs {YNNPACK}= in it"
    if not _is_of_this_python(program, environment):
        return (
            f"XLA_FLAGS are left as they are: {program} is not penstock's Python or a script of it, so its jaxlib may not be "
            f"{version}, which needs {YNNPACK}="
        )
    why = f"jaxlib {version} has faults in YNNPACK fusions, and is slower with them"
    return (Setting("XLA_FLAGS", f"{flags} {YNNPACK}=".strip(), why),)


def _is_of_this_python(program: str, environment: Mapping[str, str]) -> bool:
    """Return whether the program is this Python, or a script beside it whose first line names it."""
    found, this = shutil.which(program, path=environment.get("PATH")), Path(sys.executable)
    # The folders are compared and not the files, because the Pythons of two virtual environments may be links to one file.
    if found is None or Path(found).parent.resolve() != this.parent.resolve():
        return False
    if os.path.samefile(found, this):
        return True
    with open(found, "rb") as file:
        head = file.read(_SHEBANG)
    return head.startswith(b"#!") and os.fsencode(this.parent) in head


# Apply the settings where a command of penstock is the program itself.

# Parameters of mallopt, from glibc's malloc.h.
_MALLOPT = {"MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_MMAP_MAX_": -4, "MALLOC_ARENA_MAX": -8}
_LARGEST = 2**31 - 1  # of mallopt's int; the trim threshold takes -1 as "never"

# The settings that were applied, for this process and those that it starts: one of them tells the user.
_APPLIED = "PENSTOCK_APPLIED"


def apply(choice: Choice) -> None:
    """Apply settings to this process, and to those that it starts. Call it before JAX starts its threads.

    An allocator is loaded only when a process starts. So for another one than glibc's, this process starts again with the same
    arguments and process id. The second time, nothing is left to apply.

    glibc reads its variables only when a process starts, so here `mallopt` gets the same values. An arena that a thread has
    already made is not taken back, but XLA's threads get the main one.
    """
    variables = choice.variables
    if not variables:
        return
    variables[_APPLIED] = " ".join(f"{name}={value}" for name, value in variables.items())
    if PRELOAD in variables:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**ENVIRONMENT, **variables})
    os.environ.update(variables)
    for name in _MALLOPT.keys() & variables:
        value = int(variables[name])
        ctypes.CDLL(None).mallopt(_MALLOPT[name], value if value <= _LARGEST else -1)


def say_what_was_applied() -> None:
    """Print a line to standard error if settings were applied. A command calls it when its arguments have proved usable."""
    if applied := os.environ.get(_APPLIED):
        print(f"penstock: started with the settings of penstock run: {applied}", file=sys.stderr)


# The command `penstock run`.

DESCRIPTION = """\
Start a program with the settings of the C library's allocator and of XLA with which training with JAX was fastest where we
measured it, and change nothing else. On a CPU, a step gets its memory from the system anew each time without them. Variables
that you have set stay as they are. It becomes the program, which keeps its process id."""
EPILOG = """\
example:
  penstock run -- python train.py --steps 1000
  penstock run --show"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `penstock run`."""
    parser.usage = "penstock run [--show] [-v | --quiet] -- PROGRAM [ARGUMENTS …]"
    parser.add_argument("--show", action="store_true", help="print the settings as shell commands, and start nothing")
    amount = parser.add_mutually_exclusive_group()
    amount.add_argument("-v", "--verbose", action="store_true", help="print what is set and why")
    amount.add_argument("--quiet", action="store_true", help="do not print what could not be set, either")
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="PROGRAM", help="the program and its arguments")


def run(args: argparse.Namespace) -> int:
    """Replace this process by the program, or print the settings.

    The exit status is 0 after --show, and 2 without a program. As in shells, it is 127 if there is no such program, and 126 if it
    cannot be started. On Windows it is the status of the program.
    """
    program = args.program[1:] if args.program[:1] == ["--"] else args.program
    choice = choose(os.environ, *program[:1])
    if args.show:
        print("\n".join(shell_lines(choice)))
        return 0
    if not program:
        return _fail(2, "no program to start; penstock run -- python train.py")
    if shutil.which(program[0]) is None:
        hint = f"; penstock run -- python {shlex.join(program)}" if program[0].endswith(".py") else ""
        if Path(program[0]).exists():
            return _fail(126, f"{program[0]} cannot be executed{hint}")
        return _fail(127, f"{program[0]} is not a program on the search path{hint}")
    for line in () if args.quiet else describe(choice) if args.verbose else choice.left:
        print(f"penstock run: {line}", file=sys.stderr, flush=True)
    return _replace_process(program, choice)


def describe(choice: Choice) -> list[str]:
    """Return lines that say what is set and why, and what is left as it is."""
    return [*(f"{setting.name}={setting.value} ({setting.why})" for setting in choice.settings), *choice.left]


def shell_lines(choice: Choice) -> list[str]:
    """Return the settings as commands of a shell."""
    exports = (f"export {setting.name}={shlex.quote(setting.value)}  # {setting.why}" for setting in choice.settings)
    return [*exports, *(f"# {line}" for line in choice.left)]


def _fail(status: int, reason: str) -> int:
    """Print why no program is started, and return the exit status."""
    print(f"penstock run: error: {reason}", file=sys.stderr)
    return status


def _replace_process(program: Sequence[str], choice: Choice) -> int:
    """Replace this process by the program. On Windows, where no process can be replaced, start it and wait for it."""
    sys.stdout.flush()
    environment = {**ENVIRONMENT, **choice.variables}
    try:
        if os.name == "nt":
            return subprocess.call(list(program), env=environment)
        for name in ("SIGPIPE", "SIGXFSZ"):  # Python ignores them, and the program would inherit that
            signal.signal(getattr(signal, name), signal.SIG_DFL)
        os.execvpe(program[0], list(program), environment)
    except FileNotFoundError:  # `which` has found the program
        return _fail(126, f"{program[0]} cannot be started: the interpreter in its first line is missing")
    except OSError as error:
        return _fail(126, f"{program[0]} cannot be started: {error.strerror}")
