"""Collectives are read from the text of a compiled program, with their groups, axes and bytes."""

import pytest
from tests.shard.hlo.hlo_text import MESH, only, program

from penstock.shard.hlo.collectives import Collective, find_collectives
from penstock.shard.hlo.flops import count_flops, describe_unknown_costs


@pytest.mark.parametrize(
    ("groups", "size", "axes"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", 4, ("model",)),
        ("{{0,4},{1,5},{2,6},{3,7}}", 2, ("data",)),
        ("{{4,0},{1,5},{6,2},{3,7}}", 2, ("data",)),
        ("{}", 8, ("data", "model")),
        ("{{0,1},{2,3},{4,5},{6,7}}", 2, ()),
        ("[2,4]<=[8]", 4, ("model",)),
        ("[4,2]<=[2,4]T(1,0)", 2, ("data",)),
        ("[1,8]<=[8]", 8, ("data", "model")),
        ("[2,4]<=[4,2]T(1,0)", 4, ()),
        ("mesh['a'=2,'b'=4] {'b'}", 4, ("model",)),
        ("mesh['a'=2,'b'=4] {'a'}", 2, ("data",)),
        ("mesh['a'=2,'b'=4] {'a','b'}", 8, ("data", "model")),
        ("mesh['a'=1,'b'=4,'c'=2], device_ids=([2,4]T(1,0)) {'b'}", 4, ("model",)),
        ("mesh['a'=1,'b'=4,'c'=2], device_ids=([2,4]T(1,0)) {'c'}", 2, ("data",)),
        ("mesh['a'=8] {'a':(2)4}", 4, ("model",)),
        ("mesh['a'=8] {'a':(1)2}", 2, ("data",)),
        ("mesh['a'=8] {'a':(2)2}", 2, ()),
    ],
)
def test_groups_and_the_axes_they_span(groups, size, axes):
    text = program(f"ROOT %r = f32[8,16]{{1,0}} all-reduce(%p), channel_id=1, replica_groups={groups}, to_apply=%add")
    assert only(text) == Collective("all-reduce", 512, size, 1.0, axes)


def test_groups_of_one_move_nothing():
    text = program("ROOT %r = f32[8,16] all-reduce(%p), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%add")
    assert find_collectives(text, MESH) == []


def test_axes_of_one_device_are_not_spanned():
    text = program("ROOT %r = f32[8,16] all-reduce(%p), replica_groups={}, to_apply=%add")
    assert only(text, {"a": 1, "b": 8}).axes == ("b",)


def test_a_mesh_that_is_too_small_is_refused():
    text = program("ROOT %r = f32[8,16] all-reduce(%p), replica_groups=[2,4]<=[8], to_apply=%add")
    with pytest.raises(ValueError, match=r"device 7.*data 2 × model 2 has 4"):
        find_collectives(text, {"data": 2, "model": 2})


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("all-reduce(%p), replica_groups=#new<2x4>, to_apply=%add", "replica_groups=#new<2x4>.* are no groups of devices"),
        ("collective-permute(%p), source_target_pairs=#new<8>", "%?r has no source_target_pairs"),
    ],
)
def test_device_groups_in_an_unknown_form_are_an_error(line, said):
    with pytest.raises(ValueError, match=said):
        find_collectives(program(f"ROOT %r = f32[8,16] {line}"), MESH)


@pytest.mark.parametrize(
    ("line", "kind", "size", "bytes_on_wire"),
    [
        ("all-reduce(%p), replica_groups=[2,4]<=[8], to_apply=%add", "all-reduce", 512, 2 * 384),
        ("all-gather(%p), replica_groups=[2,4]<=[8], dimensions={0}", "all-gather", 2048, 1536),
        ("reduce-scatter(%p), replica_groups=[2,4]<=[8], dimensions={0}, to_apply=%add", "reduce-scatter", 512, 384),
        ("all-to-all(%p), replica_groups=[2,4]<=[8], dimensions={0}", "all-to-all", 512, 384),
        ("collective-broadcast(%p), replica_groups={{1,0,2,3},{5,4,6,7}}", "collective-broadcast", 512, 512),
    ],
)
def test_bytes_and_bytes_on_wire(line, kind, size, bytes_on_wire):
    found = only(program(f"ROOT %r = f32[32,16] {line}"))
    assert (found.kind, found.bytes, found.bytes_on_wire) == (kind, size, bytes_on_wire)


