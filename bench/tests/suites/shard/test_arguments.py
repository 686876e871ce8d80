"""The arguments of `penstock bench shard` are judged before anything runs."""

from __future__ import annotations

import argparse
import importlib.util

import pytest

from penstock import cli
from penstock.shard.hlo import topologies
from penstock_bench.suites.shard import real
from penstock_bench.suites.shard.arguments import add_arguments, choose
from penstock_bench.suites.shard.outside import OUTSIDE
from penstock_bench.suites.shard.real_workload import SMALL_CASE
from penstock_bench.suites.shard.zoo import ZOO


@pytest.fixture
def with_compilers(monkeypatch):
    """Say that all compilers are installed; nothing is compiled here."""
    monkeypatch.setattr(topologies, "describe_missing_compiler", lambda topology: "")


def chosen(*given: str) -> dict[str, list[str]]:
    """Return the names of the workloads that arguments choose, each with the names of its variants."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return {found.name: [variant.name for variant in found.variants] for found in choose(parser.parse_args(given))}


def test_the_zoo_is_scored_by_the_cpu_compiler_and_trained():
    found = chosen()
    assert list(found) == ["zoo-cpu-tpu-v5e", "training-zoo-cpu-tpu-v5e"]
    assert found["zoo-cpu-tpu-v5e"] == [f"{name} {mesh}" for name in ZOO for mesh in ("8", "2x4", "2x2x2")]


def test_a_report_can_have_several_compilers(with_compilers):
    found = chosen("--topology", "cpu", "--topology", "v5e:2x2", "--only", "mlp", "--no-train")
    assert found == {"zoo-cpu-tpu-v5e": ["mlp 8", "mlp 2x4", "mlp 2x2x2"], "zoo-v5e:2x2": ["mlp 4", "mlp 2x2"]}


def test_the_hardware_is_that_of_the_topology(with_compilers):
    assert list(chosen("--topology", "v6e:2x4", "--hardware", "v6e", "--no-train")) == ["zoo-v6e:2x4"]


def test_steps_of_other_packages_are_on_a_mesh_of_two_axes_and_not_trained():
    assert chosen("--suite", "outside") == {"outside-cpu-tpu-v5e": [f"{name} 2x4" for name in OUTSIDE]}
    assert list(chosen("--suite", "outside", "--train")) == ["outside-cpu-tpu-v5e", "training-outside-cpu-tpu-v5e"]


def test_real_sizes_have_topologies_of_their_own(with_compilers):
    found = chosen("--suite", "real")
    assert found["real"] == list(real.REAL)
    assert found["planning-real"] == ["llama-7b-64", "llama-70b-64"]
    assert chosen("--suite", "real", "--only", "moe-dense-16") == {"real": ["moe-dense-16"]}


def test_quick_chooses_little(with_compilers):
    assert chosen("--quick") == {"zoo-cpu-tpu-v5e": ["mlp 2x4", "gpt2 2x4"]}
    assert chosen("--quick", "--suite", "outside") == {"outside-cpu-tpu-v5e": ["equinox-gru 2x4"]}
    assert chosen("--quick", "--suite", "real") == {"real": [SMALL_CASE]}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--topology", "v5e:3x3"], "there is no topology 'v5e:3x3'"),
        (["--topology", "v3:2x2"], "v3:2x2: there is no datasheet of v3 here"),
        (
            ["--topology", "v5e:2x4", "--mesh", "2x2"],
            "--mesh 2x2: is no mesh of the 8 devices of --topology v5e:2x4;",
        ),
        (["--topology", "v5e:2x4", "--hardware", "h100"], "--hardware h100: --topology v5e:2x4 is of tpu-v5e"),
        (["--suite", "outside", "--only", "mlp"], "--only mlp: is not in --suite outside; choose from bert, "),
        (["--suite", "real", "--only", "llama-7b"], "--only llama-7b: is not in --suite real; choose from llama-7b-16, "),
        (["--suite", "real", "--topology", "v5e:2x4"], "--topology: each case of --suite real has its own"),
        (["--suite", "real", "--mesh", "2x4"], "--mesh: each case of --suite real has its own"),
    ],
)
def test_what_there_is_not_is_told_in_a_line(given, said, with_compilers, capsys):
    assert cli.main(["bench", "shard", *given]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


@pytest.mark.parametrize("given", [["--topology", "v5e:2x4"], ["--suite", "real"]])
def test_a_tpu_compiler_that_is_missing_is_told_in_a_line(given, monkeypatch, capsys):
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "libtpu" else found(name, *more))
    assert cli.main(["bench", "shard", *given]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{' '.join(given)}: the TPU compiler is not installed" in line
    assert 'pip install "penstock[tpu]"' in line


def test_help_explains_the_suites(capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", "shard", "--help"])
    said = capsys.readouterr().out
    assert all(word in said for word in ("--topology", "outside", "PENSTOCK_BENCH_CACHE"))
