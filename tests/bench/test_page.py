from __future__ import annotations

import base64
import html
import json
import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Sequence
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from selenium.webdriver import Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.wait import WebDriverWait
from tests.bench.run_document import comparison, document, failed_control

from penstock.bench.page import as_html
from penstock.bench.page._axis import Axis, ratio_axis, tick_text, value_axis
from penstock.bench.page._forest import forest
from penstock.bench.page._spread import spread

_SVG = "http://www.w3.org/2000/svg"
_METRIC = {"name": "speed", "unit": "m/s", "better": "higher", "ideal": None, "rows": []}
_EVIL = "<script>alert(1)</script>\"'&"


class _Reader(HTMLParser):
    """The text that a reader sees, the tags in their order, and the JSON."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.seen: list[str] = []
        self.data = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in {"meta", "link"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "script" in self.open and self.tags[-1][1].get("id") == "data":
            self.data += data
        elif not {"script", "style", "head"} & {*self.open}:
            self.seen.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.seen).split())


def _svgs(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(found) for found in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def _positions(svg: ElementTree.Element) -> Iterator[tuple[float, float]]:
    """Where all marks are, and where all texts begin or end."""
    for element in svg.iter():
        kind, at = element.tag.removeprefix(f"{{{_SVG}}}"), element.attrib
        if kind == "line":
            yield float(at["x1"]), float(at["y1"])
            yield float(at["x2"]), float(at["y2"])
        elif kind == "circle":
            x, y, radius = float(at["cx"]), float(at["cy"]), float(at["r"])
            yield from [(x - radius, y - radius), (x + radius, y + radius)]
        elif kind == "text":
            yield float(at["x"]), float(at["y"])
        elif kind == "path":
            for pair in re.split("[MLZ]", at["d"]):
                if pair:
                    x, y = map(float, pair.split())
                    yield x, y


def _assert_inside(svg: ElementTree.Element) -> None:
    _, _, width, height = map(float, svg.attrib["viewBox"].split())
    for x, y in _positions(svg):
        assert 0 <= x <= width, svg.attrib["aria-label"]
        assert 0 <= y <= height


def _first_of(run: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """The run with its first workload alone, changed."""
    return {**run, "workloads": [{**run["workloads"][0], **changed}]}


# What the page says.


def test_page_says_every_sentence():
    run = document()
    text = _Reader(as_html(run)).text
    for workload in run["workloads"]:
        assert workload["title"] in text
        for one in workload["comparisons"]:
            assert one["sentence"] in text
        for target in workload["targets"]:
            assert target["text"] in text
    assert run["method"] in text
    assert "How we measure" in text
    assert "seed 20260714" in text
    assert "30 min 34 s" in text
    for said in (*run["machine_lines"], *run["verdict"]["sentences"]):
        assert said in text


def test_page_names_what_is_missing_what_failed_and_what_disagrees():
    page = as_html(document())
    text = _Reader(page).text
    assert "tf.data: not installed. To have it: pip install 'penstock[bench]' tensorflow" in text
    assert "cuDNN: there is no GPU" in text
    assert "<code>pip install &#x27;penstock[bench]&#x27; tensorflow</code>" in page
    assert "ray.data was left out, it failed in round 1: it took more than 120 s" in text
    assert "<pre>WARNING: object store is &lt;full&gt; &amp; spilling\n" in page
    assert "keras was left out, it failed before the first round: its logits are not those of the reference" in text
    assert re.search(r"keras\s*logits\s*not finite\s*1.0e-04\s*logits\s*NO", re.sub("<[^>]*>", " ", page))
    assert "<dt>grain</dt><dd>with the best of 5 settings of its threads</dd>" in page


@pytest.mark.parametrize(
    ("changed", "banners"),
    [
        ({}, []),
        ({"size": "quick"}, ["Quick sizes."]),
        ({"partial": "interrupted <here>"}, ["This run is partial."]),
        ({"partial": "x", "size": "quick"}, ["This run is partial.", "Quick sizes."]),
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
    reader = _Reader(page)
    assert run["verdict"]["sentences"][0] in reader.text
    words = {"different", "not shown", "not judged"}
    assert not words & {seen.strip() for seen in reader.seen}
    assert reader.seen.count("no claim") == 2 * sum(
        not one["control"] for workload in run["workloads"] for one in workload["comparisons"]
    )
    # Sentences and targets are there, but folded under a line that takes them back.
    unfolded = re.sub(r'<details class="void">.*?</details>', "", page, flags=re.DOTALL)
    said = _Reader(unfolded).text
    for workload in run["workloads"]:
        assert all((one["sentence"] in said) == one["control"] for one in workload["comparisons"])
        assert not any(target["text"] in said for target in workload["targets"])
    assert 'class="row shown"' not in page


def test_page_of_a_run_that_was_not_judged_shows_no_difference():
    run = {**document(), "verdict": {"trusted": None, "sentences": []}}
    page = as_html(run)
    assert 'class="row shown"' not in page
    assert not {"different", "not shown", "no claim"} & {*_Reader(page).seen}


# What the page is made of.


def test_page_is_well_formed_and_its_headings_are_in_order():
    reader = _Reader(as_html(document()))
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


def test_page_asks_the_network_for_nothing():
    page = as_html(document())
    assert {*re.findall(r"[a-z]+://[^\s\"'<]*", page)} == {_SVG}
    assert "@import" not in page
    assert not {"src", "srcset", "action", "style", "onclick"} & {name for _, found in _Reader(page).tags for name in found}
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    assert html.unescape(policy[1]).startswith("default-src 'none'; style-src 'sha256-")


def test_names_are_escaped_wherever_they_stand():
    def evil(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: evil(each) if key not in {"metric", "better"} else each for key, each in value.items()}
        if isinstance(value, list):
            return [evil(each) for each in value]
        return f"{value}{_EVIL}" if isinstance(value, str) else value

    bad = evil(document())
    for workload in bad["workloads"]:
        workload["notes"] = {f"{name}{_EVIL}": f"note{_EVIL}" for name in ("grain", "penstock")}
        for metric in workload["metrics"]:
            metric["name"] = metric["name"].removesuffix(_EVIL)
    page = as_html(bad)
    reader = _Reader(page)
    assert reader.open == []
    assert [tag for tag, _ in reader.tags if tag == "script"] == ["script"] * 2
    assert f"penstock{_EVIL}" in reader.text
    assert any(_EVIL in "".join(svg.itertext()) for svg in _svgs(page))
    assert json.loads(reader.data) == bad


def test_page_holds_the_document_and_nothing_is_lost():
    run = document()
    run["workloads"][0]["failures"][0]["output"] = "</script><!--<script> & \u2028\u2029 é \x00 \udc80"
    reader = _Reader(as_html(run))
    assert json.loads(reader.data) == run
    assert not set("<>&\u2028\u2029") & {*reader.data}
    as_html(run).encode()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_number_that_json_has_not_is_refused(value: float):
    with pytest.raises(ValueError, match="JSON"):
        as_html({**document(), "seconds": value})


def test_page_of_nothing_says_so():
    empty = {"rows": [], "name": "speed", "unit": "m/s", "better": "higher", "ideal": None}
    nothing = {"comparisons": [], "targets": [], "parity": [], "samples": [], "failures": [], "missing": []}
    bare = _first_of(document(), metrics=[empty], baseline=None, control=None, notes={}, sizes={}, **nothing)
    bare["machine"]["commit"] = None
    page = as_html(bare)
    text = _Reader(page).text
    assert "No variant got as far as a number." in text
    assert "commit unknown" in text
    assert _svgs(page) == []
    assert "nothing in 0 workloads" in _Reader(as_html({**bare, "workloads": []})).text


def test_page_of_two_rounds_has_no_intervals():
    metric = {**_METRIC, "rows": [{"variant": "b", "runs": 2, "median": 3.0, "low": 2.9, "high": 3.1, "of_ideal": None}]}
    few = [comparison("speed", "b", "a", [1.0, 1.1]), comparison("speed", "a", "a", [1.0, 1.0], control=True)]
    none = {**few[0], "variant": "c", "ratio": None}
    text = _Reader(as_html(_first_of(document(), metrics=[metric], comparisons=[*few, none], targets=[], samples=[]))).text
    assert "1.049× no interval" in text.replace("1.049×no", "1.049× no")
    assert "–not measured" in text


def test_shape_of_many_steps_is_small():
    run = document()
    for sample in run["workloads"][1]["samples"]:
        sample["steps"]["step time"] = sample["steps"]["step time"] * 25
    workload = run["workloads"][1]
    image = spread(workload, workload["metrics"][0])
    assert image is not None
    assert "80,000 steps" in image
    assert len(image) < 20_000


# Where marks are.


@pytest.mark.parametrize("make", [document, lambda: failed_control(document())])
def test_all_marks_are_inside(make: Callable[[], dict[str, Any]]):
    svgs = _svgs(as_html(make()))
    assert len(svgs) == 6
    for svg in svgs:
        _assert_inside(svg)


_RATIO = st.floats(1e-300, 1e300) | st.floats(0.99, 1.01) | st.floats(0.01, 1000) | st.just(0.0)
_ROWS = st.lists(st.tuples(_RATIO, _RATIO, _RATIO, st.booleans(), st.booleans()), min_size=1, max_size=8)


@settings(deadline=None)
@given(_ROWS)
def test_extremes_of_ratios_stay_inside(rows: Sequence[tuple[float, float, float, bool, bool]]):
    compared = []
    for number, (one, other, ratio, control, bare) in enumerate(rows):
        low, high = (None, None) if bare else sorted((one, other))
        made = {"metric": "speed", "variant": f"variant {number}" * (number + 1), "baseline": "b", "control": control}
        compared.append({**made, "ratio": ratio, "low": low, "high": high, "verdict": "different", "sentence": ""})
    _assert_inside(ElementTree.fromstring(forest(compared, _METRIC, True)))


@settings(deadline=None)
@given(st.lists(st.floats(-1e12, 1e12) | st.floats(1e-9, 1e9), min_size=1, max_size=20))
@example([1.0, 5e-324])
@example([5e-324])
@example([1e-321, -1e-321])
def test_extremes_of_values_stay_inside(values: Sequence[float]):
    samples = [{"variant": "a", "again": False, "round": at, "values": {"speed": v}, "steps": {}} for at, v in enumerate(values)]
    image = spread({"samples": samples}, {**_METRIC, "rows": [{"variant": "a"}]})
    assert image is not None
    _assert_inside(ElementTree.fromstring(image))


@settings(deadline=None)
@given(st.lists(_RATIO, min_size=1, max_size=5), st.lists(_RATIO, max_size=5))
def test_ratio_axis_marks_one_and_holds_all_ratios(ratios: list[float], bounds: list[float]):
    axis = ratio_axis(ratios, bounds, 100, 400)
    assert 1.0 in [round(tick, 9) for tick in axis.ticks()]
    assert all(axis.low <= tick <= axis.high for tick in axis.ticks())
    assert all(axis.low <= ratio <= axis.high for ratio in ratios if 1e-200 < ratio < 1e200)


def test_interval_that_leaves_the_plot_ends_in_an_arrow():
    rows = [{**comparison("speed", "b", "a", [1.0, 1.1, 1.2]), "low": 1e-6, "high": 1e6}]
    image = forest(rows, _METRIC, True)
    assert image.count('class="arrow"') == 2
    assert 'class="cap"' not in image
    assert "1.000e-06 – 1,000,000" in image


def test_control_is_the_first_one():
    pairs = [comparison("speed", "b", "a", [1.0, 1.1, 1.2]), comparison("speed", "a", "a", [1.0, 1.1, 1.0], control=True)]
    svg = ElementTree.fromstring(forest(pairs, _METRIC, True))
    assert [text.text for text in svg.iter(f"{{{_SVG}}}text") if text.get("class") == "name"] == ["A/A: a, twice", "b"]


def test_ratio_of_zero_takes_no_room_from_the_others():
    rows = [comparison("speed", name, "a", ratios) for name, ratios in [("b", [1.0, 1.1, 1.2]), ("c", [2.0, 2.1, 2.2])]]
    zero = {**rows[0], "variant": "z", "ratio": 0.0, "low": None, "high": None}
    image = forest([*rows, zero], _METRIC, True)
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


# What the page does in a browser.


@pytest.fixture
def opened(browser: Chrome, tmp_path: Path) -> Iterator[Callable[..., Chrome]]:
    """Open the page of a run; when the test is over, the browser must have had nothing to complain of."""

    def open_page(run: dict[str, Any], width: int = 1000, colours: str = "light") -> Chrome:
        features = [{"name": "prefers-color-scheme", "value": colours}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        path = tmp_path / "page.html"
        path.write_text(as_html(run), "utf-8")
        browser.get(path.as_uri())
        return browser

    yield open_page
    assert browser.get_log("browser") == []


def test_plots_are_seen(opened: Callable[..., Chrome]):
    run = document()
    run["workloads"][0]["comparisons"][0] |= {"ratio": 0.0001234, "low": 0.00003211, "high": 0.0001234}
    page = opened(run)
    plots = page.find_elements(By.CSS_SELECTOR, "svg.plot")
    assert len(plots) == 6
    for plot in plots:
        assert plot.rect["width"] > 400
        assert plot.rect["height"] > 100
    # Texts too are inside of their plot.
    outside = page.execute_script("""
        return [...document.querySelectorAll("svg.plot text")].filter((text) => {
          const [inner, outer] = [text, text.ownerSVGElement].map((each) => each.getBoundingClientRect());
          return inner.left < outer.left - 1 || inner.right > outer.right + 1 || inner.bottom > outer.bottom + 1;
        }).map((text) => text.textContent);""")
    assert outside == []


def test_header_sorts_both_ways_by_number(opened: Callable[..., Chrome]):
    page = opened(document())
    table = page.find_element(By.CSS_SELECTOR, "table.sortable")
    headers = table.find_elements(By.CSS_SELECTOR, "thead th")
    names = [header.text for header in headers]

    def cells(column: str) -> list[str]:
        return [row.find_elements(By.CSS_SELECTOR, "th, td")[names.index(column)].text for row in body()]

    def body() -> Sequence[Any]:
        return table.find_elements(By.CSS_SELECTOR, "tbody tr")

    def sorts() -> list[str | None]:
        return [header.get_attribute("aria-sort") for header in headers]

    assert cells("variant") == ["grain defaults", "grain", "penstock", "torch DataLoader"]
    assert {*sorts()} == {None}
    median = headers[names.index("median")].find_element(By.TAG_NAME, "button")
    median.click()
    assert cells("median") == sorted(cells("median"), key=lambda text: float(text.replace(",", "")))
    assert cells("variant")[0] == "grain defaults"
    assert sorts()[names.index("median")] == "ascending"
    median.send_keys(Keys.ENTER)
    assert cells("variant")[-1] == "grain defaults"
    assert [sort for sort in sorts() if sort] == ["descending"]
    # A number that is not there is the last one, both ways.
    ratio = headers[names.index("ratio")].find_element(By.TAG_NAME, "button")
    for _ in range(2):
        ratio.click()
        assert cells("ratio")[-1] == "–"
    assert [sort for sort in sorts() if sort] == ["descending"]
    headers[0].find_element(By.TAG_NAME, "button").click()
    assert cells("variant") == ["grain", "grain defaults", "penstock", "torch DataLoader"]


def test_numbers_are_not_sorted_as_text(opened: Callable[..., Chrome]):
    values = {"a": 1000.0, "b": 9.0, "c": 20.0, "d": 3e-5}
    rows = [{"variant": name, "runs": 1, "median": v, "low": v, "high": v, "of_ideal": None} for name, v in values.items()]
    run = _first_of(document(), metrics=[{**_METRIC, "rows": rows}], comparisons=[], targets=[], samples=[])
    page = opened(run)
    page.find_element(By.XPATH, "//th/button[text()='median']").click()
    assert [cell.text for cell in page.find_elements(By.CSS_SELECTOR, "tbody th")] == ["d", "b", "c", "a"]


def test_download_is_the_document(opened: Callable[..., Chrome], tmp_path: Path):
    run = document()
    run["workloads"][0]["failures"][0]["output"] = f"{_EVIL} \u2028\u2029 é"
    page = opened(run)
    folder = tmp_path / "downloads"
    page.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(folder)})
    page.find_element(By.ID, "download").click()
    saved = folder / "penstock-feed-2026-07-14T09-31-07-00-00.json"
    WebDriverWait(page, 30).until(lambda _: saved.exists())
    assert json.loads(saved.read_text("utf-8")) == run


@pytest.mark.parametrize("colours", ["light", "dark"])
def test_colours_follow_the_reader_and_the_button(opened: Callable[..., Chrome], colours: str):
    page = opened(document(), colours=colours)
    button = page.find_element(By.ID, "theme")
    before = _background(page)
    assert (sum(before) > 600) == (colours == "light")
    assert button.text == ("Dark colours" if colours == "light" else "Light colours")
    button.click()
    assert (sum(_background(page)) > 600) == (colours == "dark")
    button.click()
    assert _background(page) == before


@pytest.mark.parametrize("colours", ["light", "dark"])
def test_texts_stand_out(opened: Callable[..., Chrome], colours: str):
    """As the Web Content Accessibility Guidelines ask of level AA: a contrast of 4.5 for text, of 3 for marks."""
    page = opened({**failed_control(document()), "partial": "x"}, colours=colours)
    places = {"p": "color", ".quiet": "color", "a": "color", ".bad strong": "color", "caption": "color", "pre": "color"}
    places |= {"svg .small": "fill", "svg .tick": "fill", "svg .name": "fill", "thead button": "color", ".tools button": "color"}
    marks = {".forest .row .whisker": "stroke", ".forest .control .whisker": "stroke", ".spread .dot": "fill", ".density": "fill"}
    for least, found in ((4.5, places), (3.0, marks)):
        for selector, attribute in found.items():
            colour, behind = page.execute_script(
                """
                const element = document.querySelector(arguments[0]);
                const clear = (each) => getComputedStyle(each).backgroundColor === "rgba(0, 0, 0, 0)";
                let behind = element;
                while (clear(behind)) behind = behind.parentElement;
                return [getComputedStyle(element)[arguments[1]], getComputedStyle(behind).backgroundColor];""",
                selector,
                attribute,
            )
            assert _contrast(_rgb(colour), _rgb(behind)) >= least, selector


@pytest.mark.parametrize("width", [320, 360, 1000])
def test_nothing_but_boxes_scrolls_sideways(opened: Callable[..., Chrome], width: int):
    run = failed_control({**document(), "partial": "x" * 200})
    run["machine_lines"].append("FLAGS=" + "--a_very_long_flag" * 20)
    run["workloads"][0]["missing"].append({"variant": "v" * 60, "reason": "not installed", "command": "pip install " + "w" * 120})
    page = opened(run, width=width)
    page.execute_script("document.querySelectorAll('details').forEach((each) => { each.open = true; });")
    assert page.execute_script("return document.documentElement.scrollWidth") <= width
    boxes = page.execute_script(
        "return [...document.querySelectorAll('.scroll')].map((box) => box.scrollWidth - box.clientWidth)"
    )
    assert (max(boxes) > 0) == (width < 500)


def test_page_prints_in_light_colours_and_unfolded(opened: Callable[..., Chrome]):
    page = opened(document(), colours="dark")
    page.execute_script("""
        window.atPrint = [];
        addEventListener("beforeprint", () => window.atPrint.push(document.querySelectorAll("details:not([open])").length));""")
    assert page.find_elements(By.CSS_SELECTOR, "details:not([open])")
    pdf = base64.b64decode(page.execute_cdp_cmd("Page.printToPDF", {"printBackground": True})["data"])
    assert pdf.startswith(b"%PDF-")
    assert len(pdf) > 20_000
    assert page.execute_script("return window.atPrint") == [0]
    assert page.find_elements(By.CSS_SELECTOR, "details:not([open])")
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print", "features": dark})
    assert sum(_background(page)) == 3 * 255
    assert sum(_rgb(page.execute_script("return getComputedStyle(document.body).color"))) < 200
    assert not page.find_element(By.CLASS_NAME, "tools").is_displayed()
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})


def test_a_name_that_is_a_script_does_not_run(opened: Callable[..., Chrome]):
    run = document()
    run["workloads"][0]["metrics"][0]["rows"][0]["variant"] = _EVIL
    run["workloads"][0]["comparisons"][0]["variant"] = _EVIL
    page = opened(run)
    assert page.find_element(By.CSS_SELECTOR, "tbody th").text == _EVIL
    assert any(text.text == _EVIL[:24] for text in page.find_elements(By.CSS_SELECTOR, "svg text.name"))


def _background(page: Chrome) -> tuple[int, ...]:
    return _rgb(page.execute_script("return getComputedStyle(document.body).backgroundColor"))


def _rgb(colour: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", colour)[:3]))


def _contrast(one: Sequence[int], other: Sequence[int]) -> float:
    darker, lighter = sorted((_luminance(one), _luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def _luminance(colour: Sequence[int]) -> float:
    """Relative luminance of sRGB: https://www.w3.org/TR/WCAG21/#dfn-relative-luminance."""
    linear = [c / 255 / 12.92 if c / 255 <= 0.04045 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
