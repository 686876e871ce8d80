"""Keras on JAX with penstock's threaded epochs beside Keras alone: a step of fit and predict, as real input is read.

The models are Keras Hub's with random weights: small ones, or, with `--size full`, as they were published.
"""

from __future__ import annotations

from penstock.bench.suites.keras.arguments import add_arguments as add_arguments
from penstock.bench.suites.keras.arguments import choose as choose
from penstock.bench.suites.keras.workload import QUICK_TASKS, TASKS, workload_of
from penstock.bench.suites.keras.workload import find as find

ROUNDS = 6  # as importing Keras takes longer than the steps, there is no time for more
MINUTES = 45.0
WORKLOADS = tuple(workload_of(task, "small") for task in TASKS)
QUICK = tuple(workload_of(task, "small") for task in QUICK_TASKS)
