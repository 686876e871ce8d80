"""An all-reduce counts as a reduce-scatter if each device keeps a slice of the result."""

import pytest
from tests.shard.hlo.hlo_text import MESH, only, program

from penstock.shard.hlo.collectives import Collective, find_collectives

SLICE = """
%fused (a: f32[8,16], t: u32[8], d: u32[]) -> f32[2,16] {{
  %a = f32[8,16]{{1,0}} parameter(0)
  %t = u32[8]{{0}} parameter(1)
  %d = u32[] parameter(2)
  %k = u32[1]{{0}} dynamic-slice(%t, %d), dynamic_slice_sizes={{1}}
  %two = u32[1]{{0}} constant({{2}})
  %m = u32[1]{{0}} multiply(%k, %two)
  %b = s32[] bitcast(%m)
  %z = s32[] constant(0)
  {between}
  ROOT %s = f32[2,16]{{1,0}} dynamic-slice(%x, %b, %z), dynamic_slice_sizes={{2,16}}
}}
"""


@pytest.mark.parametrize(
    "between",
    ["%x = f32[8,16] copy(%a)", "%x = f32[8,16] negate(%a)", "%c = f32[8,16] convert(%a)\n  %x = f32[8,16] bitcast(%c)"],
)
@pytest.mark.parametrize("through", ["%v = f32[8,16] bitcast(%r)", "%v = f32[8,16] all-reduce-done(%r)"])
def test_an_all_reduce_that_each_device_slices_is_a_reduce_scatter(between, through):
    def kept(table, groups="[2,4]<=[8]"):
        text = program(
            f"""
          %r = f32[8,16]{{1,0}} all-reduce{"-start" if "done" in through else ""}(%p), replica_groups={groups}, to_apply=%add
          {through}
          %id = u32[] partition-id()
          %table = u32[8]{{0}} constant({table})
          ROOT %f = f32[2,16]{{1,0}} fusion(%v, %table, %id), kind=kLoop, calls=%fused
        """,
            before=SLICE.format(between=between),
        )
        return find_collectives(text, MESH)

    assert kept("{0, 1, 2, 3, 0, 1, 2, 3}") == [Collective("reduce-scatter", 512, 4, 1.0, ("model",))]
    # Reduced over both axes, sliced over one.
    assert kept("{0, 1, 2, 3, 0, 1, 2, 3}", "[1,8]<=[8]") == [
        Collective("reduce-scatter", 512, 4, 1.0, ("model",)),
        Collective("all-reduce", 128, 2, 1.0, ("data",)),
    ]
    # Reduced over one axis, sliced over the other: each device needs the full result of its group.
    assert kept("{0, 0, 0, 0, 1, 1, 1, 1}") == [Collective("all-reduce", 512, 4, 1.0, ("model",))]
    assert kept("{0, 1, 1, 1, 0, 1, 1, 1}") == [Collective("all-reduce", 512, 4, 1.0, ("model",))]
    # The table is too long to be printed, so that the size decides.
    assert kept("{...}") == [Collective("reduce-scatter", 512, 4, 1.0, ("model",), guessed=True)]
    assert kept("{...}", "[1,8]<=[8]") == [
        Collective("reduce-scatter", 512, 4, 1.0, ("model",), guessed=True),
        Collective("all-reduce", 128, 2, 1.0, ("data",), guessed=True),
    ]


def test_a_slice_at_the_same_offset_on_all_devices_keeps_the_all_reduce():
    text = program("""
      %r = f32[8,16]{1,0} all-reduce(%p), replica_groups=[2,4]<=[8], to_apply=%add
      %two = s32[] constant(2)
      ROOT %s = f32[2,16]{1,0} dynamic-slice(%r, %two, %two), dynamic_slice_sizes={2,16}
    """)
    assert only(text).kind == "all-reduce"


