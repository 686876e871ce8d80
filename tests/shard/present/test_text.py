"""A plan as text has its costs and leaves, on one screen."""

from dataclasses import replace

import pytest
from tests.shard.plans import BATCH, GIB, TENSOR, collective, leaf, megatron, plan, spec

from penstock.shard.hlo.analysis import Measured
from penstock.shard.present.text import group_layers, plan_line, plan_text
from penstock.shard.search.costs import Proof


def test_the_text_has_mesh_axes_costs_and_leaves():
    text = str(megatron())
    for words in [
        "8 × tpu-v5e, mesh data 2 × model 4, limit 16 GiB a device",
        "model (4): tensor parallel, 4 all-reduces a layer",
        "data parallel",
        "over the limit",
        "31%",  # of the limit: 5 of 16 GiB
        "1 GiB parameters, 2 GiB optimizer, 1000 B batch, 2 GiB activations",
        "all-reduce over model",
        "state/params/layers/*/up    ×4  float32[512,2048]",
        "P(None, 'model')",
        "P('data', 'model')",
    ]:
        assert words in text
    assert "over the limit" not in text.splitlines()[4]


def proved(fastest, seconds, memory=0.0, **changes):
    """Return the text of a plan, in one line, with a proof in units of its own seconds."""
    made = megatron()
    fastest, seconds = (each and each * made.cost.seconds for each in (fastest, seconds))
    return " ".join(str(replace(made, proof=Proof(fastest, seconds, memory), **changes)).split())


def test_the_text_says_what_is_proved_of_all_layouts():
    assert "proved: by this estimate, no layout that fits is more than 0.4% faster than the fastest found" in proved(1, 1 / 1.004)
    said = "no layout that fits is faster than the fastest found; this plan, a near-tie or a baseline, is 2.0% slower than that"
    assert said in proved(1 / 1.02, 1 / 1.02)
    assert "near-tie" not in proved(1, 1 / 1.004)
    assert "not proved: by this estimate, a layout that fits may be up to 3.0% faster than the fastest" in proved(1, 1 / 1.03)
    assert "proved: by this estimate, every layout needs at least 20 GiB" in proved(None, None, 20 * GIB)
    assert "proved" not in proved(None, 0.5, 2 * GIB)
    assert "proved" not in str(megatron())


def test_the_gap_of_a_plan_is_that_of_its_search():
    made = megatron()
    assert made.gap is None
    assert replace(made, proof=Proof(1.02, 1.0, 0.0)).gap == 0.02
    assert replace(made, proof=Proof(None, None, 1.0)).gap is None
    assert replace(made, proof=Proof(0.0, 0.0, 0.0)).gap == 0.0


def test_the_text_has_the_compilers_figure():
    measured = Measured(GIB, GIB, 7 * GIB, GIB, 1e12, (), 23.0, compiled_for="the TPU compiler for v5e:2x4")
    lines = str(replace(megatron(), checked=measured)).splitlines()
    assert "compiled by the TPU compiler for v5e:2x4 in 23 s: 8 GiB, 50% of the limit" in lines


def test_the_text_says_that_the_cpu_compiler_needs_more_than_that_of_the_chip():
    measured = Measured(GIB, GIB, 7 * GIB, GIB, 1e12, (), 2.0, compiled_for="the CPU compiler for 8 virtual devices")
    made = replace(megatron(), checked=measured)
    assert "8 GiB, 50% of the limit; it needs up to" in str(made)
    assert "times the memory of the TPU compiler" in " ".join(str(made).split())
    assert "it needs up to" not in str(replace(made, hardware="this machine"))


@pytest.mark.parametrize("limit", [4, 6, 7])
def test_the_text_says_that_a_plan_near_its_limit_or_above_is_unchecked(limit):
    made = replace(megatron(), limit=limit * GIB)
    assert f"unchecked: the memory is predicted, {5 / limit:.0%} of the limit, and no compiler has confirmed it" in str(made)
    assert "unchecked" not in str(replace(made, checked=Measured(GIB, GIB, GIB, GIB, 1e12, (), 1.0)))


def test_a_plan_says_that_it_is_unchecked_where_the_compiler_failed():
    made = replace(megatron(), compiler_failed=True)
    assert "unchecked: the memory is predicted, 31% of the limit, and no compiler has confirmed it" in str(made)
    assert plan_line(made).endswith(" a step, unchecked")
    assert plan_line(megatron()).endswith(" a step")


def test_the_line_of_a_plan_has_the_memory_of_the_compiler():
    made = replace(megatron(), limit=4 * GIB)
    assert "5 GiB of 4 GiB a device" in plan_line(made)
    assert "3 GiB of 4 GiB a device" in plan_line(replace(made, checked=Measured(GIB, GIB, GIB, 0, 1e12, (), 1.0)))


def test_a_plan_that_fits_once_compiled_is_not_called_over_the_limit():
    measured = Measured(GIB, GIB, GIB, GIB, 1e12, (), 1.0, compiled_for="the TPU compiler for v5e:2x4")
    lines = str(replace(megatron(), limit=4 * GIB, checked=measured)).splitlines()
    assert ["over the limit" in line for line in lines if line.startswith(("  this plan", "  data parallel"))] == [False, True]


def test_a_plan_far_below_its_limit_needs_no_check():
    assert "unchecked" not in str(megatron())


@pytest.mark.parametrize("sentence", ["1 loop of unknown length counts once", "words " * 40])
def test_the_text_has_unknown_costs_below_the_times(sentence):
    made = megatron()
    lines = str(replace(made, cost=replace(made.cost, unknown=(sentence,)))).splitlines()
    table = next(at for at, line in enumerate(lines) if "data parallel" in line)
    said = " ".join(line.strip() for line in lines[table + 1 : lines.index("", table)])
    assert said == sentence.strip()
    assert max(map(len, lines)) <= 130


@pytest.mark.parametrize("count", [1, 30, 100])
def test_the_text_is_one_screen(count):
    path = "state/params/" + "a_very_long_name/" * 12
    leaves = [leaf(f"{path}{chr(97 + n % 26) * (n // 26 + 1)}", (64, 64), spec(("data", "model"), None)) for n in range(count)]
    kinds = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
    collectives = [collective(kind, axes, 1e6) for kind in kinds for axes in [("data",), ("model",), ("data", "model")]]
    lines = plan_text(plan(leaves, {"data": 2, "model": 4}, {"data": BATCH, "model": TENSOR}, *collectives)).splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 130
    assert [line for line in lines if line.endswith(" ")] == []
    assert ("more" in lines[-1]) == (count > 1 + 25)


def test_leaves_of_repeated_layers_are_one_group_with_their_moments():
    rows = group_layers(megatron())
    assert [(row.path, len(row.leaves)) for row in rows] == [
        ("state/params/layers/*/up", 4),
        ("state/params/layers/*/down", 4),
        ("batch/tokens", 1),
    ]
    assert rows[0].moments == (spec("data", "model"),)
    matrix = 512 * 2048 * 4
    assert rows[0].bytes == 4 * (matrix / 4 + 2 * matrix / 8)
