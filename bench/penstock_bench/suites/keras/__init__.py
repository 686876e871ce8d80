"""Keras on JAX with penstock's threaded epochs, compared with Keras alone: the time of a step of `fit` and `predict`.

The input is read as in real programs. The models are Keras Hub's with random weights: small ones, or, with `--size full`, in
their published sizes.
"""

from __future__ import annotations

from penstock_bench.suites.keras.arguments import add_arguments as add_arguments
from penstock_bench.suites.keras.arguments import choose as choose
from penstock_bench.suites.keras.workload import QUICK_TASKS, TASKS, workload_of
from penstock_bench.suites.keras.workload import find as find

ROUNDS = 6  # because importing Keras takes longer than the steps
MINUTES = 45.0
WORKLOADS = tuple(workload_of(task, "small") for task in TASKS)
QUICK = tuple(workload_of(task, "small") for task in QUICK_TASKS)
