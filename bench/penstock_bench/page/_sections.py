"""Make the page's sections, in its order, from the JSON of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from penstock.page import Cell, Column, Content, Markup, of_text, table, tag
from penstock_bench.number_format import number, times
from penstock_bench.page._cells import of_number
from penstock_bench.page._forest import forest
from penstock_bench.page._missing import absences, definitions, sizes
from penstock_bench.page._scores import score_tables, target_count, target_list
from penstock_bench.page._spread import has_steps, spread
from penstock_bench.wording import of_command

_Json: TypeAlias = Mapping[str, Any]

_CONTROL = (
    "One variant ran twice in every round, under the same rules as all others. If the two are shown to differ, "
    "it is the measurement that differs, and no other difference of the run can be believed."
)
_FOREST_KEY = (
    "Line: the 95 % interval; an arrowhead: it goes on beyond the plot. Filled dot: a difference was shown, corrected for "
    "the number of comparisons; hollow: none was. Diamond and dashes: the A/A control, a variant against itself."
)
_STEPS_KEY = (
    "Area: the single steps of all runs, each variant to its own highest bin; a bin with one step is still drawn. "
    "Dots: the runs, the first round at the top. Upright stroke: the median of the runs."
)
_BLOCKS_KEY = (
    "Area: all blocks, each variant to its own highest bin; a bin with one block is still drawn. "
    "Dots: the processes, the first round at the top. Upright stroke: their median."
)
_RUNS_KEY = "Dots: the runs, the first round at the top. Upright stroke: their median."


def title(document: _Json) -> str:
    """Return the title of the window."""
    return f"penstock {of_command(document['suite'])}, {document['machine']['date']}"


def body(document: _Json) -> Content:
    """Return all sections of the page."""
    workloads = [_Numbered(index, workload) for index, workload in enumerate(document["workloads"], 1)]
    trusted = document["verdict"]["trusted"]
    return [
        tag("header", _heading(document), _banners(document), _contents(workloads)),
        tag(
            "main",
            _verdict(document, workloads),
            [_workload(one, trusted) for one in workloads],
            _method(document),
            _machine(document),
        ),
        tag("footer", tag("p", "All that is on this page was made from the JSON that it holds.")),
    ]


class _Numbered:
    """A workload and its HTML anchor. The anchor is a number, as names may be equal or not valid in an anchor."""

    def __init__(self, index: int, workload: _Json) -> None:
        self.anchor = f"workload-{index}"
        self.json = workload


def _heading(document: _Json) -> Content:
    machine = document["machine"]
    timed = [one for one in document["workloads"] if not one["scored"]]
    scores = sum(len(one["samples"]) for one in document["workloads"] if one["scored"])
    names = list(dict.fromkeys(row["variant"] for one in timed for metric in one["metrics"] for row in metric["rows"]))
    names += [_count(scores, "score")] if scores else []
    compared = _listed(names) if names else "nothing"
    commit = f"commit {machine['commit']}" if machine["commit"] else "commit unknown"
    return [
        tag("h1", tag("span", "penstock ", class_="quiet"), of_command(document["suite"])),
        tag(
            "p",
            f"{compared} in {_count(len(document['workloads']), 'workload')}, on {machine['cpu']} ",
            f"({machine['usable_cores']} of {machine['cores']} cores), ",
            tag("time", machine["date"]),
            f"; penstock {machine['penstock']}, {commit}.",
            class_="lead",
        ),
    ]


def _banners(document: _Json) -> Content:
    made: list[Content] = []
    if document["verdict"]["trusted"] is False:
        said = " ".join(document["verdict"]["sentences"])
        made.append(_banner("The A/A control failed: this report claims nothing.", said, "bad"))
    if document["partial"] is not None:
        made.append(_banner("This run is partial.", f"It ended before it was done: {document['partial']}", "bad"))
    if document["size"] == "quick" and not _all_scored(document):
        made.append(_banner("Quick sizes.", "The numbers show that all works, not how fast it is."))
    return made


def _all_scored(document: _Json) -> bool:
    """Tell whether all workloads of the run are scored."""
    return bool(document["workloads"]) and all(workload["scored"] for workload in document["workloads"])


def _banner(strong: str, words: str, class_: str = "") -> Markup:
    return tag("p", tag("strong", strong), " ", words, class_=f"banner {class_}".strip(), role="note")


def _contents(workloads: Sequence[_Numbered]) -> Markup:
    links = [("verdict", "Verdict"), *((one.anchor, one.json["name"]) for one in workloads), ("method", "Method")]
    links.append(("machine", "Machine"))
    items = [tag("li", tag("a", words, href=f"#{anchor}")) for anchor, words in links]
    return tag("nav", tag("ul", items), aria_label="Contents")


def _verdict(document: _Json, workloads: Sequence[_Numbered]) -> Markup:
    verdict = document["verdict"]
    # If the control failed, the banner has these sentences.
    overall = None if verdict["trusted"] is False else [tag("p", sentence) for sentence in verdict["sentences"]]
    return tag(
        "section",
        tag("h2", "Verdict", id="verdict"),
        overall,
        [_verdict_of(one, verdict["trusted"]) for one in workloads],
        None if _all_scored(document) else _control_section(workloads),
    )


def _control_section(workloads: Sequence[_Numbered]) -> Content:
    """Return the section about the results of the A/A controls."""
    return [tag("h3", "A/A control"), tag("p", _CONTROL), _controls(workloads) or tag("p", "No control ran.")]


def _verdict_of(one: _Numbered, trusted: bool | None) -> Content:
    """Return a workload's comparisons as sentences; for a scored one, its targets."""
    link = tag("h3", tag("a", one.json["name"], href=f"#{one.anchor}"))
    if one.json["scored"]:
        return [link, tag("p", target_count(one.json["targets"]))]
    said = [
        tag("li", tag("strong", _word(comparison, trusted), class_="word"), " ", comparison["sentence"])
        for comparison in one.json["comparisons"]
        if not comparison["control"]
    ]
    words: Content = tag("ul", said, class_="said") if said else tag("p", "Nothing was compared.")
    return [link, _unless_failed(trusted, words, "comparisons")]