def test_a_permute():
    text = program(
        "ROOT %r = f32[8,16] collective-permute(%p), source_target_pairs={{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}"
    )
    assert only(text) == Collective("collective-permute", 512, 4, 1.0, ("model",))
    assert only(text).bytes_on_wire == 512
    text = program("ROOT %r = f32[8,16] collective-permute(%p), source_target_pairs={{0,4},{1,5}}")
    assert only(text) == Collective("collective-permute", 512, 2, 1.0, ("data",))
    assert find_collectives(program("ROOT %r = f32[8,16] collective-permute(%p), source_target_pairs={{0,0}}"), MESH) == []


def test_a_tuple_all_reduce_is_summed_despite_its_comments():
    operands = ", ".join(f"%p{i}" if i != 5 else "/*index=5*/%p5" for i in range(6))
    types = ", ".join("/*index=5*/bf16[4]{0:T(256)}" if i == 5 else "f32[8,16]{1,0:T(8,128)(2,1)S(1)}" for i in range(6))
    parameters = "\n".join(f"%p{i} = {'bf16[4]{0}' if i == 5 else 'f32[8,16]{1,0}'} parameter({i})" for i in range(6))
    text = program(
        f"ROOT %r = ({types}) all-reduce({operands}), channel_id=3, replica_groups=[2,4]<=[8], to_apply=%add",
        parameters=parameters,
    )
    assert only(text) == Collective("all-reduce", 5 * 512 + 8, 4, 1.0, ("model",))


def test_asynchronous_pairs_count_once():
    text = program("""
      %s = (f32[8,16]{1,0}, f32[16,16]{1,0}) all-gather-start(%p), channel_id=1, replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}
      %d = f32[16,16]{1,0} all-gather-done(%s)
      %a = f32[8,16]{1,0} all-reduce-start(%p), channel_id=2, replica_groups=[2,4]<=[8], to_apply=%add
      %b = f32[8,16]{1,0} all-reduce-done(%a)
      %c = (f32[8,16], f32[8,16], u32[], u32[]) collective-permute-start(%p), source_target_pairs={{0,1},{1,0}}
      ROOT %e = f32[8,16] collective-permute-done(%c)
    """)
    assert find_collectives(text, MESH) == [
        Collective("all-gather", 1024, 2, 1.0, ("data",)),
        Collective("all-reduce", 512, 4, 1.0, ("model",)),
        Collective("collective-permute", 512, 2, 1.0, ("model",)),
    ]


def test_async_start_of_a_computation():
    wrapped = """
%wrapped (q: f32[8,16]) -> f32[2,16] {
  %q = f32[8,16]{1,0} parameter(0)
  ROOT %rs = f32[2,16]{1,0} reduce-scatter(%q), channel_id=1, replica_groups=[2,4]<=[8], dimensions={0}, to_apply=%add
}
"""
    text = program(
        """
      %s = ((f32[8,16]{1,0}), f32[2,16]{1,0}, u32[]) async-start(%p), calls=%wrapped
      %u = ((f32[8,16]{1,0}), f32[2,16]{1,0}, u32[]) async-update(%s), calls=%wrapped
      ROOT %d = f32[2,16]{1,0} async-done(%u), calls=%wrapped
    """,
        before=wrapped,
    )
    assert only(text) == Collective("reduce-scatter", 512, 4, 1.0, ("model",))


