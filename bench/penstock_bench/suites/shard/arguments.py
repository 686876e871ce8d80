"""Declare the arguments of `penstock bench shard`, and return the workloads that they choose."""

from __future__ import annotations

import argparse

from penstock_bench.model import Workload
from penstock_bench.suites.shard import hub, real_workload, steps, workload
from penstock_bench.suites.shard.task import CPU, HARDWARE, Compiler, Task

_ZOO, _OUTSIDE, _REAL, _KERAS = "zoo", "outside", "real", "keras"
_QUICK = {_ZOO: ("mlp", "gpt2"), _OUTSIDE: ("equinox-gru",), _KERAS: ("BertBackbone",), _REAL: (real_workload.SMALL_CASE,)}

_EPILOG = f"""suites:
  zoo      17 steps in plain JAX, Linen, NNX and Equinox, on which the planner was developed; and three steps of training
  outside  23 steps of other packages: pip install -e "bench[outside]"
  keras    all backbones of Keras Hub, small and with random weights; twelve of them are fitted under AutoShardDistribution
  real     Llama 3B to 13B and mixtures of experts on 16 to 64 devices, each for its own topology: v5e, two slices of it, or
           hosts of H100. It takes hours, as a compiler takes minutes for each layout. Set PENSTOCK_BENCH_CACHE to a folder,
           which keeps the figures of layouts by hand: a run that was interrupted goes on there, and later runs do not compile
           them again.

examples:
  penstock bench shard --only gpt2 --mesh 2x4 --html plans.html
  penstock bench shard --topology {CPU} --topology v5e:2x4 --json zoo.json
  penstock bench shard --suite outside --topology v5e:2x4
  PENSTOCK_BENCH_CACHE=compiled penstock bench shard --suite real --only llama-7b-16"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give the parser of `penstock bench shard` its own arguments."""
    parser.add_argument(
        "--suite",
        dest="steps",
        choices=(_ZOO, _OUTSIDE, _KERAS, _REAL),
        default=_ZOO,
        help="the steps to plan for (default: %(default)s)",
    )
    parser.add_argument(
        "--only", action="append", metavar="STEP", help="plan for this step of the suite; may be given several times"
    )
    parser.add_argument(
        "--topology",
        action="append",
        metavar="NAME",
        help=f"the compiler that judges: a topology, such as v5e:2x4 or h100:8, which needs no TPU or GPU, or {CPU} (default); "
        "may be given several times",
    )
    parser.add_argument(
        "--mesh",
        action="append",
        metavar="MESH",
        help=f"plan for this mesh, of {', '.join(Compiler().meshes)} for 8 devices; may be given several times (default: all for "
        f"the zoo, all of one and two axes for {_KERAS}, the one of two axes for {_OUTSIDE})",
    )
    parser.add_argument("--hardware", help=f"whose peaks, links and memory count (default: the topology's, or {HARDWARE})")
    parser.add_argument(
        "--quick",
        action="store_true",
        help=f"{' and '.join(_QUICK[_ZOO])} (or one step of another suite) on a mesh of two axes, unless "
        "--only and --mesh say otherwise; no training",
    )
    parser.add_argument(
        "--train",
        action=argparse.BooleanOptionalAction,
        default=None,
        help=f"train three steps under the plan, and on one device (default: for {_ZOO} and {_KERAS}, unless --quick)",
    )
    parser.epilog = _EPILOG


def choose(args: argparse.Namespace) -> tuple[Workload, ...]:
    """Return the workloads: for each compiler, one of the plans, and one of the training under them.

    Raises:
      ValueError: there is no such step, mesh, hardware or topology, or its compiler is not installed.
    """
    if args.steps == _REAL:
        return _choose_real(args)
    known = steps.names(args.steps)
    _check_steps(args, known)
    models = tuple(dict.fromkeys(args.only or (_QUICK[args.steps] if args.quick else known)))
    train = args.train if args.train is not None else args.steps in (_ZOO, _KERAS) and not args.quick
    chosen = []
    for compiler in _compilers(args):
        tasks = [
            Task(model, mesh, compiler, args.steps, steps.limits(args.steps, model))
            for model in models
            for mesh in _meshes(args, compiler)
        ]
        chosen.append(workload.plans_workload(tasks))
        if train and args.steps == _KERAS:
            fitted = [task for task in tasks if task.model in hub.DEEP]
            chosen += [workload.fit_workload(fitted)] if fitted else []
        elif train:
            chosen.append(workload.training_workload(tasks))
    return tuple(chosen)


def find(name: str) -> Workload:
    """Return any workload of the suite by its name, for a worker process."""
    return real_workload.find_real(name) or workload.find(name)


def _choose_real(args: argparse.Namespace) -> tuple[Workload, ...]:
    from penstock_bench.suites.shard import real

    given = {"--topology": args.topology, "--mesh": args.mesh, "--hardware": args.hardware, "--train": args.train}
    if refused := [option for option, value in given.items() if value]:
        raise ValueError(f"{refused[0]}: each case of --suite {_REAL} has its own topology, and none is trained: leave it out")
    _check_steps(args, (*real.REAL, real_workload.SMALL_CASE))
    cases = tuple(dict.fromkeys(args.only or (_QUICK[_REAL] if args.quick else real.REAL)))
    for case in cases:
        _check_compiler(f"--suite {_REAL}", real.load(case).topology)
    timed = () if args.only or args.quick else (real_workload.planning_workload(),)
    return (real_workload.real_workload(cases), *timed)


def _check_steps(args: argparse.Namespace, known: tuple[str, ...]) -> None:
    if unknown := [name for name in args.only or () if name not in known]:
        raise ValueError(f"--only {unknown[0]}: is not in --suite {args.steps}; choose from {', '.join(known)}")


def _compilers(args: argparse.Namespace) -> list[Compiler]:
    """Return the compilers that --topology and --hardware choose."""
    from penstock.shard.hlo.topologies import find_topology
    from penstock.shard.mesh.hardware import find_hardware

    hardware = find_hardware(args.hardware).name if args.hardware else None
    found = []
    for name in dict.fromkeys(args.topology or (CPU,)):
        if name == CPU:
            found.append(Compiler(CPU, hardware or HARDWARE))
            continue
        compiler = Compiler.of_label(find_topology(name).name)
        if hardware not in (None, compiler.hardware):
            raise ValueError(f"--hardware {hardware}: --topology {name} is of {compiler.hardware}; leave --hardware out")
        _check_compiler(f"--topology {name}", name)
        found.append(compiler)
    return found


def _check_compiler(option: str, topology: str) -> None:
    from penstock.shard.hlo.topologies import describe_missing_compiler, find_topology

    if missing := describe_missing_compiler(find_topology(topology)):
        raise ValueError(f"{option}: {missing}")


def _meshes(args: argparse.Namespace, compiler: Compiler) -> tuple[str, ...]:
    """Return the meshes to plan for, which are of as many devices as the compiler compiles for."""
    known = compiler.meshes
    if unknown := [mesh for mesh in args.mesh or () if mesh not in known]:
        raise ValueError(
            f"--mesh {unknown[0]}: is no mesh of the {compiler.devices} devices of --topology {compiler.name}; choose from "
            f"{', '.join(known)}"
        )
    two_axes = known[1:2] or known
    every = {_ZOO: known, _KERAS: known[:2]}.get(args.steps, two_axes)
    return tuple(dict.fromkeys(args.mesh or (two_axes if args.quick else every)))
