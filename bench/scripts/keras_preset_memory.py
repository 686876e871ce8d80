"""Measure the memory of the host while a preset of Keras Hub is loaded: under AutoShardDistribution, and by Keras alone.

    pip install -e . -e "bench[suites]"
    python bench/scripts/keras_preset_memory.py --json preset.json

A Llama of random weights is saved as a preset, and loaded in fresh processes of eight virtual CPU devices, whose memory is the
host's. The measure is the peak of the process's own memory (RssAnon of /proc, which leaves out the pages of files) above that
before. It is given in parts of the weights, after the largest variable is subtracted, because Keras reads one variable at a time.
It is at least 1, as all shards are here. Bound: 1.3.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

WAYS = ("AutoShardDistribution", "AutoShardDistribution, planned before", "ModelParallel", "one device")
_CONFIGURATION = {
    "vocabulary_size": 32_000,
    "num_layers": 6,
    "num_query_heads": 8,
    "num_key_value_heads": 4,
    "hidden_dim": 1024,
    "intermediate_dim": 4096,
}


def main() -> None:
    """Save a preset, load it in each way, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="processes for each way (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--load", nargs=2, metavar=("WAY", "PRESET"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    os.environ["KERAS_BACKEND"] = "jax"
    if args.load:
        print(json.dumps(_load(*args.load)))
        return
    with tempfile.TemporaryDirectory() as folder:
        preset = str(Path(folder) / "llama")
        subprocess.run([sys.executable, "-c", _SAVE, preset, json.dumps(_CONFIGURATION)], check=True, capture_output=True)
        found = {way: [_run(way, preset) for _ in range(args.rounds)] for way in WAYS}
    print(f"{'':40} peak above, MiB   (peak − largest variable) ÷ weights")
    for way, runs in found.items():
        peaks = ", ".join(f"{each['peak'] / 2**20:.0f}" for each in runs)
        print(f"{way:40} {peaks:18} {', '.join(format(each['ratio'], '.2f') for each in runs)}")
    weights = found[WAYS[0]][0]
    print(f"weights {weights['weights'] / 2**20:.0f} MiB, largest variable {weights['largest'] / 2**20:.0f} MiB")
    if args.json:
        args.json.write_text(json.dumps({"configuration": _CONFIGURATION, "ways": found}, indent=1) + "\n")


_SAVE = """
import json, sys, keras_hub
keras_hub.models.LlamaBackbone(**json.loads(sys.argv[2])).save_to_preset(sys.argv[1])
"""


def _run(way: str, preset: str) -> dict[str, float]:
    """Return the figures of one process."""
    command = [sys.executable, __file__, "--load", way, preset]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _load(way: str, preset: str) -> dict[str, float]:
    """Load the preset in this process, and return its peak memory above that before, in bytes."""
    import contextlib

    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    import keras
    import keras_hub

    import penstock.keras as pk

    scope: Any = contextlib.nullcontext()
    if way == "ModelParallel":
        mesh = keras.distribution.DeviceMesh((1, 8), ("batch", "model"))
        layouts = keras_hub.models.LlamaBackbone.get_layout_map(mesh)
        scope = keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch").scope()
    elif way.startswith("Auto"):
        distribution = pk.AutoShardDistribution()
        scope = distribution.scope()
        if way.endswith("before"):
            tokens = jax.ShapeDtypeStruct((8, 32), "int32")
            targets = jax.ShapeDtypeStruct((8, 32, _CONFIGURATION["hidden_dim"]), "float32")
            distribution.plan(_compiled_backbone, ({"token_ids": tokens, "padding_mask": tokens}, targets))
    jax.block_until_ready(jax.jit(lambda: jax.numpy.zeros(8))())
    before, peak = _own_memory(), _Peak()
    with scope:
        backbone = keras_hub.models.Backbone.from_preset(preset)
    highest = peak.stop() - before
    sizes = [variable.value.nbytes for variable in backbone.variables]
    weights, largest = sum(sizes), max(sizes)
    return {"peak": highest, "weights": weights, "largest": largest, "ratio": (highest - largest) / weights}


def _compiled_backbone() -> Any:
    """Return the model of the preset, compiled, to be planned from shapes."""
    import keras_hub

    backbone = keras_hub.models.LlamaBackbone(**_CONFIGURATION)
    backbone.compile("adamw", "mse")
    return backbone


class _Peak:
    """A thread that looks at the memory of this process every 2 ms, which is often enough for arrays of 100 MiB."""

    def __init__(self) -> None:
        self._highest, self._done = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self._highest = max(self._highest, _own_memory())

    def stop(self) -> int:
        """End the thread, and return the highest figure."""
        self._done.set()
        self._thread.join()
        return max(self._highest, _own_memory())


def _own_memory() -> int:
    """Return the bytes of memory of this process that are not pages of files."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon: this benchmark needs Linux")


if __name__ == "__main__":
    main()
