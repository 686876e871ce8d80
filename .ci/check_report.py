"""Check a JSON report of `penstock bench all --quick`; PyTorch/XLA, which has its own interpreter, may be missing."""

import json
import sys
from pathlib import Path

run = json.loads(Path(sys.argv[1]).read_text())
assert run["partial"] is None
for workload in run["workloads"]:
    absent = {one["variant"] for one in workload["missing"]} - {"PyTorch/XLA"}
    assert workload["samples"], workload["name"]
    assert not absent, (workload["name"], absent)
