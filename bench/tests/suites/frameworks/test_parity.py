"""Every framework computes what the reference computes, and the comparison sees what goes wrong."""

from __future__ import annotations

import itertools
import subprocess
import sys

import jax
import numpy as np
import pytest
from flax import nnx
from tests.extras import require

import penstock_bench.worker
from penstock.run_command import nvidia_gpu
from penstock_bench.suites import frameworks
from penstock_bench.suites.frameworks import find, flax_trainer, flax_vit, keras_vit, weights
from penstock_bench.suites.frameworks.experiment import QUICK

NAME = "vit-tiny-b4-fp32-eager-sgd-random"
# Those that are in interpreters of their own, as far as they are there.
ELSEWHERE = [v for v in find(NAME).variants if v.environment is not None and not v.environment.lacks(v.requires)]


def name_of(precision: str = "fp32", attention: str = "eager", optimizer: str = "sgd", batch: int = 4) -> str:
    return f"vit-tiny-b{batch}-{precision}-{attention}-{optimizer}-random"


def outputs(name: str, variant: str):
    if "orch" in variant:
        require("torch")
    workload = find(name)
    return workload.variant(variant).outputs(workload.sizes["quick"])


def worker(variant, name: str, *options: str) -> subprocess.CompletedProcess:
    python = sys.executable if variant.environment is None else str(variant.environment.python)
    command = [python, penstock_bench.worker.__file__, frameworks.__name__, name, variant.name, "quick", *options]
    return subprocess.run(command, check=True, capture_output=True, text=True)


def assert_agreed(rows):
    assert rows
    assert all(row.agreed for row in rows.values()), rows


ROWS = list(itertools.product(["PyTorch eager", "JAX", "Keras on JAX"], ["fp32", "bf16"], ["sgd", "adamw"]))
# Each framework, each precision and each optimizer; PyTorch's rows compile nothing.
QUICK_ROWS = [
    ("PyTorch eager", "fp32", "sgd"),
    ("PyTorch eager", "bf16", "adamw"),
    ("JAX", "fp32", "adamw"),
    ("Keras on JAX", "bf16", "sgd"),
]


@pytest.mark.parametrize(
    ("variant", "precision", "optimizer"),
    [row if row in QUICK_ROWS else pytest.param(*row, marks=pytest.mark.slow) for row in ROWS],
)
def test_a_framework_agrees_with_the_reference(variant, precision, optimizer, compared):
    name = name_of(precision, optimizer=optimizer)
    assert_agreed(compared(name, outputs(name, variant)))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_pytorchs_fused_attention_agrees_with_the_reference(precision, compared):
    name = name_of(precision, "fused", "adamw")
    assert_agreed(compared(name, outputs(name, "PyTorch eager")))


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["PyTorch eager", "JAX", "Keras on JAX"])
def test_one_record_is_a_batch(variant, compared):
    name = name_of(batch=1)
    assert_agreed(compared(name, outputs(name, variant)))


@pytest.mark.slow
def test_the_compiled_model_agrees_with_the_reference(compared):
    name = name_of("fp32", "eager", "sgd")
    assert_agreed(compared(name, outputs(name, "torch.compile")))


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "optimizer"), [("fp32", "sgd"), ("bf16", "adamw")])
def test_those_of_other_interpreters_agree_with_the_reference(precision, optimizer, compared, tmp_path):
    for variant in ELSEWHERE:
        name, path = name_of(precision, optimizer=optimizer), tmp_path / "outputs.npz"
        worker(variant, name, "--outputs", str(path))
        assert_agreed(compared(name, dict(np.load(path))))


@pytest.mark.parametrize("variant", ["PyTorch eager", pytest.param("JAX", marks=pytest.mark.slow)])
def test_float32_is_not_taken_for_bfloat16(variant, compared):
    rows = compared(name_of("bf16"), outputs(name_of("fp32"), variant))
    assert not rows["logits"].agreed
    assert rows["logits"].difference < rows["logits"].least


# Mistakes: each is planted in the JAX variant.


def seen(name: str, compared) -> set[str]:
    return {quantity for quantity, row in compared(name, outputs(name, "JAX")).items() if not row.agreed}


def plant_half_the_scale_of_scores(monkeypatch):
    right = flax_vit.explicit_attention
    monkeypatch.setattr(flax_vit, "explicit_attention", lambda query, key, value: right(query / 2, key, value))


def plant_twice_the_learning_rate(monkeypatch):
    monkeypatch.setattr(flax_trainer, "LEARNING_RATE", 2 * flax_trainer.LEARNING_RATE)