def _unless_failed(trusted: bool | None, words: Content, of: str) -> Content:
    """Return the words. If the control failed, collapse them under a line that says that they are no claims."""
    if trusted is not False:
        return words
    warning = f"No claim: what the {of} would say, had the control passed"
    return tag("details", tag("summary", warning), words, class_="void")


def _controls(workloads: Sequence[_Numbered]) -> Content:
    controls = [(one, comparison) for one in workloads for comparison in one.json["comparisons"] if comparison["control"]]
    if not controls:
        return None
    items = [
        tag(
            "li",
            tag("strong", f"{one.json['name']}, {comparison['metric']}", class_="word"),
            f" {comparison['sentence']}",
        )
        for one, comparison in controls
    ]
    return tag("ul", items, class_="said")


def _workload(one: _Numbered, trusted: bool | None) -> Markup:
    """Return the section of a workload."""
    workload = one.json
    targets = workload["targets"]
    notes = [(variant, note) for variant, note in workload["notes"].items() if note]
    return tag(
        "section",
        tag("h2", workload["name"], id=one.anchor),
        tag("p", workload["title"], class_="lead"),
        _banner("The variants ran one after the other:", f"{workload['alone']}.") if workload["alone"] else None,
        score_tables(workload) if workload["scored"] else [_metric(workload, metric, trusted) for metric in workload["metrics"]],
        [tag("h3", "Targets"), _unless_failed(trusted, target_list(targets), "targets")] if targets else None,
        _parity(workload),
        absences(workload),
        [tag("h3", "The variants"), definitions(notes)] if notes else None,
        sizes(workload["sizes"]),
    )


def _metric(workload: _Json, metric: _Json, trusted: bool | None) -> Content:
    """Return the table and the plots of a metric."""
    compared = [comparison for comparison in workload["comparisons"] if comparison["metric"] == metric["name"]]
    what = f"{metric['name']}, in {metric['unit']}; {metric['better']} is better"
    plots: list[Content] = []
    if compared:
        references = _listed(dict.fromkeys(one["baseline"] for one in compared if not one["control"]))
        heading = f"Ratio to {references}." if references else "The A/A control."
        claims = "" if trusted else " This run makes no claims." if trusted is False else " Nothing was judged."
        plots.append(_figure(forest(compared, metric, trusted is True), heading, _FOREST_KEY + claims))
    shape = spread(workload, metric)
    if shape:
        steps = has_steps(workload, metric)
        live = workload["design"] == "live pairs"
        heading = "Blocks and processes." if live else "Single steps and runs." if steps else "Runs."
        plots.append(_figure(shape, heading, _BLOCKS_KEY if live else _STEPS_KEY if steps else _RUNS_KEY))
    if not metric["rows"]:
        return [tag("h3", _first_upper(what)), tag("p", "No variant got as far as a number."), plots]
    return [tag("h3", _first_upper(what)), _medians(workload, metric, trusted), plots]


def _figure(image: Markup, heading: str, key: str) -> Markup:
    label = f"Plot: {heading}"
    box = tag("div", image, class_="scroll", tabindex="0", role="region", aria_label=label)
    return tag("figure", tag("figcaption", tag("strong", heading), " ", key), box)


