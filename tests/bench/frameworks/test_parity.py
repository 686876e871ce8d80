"""Every framework computes what the reference computes, and the comparison sees what goes wrong."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import penstock.bench.worker
from penstock.bench.suites.frameworks import find, flax_trainer, flax_vit, keras_vit, torch_vit, weights
from penstock.bench.suites.frameworks.experiment import QUICK
from penstock.bench.suites.frameworks.workload import TOLERANCES

KINDS = [f"{attention}-{optimizer}" for attention, optimizer in itertools.product(("eager", "fused"), ("sgd", "adamw"))]
NAME = "vit-tiny-b4-fp32-eager-sgd-random"
# Those that are in interpreters of their own, as far as they are there.
ELSEWHERE = [v for v in find(NAME).variants if v.environment is not None and not v.environment.lacks(v.requires)]


def outputs(name: str, variant: str):
    workload = find(name)
    return workload.variant(variant).outputs(workload.sizes["quick"])


def agrees(found: dict[str, float], precision: str) -> bool:
    return all(found[quantity] <= tolerance for quantity, tolerance in TOLERANCES[precision].items())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("variant", ["PyTorch eager", "JAX", "Keras on JAX"])
def test_a_framework_agrees_with_the_reference(variant, precision, kind, differences, reference):
    name = f"vit-tiny-b4-{precision}-{kind}-random"
    found = differences(outputs(name, variant), reference(name))
    assert agrees(found, precision), found


@pytest.mark.parametrize("name", [NAME, "vit-tiny-b4-bf16-fused-adamw-random"])
def test_the_compiled_model_agrees_with_the_reference(name, differences, reference):
    found = differences(outputs(name, "torch.compile"), reference(name))
    assert agrees(found, name.split("-")[3]), found


def test_those_of_other_interpreters_agree_with_the_reference(differences, reference, tmp_path):
    for variant, precision in itertools.product(ELSEWHERE, ("fp32", "bf16")):
        name, path = f"vit-tiny-b4-{precision}-eager-adamw-random", tmp_path / "outputs.npz"
        worker = penstock.bench.worker.__file__
        command = [variant.environment.python, worker, "frameworks", name, variant.name, "quick", "--outputs", path]
        subprocess.run(command, check=True)
        found = differences(dict(np.load(path)), reference(name))
        assert agrees(found, precision), found


def half_the_scale(query, key, value):
    return flax_vit.explicit_attention(query / 2, key, value)


def labels_off_by_one(batch):
    return batch._replace(labels=(batch.labels + 1) % QUICK.classes)


@pytest.mark.parametrize(
    ("module", "name", "wrong", "seen_in"),
    [
        (flax_vit, "explicit_attention", half_the_scale, {"logits", "loss", "update"}),
        (flax_vit, "gelu", lambda x: jax.nn.gelu(x, approximate=True), {"logits", "loss"}),
        (flax_vit, "LAYER_NORM_EPSILON", 1e-3, {"logits", "loss", "update"}),
        (flax_trainer, "LEARNING_RATE", 2e-3, {"update"}),
    ],
)
def test_a_mistake_is_seen(module, name, wrong, seen_in, differences, reference, monkeypatch):
    right = getattr(module, name)
    if wrong is half_the_scale:
        wrong = lambda query, key, value: right(query / 2, key, value)  # noqa: E731
    monkeypatch.setattr(module, name, wrong)
    found = differences(outputs(NAME, "JAX"), reference(NAME))
    assert {quantity for quantity in seen_in if found[quantity] > TOLERANCES["fp32"][quantity]} == seen_in, found


def test_labels_off_by_one_are_seen(differences, reference, monkeypatch):
    place = flax_trainer.FlaxTrainer.place
    monkeypatch.setattr(flax_trainer.FlaxTrainer, "place", lambda self, batch: place(self, labels_off_by_one(batch)))
    found = differences(outputs(NAME, "JAX"), reference(NAME))
    assert found["loss"] > TOLERANCES["fp32"]["loss"]
    assert found["update"] > TOLERANCES["fp32"]["update"]
    assert found["logits"] <= TOLERANCES["fp32"]["logits"]


@pytest.mark.parametrize("seen", ["scale", "learning rate"])
def test_bfloat16_hides_no_mistake_of_substance(seen, differences, reference, monkeypatch):
    name, attention = NAME.replace("fp32", "bf16"), flax_vit.explicit_attention
    if seen == "scale":
        monkeypatch.setattr(flax_vit, "explicit_attention", lambda query, key, value: attention(query / 2, key, value))
    else:
        monkeypatch.setattr(flax_trainer, "LEARNING_RATE", 2e-3)
    assert not agrees(differences(outputs(name, "JAX"), reference(name)), "bf16")


def test_weights_survive_each_framework_bit_for_bit():
    from flax import nnx

    initial = weights.initial(QUICK)
    torch_model = torch_vit.ViT(QUICK, fused=False)
    torch_vit.load(torch_model, initial)
    keras_model = keras_vit.vit(QUICK, mixed=False, fused=False)
    keras_vit.load(keras_model, initial)
    params = nnx.state(flax_vit.ViT(QUICK, np.float32, "eager", rngs=nnx.Rngs(0)))
    back = {
        "torch": torch_vit.canonical(torch_model),
        "keras": keras_vit.canonical(keras_model, QUICK),
        "flax": flax_vit.canonical(flax_vit.load(params, initial), QUICK),
    }
    for framework, found in back.items():
        assert set(found) == set(initial), framework
        for name, value in initial.items():
            np.testing.assert_array_equal(found[name], value, err_msg=f"{framework}: {name}")


def test_nothing_here_is_the_installed_package_of_another_checkout():
    assert Path(weights.__file__).is_relative_to(Path(__file__).parents[3] / "src"), sys.path
