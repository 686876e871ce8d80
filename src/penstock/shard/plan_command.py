"""Run `penstock plan`: plan a step that a function of the user's module returns.

It prints the plan or its code, and writes the files that the arguments name. The step is traced and never run.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import importlib
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
from jax.sharding import PartitionSpec

from penstock._bytes import parse_bytes
from penstock._jaxlib_faults import warn_of_known_faults
from penstock.errors import CannotStartError, CompileError, PlanError
from penstock.shard.graph.constraints import ROLES
from penstock.shard.hlo.topologies import find_topology
from penstock.shard.memory import UNCHECKED
from penstock.shard.plan import Plan
from penstock.shard.planning import plan

DESCRIPTION = """\
Find a sharding of all arguments and intermediates of a train step. The step is traced on shapes: nothing is allocated, nothing
runs. It is compiled if its memory is predicted near the limit or above, or with --check or --verify. The planned devices need not
be present.

FUNCTION is module:name: train:job for the function job of train.py, or train:Jobs.small for an attribute of a class or an object
in it. The current folder is searched first, as with python -m. The function takes no arguments and returns the step and its
arguments, as arrays or jax.ShapeDtypeStruct:

  def job():
      state = jax.eval_shape(init_state)                 # shapes of the full size, without allocating them
      tokens = jax.ShapeDtypeStruct((64, 4096), "int32")
      return step, state, {"tokens": tokens, "targets": tokens}"""

EPILOG = """\
exit status: 0; 1 if no layout fits the memory, the function or the step fails, or --verify finds that the limit is exceeded;
2 for wrong arguments

examples:
  penstock plan train:job --devices 8 --hardware tpu-v5e
  penstock plan train:job --check v5e:2x4 --memory 12GiB
  penstock plan train:job --check h100:8 --remat auto --microbatches auto
  penstock plan train:job --mesh data=2,model=4 --hardware tpu-v5e --memory 12GiB --html plan.html
  penstock plan train:job --devices 8 --hardware tpu-v5e --code > layout.py
  penstock plan train:job --devices 8 --hardware tpu-v5e --constraint 'params/embed=P("model", None)' --verify v5e:2x4"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `penstock plan` to its parser."""
    parser.add_argument("function", metavar="FUNCTION", help="module:name of a function that returns (step, *arguments)")
    parser.add_argument(
        "--devices", type=_count, metavar="N", help="number of devices; without --mesh, the mesh shape is searched too"
    )
    parser.add_argument(
        "--mesh", type=_mesh, metavar="NAME=SIZE,…", help="one to three mesh axes, as data=2,model=4 (default: the best)"
    )
    parser.add_argument("--hardware", metavar="NAME", help="as tpu-v5e, h100, 'this machine' (default: what JAX finds here)")
    parser.add_argument("--memory", type=_memory, metavar="BYTES", help="limit of a device, as 16GiB (default: the hardware's)")
    parser.add_argument(
        "--constraint",
        type=_constraint,
        action="append",
        default=[],
        metavar="PATH=P(…)",
        help="a layout that the leaves of a path have to use; the path may contain stars; may be given several times",
    )
    parser.add_argument(
        "--role",
        type=_role,
        action="append",
        default=[],
        metavar="PATH=ROLE",
        help=f"the role of the leaves of a path, if the step misleads: {', '.join(ROLES)}; may be given several times",
    )
    parser.add_argument(
        "--check",
        type=_check,
        metavar="yes|no|TOPOLOGY",
        help="the compiler that decides whether the plan fits: yes compiles it always, no never, and a topology, as v5e:2x4 "
        "or h100:4x8, with the compiler for these TPUs or GPUs (default: if the memory is predicted near the limit or above)",
    )
    parser.add_argument(
        "--remat",
        choices=["auto", "all"],
        help="decide which activations the backward pass computes again, so that the step fits; all ignores jax.checkpoint in it",
    )
    parser.add_argument(
        "--microbatches",
        type=_parts,
        metavar="auto|N",
        help="run the batch in N parts, one after the other, or decide how many, so that the step fits",
    )
    parser.add_argument(
        "--verify",
        nargs="?",
        const="",
        metavar="TOPOLOGY",
        help="compile the plan and print the compiler's figures beside the prediction: for a topology that need not be "
        "present, as v5e:2x4 or h100:4x8, or without one for the devices that are present, or for virtual CPU devices",
    )
    parser.add_argument("--baselines", action="store_true", help="with --verify: compile the baselines of the plan too")
    parser.add_argument("--take", metavar="BASELINE", help="take this baseline of the plan instead: FSDP, for example")
    parser.add_argument("--html", type=Path, metavar="PATH", help="write the plan as an HTML page, with drawings of the layouts")
    parser.add_argument(
        "--code",
        action="store_true",
        help="print the plan as a Python module in plain JAX, which does not need penstock, and no more",
    )
    parser.add_argument("--save", type=Path, metavar="PATH", help="write the plan for penstock.Plan.load")


