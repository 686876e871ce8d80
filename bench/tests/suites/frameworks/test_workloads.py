from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from penstock_bench.model import VerificationError
from penstock_bench.suites import find as find_in_module
from penstock_bench.suites import frameworks
from penstock_bench.suites.frameworks import arguments, trainer, workload
from penstock_bench.suites.frameworks.experiment import Experiment

NAME = "vit-tiny-b8-fp32-eager-sgd-random"


def chosen(*flags: str) -> list[str]:
    parser = argparse.ArgumentParser()
    frameworks.add_arguments(parser)
    return [workload.name for workload in frameworks.choose(parser.parse_args(flags))]


@pytest.fixture
def gpu(monkeypatch):
    for module in (trainer, arguments, workload):
        monkeypatch.setattr(module, "nvidia_gpu", lambda: True)


@pytest.fixture
def no_gpu(monkeypatch):
    for module in (trainer, arguments, workload):
        monkeypatch.setattr(module, "nvidia_gpu", lambda: False)


def test_a_name_says_all_and_finds_its_workload():
    experiment = Experiment("base", 256, "bf16", "fused", "adamw", "jpeg")
    assert experiment.name == "vit-base-b256-bf16-fused-adamw-jpeg"
    assert Experiment.parse(experiment.name) == experiment
    assert find_in_module(frameworks.__name__, experiment.name).name == experiment.name


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("vit-tiny-b8-fp32-eager-sgd", "a name is like 'vit-tiny-b8-fp32-eager-sgd-random'"),
        ("resnet-tiny-b8-fp32-eager-sgd-random", "a name is like"),
        ("vit-huge-b8-fp32-eager-sgd-random", "'huge' is unknown: choose from tiny, small, base"),
        ("vit-tiny-b0-fp32-eager-sgd-random", "batch 0 is not a number of records"),
        ("vit-tiny-bx-fp32-eager-sgd-random", "no workload is called"),
        ("vit-tiny-b8-fp16-eager-sgd-random", "choose from fp32, tf32, bf16"),
    ],
)
def test_a_name_that_is_none_is_an_error_that_says_why(name, says):
    with pytest.raises(ValueError, match=says):
        frameworks.find(name)


def test_without_flags_it_is_the_articles_experiment_at_sizes_a_cpu_can_do(no_gpu):
    assert chosen() == [f"vit-{model}-b{batch}-fp32-eager-sgd-random" for model in ("tiny", "small") for batch in (8, 32)]


def test_without_flags_a_gpu_gets_the_base_model_in_what_it_multiplies_fast(gpu):
    assert chosen() == [f"vit-base-b{batch}-{kind}-eager-sgd-random" for batch in (32, 256) for kind in ("tf32", "bf16")]


def test_flags_multiply(no_gpu):
    names = chosen(
        "--model", "tiny", "--batch", "4, 04,2", "--attention", "eager,fused", "--optimizer", "adamw", "--data", "jpeg"
    )
    assert names == [f"vit-tiny-b{batch}-fp32-{kind}-adamw-jpeg" for batch in (4, 2) for kind in ("eager", "fused")]


@pytest.mark.parametrize(
    ("flag", "word", "says"),
    [
        ("--model", "tiny,large", "--model 'large' is unknown: choose from tiny, small, base"),
        ("--precision", "fp16", "choose from fp32, tf32, bf16"),
        ("--attention", "flash", "choose from eager, fused"),
        ("--optimizer", "", "--optimizer '' is unknown"),
        ("--data", "png", "choose from random, jpeg"),
        ("--batch", "eight", "--batch 'eight' is not a number of records"),
        ("--batch", "8,-1", "--batch '-1' is not a number of records"),
        ("--precision", "tf32", "what NVIDIA GPUs multiply with, and there is none here"),
    ],
)
def test_a_flag_that_makes_no_sense_is_an_error_that_says_what_does(flag, word, says, no_gpu):
    with pytest.raises(ValueError, match=says):
        chosen(flag, word)


def unsuited(name: str) -> dict[str, str]:
    found = frameworks.find(name).variants
    return {v.name: v.unsuited for v in found if v.unsuited and not v.name.endswith(workload.AT_BEST)}


def test_on_a_gpu_there_is_a_target_and_no_torch_xla(gpu):
    name = "vit-base-b32-bf16-fused-adamw-random"
    assert unsuited(name) == {"PyTorch/XLA": "torch_xla has no CUDA since 2.9"}
    found = frameworks.find(name)
    assert [(target.variant, target.bound, target.relative_to) for target in found.targets] == [("JAX", 0.9, "torch.compile")]


