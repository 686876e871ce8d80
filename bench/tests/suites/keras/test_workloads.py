from __future__ import annotations

import argparse
import subprocess
import sys

import pytest

from penstock_bench.suites import find as find_in_module
from penstock_bench.suites import keras


def chosen(*flags: str) -> list[str]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")  # of all suites
    keras.add_arguments(parser)
    return [workload.name for workload in keras.choose(parser.parse_args(flags))]


def test_without_flags_the_small_size_of_all_is_run():
    assert chosen() == [workload.name for workload in keras.WORKLOADS]
    assert chosen("--only", "overhead", "--only", "gemma-fit") == ["gemma-fit", "overhead"]


def test_a_quick_run_leaves_out_what_it_would_do_twice():
    assert chosen("--quick") == [workload.name for workload in keras.QUICK]
    assert set(chosen()) - set(chosen("--quick")) == {"bert-fit-b16", "bert-fit-b32", "bert-fit-b64"}
    assert chosen("--quick", "--only", "bert-fit-b16") == ["bert-fit-b16"]


def test_full_size_leaves_out_what_has_only_one_and_says_so_when_it_is_asked_for():
    assert "bert-fit-b8-full" in chosen("--size", "full")
    assert not [name for name in chosen("--size", "full") if name.startswith(("slow", "overhead"))]
    with pytest.raises(ValueError, match="overhead has no full size"):
        chosen("--size", "full", "--only", "overhead")


def test_each_workload_is_found_by_its_name():
    for name in [*chosen(), *chosen("--size", "full")]:
        assert find_in_module(keras.__name__, name).name == name
    with pytest.raises(ValueError, match="no workload is called 'bert-fit-b9'"):
        keras.find("bert-fit-b9")
    with pytest.raises(ValueError, match="'overhead-full'"):
        keras.find("overhead-full")


def test_threaded_epochs_are_beside_keras_alone_and_have_a_target():
    for name in [*chosen(), *chosen("--size", "full")]:
        workload = keras.find(name)
        assert [variant.name for variant in workload.variants] == ["default", "threaded"]
        (target,) = workload.targets
        assert (workload.baseline, target.relative_to, target.variant, target.metric) == (
            "default",
            "default",
            "threaded",
            "step",
        )
        bounds = {"slow-fit": 1 / 1.8, "overhead": 1.03}
        assert target.bound == bounds.get(name, 1.01)


def test_a_title_says_how_many_records_a_batch_has():
    for name in chosen():
        workload = keras.find(name)
        for size in ("full", "quick"):
            assert "{" not in workload.fill(workload.title, size)
            assert workload.sizes[size].geometry == "small"
    assert keras.find("bert-fit-b64").fill("{batch}", "full") == "64"


def test_quick_is_small_in_the_full_size_too():
    assert keras.find("gemma-fit-full").sizes["full"].geometry == "full"
    assert keras.find("gemma-fit-full").sizes["quick"] == keras.find("gemma-fit").sizes["quick"]


def test_the_suite_is_described_without_keras():
    code = "import sys; from penstock_bench.suites import keras; print({'keras', 'keras_hub', 'tokenizers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "set()\n"
