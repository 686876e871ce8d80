"""Train steps of real sizes for 16 to 64 devices, with layouts by hand, to compare plans with by the compiler for these."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp

from penstock.shard.hlo.topologies import find_topology
from penstock_bench.suites.shard.real import encoders, llama, mixture
from penstock_bench.suites.shard.real.case import Case as Case
from penstock_bench.suites.shard.real.case import jit_layout as jit_layout
from penstock_bench.suites.shard.real.case import measure_layout as measure_layout
from penstock_bench.suites.shard.real.layouts import HandLayout as HandLayout
from penstock_bench.suites.shard.real.layouts import expert_parallel, fsdp, megatron
from penstock_bench.suites.shard.real.step import Size, init, make_step

# For each model, its size, its feed-forward part, and the sequences of a chip.
_MODELS = {
    "llama-7b": (llama.LLAMA_7B, llama.init_swiglu, llama.swiglu, 2),
    "llama-13b": (llama.LLAMA_13B, llama.init_swiglu, llama.swiglu, 2),
    "llama-70b": (llama.LLAMA_70B, llama.init_swiglu, llama.swiglu, 2),
    "llama-small": (llama.LLAMA_SMALL, llama.init_swiglu, llama.swiglu, 2),
    "llama-3b": (llama.LLAMA_3B, llama.init_swiglu, llama.swiglu, 2),
    "moe-dense": (mixture.MIXTURE, mixture.init_experts, mixture.dense, 2),
    "moe-sorted": (mixture.MIXTURE, mixture.init_experts, mixture.by_sorting, 2),
}
_ENCODERS = {"vit-large": encoders.vit_large, "t5-large": encoders.t5_large}
_TOPOLOGIES = {"8": "v5e:2x4", "16": "v5e:4x4", "32": "v5e:4x8", "64": "v5e:8x8"}
_WAYS = (2, 4, 8)  # sizes of the model axis that an expert tries

REAL = (
    *("llama-7b-16", "llama-7b-64", "llama-13b-32", "llama-13b-64", "llama-3b-16", "llama-3b-32"),
    *("moe-dense-16", "moe-dense-32", "moe-sorted-16", "moe-sorted-32"),
    *("llama-3b-2xv5e:4x4", "moe-sorted-2xv5e:4x4"),
    *("llama-7b-h100:8x8", "moe-dense-h100:8x8", "moe-sorted-h100:8x8"),
)
"""The cases of the suite. `load` also knows other models, numbers of chips and topologies."""


def load(
    name: str,
    *,
    size: Size | None = None,
    sequences: int | None = None,
    layers: int | None = None,
    unrolled: bool = False,
    policy: str | None = "nothing_saveable",
) -> Case:
    """Return a case by its name, a model and a topology: "llama-7b-h100:8x8". Nothing of its size is allocated.

    A number stands for a topology of so many v5e chips: "llama-7b-16".

    Args:
      size: another size of the model; not for models that encode.
      sequences: the sequences or images of a chip, if not the model's own.
      layers: the number of layers, if not the model's own.
      unrolled: whether the layers are called in a loop of Python instead of a scan.
      policy: the policy of `jax.checkpoint` around each layer; None for no checkpoints.

    Raises:
      ValueError: there is no such model or topology.
    """
    model, _, place = name.rpartition("-")
    if model not in {**_MODELS, **_ENCODERS} or not (place in _TOPOLOGIES or ":" in place):
        raise ValueError(
            f"{name!r} is no case: name one of the models {', '.join((*_MODELS, *_ENCODERS))}, a dash, and a topology, or a "
            f"number of v5e chips, {', '.join(_TOPOLOGIES)}"
        )
    topology = find_topology(_TOPOLOGIES.get(place, place))
    devices = topology.devices
    if model in _ENCODERS:
        found = _ENCODERS[model](policy, layers)
        batch = found.batch(devices * (sequences or found.rows))
        return Case(name, devices, topology.name, found.init, batch, lambda constrain: found.step, ())
    own, init_feed_forward, feed_forward, rows = _MODELS[model]
    size = size or own
    size = dataclasses.replace(size, layers=layers or size.layers, unrolled=unrolled, policy=policy)
    tokens = jax.ShapeDtypeStruct((devices * (sequences or rows), size.length), jnp.int32)
    return Case(
        name=name,
        devices=devices,
        topology=topology.name,
        init=partial(init, size, init_feed_forward),
        batch={"tokens": tokens, "targets": tokens},
        make_step=partial(make_step, size, feed_forward),
        layouts=_layouts(devices, topology.domains, size),
    )


def _layouts(devices: int, domains: int, size: Size) -> tuple[HandLayout, ...]:
    """Return the layouts by hand for a size: each on several meshes, as an expert would try them.

    With several domains (slices of TPUs, hosts of GPUs), FSDP within each and data parallel over them is one more.
    """
    ways = [count for count in _WAYS if count < devices]
    experts = [expert_parallel(devices, count) for count in ways if size.experts]
    tensor = [megatron(devices, count, sequence=sequence) for sequence in (False, True) for count in ways]
    within = (fsdp(devices, domains),) if domains > 1 else ()
    return (fsdp(devices), *within, *tensor, *experts)
