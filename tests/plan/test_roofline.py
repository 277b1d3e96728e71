"""Costs of instructions, by hand, on stored texts."""

import itertools
from pathlib import Path

import pytest

from hyena_jax.plan import roofline
from hyena_jax.plan.hlo import Program
from hyena_jax.plan.kernels import KernelWork
from hyena_jax.plan.roofline import (
    CONVOLUTION,
    COPIES,
    ELEMENTWISE,
    LOSS,
    PRODUCTS,
    RECURRENCE,
    _n_valid,
    costs,
)
from hyena_jax.system.chips import CHIPS

V5E = CHIPS["v5e"]
TABLES = """\
FileNames
1 "/home/me/hyena_jax/{file}"

FunctionNames
1 "{function}"

FileLocations
1 {{file_name_id=1 function_name_id=1 line=7 end_line=7 column=1 end_column=2}}

StackFrames
1 {{file_location_id=1 parent_frame_id=0}}

"""


def program(
    lines: str, computations: str = "", file: str = "models/blocks.py", function: str = "f"
) -> Program:
    tables = TABLES.format(file=file, function=function)
    return Program(f"HloModule m\n\n{tables}\n{computations}\nENTRY %main () -> f32[] {{\n{lines}\n}}\n")


def only(lines: str, *args: str, **kwargs: str):
    (found,) = costs(program(lines, *args, **kwargs), V5E)
    return found


PRODUCT = "convolution(%a, %b), dim_labels=bf_io->bf"
OPERANDS = """\
  %a = f32[256,512]{1,0:T(8,128)} parameter(0)
  %b = f32[512,64]{1,0:T(8,128)} parameter(1)
"""


@pytest.mark.parametrize(("precision", "passes"), [("", 1), ("high", 3), ("highest", 6)])
def test_a_product_takes_passes_by_its_precision(precision, passes):
    option = f", operand_precision={{{precision},{precision}}}" if precision else ""
    found = only(OPERANDS + f"  ROOT %c = f32[256,64]{{1,0:T(8,128)}} {PRODUCT}{option}")
    assert found.kind == PRODUCTS
    assert found.products == pytest.approx(passes * 2 * 256 * 512 * 64 / V5E.flops)
    # Rows of 64 floats fill whole tiles of 128.
    assert found.memory == pytest.approx(4 * (256 * 512 + 512 * 128 + 256 * 128) / V5E.memory_rate)


def test_a_product_of_sixteen_heads_as_a_dilated_convolution():
    """XLA's way to write a batched product: only one position of the window meets an input."""
    found = only(
        """\
  %a = bf16[16,4096,160]{1,2,0:T(8,128)(2,1)} parameter(0)
  %b = bf16[16,160,160]{1,2,0:T(8,128)(2,1)} parameter(1)
  ROOT %c = bf16[16,4096,160]{1,2,0:T(8,128)(2,1)} convolution(%a, %b), \
window={size=16 stride=16 pad=15_15 lhs_dilate=15 rhs_reversal=1}, dim_labels=0bf_0io->0bf"""
    )
    assert found.products == pytest.approx(2 * 16 * 4096 * 160 * 160 / V5E.flops)


