"""Measures one variant, once, and prints what it measured as one JSON line. The harness starts it as a process."""

from __future__ import annotations

import argparse
import json

import jax

from penstock.bench.suites import workloads


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m penstock.bench.worker")
    for name in ("module", "workload", "variant", "size"):
        parser.add_argument(name)
    args = parser.parse_args()
    workload = workloads(args.module)[args.workload]
    measurement = workload.variant(args.variant).measure(workload.sizes[args.size])
    device = jax.devices()[0]
    details = {**measurement.details, "device": f"{device.platform}: {device.device_kind}"}
    print(json.dumps({"values": dict(measurement.values), "details": details}), flush=True)


if __name__ == "__main__":  # worker processes of the libraries under test import this module again
    main()