def run(args: argparse.Namespace) -> int:
    """Run `penstock plan`, and return the exit status, as `EPILOG` describes it."""
    try:
        _check_options(args)
        step, *arguments = _load(args.function)
        warn_of_known_faults()
        with warnings.catch_warnings():
            warnings.showwarning = _print_warning
            warnings.filterwarnings("always", UNCHECKED)
            planned = plan(
                step,
                *arguments,
                mesh=args.mesh,
                devices=args.devices,
                hardware=args.hardware,
                memory=args.memory,
                constraints=dict(args.constraint),
                roles=dict(args.role),
                check=args.check,
                remat=args.remat,
                microbatches=args.microbatches,
            )
        if args.take is not None:
            planned = _take(planned, args.take)
        if args.code:
            print(planned.code(), end="")
        else:
            print(planned)
        if args.save:
            planned.save(args.save)
        if args.html:
            planned.html(args.html)
        if args.verify is None:
            return 0
        verified = planned.verify(args.verify or None, baselines=args.baselines)
        print(f"\n{verified}")
        return 0 if verified.fits else 1
    except (PlanError, CompileError) as error:
        return _failed(str(error), 1)
    except CannotStartError as error:
        return _failed(str(error), 2)
    except Exception as error:
        user_lines = _user_traceback(error.__traceback__)
        if user_lines is not None:
            traceback.print_exception(type(error), error, user_lines)
            return _failed(f"{args.function} raised {type(error).__name__}, as above", 1)
        if isinstance(error, (ValueError, TypeError, OSError)):
            return _failed(str(error), 2)
        raise


def _take(planned: Plan, name: str) -> Plan:
    """Return a baseline of a plan; raise a `ValueError` if it has none of this name."""
    try:
        return planned.alternatives[name]
    except KeyError as error:
        raise ValueError(f"--take: {error.args[0]}") from None


def _failed(message: str, status: int) -> int:
    """Print an error, and return the exit status."""
    print(f"penstock plan: error: {message}", file=sys.stderr)
    return status


def _print_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Print a warning without its file and line."""
    print(f"penstock plan: warning: {message}", file=sys.stderr)


def _load(name: str) -> tuple[Any, ...]:
    """Load and call the user's function, and return its result: the step and its arguments.

    Raises:
      CannotStartError: there is no such function, or it does not return a step and its arguments.
    """
    module_name, colon, function_name = name.partition(":")
    if not (module_name and colon and function_name):
        raise CannotStartError(f"{name!r} is not a module:function, such as train:job for the function job of train.py")
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the user's module imports the missing module
        raise CannotStartError(
            f"there is no module {error.name!r}, neither in {folder} nor installed; run it where {error.name}.py is"
        ) from None
    function: Any = module
    within = ""
    for part in function_name.split("."):
        holder, function = function, getattr(function, part, None)
        if function is None or (not callable(function) and f"{within}{part}" == function_name):
            names = [each for each in dir(holder) if not each.startswith("_") and callable(getattr(holder, each, None))]
            near = [f"{within}{each}" for each in difflib.get_close_matches(part, names, cutoff=0.3) or names[:5]]
            listed = ", ".join(near) or "none"
            raise CannotStartError(f"{module_name} has no function {function_name!r}; functions that it has: {listed}")
        within += f"{part}."
    result = function()
    if not isinstance(result, tuple) or len(result) < 2 or not callable(result[0]):
        found = f"({', '.join(type(each).__name__ for each in result)})" if isinstance(result, tuple) else type(result).__name__
        raise CannotStartError(f"{name} returned {found}; it should return the step and its arguments: (step, *arguments)")
    return result


def _user_traceback(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback from its first line outside of penstock, JAX and the import system; None if there is none."""
    ours = tuple(f"{folder}{os.sep}" for folder in (Path(__file__).parents[1], Path(jax.__file__).parent))
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith((*ours, "<frozen ", importlib.__file__)):
        trace = trace.tb_next
    return trace


