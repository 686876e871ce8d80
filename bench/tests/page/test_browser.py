"""The page in a browser."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from bench.tests.page.read_page import EVIL, METRIC, first_of
from bench.tests.run_document import document, failed_control
from tests.extras import require

from penstock_bench.page import as_html

Chrome = require("selenium.webdriver").Chrome
By = require("selenium.webdriver.common.by").By
Keys = require("selenium.webdriver.common.keys").Keys
WebDriverWait = require("selenium.webdriver.support.wait").WebDriverWait


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
    run = first_of(document(), metrics=[{**METRIC, "rows": rows}], comparisons=[], targets=[], samples=[])
    page = opened(run)
    page.find_element(By.XPATH, "//th/button[text()='median']").click()
    assert [cell.text for cell in page.find_elements(By.CSS_SELECTOR, "tbody th")] == ["d", "b", "c", "a"]


def test_download_is_the_document(opened: Callable[..., Chrome], tmp_path: Path):
    run = document()
    run["workloads"][0]["failures"][0]["output"] = f"{EVIL} \u2028\u2029 é"
    page = opened(run)
    folder = tmp_path / "downloads"
    page.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(folder)})
    page.find_element(By.ID, "download").click()
    saved = folder / "penstock-feed-2026-07-14T09-31-07-00-00.json"
    # The file may be there, empty, before its text is.
    WebDriverWait(page, 30).until(lambda _: saved.exists() and saved.stat().st_size > 0 and [*folder.iterdir()] == [saved])
    assert json.loads(saved.read_text("utf-8")) == run


def test_colours_follow_the_reader_and_the_button(opened: Callable[..., Chrome]):
    assert sum(_background(opened(document(), colours="light"))) > 600
    page = opened(document(), colours="dark")
    button = page.find_element(By.ID, "theme")
    before = _background(page)
    assert sum(before) <= 600
    assert button.text == "Light colours"
    button.click()
    assert sum(_background(page)) > 600
    assert button.text == "Dark colours"
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


@pytest.mark.parametrize("width", [320, 1000])
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
    run["workloads"][0]["metrics"][0]["rows"][0]["variant"] = EVIL
    run["workloads"][0]["comparisons"][0]["variant"] = EVIL
    page = opened(run)
    assert page.find_element(By.CSS_SELECTOR, "tbody th").text == EVIL
    assert any(text.text == EVIL[:24] for text in page.find_elements(By.CSS_SELECTOR, "svg text.name"))


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
