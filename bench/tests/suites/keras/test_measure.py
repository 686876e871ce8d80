"""Runs of quick sizes, in processes of their own as in a benchmark: what they leave out of Keras is left out of theirs only."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from penstock_bench import worker
from penstock_bench.suites import keras


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


def run(workload: str, variant: str, cache: Path, *more: str, code: str | None = None) -> subprocess.CompletedProcess[str]:
    command = ["-c", code, "worker"] if code else [worker.__file__]
    return subprocess.run(
        [sys.executable, *command, keras.__name__, workload, variant, "quick", *more],
        env={**os.environ, "PENSTOCK_BENCH_CACHE": str(cache)},
        check=False,
        capture_output=True,
        text=True,
        timeout=200,
    )


def measured(workload: str, variant: str, cache: Path) -> dict:
    path = cache / "result.json"
    finished = run(workload, variant, cache, "--result", str(path))
    assert finished.returncode == 0, finished.stderr
    return json.loads(path.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("workload", ["bert-predict", "slow-fit", "overhead"])
def test_both_variants_compute_the_same_before_their_blocks(workload, cache):
    by_variant = {variant: measured(workload, variant, cache) for variant in ("default", "threaded")}
    for result in by_variant.values():
        assert min(result["steps"]["step"]) > 0
        assert all(math.isfinite(value) for value in result["evidence"].values())
    assert by_variant["default"]["evidence"] == by_variant["threaded"]["evidence"]
    assert by_variant["default"]["evidence"].keys() == ({"predicted"} if workload == "bert-predict" else {"loss", "weights"})


@pytest.mark.slow
def test_what_variants_are_compared_by_is_alike_bit_for_bit(cache):
    found = {}
    for variant in ("default", "threaded"):
        path = cache / f"{variant}.npz"
        finished = run("overhead", variant, cache, "--outputs", str(path))
        assert finished.returncode == 0, finished.stderr
        with np.load(path) as file:
            found[variant] = dict(file)
    assert {name.partition(": ")[0] for name in found["default"]} == {"loss", "weights"}
    assert found["default"].keys() == found["threaded"].keys()
    assert all(np.array_equal(found["default"][name], found["threaded"][name]) for name in found["default"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "instead", "says"),
    [
        ("threaded", "None", "epochs were to be threaded, but keras"),
        ("default", "penstock.keras.enable_threaded_epochs()", "epochs were to be default, but penstock"),
    ],
)
def test_a_variant_that_is_not_what_it_says_is_none(variant, instead, says, cache):
    code = f"""
import sys
from penstock_bench.suites.keras import keras_setup, measure
import penstock.keras
measure.begin = lambda epochs: {instead}
from penstock_bench import worker
from penstock_bench.suites import find
workload = find(*sys.argv[2:4])
worker._alone(workload.variant(sys.argv[4]), workload.sizes["quick"], 0.0)
"""
    finished = run("slow-fit", variant, cache, code=code)
    assert finished.returncode != 0
    assert says in finished.stderr


def test_documents_are_many_and_their_tokens_fill_the_batch(monkeypatch, tmp_path):
    pytest.importorskip("tokenizers")
    from penstock_bench.suites.keras import text

    monkeypatch.setenv("PENSTOCK_BENCH_CACHE", str(tmp_path))
    texts = text.corpus()
    assert len(set(texts.documents)) == len(texts.documents) > 1000
    token_ids = texts.token_ids(len(texts.documents) - 2, 4, 32)  # round and round
    assert (token_ids.shape, token_ids.dtype) == ((4, 32), np.int32)
    assert len({row.tobytes() for row in token_ids}) == 4
    assert token_ids.max() < text.VOCABULARY
    assert (text.corpus().token_ids(0, 2, 32) == token_ids[2:]).all()
