"""Make up the JSON of a run, with something of everything that a run may have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

_RATES = {"grain defaults": 2_310.0, "grain": 9_620.0, "penstock": 9_540.0, "torch DataLoader": 6_120.0}
_STEP_TIMES = {"flax.nnx Trainer": 21.4, "penstock": 17.3, "hand-written loop": 17.2}
_ROUNDS = 8


def document(seed: int = 5) -> dict[str, Any]:
    """Two workloads, three metrics, one of them of single steps; trusted, complete, of full size."""
    rng = np.random.default_rng(seed)
    return {
        "format": 3,
        "suite": "feed",
        "size": "full",
        "partial": None,
        "order_seed": 20260714,
        "seconds": 1834.5,
        "machine": {
            "date": "2026-07-14T09:31:07+00:00",
            "cpu": "Intel Xeon Platinum 8481C",
            "cores": 16,
            "usable_cores": 8,
            "memory_bytes": 64 * 2**30,
            "clocks": None,
            "huge_pages": "madvise",
            "known_cases": [],
            "gpus": [],
            "platform": "Linux-6.1.0-x86_64",
            "python": "3.12.4",
            "versions": {"jax": "0.10.0", "numpy": "2.4.6"},
            "load_average": [0.31, 0.22, 0.18],
            "flags": {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"},
            "penstock": "0.4.0",
            "commit": "3f1c2ab",
        },
        "machine_lines": [
            "Intel Xeon Platinum 8481C, 8 of 16 cores, 64 GiB; Linux-6.1.0-x86_64",
            "devices: cpu: cpu",
            "Python 3.12.4, jax 0.10.0, numpy 2.4.6; XLA_FLAGS=--xla_cpu_multi_thread_eigen=false",
            "load average at start 0.31, 0.22, 0.18",
        ],
        "method": [
            "Each variant ran in a fresh process in every one of 8 rounds, in a shuffled order, and one of them once more. "
            "Ratios are medians of the ratios within rounds; intervals are bootstrapped over rounds; p-values are of a "
            "permutation test and corrected after Holm for all comparisons of the run."
        ],
        "verdict": {"trusted": True, "sentences": ["All A/A controls passed: no variant was shown to differ from itself."]},
        "workloads": [_images(rng), _training(rng)],
    }


def failed_control(run: Mapping[str, Any]) -> dict[str, Any]:
    """The same run, had a variant been shown to differ from itself in the last workload."""
    *before, last = run["workloads"]
    *others, control = last["comparisons"]
    ratios = [1.19, 1.22, 1.21, 1.23, 1.20, 1.21, 1.18, 1.22]
    control = comparison(control["metric"], control["variant"], control["baseline"], ratios, control=True)
    said = f"The A/A control of {last['name']} failed: {control['variant']} was shown to differ from itself."
    return {
        **run,
        "verdict": {"trusted": False, "sentences": [said]},
        "workloads": [*before, {**last, "comparisons": [*others, control]}],
    }


def comparison(metric: str, variant: str, baseline: str, ratios: Sequence[float], control: bool = False) -> dict[str, Any]:
    """Return the comparison of the ratios within rounds; fewer than three of them show hardly anything."""
    made = {"metric": metric, "variant": variant, "baseline": baseline, "control": control, "pairs": len(ratios)}
    logs = np.log(ratios)
    ratio = float(np.exp(np.median(logs)))
    if len(ratios) < 3:
        none = dict.fromkeys(["low", "high", "p", "p_corrected", "detectable"])
        sentence = f"{variant} gives {ratio:.3f}x the {metric} of {baseline}; too few runs to judge."
        return {**made, "ratio": ratio, **none, "verdict": "not judged", "sentence": sentence}
    reach = float(stats.sem(logs) * stats.t.ppf(0.975, len(logs) - 1))
    low, high = float(np.exp(np.mean(logs) - reach)), float(np.exp(np.mean(logs) + reach))
    p = float(stats.ttest_1samp(logs, 0).pvalue)
    corrected = min(1.0, 3 * p)
    verdict = "different" if corrected < 0.05 else "not shown"
    known = "" if verdict == "different" else " No difference was shown."
    return {
        **made,
        "ratio": ratio,
        "low": low,
        "high": high,
        "p": p,
        "p_corrected": corrected,
        "detectable": float(np.exp(2 * reach)),
        "verdict": verdict,
        "sentence": f"{variant} gives {ratio:.3f}x the {metric} of {baseline} (95 %: {low:.3f}x to {high:.3f}x).{known}",
    }


def _images(rng: np.random.Generator) -> dict[str, Any]:
    samples = []
    for round_ in range(_ROUNDS):
        for position, (variant, again) in enumerate(_order(rng, [*_RATES], "grain")):
            values = {
                "throughput": float(_RATES[variant] * rng.lognormal(0, 0.03)),
                "first record": float(2_000 / _RATES[variant] * rng.lognormal(0, 0.2)),
            }
            samples.append(_sample(variant, again, round_, position, values, {}))
    failure = {
        "variant": "ray.data",
        "round": 0,
        "reason": "it took more than 120 s",
        "output": "WARNING: object store is <full> & spilling\n" + "waiting for blocks ...\n" * 30,
    }
    throughput = {"name": "throughput", "unit": "records/s", "better": "higher", "ideal": 9_600.0}
    first = {"name": "first record", "unit": "s", "better": "lower", "ideal": None}
    made = _workload(
        "images", "60,000 images of 64 × 64, decoded and batched by 256", [*_RATES], "grain", [throughput, first], samples
    )
    return {
        **made,
        "sizes": {"records": 60_000, "batch": 256, "image": "64 × 64"},
        "notes": {"grain defaults": "", "grain": "with the best of 5 settings of its threads", "penstock": "", "ray.data": ""},
        "targets": [
            _target("penstock", "throughput", 0.95, 0.992, True, "target: penstock at least 0.95x grain: 0.992x, met"),
            _target("penstock", "first record", 0.5, 1.02, False, "target: penstock at most 0.5x grain: 1.02x, NOT MET"),
        ],
        "failures": [failure],
        "missing": [
            {"variant": "tf.data", "reason": "not installed", "command": "pip install 'penstock[torch]' tensorflow"},
            {"variant": "cuDNN", "reason": "there is no GPU", "command": ""},
        ],
    }


def _training(rng: np.random.Generator) -> dict[str, Any]:
    samples = []
    for round_ in range(_ROUNDS):
        for position, (variant, again) in enumerate(_order(rng, [*_STEP_TIMES], "hand-written loop")):
            steps = _STEP_TIMES[variant] * rng.lognormal(0.01 * rng.normal(), 0.02, 400) + rng.exponential(0.2, 400)
            late = rng.choice(400, 3)
            steps[late] *= rng.uniform(1.3, 2.6, 3)
            values = {"step time": float(np.median(steps))}
            samples.append(_sample(variant, again, round_, position, values, {"step time": np.round(steps, 4).tolist()}))
    metric = {"name": "step time", "unit": "ms", "better": "lower", "ideal": None}
    made = _workload(
        "training", "a transformer of 12 M weights, 400 steps", [*_STEP_TIMES], "hand-written loop", [metric], samples
    )
    parity = [
        _parity("flax.nnx Trainer", "logits", 3.2e-6, 1e-4, "logits"),
        _parity("flax.nnx Trainer", "update", 4.1e-5, 1e-3, "update: blocks/3/attention/query/kernel"),
        _parity("penstock", "logits", 0.0, 1e-4, "logits"),
        _parity("keras", "logits", None, 1e-4, "logits"),
    ]
    failed = {"variant": "keras", "round": None, "reason": "its logits differ from the reference", "output": ""}
    return {**made, "sizes": {"steps": 400, "batch": 32}, "parity": parity, "failures": [failed]}


def _workload(
    name: str,
    title: str,
    variants: Sequence[str],
    baseline: str,
    metrics: Sequence[Mapping[str, Any]],
    samples: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    comparisons = []
    for metric in metrics:
        runs = {
            (variant, again): np.array(
                [one["values"][metric["name"]] for one in samples if (one["variant"], one["again"]) == (variant, again)]
            )
            for variant in variants
            for again in (False, True)
        }
        base = runs[baseline, False]
        comparisons += [
            comparison(metric["name"], variant, baseline, runs[variant, False] / base)
            for variant in variants
            if variant != baseline
        ]
        comparisons.append(comparison(metric["name"], baseline, baseline, runs[baseline, True] / base, control=True))
    return {
        "name": name,
        "title": title,
        "baseline": baseline,
        "control": baseline,
        "sizes": {},
        "notes": {},
        "metrics": [{**metric, "rows": [_row(variant, metric, samples) for variant in variants]} for metric in metrics],
        "comparisons": comparisons,
        "targets": [],
        "parity": [],
        "design": "one after the other",
        "alone": "",
        "repetition": None,
        "blocks": {},
        "scored": False,
        "tables": [],
        "score_notes": [],
        "samples": samples,
        "failures": [],
        "missing": [],
    }


def _row(variant: str, metric: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    values = [one["values"][metric["name"]] for one in samples if one["variant"] == variant and not one["again"]]
    middle = float(np.median(values))
    of_ideal = middle / metric["ideal"] if metric["ideal"] else None
    return {
        "variant": variant,
        "runs": len(values),
        "median": middle,
        "low": min(values),
        "high": max(values),
        "of_ideal": of_ideal,
    }


def _order(rng: np.random.Generator, variants: Sequence[str], control: str) -> list[tuple[str, bool]]:
    runs = [*((variant, False) for variant in variants), (control, True)]
    return [runs[place] for place in rng.permutation(len(runs))]


def _sample(
    variant: str, again: bool, round_: int, position: int, values: Mapping[str, float], steps: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
    return {
        "variant": variant,
        "again": again,
        "round": round_,
        "position": position,
        "started": 41.0 * round_ + 8.0 * position,
        "seconds": 7.5,
        "load": 0.9,
        "values": values,
        "steps": steps,
        "details": {"device": "cpu: cpu"},
    }


def _target(variant: str, metric: str, bound: float, reached: float, met: bool, text: str) -> dict[str, Any]:
    made = {"variant": variant, "metric": metric, "bound": bound, "relative_to": "grain", "reached": reached}
    return {**made, "met": met, "text": text, "misses": []}


def _parity(variant: str, quantity: str, difference: float | None, tolerance: float, worst: str) -> dict[str, Any]:
    agreed = difference is not None and difference <= tolerance
    made = {"variant": variant, "quantity": quantity, "difference": difference, "tolerance": tolerance}
    return {**made, "worst": worst, "agreed": agreed}