def test_a_conditional_counts_its_most_expensive_branch():
    branch = """
%{name} (q{name}: f32[8,16]) -> f32[8,16] {{
  %q{name} = f32[8,16]{{1,0}} parameter(0)
  ROOT %r{name} = f32[8,16]{{1,0}} {op}
}}
"""
    before = branch.format(name="cheap", op="copy(%qcheap)")
    before += branch.format(name="dear", op="all-reduce(%qdear), replica_groups=[2,4]<=[8], to_apply=%add")
    for attributes in ("branch_computations={%cheap, %dear}", "true_computation=%dear, false_computation=%cheap"):
        text = program(
            f"""
          %which = s32[] constant(0)
          ROOT %r = f32[8,16]{{1,0}} conditional(%which, %p, %p), {attributes}
        """,
            before=before,
        )
        assert only(text) == Collective("all-reduce", 512, 4, 1.0, ("model",))
        assert count_flops(text) == 128


# An all-gather that the TPU compiler (libtpu 0.0.52, v5e:2x4) overlaps: three fusions, each with the all-gather in it.
# Shortened.
TPU_ASYNC = """
HloModule jit_step, is_scheduled=true, num_partitions=8

%fused_computation.30 (param_0.82: f32[1,64,64]) -> (f32[1,64,64], f32[1,64,128], s32[2], u32[]) {
  %param_0.82 = f32[1,64,64]{1,0,2:T(1,128)S(1)} parameter(0)
  %all-gather.27 = f32[1,64,128]{1,0,2:T(1,128)} all-gather(%param_0.82), channel_id=15, replica_groups=[4,2]<=[2,4]T(1,0), dimensions={2}, use_global_device_ids=true, frontend_attributes={chain_id="0"}, backend_config={"async_collective_fusion_config":{"flag_start":"2","flag_end":"8"}}
  ROOT %custom-call.4 = (f32[1,64,64]{1,0,2:T(1,128)S(1)}, f32[1,64,128]{1,0,2:T(1,128)S(1)}, s32[2]{0:S(4)}, u32[]{:S(2)}) custom-call(%all-gather.27), custom_call_target="AsyncCollectiveStart"
}

%async_collective_fusion.59 (param_0.86: f32[1,64,64], param_1.87: f32[1,64,128], param_12.7: bf16[128,64], param_13.6: f32[32,128]) -> (f32[32,64], f32[1,64,128]) {
  %param_13.6 = f32[32,128]{1,0:T(8,128)S(1)} parameter(3)
  %param_12.7 = bf16[128,64]{1,0:T(8,128)(2,1)S(1)} parameter(2)
  %convolution.8.clone.5 = f32[32,64]{1,0:T(8,128)} convolution(%param_13.6, %param_12.7), dim_labels=bf_io->bf, metadata={op_name="jit(step)/jvp()/while/body/closed_call/dot_general" stack_frame_id=11}
  %param_0.86 = f32[1,64,64]{1,0,2:T(1,128)S(1)} parameter(0)
  %all-gather.29 = f32[1,64,128]{1,0,2:T(1,128)S(1)} all-gather(%param_0.86), channel_id=15, replica_groups=[4,2]<=[2,4]T(1,0), dimensions={2}, use_global_device_ids=true, frontend_attributes={chain_id="0"}, backend_config={"async_collective_fusion_config":{"flag_start":"2","flag_end":"8"}}
  ROOT %tuple.63 = (f32[32,64]{1,0:T(8,128)S(1)}, f32[1,64,128]{1,0,2:T(1,128)S(1)}) tuple(%convolution.8.clone.5, %all-gather.29)
}

%fused_computation.32 (param_0.90: f32[1,64,64], param_1.89: f32[1,64,128]) -> f32[1,64,128] {
  %param_0.90 = f32[1,64,64]{1,0,2:T(1,128)S(1)} parameter(0)
  %param_1.89 = f32[1,64,128]{1,0,2:T(1,128)S(1)} parameter(1)
  %all-gather.31 = f32[1,64,128]{1,0,2:T(1,128)} all-gather(%param_0.90), channel_id=15, replica_groups=[4,2]<=[2,4]T(1,0), dimensions={2}, use_global_device_ids=true, frontend_attributes={chain_id="0"}, backend_config={"async_collective_fusion_config":{"flag_start":"2","flag_end":"8"}}
  ROOT %custom-call.6 = f32[1,64,128]{1,0,2:T(1,128)S(1)} custom-call(%param_0.90, %param_1.89, %all-gather.31), custom_call_target="AsyncCollectiveDone"
}

ENTRY %main (w: f32[1,64,64], x: f32[32,128], y: bf16[128,64]) -> f32[1,64,128] {
  %w = f32[1,64,64]{1,0,2:T(1,128)S(1)} parameter(0)
  %x = f32[32,128]{1,0:T(8,128)S(1)} parameter(1)
  %y = bf16[128,64]{1,0:T(8,128)(2,1)S(1)} parameter(2)
  %async-collective-start = (f32[1,64,64]{1,0,2:T(1,128)S(1)}, f32[1,64,128]{1,0,2:T(1,128)S(1)}, s32[2]{0:S(4)}, u32[]{:S(2)}) fusion(%w), kind=kCustom, output_to_operand_aliasing={{0}: (0, {})}, calls=%fused_computation.30
  %gte.0 = f32[1,64,64]{1,0,2:T(1,128)S(1)} get-tuple-element(%async-collective-start), index=0
  %gte.1 = f32[1,64,128]{1,0,2:T(1,128)S(1)} get-tuple-element(%async-collective-start), index=1
  %fusion.59 = (f32[32,64]{1,0:T(8,128)S(1)}, f32[1,64,128]{1,0,2:T(1,128)S(1)}) fusion(%gte.0, %gte.1, %y, %x), kind=kOutput, output_to_operand_aliasing={{1}: (1, {})}, calls=%async_collective_fusion.59
  %gte.2 = f32[1,64,128]{1,0,2:T(1,128)S(1)} get-tuple-element(%fusion.59), index=1
  ROOT %async-collective-done = f32[1,64,128]{1,0,2:T(1,128)S(1)} fusion(%gte.0, %gte.2), kind=kCustom, output_to_operand_aliasing={{}: (1, {})}, calls=%fused_computation.32, frontend_attributes={is_spmd_generated="true"}
}
"""  # noqa: E501


