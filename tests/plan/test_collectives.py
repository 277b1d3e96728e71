"""What devices exchange, read from stored HLO texts."""

import pytest

from hyena_jax.plan.collectives import Collective, collectives, received_between_slices
from hyena_jax.plan.hlo import Program

# A loop of 12 rounds around a gather that XLA overlaps with a product, as it prints it for a TPU: the gather
# stands in two fusions, with one channel. Then a gather of two arrays that starts and ends apart, a sum of
# two arrays, and a shift to the next device.
PROGRAM = """\
HloModule jit_train_step, is_scheduled=true

%fused_start (p: bf16[16,256]) -> bf16[256,256] {
  %p = bf16[16,256]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %gather.1 = bf16[256,256]{1,0:T(8,128)(2,1)S(1)} all-gather(%p), channel_id=7, \
replica_groups=[1,16]<=[16], dimensions={0}, metadata={op_name="jit(train_step)/blocks_0/gather"}
}

%fused_done (p: bf16[16,256]) -> bf16[256,256] {
  %p = bf16[16,256]{1,0} parameter(0)
  ROOT %gather.2 = bf16[256,256]{1,0} all-gather(%p), channel_id=7, dimensions={0}
}

%body (arg: (s32[], bf16[16,256])) -> (s32[], bf16[16,256]) {
  %arg = (s32[], bf16[16,256]{1,0}) parameter(0)
  %w = bf16[16,256]{1,0} get-tuple-element(%arg), index=1
  %start = bf16[256,256]{1,0} fusion(%w), kind=kCustom, calls=%fused_start
  %done = bf16[256,256]{1,0} fusion(%w), kind=kCustom, calls=%fused_done
  ROOT %tuple = (s32[], bf16[16,256]{1,0}) tuple(%arg, %w)
}

%condition (arg: (s32[], bf16[16,256])) -> pred[] {
  ROOT %less = pred[] constant(true)
}

%unused (p: f32[4]) -> f32[16] {
  ROOT %gather.9 = f32[16]{0} all-gather(%p), channel_id=99, dimensions={0}
}

ENTRY %main (x: bf16[16,256], y: f32[4], z: f32[2,3]) -> f32[16] {
  %x = bf16[16,256]{1,0} parameter(0)
  %loop = (s32[], bf16[16,256]{1,0}) while(%x), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"12"}}
  %pair = (f32[4]{0}, f32[2,3]{1,0}, f32[16]{0}, f32[8,3]{1,0}) all-gather-start(%y, %z), channel_id=8
  %sum = (f32[10]{0}, s32[]) all-reduce(%a, %b), channel_id=9, \
replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  %shift = (c64[5]{0}, c64[5]{0}, u32[], u32[]) collective-permute-start(%c), channel_id=10
  ROOT %out = f32[16]{0} get-tuple-element(%pair), index=2
}
"""


def test_each_exchange_counts_once_and_in_every_round():
    found = collectives(Program(PROGRAM))
    assert found == [
        Collective(
            "all-gather", 2 * 256 * 256, 12, ("bf16[256,256]",), 16, "jit(train_step)/blocks_0/gather"
        ),
        Collective("all-gather", 4 * (16 + 24), 1, ("f32[16]", "f32[8,3]"), 0, ""),
        Collective("all-reduce", 44, 1, ("f32[10]", "s32[]"), 4, ""),
        Collective("collective-permute", 40, 1, ("c64[5]",), 0, ""),
    ]


def test_a_text_without_a_program_is_refused():
    with pytest.raises(ValueError, match="ENTRY"):
        Program("HloModule nothing")


def test_bytes_that_a_ring_of_four_devices_brings_to_each():
    def received(kind: str) -> float:
        return Collective(kind, 1000, 1, (), 4, "").received(8)

    assert received("all-gather") == 750
    assert received("all-reduce") == 1500
    assert received("reduce-scatter") == 3000  # the result is a fourth of what is summed
    assert received("all-to-all") == 750
    assert received("collective-permute") == 1000
    assert Collective("all-gather", 1000, 1, (), 0, "").received(8) == 875


# A gradient reduced between two slices in a loop of 12 rounds, as XLA prints it: the host's runtime moves it.
OF_SLICES = """\
HloModule jit_train_step, is_scheduled=true

%body (arg: (s32[], f32[32,8,128])) -> (s32[], f32[32,8,128]) {
  %arg = (s32[], f32[32,8,128]{2,1,0}) parameter(0)
  %send = (f32[32,8,128]{2,1,0:T(8,128)}, u32[], token[]) send(%part, %token), channel_id=10, \
is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",\
_xla_megascale_transfer_type="ALL_REDUCE"}
  %recv = (f32[32,8,128]{2,1,0:T(8,128)}, u32[], token[]) recv(%token), channel_id=11, \
is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",\
_xla_megascale_transfer_type="ALL_REDUCE"}
  %done = (f32[32,8,128]{2,1,0:T(8,128)}, token[]) recv-done(%recv), channel_id=11
  ROOT %tuple = (s32[], f32[32,8,128]{2,1,0}) tuple(%arg, %done)
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %loop = (s32[], f32[32,8,128]{2,1,0}) while(%x), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"12"}}
  %read = (f32[7]{0}, u32[], token[]) recv(%token), channel_id=12, is_host_transfer=true
  %rest = (f32[5]{0}, u32[], token[]) recv(%token), channel_id=13, is_host_transfer=true, \
frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime"}
  ROOT %out = f32[4]{0} copy(%x)
}
"""


@pytest.mark.parametrize(("n_slices", "times"), [(2, 1), (4, 1.5)])
def test_what_crosses_the_network_between_slices_is_counted_apart(n_slices, times):
    program = Program(OF_SLICES)
    assert collectives(program) == []
    assert received_between_slices(program, n_slices) == times * 12 * 32 * 8 * 128 * 4 + 5 * 4