def test_positions_of_a_window_that_meet_an_input():
    n, taps, outputs = 7, 5, 11
    for window in itertools.product((1, 2, 3, 16), (1, 2), (1, 2, 4, 15), (-1, 0, 3, 15)):
        stride, spread, holes, before = window
        places = [o * stride + k * spread - before for o in range(outputs) for k in range(taps)]
        valid = [place for place in places if place >= 0 and place % holes == 0 and place // holes < n]
        assert _n_valid(n, taps, outputs, *window) == len(valid), window


def test_a_transform_takes_5_n_log_n():
    lines = "  %a = c64[6,1024]{1,0} parameter(0)\n"
    found = only(lines + "  ROOT %f = c64[6,1024]{1,0} fft(%a), fft_type=FFT, fft_length={1024}")
    assert found.vector == pytest.approx(5 * 6 * 1024 * 10 / V5E.vector_rate)
    assert found.memory == pytest.approx(2 * 8 * 6 * 1024 / V5E.memory_rate)


def test_bytes_in_the_vector_memory_are_free():
    line = "  ROOT %c = f32[256,512]{1,0:T(8,128)S(1)} negate(%a)"
    found = only(OPERANDS + line)
    assert found.kind == ELEMENTWISE
    assert found.memory == pytest.approx(4 * 256 * 512 / V5E.memory_rate)
    assert found.vector == pytest.approx(256 * 512 / V5E.vector_rate)


def test_a_fusion_reads_only_the_slice_that_it_takes_and_writes_only_what_it_updates():
    fused = """\
%fused (p0: f32[64,512], p1: s32[]) -> f32[64,512] {
  %p0 = f32[64,512]{1,0:T(8,128)} parameter(0)
  %p1 = s32[] parameter(1)
  %row = f32[8,512]{1,0:T(8,128)} dynamic-slice(%p0, %p1, %p1), dynamic_slice_sizes={8,512}
  %twice = f32[8,512]{1,0:T(8,128)} add(%row, %row)
  ROOT %all = f32[64,512]{1,0:T(8,128)} dynamic-update-slice(%p0, %twice, %p1, %p1)
}
"""
    lines = """\
  %x = f32[64,512]{1,0:T(8,128)} parameter(0)
  %i = s32[]{:S(2)} parameter(1)
  ROOT %y = f32[64,512]{1,0:T(8,128)} fusion(%x, %i), kind=kLoop, calls=%fused"""
    assert only(lines, fused).memory == pytest.approx(2 * 4 * 8 * 512 / V5E.memory_rate)


def test_a_copy_in_the_background_costs_nothing_but_its_bytes():
    found = only(
        "  %x = f32[1024]{0:T(1024)} parameter(0)\n"
        "  %c = (f32[1024]{0:T(1024)}, f32[1024]{0:T(1024)S(1)}, u32[]{:S(2)}) copy-start(%x)\n"
        "  ROOT %d = f32[1024]{0:T(1024)S(1)} copy-done(%c)"
    )
    assert (found.kind, found.roofline, found.pessimistic) == (COPIES, 0, 0)
    assert found.memory == pytest.approx(4 * 1024 / V5E.memory_rate)


@pytest.mark.parametrize(
    ("file", "function", "kind"),
    [
        ("ops/long_conv.py", "f", CONVOLUTION),
        ("ops/kernels/recurrence.py", "f", RECURRENCE),
        ("training/loss.py", "cross_entropy", LOSS),
        ("models/language_model.py", "LanguageModel.logits", LOSS),
        ("models/language_model.py", "LanguageModel.hidden", ELEMENTWISE),
    ],
)
def test_kinds_follow_the_line_of_python(file, function, kind):
    line = '  ROOT %c = f32[256,512]{1,0} negate(%a), metadata={op_name="f" stack_frame_id=1}'
    found = only(OPERANDS + line, file=file, function=function)
    assert found.kind == kind
    assert found.source == f"{file}:7"


def test_a_relayout_is_one_wherever_it_is():
    line = '  ROOT %c = f32[512,256]{1,0} transpose(%a), metadata={op_name="f" stack_frame_id=1}'
    assert only(OPERANDS + line, file="ops/long_conv.py").kind == COPIES


def test_a_kernel_takes_what_was_counted_in_its_jaxpr():
    result = "  ROOT %my_kernel.3 = f32[256,512]{1,0:T(8,128)}"
    line = f'{result} custom-call(%a), custom_call_target="tpu_custom_call"'
    (found,) = costs(program(OPERANDS + line), V5E, {"my_kernel(f32[256,512])": KernelWork(1e9, 2e9)})
    assert found.products == pytest.approx(1e9 / V5E.flops)
    assert found.vector == pytest.approx(2e9 / V5E.vector_rate)
    assert found.memory == pytest.approx(2 * 4 * 256 * 512 / V5E.memory_rate)


def test_the_pessimistic_end():
    """Half the memory's peak; products and the rest in turn; 24 cycles a register, or 12 with products."""
    result = "  ROOT %c = f32[256,64]{1,0:T(8,128)}"
    product = only(OPERANDS + f"{result} {PRODUCT}")
    assert product.pessimistic == pytest.approx(2 * product.memory)
    near = OPERANDS.replace("T(8,128)", "T(8,128)S(1)")
    small = only(
        near + f"  ROOT %c = f32[256,64]{{1,0:T(8,128)S(1)}} {PRODUCT}, operand_precision={{high,high}}"
    )
    assert small.pessimistic == pytest.approx(max(small.products, 16 / V5E.register_rate))
    copied = only(OPERANDS + "  ROOT %c = f32[256,512]{1,0:T(8,128)} negate(%a)")
    assert copied.pessimistic == pytest.approx(2 * copied.memory)
    inside = "  %v = f32[256,512]{1,0:T(8,128)S(1)} parameter(2)\n"
    near = only(inside + "  ROOT %c = f32[256,512]{1,0:T(8,128)S(1)} negate(%v)")
    assert near.pessimistic == pytest.approx(128 / V5E.register_rate)
    kernel = only(OPERANDS + f'{result} custom-call(%a), custom_call_target="tpu_custom_call"')
    assert kernel.pessimistic == kernel.roofline


def test_exchanges_and_what_only_names_arrays_cost_nothing_here():
    lines = (
        OPERANDS
        + "  %g = f32[512,512]{1,0} all-gather(%a), channel_id=1, dimensions={0}\n"
        + '  %n = f32[256,512]{1,0} custom-call(%a), custom_call_target="ConcatBitcast"\n'
        + "  ROOT %t = (f32[512,512]{1,0}, f32[256,512]{1,0}) tuple(%g, %n)"
    )
    assert costs(program(lines), V5E) == []


def test_files_that_decide_a_kind_exist():
    for name in (*roofline.SOURCES, *roofline.HELPERS, roofline.HEAD[0]):
        assert (Path(roofline.__file__).parents[1] / name).is_file(), name