def test_on_a_cpu_each_framework_is_as_it_comes_and_jax_at_its_best_too(no_gpu, monkeypatch):
    monkeypatch.setattr(workload, "variables_of_run", lambda: ({"MALLOC_ARENA_MAX": "1"}, ""))
    found = frameworks.find(NAME)
    as_they_come = ["PyTorch eager", "torch.compile", "PyTorch/XLA", "JAX", "Keras on JAX"]
    assert [v.name for v in found.variants if not v.variables] == as_they_come
    best = {v.name: v.variables for v in found.variants if v.variables}
    assert best == {name: {"MALLOC_ARENA_MAX": "1"} for name in ("JAX, penstock run", "Keras on JAX, penstock run")}
    assert {(t.variant, t.bound, t.relative_to) for t in found.targets} == {
        ("JAX, penstock run", 0.85, "JAX"),
        ("JAX, penstock run", 1.0, "PyTorch eager"),
    }
    parser = argparse.ArgumentParser()
    frameworks.add_arguments(parser)
    (chosen_one,) = frameworks.choose(parser.parse_args(["--model", "tiny", "--batch", "8"]))
    assert [v.name for v in chosen_one.variants] == as_they_come
    assert not chosen_one.targets
    (chosen_one,) = frameworks.choose(parser.parse_args(["--model", "tiny", "--batch", "8", "--at-best"]))
    assert [v.name for v in chosen_one.variants] == [v.name for v in found.variants]
    monkeypatch.setattr(workload, "variables_of_run", lambda: ({}, "another C library"))
    found = frameworks.find(NAME)
    assert {v.name: v.unsuited for v in found.variants if v.unsuited} == dict.fromkeys(best, "another C library")
    assert not found.targets


def test_what_calls_itself_fused_and_is_not_takes_no_part(no_gpu):
    assert not unsuited(NAME)
    for precision in ("fp32", "bf16"):
        reasons = unsuited(NAME.replace("fp32-eager", f"{precision}-fused"))
        assert set(reasons) == {"PyTorch/XLA", "JAX", "Keras on JAX"}
        assert set(reasons.values()) == {"XLA has no fused attention for float32, nor on a CPU"}


def test_who_takes_no_part_has_no_target(gpu):
    found = frameworks.find("vit-base-b32-tf32-fused-sgd-random")
    assert "JAX" in unsuited(found.name)
    assert not found.targets


def test_a_run_may_take_longer_where_a_step_does(no_gpu):
    assert frameworks.find(NAME).time_limit == 600
    assert frameworks.find("vit-base-b256-fp32-eager-sgd-random").time_limit > 2 * 3600


def test_a_gpu_that_one_uses_and_the_suite_does_not_see_is_an_error(no_gpu):
    trainer.check_device("JAX", on_gpu=False)
    with pytest.raises(VerificationError, match="JAX uses a GPU here that the suite does not know of"):
        trainer.check_device("JAX", on_gpu=True)


def test_a_gpu_that_one_does_not_use_is_an_error(gpu):
    trainer.check_device("JAX", on_gpu=True)
    with pytest.raises(VerificationError, match="does not use the machine's GPU"):
        trainer.check_device("JAX", on_gpu=False)


def test_batches_share_an_agreement_if_what_is_compared_is_the_same():
    def agreement(name: str) -> str:
        return frameworks.find(name).agreement.name

    assert agreement(NAME) == agreement(NAME.replace("b8", "b32")) == agreement(NAME.replace("random", "jpeg"))
    others = [NAME.replace(*change) for change in (("b8", "b4"), ("fp32", "bf16"), ("eager", "fused"), ("sgd", "adamw"))]
    assert len({agreement(name) for name in (NAME, *others)}) == 5


def test_the_reference_is_found_by_its_name_and_never_timed():
    found = frameworks.find(NAME)
    reference = found.variant("float64")
    assert reference is found.agreement.reference
    with pytest.raises(NotImplementedError, match="never timed"):
        reference.measure(found.sizes["quick"])


def test_titles_and_notes_can_be_filled():
    found = frameworks.find(NAME)
    assert "224x224" in found.fill(found.title, "full")
    assert all(found.fill(variant.note, "full") for variant in found.variants)


def test_workloads_are_defined_without_any_framework():
    package = str(Path(penstock.__file__).parent)
    code = f"""
import sys, types
for name in ("jax", "flax", "optax", "torch", "torch_xla", "keras", "PIL"):
    sys.modules[name] = None
package = types.ModuleType("penstock")
package.__path__ = [{package!r}]
sys.modules["penstock"] = package
from penstock_bench.suites import find
print(find({frameworks.__name__!r}, {NAME!r}).name)
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == NAME