def plant_labels_off_by_one(monkeypatch):
    place = flax_trainer.FlaxTrainer.place

    def place_with_others(self, batch):
        return place(self, batch._replace(labels=(batch.labels + 1) % QUICK.classes))

    monkeypatch.setattr(flax_trainer.FlaxTrainer, "place", place_with_others)


@pytest.mark.slow
def test_half_the_scale_of_scores_is_seen(compared, monkeypatch):
    plant_half_the_scale_of_scores(monkeypatch)
    assert seen(NAME, compared) == {"logits", "loss", "update"}


@pytest.mark.slow
def test_the_approximate_gelu_is_seen(compared, monkeypatch):
    monkeypatch.setattr(flax_vit, "gelu", lambda hidden: jax.nn.gelu(hidden, approximate=True))
    assert seen(NAME, compared) >= {"logits", "loss"}


@pytest.mark.slow
def test_another_epsilon_of_norms_is_seen(compared, monkeypatch):
    monkeypatch.setattr(flax_vit, "LAYER_NORM_EPSILON", 1e-3)
    assert seen(NAME, compared) == {"logits", "loss", "update"}


@pytest.mark.slow
def test_twice_the_learning_rate_is_seen(compared, monkeypatch):
    plant_twice_the_learning_rate(monkeypatch)
    assert seen(NAME, compared) >= {"update"}


def test_labels_off_by_one_are_seen(compared, monkeypatch):
    plant_labels_off_by_one(monkeypatch)
    assert seen(NAME, compared) == {"loss", "update"}


@pytest.mark.parametrize(
    "plant", [plant_half_the_scale_of_scores, pytest.param(plant_twice_the_learning_rate, marks=pytest.mark.slow)]
)
def test_bfloat16_hides_no_mistake_of_substance(plant, compared, monkeypatch):
    plant(monkeypatch)
    assert seen(name_of("bf16"), compared)


# The meaning of "eager": inductor knows ways to write attention for which it takes a fused kernel.

COUNT_FUSED = """
import warnings
warnings.simplefilter("ignore")
import torch
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache
from penstock_bench.suites.frameworks import torch_vit
from penstock_bench.suites.frameworks.experiment import QUICK
from penstock_bench.suites.frameworks.weights import initial

def as_inductor_knows_it(query, key, value):
    return (query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5).softmax(dim=-1) @ value

def fused(function, *inputs):
    counters.clear()
    with fresh_cache():
        torch.compile(function, dynamic=False)(*inputs)
    return counters["inductor"]["fuse_attention"]

with torch.no_grad():
    print(fused(as_inductor_knows_it, *torch.randn(3, 2, 2, 5, 16)))
model = torch_vit.ViT(QUICK, fused=False)
torch_vit.load(model, initial(QUICK))
print(fused(model, torch.randn(2, 3, QUICK.image, QUICK.image)))
"""


@pytest.mark.slow
def test_inductor_does_not_fuse_the_eager_attention():
    require("torch")
    counted = subprocess.run([sys.executable, "-c", COUNT_FUSED], check=True, capture_output=True, text=True).stdout
    known, ours = map(int, counted.split())
    assert known > 0  # it does count
    assert ours == 0


@pytest.mark.parametrize("variant", ["JAX", pytest.param("Keras on JAX", marks=pytest.mark.slow)])
def test_where_xla_cannot_fuse_attention_it_is_an_error_and_not_the_same_as_eager(variant):
    if not nvidia_gpu():
        with pytest.raises(Exception, match=r"(?i)cudnn|flash|gpu|cuda"):
            outputs(name_of("bf16", "fused"), variant)


@pytest.mark.slow
def test_weights_survive_each_framework_bit_for_bit():
    require("torch")
    from penstock_bench.suites.frameworks import torch_vit

    initial = weights.initial(QUICK)
    torch_model = torch_vit.ViT(QUICK, fused=False)
    torch_vit.load(torch_model, initial)
    keras_model = keras_vit.vit(QUICK, mixed=False, fused=False)
    keras_vit.load(keras_model, initial)
    params = nnx.state(flax_vit.ViT(QUICK, np.float32, fused=False, rngs=nnx.Rngs(0)))
    back = {
        "torch": torch_vit.canonical(torch_model),
        "keras": keras_vit.canonical(keras_model, QUICK),
        "flax": flax_vit.canonical(flax_vit.load(params, initial), QUICK),
    }
    for framework, found in back.items():
        assert set(found) == set(initial), framework
        for name, value in initial.items():
            np.testing.assert_array_equal(found[name], value, err_msg=f"{framework}: {name}")
