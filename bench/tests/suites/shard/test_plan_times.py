"""`bench/scripts/plan_times.py` compares predicted times with steps that run in several processes."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).parents[3] / "scripts" / "plan_times.py"


@pytest.fixture(scope="module")
def plan_times():
    spec = importlib.util.spec_from_file_location("plan_times", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # for its dataclass
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture
def timed(plan_times):
    def make(layout, compute, collectives, *measured):
        return plan_times.Timed("step", layout, compute, collectives, measured)

    return make


def test_a_ratio_that_was_predicted_right_has_the_error_one(plan_times, timed):
    layouts = [timed("data parallel", 1.0, 1.0, 20.0, 22.0), timed("plan", 0.5, 0.5, 10.0, 11.0)]
    assert plan_times.ratio_errors(layouts, 0.0) == pytest.approx([1.0])


def test_errors_above_and_below_are_alike(plan_times, timed):
    basis = timed("data parallel", 1.0, 0.0, 8.0)
    for measured in (2.0, 8.0):  # half and twice as much as predicted
        assert plan_times.ratio_errors([basis, timed("plan", 0.5, 0.0, measured)], 0.0) == pytest.approx([2.0])


def test_compute_hides_collectives_up_to_its_own_time(plan_times, timed):
    layout = timed("plan", 2.0, 3.0, 1.0)
    assert [layout.predicted(hidden) for hidden in (0.0, 0.25, 1.0)] == [5.0, 4.5, 3.0]
    assert timed("plan", 3.0, 2.0, 1.0).predicted(1.0) == 3.0


def test_pairs_in_the_predicted_order_are_counted_and_near_ties_are_not(plan_times, timed):
    layouts = [timed("data parallel", 1.0, 0.0, 10.0), timed("FSDP", 2.0, 0.0, 15.0), timed("plan", 1.05, 0.0, 12.0)]
    assert plan_times.order_of_pairs(layouts, 0.0) == (2, 2)
    swapped = [layouts[0], timed("FSDP", 2.0, 0.0, 5.0)]
    assert plan_times.order_of_pairs(swapped, 0.0) == (0, 1)


def test_layouts_of_different_steps_are_no_pair(plan_times, timed):
    other = plan_times.Timed("other", "plan", 5.0, 0.0, (1.0,))
    assert plan_times.order_of_pairs([timed("plan", 1.0, 0.0, 1.0), other], 0.0) == (0, 0)


@pytest.mark.slow
def test_the_plan_and_its_baselines_run_in_several_processes(tmp_path):
    path = tmp_path / "figures.json"
    command = [sys.executable, PATH, "--only", "mlp", "--processes", "2", "--rounds", "2", "--json", path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    figures = json.loads(path.read_text())
    layouts = {each["layout"]: each for each in figures["layouts"]}
    assert {"plan", "data parallel", "FSDP", "Megatron"} <= set(layouts)
    assert all(len(each["measured"]) == 2 and min(each["measured"]) > 0 for each in figures["layouts"])
    assert min(figures["hardware"].values()) > 0
    assert "| nothing hidden |" in done.stdout


def test_an_odd_number_of_processes_is_refused():
    done = subprocess.run([sys.executable, PATH, "--processes", "3"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "give an even number" in done.stderr
