"""Compare settings with which a training may be started: a suite for `penstock bench`.

    penstock bench bench/scripts/launcher_settings.py --only tiny-b8 --minutes 20 --json settings.json

Each variant is the same training step of a ViT in JAX, in a process with other environment variables. JAX and PyTorch with their
defaults run beside it. On a CPU these are settings of the allocator and of XLA's YNNPACK fusions; "one arena" also keeps memory.
jemalloc and tcmalloc are used where they are installed (apt-get install libjemalloc2 libtcmalloc-minimal4). On an NVIDIA GPU they
are the flags that JAX's documentation and NVIDIA's images name: https://docs.jax.dev/en/latest/gpu_performance_tips.html,
https://docs.nvidia.com/jax-toolbox/environment-variables.
"""

from __future__ import annotations

from functools import partial

from penstock._jaxlib_faults import YNNPACK
from penstock.run_command import OTHERS, Choice, nvidia_gpu, preload
from penstock_bench.model import Metric, Variant, Workload
from penstock_bench.suites.frameworks import measure
from penstock_bench.suites.frameworks.experiment import Experiment
from penstock_bench.suites.frameworks.workload import make_flax, make_torch_eager, workload_of

_GLIBC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "68719476736"}
_HUGE = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
_ONE_ARENA = {**_GLIBC, "MALLOC_ARENA_MAX": "1"}
_NO_YNNPACK = {"XLA_FLAGS": f"{YNNPACK}="}
_YNNPACK_PRODUCTS = {"XLA_FLAGS": f"{YNNPACK}=LIBRARY_FUSION_TYPE_DOT"}
_CPU = {
    "huge pages": _HUGE,
    "keep memory": _GLIBC,
    "keep memory, huge pages": {**_GLIBC, **_HUGE},
    "one arena": _ONE_ARENA,
    "no YNNPACK": _NO_YNNPACK,
    "one arena, no YNNPACK": {**_ONE_ARENA, **_NO_YNNPACK},
    "one arena, no YNNPACK, huge pages": {**_ONE_ARENA, **_NO_YNNPACK, **_HUGE},
    "one arena, YNNPACK for products": {**_ONE_ARENA, **_YNNPACK_PRODUCTS},
}
_GPU = {
    "Triton for all products": {"XLA_FLAGS": "--xla_gpu_triton_gemm_any=true"},
    "cuBLAS for all products": {"XLA_FLAGS": "--xla_gpu_enable_triton_gemm=false"},
    "latency hiding": {"XLA_FLAGS": "--xla_gpu_enable_latency_hiding_scheduler=true"},
    "keep memory on the host": _GLIBC,
}


def _preloaded() -> dict[str, dict[str, str]]:
    """Return the settings of the allocators that are installed."""
    found = {name: Choice(settings).variables for name in OTHERS if (settings := preload(name))}
    without = {f"{name}, no YNNPACK": {**variables, **_NO_YNNPACK} for name, variables in found.items()}
    return found | without


def _workload(model: str, batch: int, precision: str, settings: dict[str, dict[str, str]]) -> Workload:
    experiment = Experiment(model, batch, precision, "eager", "sgd", "random")
    whole = workload_of(experiment)
    jax, torch = partial(measure.live, make_flax, experiment), partial(measure.live, make_torch_eager, experiment)
    needs = ("flax", "optax")
    return Workload(
        name=f"{model}-b{batch}" + ("" if precision == "fp32" else f"-{precision}"),
        title=whole.title,
        metrics=(Metric("compute", "ms", "lower"),),
        baseline="JAX",
        variants=(
            Variant("JAX", requires=needs, live=jax),
            *(Variant(f"JAX, {name}", requires=needs, live=jax, variables=of) for name, of in settings.items()),
            Variant("PyTorch eager", requires=("torch",), live=torch),
            Variant("PyTorch eager, keep memory", requires=("torch",), live=torch, variables=_GLIBC),
        ),
        sizes=whole.sizes,
        time_limit=whole.time_limit,
        verifies=whole.verifies,
    )


if nvidia_gpu():
    WORKLOADS = tuple(_workload("base", 32, precision, _GPU) for precision in ("bf16", "tf32"))
else:
    settings = {**_CPU, **_preloaded()}
    WORKLOADS = tuple(_workload(model, batch, "fp32", settings) for model in ("tiny", "small") for batch in (8, 32))
