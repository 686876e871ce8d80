"""Loops, types and computations are read from HLO text."""

import pytest
from tests.shard.hlo.hlo_text import MESH, only, program

from penstock.shard.hlo.collectives import Collective, find_collectives
from penstock.shard.hlo.flops import count_flops, describe_unknown_costs


def test_a_type_of_unknown_size_is_an_error_where_it_is_exchanged():
    text = program(
        "ROOT %r = posit[8,16] all-reduce(%p), replica_groups=[2,4]<=[8], to_apply=%add",
        parameters="%p = posit[8,16] parameter(0)",
    )
    with pytest.raises(ValueError, match="exchanges arrays of type 'posit', whose size is unknown"):
        find_collectives(text, MESH)


@pytest.mark.parametrize(("dtype", "size"), [("pred", 128), ("bf16", 256), ("f8e4m3fn", 128), ("s4", 64), ("c128", 2048)])
def test_bytes_of_types(dtype, size):
    text = program(
        f"ROOT %r = {dtype}[8,16] all-reduce(%p), replica_groups=[2,4]<=[8], to_apply=%add",
        parameters=f"%p = {dtype}[8,16] parameter(0)",
    )
    assert only(text).bytes == size


def test_text_that_is_not_hlo_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        count_flops("module @jit_f {}")


def loop(condition, update="add(%i, %one)", config="", start="constant(0)", limit="%l", dtype="s32"):
    """Return a program with a loop that has an all-reduce and a product of [8,16] and [16,16]."""
    before = f"""
%body (t: ({dtype}[], f32[8,16], f32[16,16], s32[])) -> ({dtype}[], f32[8,16], f32[16,16], s32[]) {{
  %t = ({dtype}[], f32[8,16]{{1,0}}, f32[16,16], s32[]) parameter(0)
  %i = {dtype}[] get-tuple-element(%t), index=0
  %v = f32[8,16]{{1,0}} get-tuple-element(%t), index=1
  %w = f32[16,16]{{1,0}} get-tuple-element(%t), index=2
  %l = s32[] get-tuple-element(%t), index=3
  %one = {dtype}[] constant(1)
  %two = {dtype}[] constant(2)
  %none = {dtype}[] constant(0)
  %minus = {dtype}[] constant(-1)
  %next = {dtype}[] {update}
  %dot = f32[8,16]{{1,0}} dot(%v, %w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  %r = f32[8,16]{{1,0}} all-reduce(%dot), replica_groups=[2,4]<=[8], to_apply=%add
  ROOT %o = ({dtype}[], f32[8,16]{{1,0}}, f32[16,16], s32[]) tuple(%next, %r, %w, {limit})
}}

%condition (c: ({dtype}[], f32[8,16], f32[16,16], s32[])) -> pred[] {{
  %c = ({dtype}[], f32[8,16]{{1,0}}, f32[16,16], s32[]) parameter(0)
  %j = {dtype}[] get-tuple-element(%c), index=0
  %limit = s32[] get-tuple-element(%c), index=3
  %five = {dtype}[] constant(5)
  ROOT %go = pred[] {condition}
}}
"""
    return program(
        f"""
      %given = (s32[]) parameter(1)
      %zero = {dtype}[] {start}
      %seven = s32[] constant(7)
      %q = f32[16,16] constant(0)
      %init = ({dtype}[], f32[8,16]{{1,0}}, f32[16,16], s32[]) tuple(%zero, %p, %q, %seven)
      ROOT %while = ({dtype}[], f32[8,16], f32[16,16], s32[]) while(%init), condition=%condition, body=%body{config}
    """,
        before=before,
    )