def _medians(workload: _Json, metric: _Json, trusted: bool | None) -> Markup:
    """Return the table of a metric: a row for each variant."""
    comparisons = {
        one["variant"]: one
        for one in workload["comparisons"]
        if one["metric"] == metric["name"] and one["baseline"] == workload["baseline"] and not one["control"]
    }
    columns = [
        Column("variant", False),
        Column("median"),
        Column("unit", False),
        Column("low – high"),
        Column("runs"),
        *([Column(f"of ideal {number(metric['ideal'])}")] if metric["ideal"] is not None else []),
        Column("ratio"),
        Column("95 % interval"),
        Column("p corrected"),
        Column("verdict", False),
    ]
    rows = []
    for row in metric["rows"]:
        comparison = comparisons.get(row["variant"])
        ideal = [of_number(row["of_ideal"], times(row["of_ideal"]))] if metric["ideal"] is not None else []
        rows.append(
            [
                of_text(row["variant"]),
                of_number(row["median"]),
                of_text(metric["unit"]),
                of_number(row["low"], f"{number(row['low'])} – {number(row['high'])}"),
                of_number(row["runs"], str(row["runs"])),
                *ideal,
                *_compared(comparison, row["variant"] == workload["baseline"], trusted),
            ]
        )
    return table(f"{workload['name']}: {metric['name']}, medians of the runs", columns, rows, sortable=True)


def _compared(comparison: _Json | None, baseline: bool, trusted: bool | None) -> list[Cell]:
    """Return the cells of ratio, interval, p and verdict."""
    if comparison is None:
        return [of_number(None), of_number(None), of_number(None), of_text("baseline" if baseline else "–")]
    ratio, p = comparison["ratio"], comparison["p_corrected"]
    return [
        of_number(ratio, times(ratio)),
        of_number(comparison["low"], _interval(comparison)),
        of_number(p, "< 0.0001" if p is not None and p < 1e-4 else None),
        of_text(_word(comparison, trusted)),
    ]


def _parity(workload: _Json) -> Content:
    if not workload["parity"]:
        return None
    columns = [Column("variant", False), Column("quantity", False), Column("difference"), Column("tolerance")]
    columns += [Column("largest in", False), Column("agreed", False)]
    rows = [
        [
            of_text(one["variant"]),
            of_text(one["quantity"]),
            of_number(one["difference"], "not finite" if one["difference"] is None else _tiny(one["difference"])),
            of_number(one["tolerance"], _tiny(one["tolerance"])),
            of_text(one["worst"]),
            of_text("yes" if one["agreed"] else "NO"),
        ]
        for one in workload["parity"]
    ]
    explained = "Before anything was timed, each variant's outputs were compared with a reference; differences are relative."
    return [
        tag("h3", "Do they compute the same?"),
        tag("p", explained),
        table(f"{workload['name']}: differences from the reference", columns, rows),
    ]


def _method(document: _Json) -> Markup:
    """Return the section on how the numbers were made."""
    shuffled = f"The order within each round was shuffled with seed {document['order_seed']}; the"
    order = "The" if _all_scored(document) else shuffled
    return tag(
        "section",
        tag("h2", "Method", id="method"),
        [tag("p", paragraph) for paragraph in document["method"]],
        tag("p", f"{order} run took {_duration(document['seconds'])}. "),
        tag("p", "More is under ", tag("cite", "How we measure"), " in the documentation of penstock."),
    )


def _machine(document: _Json) -> Markup:
    return tag(
        "section",
        tag("h2", "Machine", id="machine"),
        tag("ul", [tag("li", line) for line in document["machine_lines"]]),
    )


def _word(comparison: _Json, trusted: bool | None) -> str:
    """Return the verdict on a comparison; a run whose control failed has no verdicts."""
    if trusted is False:
        return "no claim"
    return comparison["verdict"] if trusted else "not judged"


def _tiny(difference: float) -> str:
    return f"{difference:.1e}" if difference else "0"


def _interval(comparison: _Json) -> str:
    low, high = comparison["low"], comparison["high"]
    return "–" if low is None or high is None else f"{number(low)} – {times(high)}"


def _listed(names: Iterable[str]) -> str:
    *others, last = [*names] or [""]
    return f"{', '.join(others)} and {last}" if others else last


def _count(of: int, what: str) -> str:
    return f"{of} {what}" if of == 1 else f"{of} {what}s"


def _first_upper(words: str) -> str:
    return words[:1].upper() + words[1:]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts = [f"{hours} h"] * (hours > 0) + [f"{minutes} min"] * (hours + minutes > 0)
    return " ".join([*parts, f"{rest} s"])
