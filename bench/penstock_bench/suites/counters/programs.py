"""Count what a compiled training step does: FLOPs, bytes, temporaries, and the page faults of running it."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any

from penstock_bench.launcher import variables_of_run
from penstock_bench.model import Measurement, Metric, Target, Variant, Workload
from penstock_bench.suites.frameworks.experiment import GEOMETRIES, Experiment, Geometry
from penstock_bench.suites.frameworks.experiment import Size as ModelSize
from penstock_bench.suites.frameworks.weights import fixed_batch

_EXPERIMENT = Experiment("tiny", 8, "fp32", "eager", "sgd", "random")
# Its temporaries are larger than what glibc keeps by itself, 32 MB, so that its steps have page faults.
_SMALL = Geometry(width=64, depth=4, heads=2)
_WARM_UP, _STEPS = 12, 5
_VARIABLES, _NOTHING_TO_COMPARE = variables_of_run()


@dataclass(frozen=True)
class Size:
    model: ModelSize


def measure(size: Size) -> Measurement:
    """Compile and run the step of a ViT."""
    import resource  # not on Windows, where the other suites run

    from penstock_bench.suites.frameworks.flax_trainer import FlaxTrainer

    trainer = FlaxTrainer(_EXPERIMENT, size.model)
    batch = trainer.place(fixed_batch(size.model.geometry, _EXPERIMENT.batch))
    compiled = trainer.compiled(batch)
    cost: Any = compiled.cost_analysis()
    memory: Any = compiled.memory_analysis()
    faults = []
    for _ in range(_WARM_UP + _STEPS):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        trainer.loss(batch)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return Measurement(
        {
            "FLOPs": cost["flops"] / 1e9,
            "bytes": cost["bytes accessed"] / 1e9,
            "temporaries": memory.temp_size_in_bytes / 1e6,
            "faults": median(faults[_WARM_UP:]),
        },
        {"faults": faults},
    )


WORKLOAD = Workload(
    name="program",
    title="the compiled training step of a ViT in JAX, batch 8, float32, and the page faults of running it",
    metrics=(
        Metric("FLOPs", "10^9", "lower"),
        Metric("bytes", "GB", "lower"),
        Metric("temporaries", "MB", "lower"),
        Metric("faults", "a step", "lower"),
    ),
    baseline=None,
    variants=(
        Variant("as it comes", measure, ("flax", "optax"), "without settings of the allocator"),
        Variant(
            "penstock run",
            measure,
            ("flax", "optax"),
            "with the settings of penstock run",
            variables=_VARIABLES,
            unsuited=_NOTHING_TO_COMPARE,
        ),
    ),
    sizes={"full": Size(ModelSize(GEOMETRIES["tiny"], files=8)), "quick": Size(ModelSize(_SMALL, files=8))},
    targets=() if _NOTHING_TO_COMPARE else (Target("penstock run", "faults", 1000),),
    scored=True,
    method="Counters of the program: XLA's cost and memory analysis, and the median of the process's page faults in a step.",
)
