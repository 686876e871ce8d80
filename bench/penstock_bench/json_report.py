"""Write a run as JSON: all samples in the order of running, the statistics of them, and the machine."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, fields
from typing import Any

from penstock_bench import report, wording
from penstock_bench.method import method
from penstock_bench.outcome import Block, Outcome, Run, Sample
from penstock_bench.tables import score_tables
from penstock_bench.verdict import Claim, Judgement, judge, rows

FORMAT = 3


def as_document(run: Run) -> dict[str, Any]:
    """Return a run as a JSON document, which `as_json` writes and the HTML page shows.

    Returns:
      Dicts, lists, strings and numbers; numbers that are not finite are None.
    """
    judgement = judge(run)
    return _finite(
        {
            "format": FORMAT,
            "suite": run.suite,
            "size": run.size,
            "partial": run.partial,
            "order_seed": run.seed,
            "seconds": run.seconds,
            "machine": dict(run.machine),
            "machine_lines": report.machine_lines(run),
            "method": method(run),
            "verdict": {"trusted": judgement.trusted, "sentences": wording.trust(run, judgement)},
            "workloads": [_outcome(outcome, judgement, index) for index, outcome in enumerate(run.outcomes)],
        }
    )


def as_json(document: dict[str, Any]) -> str:
    """Return the document as text, with each list of numbers on one line."""
    text = json.dumps(document, indent=1, allow_nan=False)
    # A string in JSON has no raw line break, so only lists match.
    return re.sub(r'\[\n[^\[\]{}"]*\]', lambda found: " ".join(found[0].split()), text) + "\n"


def _outcome(outcome: Outcome, judgement: Judgement, index: int) -> dict[str, Any]:
    workload = outcome.workload
    return {
        "name": workload.name,
        "title": workload.fill(workload.title, outcome.size),
        "baseline": workload.baseline,
        "control": outcome.control,
        "sizes": asdict(workload.sizes[outcome.size]),
        "notes": {variant.name: workload.fill(variant.note, outcome.size) for variant in workload.variants},
        "metrics": [{**asdict(metric), "rows": [asdict(row) for row in rows(outcome, metric)]} for metric in workload.metrics],
        "comparisons": [_comparison(outcome, claim) for claim in judgement.claims[index]],
        "targets": [
            {
                **asdict(verdict.target),
                "reached": verdict.reached,
                "met": verdict.met,
                "misses": list(verdict.misses),
                "text": wording.verdict_text(outcome, verdict),
            }
            for verdict in judgement.verdicts[index]
        ],
        "parity": [{**asdict(row), "agreed": row.agreed} for row in outcome.parity],
        "scored": workload.scored,
        "tables": [asdict(table) for table in score_tables(outcome)] if workload.scored else [],
        "score_notes": list(report.notes(outcome)) if workload.scored else [],
        "design": "live pairs" if outcome.live else "one after the other",
        "alone": outcome.alone,
        "repetition": asdict(outcome.repetition) if outcome.repetition else None,
        "samples": [_sample(sample) for sample in outcome.samples],
        "blocks": _blocks(outcome),
        "failures": [asdict(failure) for failure in outcome.failures],
        "missing": [asdict(missing) for missing in outcome.missing],
    }


def _blocks(outcome: Outcome) -> dict[str, list[Any]]:
    """Return the blocks as columns, in the order of running; an empty dict if there are none."""
    return {field.name: [getattr(block, field.name) for block in outcome.blocks] for field in fields(Block) if outcome.blocks}


def _sample(sample: Sample) -> dict[str, Any]:
    """Return a sample; its remarks are included if there are any."""
    written = asdict(sample)
    if not any(written["remarks"].values()):
        del written["remarks"]
    return written


def _comparison(outcome: Outcome, claim: Claim) -> dict[str, Any]:
    comparison = claim.comparison
    return {
        "metric": claim.metric.name,
        "variant": claim.variant,
        "baseline": claim.baseline,
        "control": claim.control,
        "pairs": comparison.pairs,
        "ratio": comparison.ratio,
        "low": comparison.low,
        "high": comparison.high,
        "p": comparison.p,
        "p_corrected": claim.p_corrected,
        "detectable": claim.detectable,
        "verdict": claim.call,
        "sentence": wording.claim_text(outcome, claim),
    }


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