TPU_REDUCE_SCATTER = """
HloModule jit__lambda, is_scheduled=true, num_partitions=8

%add.clone (x.1: f32[], y.1: f32[]) -> f32[] {
  %y.1 = f32[]{:T(128)} parameter(1)
  %x.1 = f32[]{:T(128)} parameter(0)
  ROOT %add.1 = f32[]{:T(128)} add(%x.1, %y.1), backend_config={"flag_configs":[],"aliasing_operands":{"lists":[]}}
}

%all-reduce-scatter (input: f32[64,64]) -> f32[64,16] {
  %input = f32[64,64]{0,1:T(8,128)S(1)} parameter(0)
  %all-reduce.2 = f32[64,64]{0,1:T(8,128)} all-reduce(%input), channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, use_global_device_ids=true, to_apply=%add.clone, frontend_attributes={from-cross-replica-sharding="true"}, backend_config={"flag_configs":[],"barrier_config":{"barrier_type":"CUSTOM","id":"1"},"scoped_memory_configs":[],"used_scoped_memory_configs":[]}
  %constant.12 = u32[] constant(0)
  %constant.shard_id_table = u32[8]{0:T(128)} constant({0, 1, 2, 3, 0, 1, 2, 3})
  %partition-id.2 = u32[] partition-id()
  %dynamic-slice.4 = u32[1]{0:T(128)} dynamic-slice(%constant.shard_id_table, %partition-id.2), dynamic_slice_sizes={1}
  %bitcast.1 = u32[]{:T(128)} bitcast(%dynamic-slice.4)
  %constant.13 = u32[] constant(16)
  %multiply.3 = u32[]{:T(128)} multiply(%bitcast.1, %constant.13)
  ROOT %dynamic-slice.5 = f32[64,16]{0,1:T(8,128)S(1)} dynamic-slice(%all-reduce.2, %constant.12, %multiply.3), dynamic_slice_sizes={64,16}
}

ENTRY %main.0_spmd (param: f32[64,64]) -> f32[64,16] {
  %param = f32[64,64]{0,1:T(8,128)S(1)} parameter(0)
  %fusion = f32[64,16]{0,1:T(8,128)S(1)} fusion(%param), kind=kCustom, calls=%all-reduce-scatter, frontend_attributes={is_spmd_generated="true"}, backend_config={"collective_algorithm_config":{"emitter":"SingleInputAllReduceScatterFusion","debug":"\\nStrategyRing{colors:1 phases:1 cores:{4} nophase0:0}"}}
  ROOT %all-reduce.1 = f32[64,16]{0,1:T(8,128)} all-reduce(%fusion), channel_id=2, replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_0'}, use_global_device_ids=true, to_apply=%add.clone, frontend_attributes={is_spmd_generated="true"}
}
"""  # noqa: E501


