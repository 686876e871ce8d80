from __future__ import annotations

import html
import json
import math
import re
from itertools import pairwise
from typing import Any

import pytest
from bench.tests.page.read_page import EVIL, METRIC, first_of, svgs_of
from bench.tests.run_document import comparison, document, failed_control
from tests.html_page import Reader, assert_needs_no_network

from penstock_bench.page import as_html


def test_page_says_every_sentence():
    run = document()
    text = Reader(as_html(run)).text
    for workload in run["workloads"]:
        assert workload["title"] in text
        for one in workload["comparisons"]:
            assert one["sentence"] in text
        for target in workload["targets"]:
            assert target["text"] in text
    assert all(paragraph in text for paragraph in run["method"])
    assert "How we measure" in text
    assert "seed 20260714" in text
    assert "30 min 34 s" in text
    for said in (*run["machine_lines"], *run["verdict"]["sentences"]):
        assert said in text


def test_page_names_what_is_missing_what_failed_and_what_disagrees():
    page = as_html(document())
    text = Reader(page).text
    assert "tf.data: not installed. To have it: pip install 'penstock[torch]' tensorflow" in text
    assert "cuDNN: there is no GPU" in text
    assert "<code>pip install &#x27;penstock[torch]&#x27; tensorflow</code>" in page
    assert "ray.data was left out, it failed in round 1: it took more than 120 s" in text
    assert "<pre>WARNING: object store is &lt;full&gt; &amp; spilling\n" in page
    assert "keras was left out, it failed before the first round: its logits differ from the reference" in text
    assert re.search(r"keras\s*logits\s*not finite\s*1.0e-04\s*logits\s*NO", re.sub("<[^>]*>", " ", page))
    assert "<dt>grain</dt><dd>with the best of 5 settings of its threads</dd>" in page


@pytest.mark.parametrize(
    ("changed", "banners"),
    [
        ({}, []),
        ({"size": "quick"}, ["Quick sizes."]),
        ({"partial": "interrupted <here>", "size": "quick"}, ["This run is partial.", "Quick sizes."]),
    ],
)
def test_page_warns_of_what_is_not_whole(changed: dict[str, Any], banners: list[str]):
    page = as_html({**document(), **changed})
    assert re.findall(r'class="banner[^>]*><strong>([^<]*)', page) == banners
    if changed.get("partial"):
        assert html.escape(changed["partial"]) in page


def test_page_of_a_failed_control_claims_nothing():
    run = failed_control(document())
    page = as_html(run)
    assert page.index("this report claims nothing") < page.index("<h2")
    reader = Reader(page)
    assert run["verdict"]["sentences"][0] in reader.text
    words = {"different", "not shown", "not judged"}
    assert not words & {seen.strip() for seen in reader.seen}
    assert reader.seen.count("no claim") == 2 * sum(
        not one["control"] for workload in run["workloads"] for one in workload["comparisons"]
    )
    # Sentences and targets are there, but folded under a line that takes them back.
    unfolded = re.sub(r'<details class="void">.*?</details>', "", page, flags=re.DOTALL)
    said = Reader(unfolded).text
    for workload in run["workloads"]:
        assert all((one["sentence"] in said) == one["control"] for one in workload["comparisons"])
        assert not any(target["text"] in said for target in workload["targets"])
    assert 'class="row shown"' not in page


def test_page_of_a_run_that_was_not_judged_shows_no_difference():
    run = {**document(), "verdict": {"trusted": None, "sentences": []}}
    page = as_html(run)
    assert 'class="row shown"' not in page
    assert not {"different", "not shown", "no claim"} & {*Reader(page).seen}


# The parts of the page.


def test_page_is_well_formed_its_headings_are_in_order_and_it_needs_no_network():
    page = as_html(document())
    assert_needs_no_network(page)
    reader = Reader(page)
    assert reader.open == []
    levels = [int(tag[1]) for tag, _ in reader.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    ids = [attributes["id"] for _, attributes in reader.tags if "id" in attributes]
    assert len(ids) == len({*ids})
    assert {attributes["href"] for tag, attributes in reader.tags if tag == "a"} <= {f"#{name}" for name in ids}
    tables = [tag for tag, _ in reader.tags if tag == "table"]
    assert len([tag for tag, _ in reader.tags if tag == "caption"]) == len(tables) == 4
    assert all(attributes.get("scope") in {"col", "row"} for tag, attributes in reader.tags if tag == "th")
    svgs = [attributes for tag, attributes in reader.tags if tag == "svg"]
    assert len(svgs) == 6
    assert all(attributes["role"] == "img" and attributes["aria-label"] for attributes in svgs)


def test_names_are_escaped_wherever_they_stand():
    def evil(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: evil(each) if key not in {"metric", "better"} else each for key, each in value.items()}
        if isinstance(value, list):
            return [evil(each) for each in value]
        return f"{value}{EVIL}" if isinstance(value, str) else value

    bad = evil(document())
    for workload in bad["workloads"]:
        workload["notes"] = {f"{name}{EVIL}": f"note{EVIL}" for name in ("grain", "penstock")}
        for metric in workload["metrics"]:
            metric["name"] = metric["name"].removesuffix(EVIL)
    page = as_html(bad)
    reader = Reader(page)
    assert reader.open == []
    assert [tag for tag, _ in reader.tags if tag == "script"] == ["script"] * 2
    assert f"penstock{EVIL}" in reader.text
    assert any(EVIL in "".join(svg.itertext()) for svg in svgs_of(page))
    assert json.loads(reader.data) == bad


def test_page_holds_the_document_and_nothing_is_lost():
    run = document()
    run["workloads"][0]["failures"][0]["output"] = "</script><!--<script> & \u2028\u2029 é \x00 \udc80"
    reader = Reader(as_html(run))
    assert json.loads(reader.data) == run
    assert not set("<>&\u2028\u2029") & {*reader.data}
    as_html(run).encode()


def test_number_that_json_has_not_is_refused():
    with pytest.raises(ValueError, match="JSON"):
        as_html({**document(), "seconds": math.nan})


def test_page_of_nothing_says_so():
    empty = {"rows": [], "name": "speed", "unit": "m/s", "better": "higher", "ideal": None}
    nothing = {"comparisons": [], "targets": [], "parity": [], "samples": [], "failures": [], "missing": []}
    bare = first_of(document(), metrics=[empty], baseline=None, control=None, notes={}, sizes={}, **nothing)
    bare["machine"]["commit"] = None
    page = as_html(bare)
    text = Reader(page).text
    assert "No variant got as far as a number." in text
    assert "commit unknown" in text
    assert svgs_of(page) == []
    assert "nothing in 0 workloads" in Reader(as_html({**bare, "workloads": []})).text


def test_page_of_two_rounds_has_no_intervals():
    metric = {**METRIC, "rows": [{"variant": "b", "runs": 2, "median": 3.0, "low": 2.9, "high": 3.1, "of_ideal": None}]}
    few = [comparison("speed", "b", "a", [1.0, 1.1]), comparison("speed", "a", "a", [1.0, 1.0], control=True)]
    none = {**few[0], "variant": "c", "ratio": None}
    text = Reader(as_html(first_of(document(), metrics=[metric], comparisons=[*few, none], targets=[], samples=[]))).text
    assert "1.049× no interval" in text.replace("1.049×no", "1.049× no")
    assert "–not measured" in text
