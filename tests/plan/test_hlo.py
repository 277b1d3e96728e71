"""The reader of optimised HLO, on stored texts."""

from hyena_jax.plan.hlo import Array, Frame, Program, read_arrays

# As XLA prints a program for a TPU: numbers of parent frames are one too large, a loop's rounds stand in its
# condition, and a result of two arrays carries comments.
PROGRAM = """\
HloModule jit_train_step, is_scheduled=true

FileNames
1 "/home/me/train.py"
2 "/home/me/hyena_jax/ops/long_conv.py"

FunctionNames
1 "main"
2 "fft_conv"

FileLocations
1 {file_name_id=1 function_name_id=1 line=10 end_line=10 column=1 end_column=2}
2 {file_name_id=2 function_name_id=2 line=20 end_line=20 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}


%fused (p0: f32[4,100], p1: s32[]) -> f32[1,100] {
  %p0 = f32[4,100]{1,0:T(4,128)} parameter(0)
  %p1 = s32[]{:T(128)} parameter(1)
  ROOT %slice = f32[1,100]{1,0:T(1,128)} dynamic-slice(%p0, %p1, %p1), dynamic_slice_sizes={1,100}, \
metadata={op_name="jit(train_step)/slice" stack_frame_id=2}
}

%body (arg: (s32[], f32[4,100])) -> (s32[], f32[4,100]) {
  %arg = (s32[]{:T(128)}, f32[4,100]{1,0:T(4,128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%arg), index=0
  %x = f32[4,100]{1,0:T(4,128)} get-tuple-element(%arg), index=1
  %row = f32[1,100]{1,0:T(1,128)S(1)} fusion(%x, %i), kind=kLoop, calls=%fused
  ROOT %out = (s32[]{:T(128)}, /*index=1*/f32[4,100]{1,0:T(4,128)}) tuple(%i, %x)
}

%condition (arg: (s32[], f32[4,100])) -> pred[] {
  %seven = s32[]{:T(128)} constant(7)
  %arg.1 = (s32[]{:T(128)}, f32[4,100]{1,0:T(4,128)}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%arg.1), index=0
  ROOT %less = pred[]{:T(512)} compare(%i.1, %seven), direction=LT
}

ENTRY %main (x: f32[4,100]) -> (s32[], f32[4,100]) {
  %start = (s32[]{:T(128)}, f32[4,100]{1,0:T(4,128)}) parameter(0)
  ROOT %loop = (s32[]{:T(128)}, f32[4,100]{1,0:T(4,128)}) while(%start), condition=%condition, body=%body
}
"""


def test_loops_run_as_often_as_their_condition_says():
    rounds = {one.name: n for one, n in Program(PROGRAM).running()}
    assert rounds["loop"] == 1
    assert rounds["row"] == 7
    assert "slice" not in rounds, "a part of a fusion does not run by itself"


def test_the_rounds_of_a_loop_within_a_loop_multiply():
    """Those that XLA knows come before those of the condition."""
    outer = """
%around (arg.2: (s32[], f32[4,100])) -> (s32[], f32[4,100]) {
  %arg.2 = (s32[], f32[4,100]) parameter(0)
  ROOT %inner = (s32[], f32[4,100]) while(%arg.2), condition=%condition, body=%body
}

ENTRY"""
    known = 'body=%around, backend_config={"known_trip_count":{"n":"3"}}'
    before, entry = PROGRAM.split("ENTRY")
    text = before + outer.strip("\n") + entry.replace("body=%body", known)
    assert {one.name: n for one, n in Program(text).running()}["row"] == 21


def test_a_counter_that_grows_by_two():
    twice = "  %two = s32[]{:T(128)} constant(2)\n  %next = s32[]{:T(128)} add(%i, %two)\n  ROOT %out"
    text = PROGRAM.replace("  ROOT %out", twice).replace("tuple(%i, %x)", "tuple(%next, %x)")
    assert {one.name: n for one, n in Program(text).running()}["row"] == 4


def test_operands_results_and_layouts():
    program = Program(PROGRAM)
    row = next(one for one, _ in program.running() if one.name == "row")
    assert row.operands == ("x", "i")
    assert row.called == ("fused",)
    assert row.results == (Array("f32", (1, 100), (1, 0), (1, 128), 1),)
    assert next(one for one in program.computations["body"] if one.is_root).results[1].shape == (4, 100)


def test_the_lines_of_python_of_a_fusion_are_those_of_its_parts():
    program = Program(PROGRAM)
    row = next(one for one, _ in program.running() if one.name == "row")
    assert program.frames(row) == (
        Frame("/home/me/hyena_jax/ops/long_conv.py", "fft_conv", 20),
        Frame("/home/me/train.py", "main", 10),
    )


def test_numbers_of_parent_frames_that_are_right():
    text = PROGRAM.replace("parent_frame_id=1}", "parent_frame_id=0}").replace(
        "frame_id=2}\n\n", "frame_id=1}\n\n"
    )
    row = next(one for one, _ in Program(text).running() if one.name == "row")
    assert [frame.line for frame in Program(text).frames(row)] == [20, 10]


def test_an_array_fills_whole_tiles():
    (x,) = read_arrays("bf16[3,50257,768]{1,2,0:T(8,128)(2,1)}")
    assert x.size == 3 * 50257 * 768
    assert x.padded_size == 3 * 50304 * 768  # 50,257 lies along the tile's 128, 768 along its 8
    assert x.bytes == 2 * x.size
    (small,) = read_arrays("pred[5]{0}")
    assert (small.bytes, small.padded_bytes, small.space) == (5, 5, 0)
