"""Make the workload of an experiment: the variants, their parity and their targets."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import partial

from penstock.run_command import nvidia_gpu
from penstock_bench.environment import Environment
from penstock_bench.launcher import variables_of_run
from penstock_bench.model import SLICE_SECONDS, Agreement, Metric, Target, Variant, Workload
from penstock_bench.suites.frameworks import measure, reference
from penstock_bench.suites.frameworks.experiment import GEOMETRIES, QUICK, Experiment, Size
from penstock_bench.suites.frameworks.trainer import MakeTrainer, Trainer

# After the name of a variant that is started with the settings which were measured to be best for it. PyTorch has none: the
# settings of JAX make no difference to it (bench/scripts/launcher_settings.py).
AT_BEST = ", penstock run"

TORCH_XLA = Environment("torch_xla", ("torch==2.9.0", "torch_xla==2.9.0", "numpy", "pillow"))

# About three to eight times the largest difference that was measured on a CPU: at quick size with all variants, both optimizers
# and PyTorch's two kinds of attention; and at the size of ViT-tiny with PyTorch eager and JAX.
#   fp32: logits 6e-7, loss 2e-7, update 1.4e-4 and, in ViT-small, 6.8e-4 (a norm's scale, under sgd: it changes by few units in
#     the last place, so that one rounding counts; larger models may have more of these)
#   bf16: logits 8e-3, loss 9e-4, update 2e-2 under sgd, 1.1e-1 (a scale) under adamw, which divides small gradients by themselves
# TF32 rounds the inputs of products to 11 bits where bfloat16 rounds to 8, so it has an eighth of bfloat16's tolerance.
TOLERANCES: Mapping[str, Mapping[str, float]] = {
    "fp32": {"logits": 5e-6, "loss": 1e-6, "update": 5e-3},
    "tf32": {"logits": 6e-3, "loss": 4e-4, "update": 1.5e-2},
    "bf16": {"logits": 5e-2, "loss": 3e-3, "update": 1e-1},
}
_ADAMW_UPDATES = 4  # times the tolerance of updates, for AdamW with a precision below float32

# A tenth of the measured difference. A variant that is closer to float64 has not rounded the inputs of products as prescribed.
# The logits show it best: float32 is ten thousand times closer than bfloat16. TF32's number is from theory, as above.
LEAST: Mapping[str, Mapping[str, float]] = {"fp32": {}, "tf32": {"logits": 3e-5}, "bf16": {"logits": 5e-4}}

# The slowest CPU that the time limit allows for.
_SLOWEST = 30e9  # FLOP/s
_STEPS = 12  # steps of warm-up and timing together, if one step takes longer than the time to measure


def workload_of(experiment: Experiment) -> Workload:
    best, nothing_to_compare = variables_of_run()
    return Workload(
        name=experiment.name,
        title=_title(experiment),
        metrics=tuple(Metric(name, "ms", "lower") for name in ("compute", "loading", "together")),
        baseline="PyTorch eager",
        variants=_variants(experiment, best, nothing_to_compare),
        sizes={
            "full": Size(GEOMETRIES[experiment.model], files=256),
            "quick": Size(QUICK, files=8),
        },
        targets=_targets(experiment, nothing_to_compare),
        time_limit=_time_limit(experiment),
        agreement=_agreement(experiment),
        verifies="the loss and the update of the first step, which are equal in all variants, and finite weights at the end",
        slice_seconds=SLICE_SECONDS,
    )


def _targets(experiment: Experiment, nothing_to_compare: str) -> tuple[Target, ...]:
    if "JAX" in _unsuited(experiment):
        return ()
    if nvidia_gpu():
        return (Target("JAX", "compute", 0.9, "torch.compile"),)
    if nothing_to_compare:
        return ()
    return (Target(f"JAX{AT_BEST}", "compute", 0.85, "JAX"), Target(f"JAX{AT_BEST}", "compute", 1.0, "PyTorch eager"))


def _time_limit(experiment: Experiment) -> float:
    flops = 0 if nvidia_gpu() else GEOMETRIES[experiment.model].step_flops(experiment.batch)
    return max(600.0, _STEPS * flops / _SLOWEST)


def _unsuited(experiment: Experiment) -> dict[str, str]:
    """Return the variants that cannot do the experiment, with the reasons."""
    found = {}
    if experiment.attention == "fused" and not (experiment.precision == "bf16" and nvidia_gpu()):
        # JAX's and Keras's functions for fused attention would run the same products and softmax as "eager".
        found = dict.fromkeys(("PyTorch/XLA", "JAX", "Keras on JAX"), "XLA has no fused attention for float32, nor on a CPU")
    if nvidia_gpu():
        found["PyTorch/XLA"] = "torch_xla has no CUDA since 2.9"
    return found


def _title(experiment: Experiment) -> str:
    data = {"random": "random images", "jpeg": "JPEGs"}[experiment.data]
    return (
        f"ms a training step of ViT-{experiment.model} on {data} of {{geometry.image}}x{{geometry.image}}, batch "
        f"{experiment.batch}, {experiment.precision}, {experiment.attention} attention, {experiment.optimizer}"
    )


def _variants(experiment: Experiment, best: Mapping[str, str], nothing_to_compare: str) -> tuple[Variant, ...]:
    in_torch, in_penstock = _loaders(experiment)
    pillow = ("PIL",) if experiment.data == "jpeg" else ()
    unsuited = _unsuited(experiment)

    def variant(
        name: str,
        make: MakeTrainer,
        requires: tuple[str, ...],
        note: str,
        environment: Environment | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> Variant:
        return Variant(
            name,
            requires=(*requires, *pillow),
            note=note,
            unsuited=unsuited.get(name.removesuffix(AT_BEST), nothing_to_compare if name.endswith(AT_BEST) else ""),
            variables=variables or {},
            environment=environment,
            outputs=partial(measure.outputs, make, experiment),
            live=partial(measure.live, make, experiment),
        )

    return (
        variant("PyTorch eager", make_torch_eager, ("torch",), in_torch),
        variant("torch.compile", make_torch_compiled, ("torch",), f"inductor; {in_torch}"),
        variant(
            "PyTorch/XLA",
            make_torch_xla,
            ("torch", "torch_xla"),
            f"{in_torch}, in an MpDeviceLoader; no step is queued behind another",
            TORCH_XLA,
        ),
        variant("JAX", make_flax, ("flax", "optax"), f"Flax NNX, Optax; {in_penstock}"),
        variant("Keras on JAX", make_keras, ("keras",), f"Model.fit; {in_penstock}"),
        *(
            variant(f"{name}{AT_BEST}", make, requires, "started by penstock run", variables=best)
            for name, make, requires in (("JAX", make_flax, ("flax", "optax")), ("Keras on JAX", make_keras, ("keras",)))
        ),
    )


def _loaders(experiment: Experiment) -> tuple[str, str]:
    """Name the data loaders of PyTorch's variants and of JAX's."""
    if experiment.data == "jpeg":
        workers = experiment.loader_workers
        return f"DataLoader, {workers} processes", f"penstock's Loader with {workers} threads, and feed"
    records = "a NumPy generator for each record"
    return f"{records}, DataLoader without workers", f"{records}, penstock's Loader and feed"


def _make(module: str, name: str, experiment: Experiment, size: Size, **options: bool) -> Trainer:
    """Import a framework and make its trainer. It is not imported before, because it may not be installed."""
    trainer = getattr(importlib.import_module(f"penstock_bench.suites.frameworks.{module}"), name)
    made: Trainer = trainer(experiment, size, **options)
    return made


def make_torch_eager(experiment: Experiment, size: Size) -> Trainer:
    return _make("torch_trainer", "TorchTrainer", experiment, size, compiled=False)


def make_torch_compiled(experiment: Experiment, size: Size) -> Trainer:
    return _make("torch_trainer", "TorchTrainer", experiment, size, compiled=True)


def make_torch_xla(experiment: Experiment, size: Size) -> Trainer:
    return _make("xla_trainer", "XlaTrainer", experiment, size)


def make_flax(experiment: Experiment, size: Size) -> Trainer:
    return _make("flax_trainer", "FlaxTrainer", experiment, size)


def make_keras(experiment: Experiment, size: Size) -> Trainer:
    return _make("keras_trainer", "KerasTrainer", experiment, size)


def _agreement(experiment: Experiment) -> Agreement:
    """Return the agreement. Its name has all options that change the outputs, so batch 8 and batch 32 are compared once."""
    parts = (experiment.model, experiment.precision, experiment.attention, experiment.optimizer)
    return Agreement(
        name=f"vit-{'-'.join(parts)}, batch {experiment.parity_batch}",
        reference=Variant("float64", reference.measure, outputs=partial(reference.outputs, experiment)),
        tolerances=tolerances(experiment),
        least=LEAST[experiment.precision],
    )


def tolerances(experiment: Experiment) -> dict[str, float]:
    """Return the largest relative differences from the reference, by quantity."""
    found = dict(TOLERANCES[experiment.precision])
    if experiment.optimizer == "adamw" and experiment.precision != "fp32":
        found["update"] *= _ADAMW_UPDATES
    return found