def test_a_collective_that_the_tpu_compiler_runs_in_three_fusions_counts_once():
    assert only(TPU_ASYNC) == Collective("all-gather", 2 * 4 * 64 * 64, 2, 1.0, ("data",))
    assert count_flops(TPU_ASYNC) == 2 * 32 * 64 * 128  # a convolution without a window is a product


def test_a_combined_collective_counts_beside_an_asynchronous_one_of_the_same_channel():
    # The TPU compiler gives channel 1 to each collective that it combined from several.
    combined = """
      %grads = f32[32,128]{1,0} all-reduce(%x), channel_id=1, replica_groups=[2,4]<=[8], to_apply=%add, backend_config={}
      %gte.0 = """
    text = TPU_ASYNC.replace("channel_id=15", "channel_id=1").replace("\n  %gte.0 = ", combined, 1)
    assert find_collectives(text, MESH) == [
        *find_collectives(TPU_ASYNC, MESH),
        Collective("all-reduce", 4 * 32 * 128, 4, 1.0, ("model",)),
    ]


GPU_FUSED = """
HloModule jit_step, is_scheduled=true, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%fused_all-reduce.clone (param_0: f32[128,10]) -> f32[128,10] {
  %param_0 = f32[128,10]{1,0} parameter(0)
  ROOT %all-reduce.1 = f32[128,10]{1,0} all-reduce(%param_0), channel_id=2, replica_groups=[2,4]<=[8], use_global_device_ids=true, to_apply=%add
}

ENTRY %main (x: f32[128,10]) -> f32[128,10] {
  %x = f32[128,10]{1,0} parameter(0)
  %fusion-start = ((f32[128,10]{1,0}), f32[128,10]{1,0}) fusion-start(%x), kind=kCustom, calls=%fused_all-reduce.clone, backend_config={"fusion_backend_config":{"kind":"__triton_collective"}}
  ROOT %fusion-done = f32[128,10]{1,0} fusion-done(%fusion-start)
}
"""  # noqa: E501  the lines of a program


def test_a_collective_that_the_gpu_compiler_runs_as_a_kernel_of_its_own_counts_once():
    assert only(GPU_FUSED) == Collective("all-reduce", 4 * 128 * 10, 4, 1.0, ("model",))
    assert count_flops(GPU_FUSED) == 128 * 10
    assert not describe_unknown_costs(GPU_FUSED)


