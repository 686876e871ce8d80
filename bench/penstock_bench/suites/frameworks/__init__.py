"""The training step of a ViT in PyTorch (eager, compiled, on XLA), JAX and Keras on JAX, after a check of equal results.

Without flags: ViT-tiny and -small at batch 8 and 32 in float32, or, where there is an NVIDIA GPU, ViT-base at batch 32 and 256 in
TF32 and bfloat16.
"""

from __future__ import annotations

import argparse

from penstock_bench.model import Workload
from penstock_bench.suites.frameworks.arguments import add_arguments as add_arguments
from penstock_bench.suites.frameworks.arguments import choose as choose
from penstock_bench.suites.frameworks.experiment import Experiment
from penstock_bench.suites.frameworks.workload import workload_of


def _default_workloads() -> tuple[Workload, ...]:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return choose(parser.parse_args([]))


ROUNDS = 8  # as many as fit into the minutes, if a step takes seconds
MINUTES = 59.0
WORKLOADS = _default_workloads()


def find(name: str) -> Workload:
    """Return the workload of an experiment by its name, such as "vit-tiny-b8-fp32-eager-sgd-random".

    Raises:
      ValueError: it is not the name of an experiment.
    """
    return workload_of(Experiment.parse(name))
