"""FLOPs of library calls and rare convolutions are counted; unknown costs are reported. See also test_compiled_programs.py."""

import pytest
from tests.shard.hlo.hlo_text import program

from penstock.shard.hlo.flops import count_flops, describe_unknown_costs


# In the form of XLA's own tests for GPUs.
@pytest.mark.parametrize("kind", ["Forward", "BackwardInput", "BackwardFilter"])
def test_convolutions_of_cudnn(kind):
    image, kernel, result = "f16[10,20,30,41]", "f16[2,3,41,40]", "f16[10,19,28,40]"
    left, right, out = {
        "Forward": (image, kernel, result),
        "BackwardInput": (result, kernel, image),
        "BackwardFilter": (image, result, kernel),
    }[kind]
    text = program(
        f"""
      %q = {right} parameter(1)
      ROOT %c = ({out}{{3,2,1,0}}, u8[0]{{0}}) custom-call(%p, %q), window={{size=2x3}}, dim_labels=b01f_01io->b01f,
        custom_call_target="__cudnn$conv{kind}"
    """.replace(",\n        ", ", "),
        parameters=f"%p = {left} parameter(0)",
    )
    assert count_flops(text) == 2 * 10 * 19 * 28 * 40 * 41 * 2 * 3


def test_a_convolution_over_groups_of_the_batch():
    """Check a form that the CPU compiler does not print."""
    call = "convolution(%p, %q), window={size=3x3 pad=1_1x1_1}, dim_labels=bf01_oi01->bf01, batch_group_count=4"
    text = program(
        f"%q = f32[16,8,3,3] parameter(1)\nROOT %c = f32[2,16,9,9] {call}", parameters="%p = f32[8,8,9,9] parameter(0)"
    )
    assert count_flops(text) == 2 * 2 * 8 * 16 * (8 + 9 + 8) ** 2


def test_products_of_cublas():
    config = '{"gemm_backend_config":{"alpha_real":1,"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}'
    for target in ("__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8"):
        call = f'custom-call(%p, %q), custom_call_target="{target}", backend_config={config}'
        text = program(f"%q = f32[16,32] parameter(1)\nROOT %r = (f32[8,32]{{1,0}}, s8[1028]{{0}}) {call}")
        assert count_flops(text) == 2 * 8 * 32 * 16


MAXIMUM = """
%max (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %larger = f32[] maximum(%a, %b)
}
"""


@pytest.mark.parametrize(
    ("window", "result", "flops"),
    [
        ("size=1x31 pad=0_0x15_15", "f32[8,16]", 8 * 15),
        ("size=15x31 pad=7_7x15_15", "f32[8,16]", 8 * 16 - 1),
        ("size=1x31 pad=0_0x30_0", "f32[8,16]", 8 * 16 * 30),
        ("size=1x3 pad=0_0x1_1", "f32[8,16]", 8 * 16 * 2),
        ("size=1x4 stride=1x4", "f32[8,4]", 8 * 4 * 3),
    ],
)
def test_a_window_over_a_whole_dimension_is_a_reduction(window, result, flops):
    """Check the form in which the TPU compiler writes the maximum of a softmax: each window has all elements of a row."""
    text = program(
        f"%zero = f32[] constant(0)\nROOT %r = {result} reduce-window(%p, %zero), window={{{window}}}, to_apply=%max",
        before=MAXIMUM,
    )
    assert count_flops(text) == flops


def call(target, more=""):
    return f'custom-call(%p), custom_call_target="{target}"{more}'


@pytest.mark.parametrize(
    "line", [call("Sharding"), call("annotate_device_placement"), call("TopK"), "tanh(%p)", "slice-start(%p)"]
)
def test_instructions_without_flops_are_not_reported(line):
    text = program(f"ROOT %r = f32[8,16] {line}")
    assert (count_flops(text), describe_unknown_costs(text)) == (0, ())


def test_operations_of_unknown_cost_are_reported_by_name():
    text = program(f"""
      %a = f32[8,16] {call("tpu_custom_call")}
      %b = f32[8,16] {call("tpu_custom_call")}
      %c = f32[8,16] {call("__cublas$gemm")}
      ROOT %r = f32[8,16] hyper-dot(%a, %b)
    """)
    said = "(2 × tpu_custom_call, __cublas$gemm, hyper-dot)"
    assert describe_unknown_costs(text) == (
        f"4 operations of unknown cost count nothing {said}: the true FLOPs, bytes sent and time are unknown",
    )
    assert count_flops(text) == 0


def test_a_custom_call_counts_what_it_calls():
    text = program(f"ROOT %r = f32[8,16] {call('wrapped', ', called_computations={%add}')}")
    assert (count_flops(text), describe_unknown_costs(text)) == (1, ())