def _check_options(args: argparse.Namespace) -> None:
    """Check before the search, which may take minutes, that the options agree and the files can be written."""
    if args.baselines and args.verify is None:
        raise CannotStartError("--baselines compiles baselines beside the plan: give --verify too")
    if args.code and args.verify is not None:
        raise CannotStartError("--code prints a module, and --verify prints figures: give one of them")
    for flag, path in (("--save", args.save), ("--html", args.html)):
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            wrong = "is a folder" if path.is_dir() else f"is in a folder that does not exist, {path.parent}"
            raise CannotStartError(f"{flag} {path}: {wrong}; name a file that can be written")


def _count(text: str) -> int:
    """Parse a positive integer."""
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text}: needs an integer >= 1")
    return int(text)


def _check(text: str) -> bool | str:
    """Parse yes, no, or a topology."""
    if text in ("yes", "no"):
        return text == "yes"
    return _parse_or_refuse(lambda name: find_topology(name).name, text)


def _parts(text: str) -> int | str:
    """Parse a number of parts of the batch, or auto."""
    return text if text == "auto" else _count(text)


def _mesh(text: str) -> dict[str, int]:
    """Parse mesh axes: data=2,model=4."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = (each.strip() for each in part.partition("="))
        if not (name and equals) or name in sizes:
            raise argparse.ArgumentTypeError(f"{text}: needs axes of different names and their sizes, as data=2,model=4")
        sizes[name] = _count(size)
    return sizes


def _memory(text: str) -> int:
    """Parse a number of bytes: 16GiB."""
    return _parse_or_refuse(parse_bytes, text)


def _constraint(text: str) -> tuple[str, PartitionSpec]:
    """Parse a constraint for argparse."""
    return _parse_or_refuse(parse_constraint, text)


def _role(text: str) -> tuple[str, str]:
    """Parse a path and its role: hidden/*=batch."""
    path, _, role = (each.strip() for each in text.rpartition("="))
    if not path or role not in ROLES:
        raise argparse.ArgumentTypeError(f"{text}: needs a path and one of {', '.join(ROLES)}, as 'hidden/*=batch'")
    return path, role


def _parse_or_refuse(parse: Callable[[str], Any], text: str) -> Any:
    """Parse text, and turn a `ValueError` into an error that argparse prints."""
    try:
        return parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parse_constraint(text: str) -> tuple[str, PartitionSpec]:
    """Parse a path pattern and a layout.

    The layout is parsed and never evaluated. It may contain strings, None, P.UNCONSTRAINED, and tuples of strings.

    Args:
      text: the pattern, "=", and the layout.

    Raises:
      ValueError: the text has another form.

    >>> pattern, layout = parse_constraint("params/*/w=P(('data', 'model'), None)")
    >>> pattern, tuple(layout)
    ('params/*/w', (('data', 'model'), None))
    """
    pattern, _, layout = text.rpartition("=")
    try:
        call = ast.parse(layout.strip(), mode="eval").body
        if (
            not pattern.strip()
            or not isinstance(call, ast.Call)
            or call.keywords
            or _name(call.func) not in ("P", "PartitionSpec")
        ):
            raise ValueError
        return pattern.strip(), PartitionSpec(*map(_entry, call.args))
    except (ValueError, SyntaxError):
        raise ValueError(f"""{text}: needs a path and a layout, as 'params/embed=P("model", None)'""") from None


def _entry(node: ast.expr) -> Any:
    """Read one entry of a `PartitionSpec`."""
    if isinstance(node, ast.Attribute) and _name(node.value) in ("P", "PartitionSpec") and node.attr == "UNCONSTRAINED":
        return PartitionSpec.UNCONSTRAINED
    value = ast.literal_eval(node)
    axes = value if isinstance(value, tuple) else (value,)
    if value is not None and not all(isinstance(axis, str) for axis in axes):
        raise ValueError
    return value


def _name(node: ast.expr) -> str | None:
    """Return the identifier of a name expression; None for any other expression."""
    return node.id if isinstance(node, ast.Name) else None