@pytest.mark.parametrize(
    ("text", "trips"),
    [
        (loop("compare(%j, %five), direction=LT", config=', backend_config={"known_trip_count":{"n":"3"},"x":"{"}'), 3),
        (loop("compare(%j, %five), direction=LT"), 5),
        (loop("compare(%j, %five), direction=LE"), 6),
        (loop("compare(%five, %j), direction=GT"), 5),
        (loop("compare(%j, %five), direction=NE"), 5),
        (loop("compare(%j, %five), direction=LT", update="add(%i, %two)"), 3),
        (loop("compare(%j, %five), direction=LT", start="constant(4)"), 1),
        (loop("compare(%j, %five), direction=LT", update="add(%i, %l)"), 1),
        (loop("compare(%j, %limit), direction=LT"), 7),
        (loop("compare(%j, %five), direction=GT", update="add(%i, %minus)", start="constant(9)"), 4),
        (loop("compare(%j, %five), direction=GE", update="subtract(%i, %two)", start="constant(9)"), 3),
        (loop("compare(%five, %j), direction=LT", update="add(%minus, %i)", start="constant(9)"), 4),
        (loop("compare(%j, %five), direction=NE", update="subtract(%i, %two)", start="constant(9)"), 2),
        (loop("compare(%j, %five), direction=LT", start="constant(7)"), 0),
        (loop("custom-call(%j)", config=', backend_config={"known_trip_count":{"n":"1"}}'), 1),
    ],
)
def test_a_trip_count_is_printed_by_xla_or_computed_from_the_condition(text, trips):
    assert find_collectives(text, MESH) == [Collective("all-reduce", 512, 4, float(trips), ("model",))] * (trips > 0)
    turn = 2 * 8 * 16 * 16 + 8 * 16 + 1  # product, all-reduce and counter
    assert abs(count_flops(text) - trips * turn) <= trips  # the comparison
    assert not any("loop" in sentence for sentence in describe_unknown_costs(text))


TRACED = "get-tuple-element(%given), index=0"


LT, GT, NE = (f"compare(%j, %five), direction={direction}" for direction in ("LT", "GT", "NE"))


@pytest.mark.parametrize(
    "text",
    [
        loop(LT, start=TRACED),
        loop(GT, start=TRACED, update="add(%i, %minus)"),
        loop(NE, start=TRACED, update="add(%i, %minus)"),
        loop(LT, update="multiply(%i, %two)", start="constant(1)"),
        loop(LT, update="add(%i, %i)", start="constant(1)"),
        loop(LT, update="add(%i, %none)"),
        loop(LT, update="add(%l, %one)"),
        loop(GT, update="subtract(%two, %i)", start="constant(9)"),
        loop(LT, dtype="f32"),
        loop(LT, update="add(%i, %minus)"),
        loop(GT, start="constant(9)"),
        loop(NE, start="constant(9)"),
        loop(NE, update="add(%i, %two)"),
        loop("compare(%j, %limit), direction=LT", limit="%i"),
        loop("compare(%j, %limit), direction=LT", limit="%next"),
        loop("and(%j, %five)"),
    ],
)
def test_a_loop_of_unknown_length_counts_once_and_is_reported(text):
    assert only(text) == Collective("all-reduce", 512, 4, 1.0, ("model",))
    assert 2 * 8 * 16 * 16 < count_flops(text) < 2 * (2 * 8 * 16 * 16)
    assert describe_unknown_costs(text) == (
        "1 loop of unknown length counts once: the true FLOPs, bytes sent and time are unknown",
    )


def test_a_loop_runs_its_condition_as_often_as_its_body():
    """Check both the FLOPs and the collectives."""
    exchange = "%sum = s32[] all-reduce(%j), replica_groups=[4,2]<=[2,4]T(1,0), to_apply=%add"
    text = loop(LT).replace("ROOT %go", f"{exchange}\n  ROOT %go")
    assert find_collectives(text, MESH) == [
        Collective("all-reduce", 512, 4, 5.0, ("model",)),
        Collective("all-reduce", 4, 2, 5.0, ("data",)),
    ]
    assert count_flops(text) - count_flops(loop(LT)) == 5


STEP = """
%step (a: s32[], b: f32[8,16]) -> (f32[8,16], s32[]) {
  %a = s32[] parameter(0)
  %b = f32[8,16]{1,0} parameter(1)
  %tanh = f32[8,16]{1,0} tanh(%b)
  %two.1 = s32[] constant(2)
  %sum.1 = s32[] add(%a, %two.1)
  ROOT %both = (f32[8,16]{1,0}, s32[]) tuple(%tanh, %sum.1)
}
"""


def test_a_counter_is_found_in_a_fusion_of_several_results():
    fused = "fusion(%i, %v), kind=kLoop, calls=%step\n  %next = s32[] get-tuple-element(%both.1), index=1"
    text = loop(LT).replace("%next = s32[] add(%i, %one)", f"%both.1 = (f32[8,16]{{1,0}}, s32[]) {fused}")
    assert only(text.replace("\n%body", f"{STEP}\n%body")).count == 3