def test_a_second_use_of_the_full_result_keeps_the_all_reduce():
    text = program("""
      %r = f32[8,16]{1,0} all-reduce(%p), replica_groups=[2,4]<=[8], to_apply=%add
      %id = u32[] partition-id()
      %zero = u32[] constant(0)
      %s = f32[1,16]{1,0} dynamic-slice(%r, %id, %zero), dynamic_slice_sizes={1,16}
      ROOT %t = (f32[1,16], f32[8,16]) tuple(%s, %r)
    """)
    assert only(text).kind == "all-reduce"


def test_a_use_of_the_full_result_overrides_a_guess():
    text = program("""
      %r = f32[8,16]{1,0} all-reduce(%p), replica_groups=[2,4]<=[8], to_apply=%add
      %id = u32[] partition-id()
      %zero = u32[] constant(0)
      %table = u32[16]{0} constant({...})
      %at = u32[1]{0} dynamic-slice(%table, %id), dynamic_slice_sizes={1}
      %place = u32[] bitcast(%at)
      %s = f32[2,16]{1,0} dynamic-slice(%r, %place, %zero), dynamic_slice_sizes={2,16}
      %u = f32[2,16]{1,0} dynamic-slice(%r, %zero, %zero), dynamic_slice_sizes={2,16}
      ROOT %t = (f32[2,16], f32[2,16]) tuple(%s, %u)
    """)
    assert only(text) == Collective("all-reduce", 512, 4, 1.0, ("model",))


def test_a_tuple_all_reduce_is_taken_element_by_element():
    text = program("""
      %q = f32[4]{0} parameter(1)
      %r = (f32[8,16]{1,0}, f32[4]{0}) all-reduce(%p, %q), replica_groups=[1,8]<=[8], to_apply=%add
      %big = f32[8,16]{1,0} get-tuple-element(%r), index=0
      %small = f32[4]{0} get-tuple-element(%r), index=1
      %id = u32[] partition-id()
      %zero = u32[] constant(0)
      %s = f32[1,16]{1,0} dynamic-slice(%big, %id, %zero), dynamic_slice_sizes={1,16}
      ROOT %t = (f32[1,16], f32[4]) tuple(%s, %small)
    """)
    assert find_collectives(text, MESH) == [
        Collective("reduce-scatter", 512, 8, 1.0, ("data", "model")),
        Collective("all-reduce", 16, 8, 1.0, ("data", "model")),
    ]


def test_an_all_reduce_of_a_compiler_that_forms_reduce_scatters_is_kept():
    lines = """
      %r = f32[8,16]{{1,0:T(8,128)}} all-reduce(%p), replica_groups=[1,8]<=[8], to_apply=%add{config}
      %c = (f32[8,16]{{1,0:T(8,128)S(1)}}, f32[8,16]{{1,0:T(8,128)}}, u32[]{{:S(2)}}) copy-start(%r)
      %d = f32[8,16]{{1,0:T(8,128)S(1)}} copy-done(%c)
      %id = u32[] partition-id()
      %zero = u32[] constant(0)
      ROOT %s = f32[1,16]{{1,0}} dynamic-slice(%d, %id, %zero), dynamic_slice_sizes={{1,16}}
    """
    config = ', backend_config={"barrier_config":{"barrier_type":"CUSTOM","id":"5"}}'
    assert only(program(lines.format(config=""))).kind == "reduce-scatter"
    assert only(program(lines.format(config=config))).kind == "all-reduce"


def test_overlapping_slices_keep_the_all_reduce():
    text = program("""
      %r = f32[8,16]{1,0} all-reduce(%p), replica_groups=[2,4]<=[8], to_apply=%add
      %id = u32[] partition-id()
      %zero = u32[] constant(0)
      ROOT %s = f32[4,16]{1,0} dynamic-slice(%r, %id, %zero), dynamic_slice_sizes={4,16}
    """)
    assert only(text).kind == "all-reduce"