# Two slices of eight chips: the program counts the devices of a slice. Attributes that nothing reads are left out.
SLICES = """
HloModule jit_f, is_scheduled=true, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}}

ENTRY %main (x: f32[256,1024]) -> f32[256,1024] {{
  %x = f32[256,1024]{{1,0}} parameter(0)
  %slice = u32[] custom-call(), custom_call_target="SliceId"
  %after-all = token[] after-all()
  %send = (f32[256,1024]{{1,0}}, u32[]{{:S(2)}}, token[]) send(%x, %after-all), channel_id=2, is_host_transfer=true, frontend_attributes={{_xla_host_transfer_handler_name="xla_megascale_runtime",{attributes}}}
  %recv = (f32[256,1024]{{1,0}}, u32[]{{:S(2)}}, token[]) recv(%after-all), channel_id=1, is_host_transfer=true, frontend_attributes={{_xla_host_transfer_handler_name="xla_megascale_runtime",{attributes}}}
  %send-done = token[] send-done(%send), channel_id=2, is_host_transfer=true
  %recv-done = (f32[256,1024]{{1,0}}, token[]) recv-done(%recv), channel_id=1, is_host_transfer=true
  %received = f32[256,1024]{{1,0}} get-tuple-element(%recv-done), index=0
  ROOT %inside = f32[256,1024]{{1,0}} all-reduce(%received), channel_id=3, replica_groups={{{{0,1,2,3}},{{4,5,6,7}}}}, to_apply=%add, backend_config={{}}
}}
"""  # noqa: E501  the lines of a program
SIZE = 4 * 256 * 1024
ALL_SLICES = '_xla_megascale_target="{1,2}x{0:7}"'
PAIRS = "_xla_megascale_target={{100000,200000},{100001,200001},{100002,200002}}"
EVERY = "_xla_megascale_target={{100000,100001,100002,100003,200000,200001,200002,200003}}"
CHAIN = "_xla_megascale_target={{100000->200000},{200000->100000}}"


@pytest.mark.parametrize(
    ("kind", "target", "wanted"),
    [
        ("ALL_REDUCE", ALL_SLICES, Collective("all-reduce", SIZE, 2, 1.0, ("slice",), inside=1)),
        ("ALL_GATHER", ALL_SLICES, Collective("all-gather", 2 * SIZE, 2, 1.0, ("slice",), inside=1)),
        ("ALL_REDUCE", PAIRS, Collective("all-reduce", SIZE, 2, 1.0, ("slice",), inside=1)),
        ("ALL_TO_ALL", EVERY, Collective("all-to-all", SIZE, 8, 1.0, ("slice",), inside=4)),
        ("ONE_TO_ONE", CHAIN, Collective("collective-permute", SIZE, 2, 1.0, ("slice",), inside=1)),
    ],
)
def test_a_collective_between_slices_is_read_from_its_send(kind, target, wanted):
    text = SLICES.format(attributes=f'{target},_xla_megascale_transfer_type="{kind}"')
    mesh = {"slice": 2, "data": 2, "model": 4}
    over_network, inside = find_collectives(text, mesh)
    assert over_network == wanted
    assert inside == Collective("all-reduce", SIZE, 4, 1.0, ("model",), inside=4)
    assert not describe_unknown_costs(text)
    assert find_collectives(text, {"data": 4, "model": 4})[1].axes == ("model",)


def test_the_devices_of_a_group_in_one_host_are_counted():
    text = program(
        "ROOT %r = f32[8,16]{1,0} all-reduce(%p), channel_id=1, replica_groups={{0,4},{1,5},{2,6},{3,7}}, to_apply=%add"
    )
    assert [find_collectives(text, MESH, domain)[0].inside for domain in (0, 2, 4)] == [0, 1, 1]
    text = program("ROOT %r = f32[8,16]{1,0} all-reduce(%p), channel_id=1, replica_groups=[1,8]<=[8], to_apply=%add")
    assert [find_collectives(text, MESH, domain)[0].inside for domain in (0, 2, 4)] == [0, 2, 4]


def test_a_reduce_scatter_of_the_tpu_compiler():
    assert find_collectives(TPU_REDUCE_SCATTER, MESH) == [
        Collective("reduce-scatter", 4 * 64 * 64, 4, 1.0, ("model",)),
        Collective("all-reduce", 4 * 64 * 16, 2, 1.0, ("data",)),
    ]
