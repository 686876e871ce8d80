"""Compile a step in a layout by hand, and return the compiler's figures.

The step becomes a function of its leaves, because `jax.export` knows no named tuples of Optax. It is compiled in another process:
XLA's partitioner aborts for some layouts, such as a grouped convolution sharded along its groups. The figures can be kept in a
folder, because a compilation takes up to some minutes and a layout by hand does not change.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from penstock.errors import CompileError, CompilerFailedError
from penstock.shard.apply.sharding_constraints import ShardingConstraints, insert_constraints
from penstock.shard.compiler import export_program, measure_exported, read_result, write_result
from penstock.shard.hlo import analysis, collectives, flops, parse
from penstock.shard.hlo.analysis import Measured
from penstock.shard.hlo.topologies import find_topology
from penstock_bench.suites.shard.zoo.model import PyTree

_READERS = (analysis, collectives, flops, parse)
_COMPILERS = ("jax", "jaxlib", "libtpu", "jax-cuda12-pjrt", "jax-cuda13-pjrt")


class FlatStep(NamedTuple):
    """A jitted step of the leaves of its state and batch, and these leaves.

    Attributes:
      jitted: returns the leaves of the new state and then the loss. The state is donated.
      arguments: abstract, with shardings.
    """

    jitted: Any
    arguments: list[jax.ShapeDtypeStruct]

    @property
    def mesh(self) -> dict[str, int]:
        """Return the sizes of the mesh axes."""
        sharding = self.arguments[0].sharding
        assert isinstance(sharding, NamedSharding)
        return dict(sharding.mesh.shape)


def flat_step(
    step: Callable[[PyTree, PyTree], tuple[PyTree, Array]],
    state: PyTree,
    batch: PyTree,
    state_shardings: PyTree,
    batch_shardings: PyTree,
    mesh: Any,
) -> FlatStep:
    """Return a step with these shardings of its state, before and after, and of its batch. It calls no host.

    Args:
      state, batch: abstract, or arrays.
      mesh: the `Mesh` or `AbstractMesh` of the shardings.
    """
    leaves, tree = jax.tree.flatten((state, batch))
    shardings = jax.tree.leaves((state_shardings, batch_shardings))
    donated = len(jax.tree.leaves(state))

    def flat(*arguments: Array) -> list[Array]:
        return jax.tree.leaves(step(*jax.tree.unflatten(tree, arguments)))

    def jit(function: Callable[..., list[Array]]) -> Any:
        return jax.jit(
            function,
            in_shardings=tuple(shardings),
            out_shardings=[*shardings[:donated], NamedSharding(mesh, PartitionSpec())],
            donate_argnums=tuple(range(donated)),
        )

    abstract = [_abstract(leaf, sharding) for leaf, sharding in zip(leaves, shardings, strict=True)]
    jitted = jit(flat)
    closed = jitted.trace(*abstract).jaxpr
    if "pure_callback" in str(closed):  # of error checks; such a program cannot be compiled for devices that are not present
        jitted = jit(insert_constraints(closed, ShardingConstraints(), mesh, callbacks=False))
    return FlatStep(jitted, abstract)


def compile_elsewhere(steps: Sequence[FlatStep], topology: str | None, kept: Path | None = None) -> list[Measured | CompileError]:
    """Compile steps in another process, and return the compiler's figures of each, or its error.

    Args:
      topology: the name of a topology; None compiles for virtual CPU devices.
      kept: a folder for the figures. A step whose figures are in it is not compiled again, unless the program, a version of the
        compiler or the reader of its programs has changed. The compiler's refusals are kept too.
    """
    paths = [None if kept is None else kept / f"{_digest(step, topology)}.json" for step in steps]
    found = {index: read_result(path) for index, path in enumerate(paths) if path is not None and path.exists()}
    missing = [index for index in range(len(steps)) if index not in found]
    platform = _platform(topology)
    programs = [
        export_program(steps[index].jitted, *steps[index].arguments, mesh=steps[index].mesh, platform=platform)
        for index in missing
    ]
    for index, result in zip(missing, measure_exported(programs, topology=topology) if programs else [], strict=True):
        found[index] = result
        if (path := paths[index]) is not None and not isinstance(result, CompilerFailedError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_result(path.parent, path.stem, result)
    return [found[index] for index in range(len(steps))]


def _digest(step: FlatStep, topology: str | None) -> str:
    """Return a hash of all that decides the figures: the program, its compiler, and the code that reads what this makes."""
    lowered = step.jitted.trace(*step.arguments).lower(lowering_platforms=(_platform(topology).replace("gpu", "cuda"),))
    versions = [_version(package) for package in _COMPILERS]
    # The text has no lines of source code, unlike the bytes of an exported program.
    parts = [lowered.as_text(), str(step.mesh), str(topology), *versions, *map(inspect.getsource, _READERS)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _platform(topology: str | None) -> str:
    return "cpu" if topology is None else find_topology(topology).platform


def _version(package: str) -> str:
    """Return the version of a package; "" if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _abstract(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=getattr(leaf, "weak_type", False))
