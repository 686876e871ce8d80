from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence

import pytest
from bench.tests.page.read_page import METRIC, assert_inside, svgs_of
from bench.tests.run_document import comparison, document, failed_control
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.html_page import SVG

from penstock_bench.page import as_html
from penstock_bench.page._axis import Axis, ratio_axis, tick_text, value_axis
from penstock_bench.page._forest import forest
from penstock_bench.page._spread import spread


def test_shape_of_many_steps_is_small():
    run = document()
    for sample in run["workloads"][1]["samples"]:
        sample["steps"]["step time"] = sample["steps"]["step time"] * 25
    workload = run["workloads"][1]
    image = spread(workload, workload["metrics"][0])
    assert image is not None
    assert "80,000 steps" in image
    assert len(image) < 20_000


def test_all_marks_are_inside():
    svgs = svgs_of(as_html(failed_control(document())))
    assert len(svgs) == 6
    for svg in svgs:
        assert_inside(svg)


_RATIO = st.floats(1e-300, 1e300) | st.floats(0.99, 1.01) | st.floats(0.01, 1000) | st.just(0.0)
_ROWS = st.lists(st.tuples(_RATIO, _RATIO, _RATIO, st.booleans(), st.booleans()), min_size=1, max_size=8)


@settings(max_examples=30)
@given(_ROWS)
def test_extremes_of_ratios_stay_inside(rows: Sequence[tuple[float, float, float, bool, bool]]):
    compared = []
    for number, (one, other, ratio, control, bare) in enumerate(rows):
        low, high = (None, None) if bare else sorted((one, other))
        made = {"metric": "speed", "variant": f"variant {number}" * (number + 1), "baseline": "b", "control": control}
        compared.append({**made, "ratio": ratio, "low": low, "high": high, "verdict": "different", "sentence": ""})
    assert_inside(ElementTree.fromstring(forest(compared, METRIC, True)))


@settings(max_examples=30)
@given(st.lists(st.floats(-1e12, 1e12) | st.floats(1e-9, 1e9), min_size=1, max_size=20))
@example([1.0, 5e-324])
@example([5e-324])
@example([1e-321, -1e-321])
def test_extremes_of_values_stay_inside(values: Sequence[float]):
    samples = [{"variant": "a", "again": False, "round": at, "values": {"speed": v}, "steps": {}} for at, v in enumerate(values)]
    image = spread({"samples": samples}, {**METRIC, "rows": [{"variant": "a"}]})
    assert image is not None
    assert_inside(ElementTree.fromstring(image))


@settings(max_examples=30)
@given(st.lists(_RATIO, min_size=1, max_size=5), st.lists(_RATIO, max_size=5))
def test_ratio_axis_marks_one_and_holds_all_ratios(ratios: list[float], bounds: list[float]):
    axis = ratio_axis(ratios, bounds, 100, 400)
    assert 1.0 in [round(tick, 9) for tick in axis.ticks()]
    assert all(axis.low <= tick <= axis.high for tick in axis.ticks())
    assert all(axis.low <= ratio <= axis.high for ratio in ratios if 1e-200 < ratio < 1e200)


def test_interval_that_leaves_the_plot_ends_in_an_arrow():
    rows = [{**comparison("speed", "b", "a", [1.0, 1.1, 1.2]), "low": 1e-6, "high": 1e6}]
    image = forest(rows, METRIC, True)
    assert image.count('class="arrow"') == 2
    assert 'class="cap"' not in image
    assert "1.000e-06 – 1,000,000" in image


def test_control_is_the_first_one():
    pairs = [comparison("speed", "b", "a", [1.0, 1.1, 1.2]), comparison("speed", "a", "a", [1.0, 1.1, 1.0], control=True)]
    svg = ElementTree.fromstring(forest(pairs, METRIC, True))
    assert [text.text for text in svg.iter(f"{{{SVG}}}text") if text.get("class") == "name"] == ["A/A: a, twice", "b"]


def test_ratio_of_zero_takes_no_room_from_the_others():
    rows = [comparison("speed", name, "a", ratios) for name, ratios in [("b", [1.0, 1.1, 1.2]), ("c", [2.0, 2.1, 2.2])]]
    zero = {**rows[0], "variant": "z", "ratio": 0.0, "low": None, "high": None}
    image = forest([*rows, zero], METRIC, True)
    assert image.count('class="arrow"') == 1
    assert image.count("<circle") == 2
    assert ratio_axis([0.0, 2.0], [], 0, 100) == ratio_axis([2.0], [], 0, 100)


@pytest.mark.parametrize(
    ("low", "high", "written"),
    [
        (0.988, 1.013, ["0.990", "0.995", "1.000", "1.005", "1.010"]),
        (0.4, 2.9, ["0.5", "0.7", "1", "2"]),
        (0.008, 1200, ["0.01", "0.1", "1", "10", "100", "1,000"]),
        (1e-13, 1e12, ["10⁻¹⁰", "10⁻⁵", "1", "10⁵", "10¹⁰"]),
    ],
)
def test_ticks_are_round_numbers(low: float, high: float, written: list[str]):
    ticks = Axis(low, high, 0, 300, log=True).ticks()
    assert [tick_text(tick, ticks) for tick in ticks] == written


def test_axis_of_one_value_has_room_for_it():
    axis = value_axis([5.0], 0, 100)
    assert axis.at(5.0) == 50
    assert axis.at(-1e9) == 0
    assert axis.at(1e9) == 100
