"""The linear recurrence as Pallas kernels: `gpu_recurrence` (Triton) and `tpu_recurrence` (Mosaic).

Axes: B batch, L length, D channels. Both are methods for `linear_recurrence`, for float32 or bfloat16, and
compute in float32. Each reads a and x once and writes h once. The backward pass is one pass in the other
direction that reads a, h and h_bar once and writes a_bar and x_bar once. Only reverse mode is defined: for
forward mode or second derivatives pass `associative_recurrence` to `linear_recurrence`.

On a CPU they run only with `interpret=True`. They compile for CUDA sm_90 and TPU v5e, and are not measured
on a GPU or a TPU yet. x64 is not supported. XLA cannot shard a kernel: under `jit` with sharded arrays call
them inside `shard_map`, as `shards.sharded` does.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plgpu

from hyena_jax.ops.mesh import shape_like

# A program on a GPU is one warp, one channel per thread. It loads GPU_STEPS steps before it computes them, so
# that the reads overlap.
GPU_CHANNELS, GPU_STEPS = 32, 16
# The block that a program on a TPU holds in VMEM: time in whole tiles of 16 rows (a bfloat16 tile; float32
# tiles have 8), channels in lanes of 128. A step computes on a whole register, 8 groups of 128 channels.
TPU_TILE, TPU_STEPS, TPU_LANES, TPU_CHANNELS = 16, 256, 128, 1024


def gpu_recurrence(
    a: jax.Array, x: jax.Array, h0: jax.Array, reverse: bool = False, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Triton kernel: one program for each sequence and 32 channels loops over time with h in registers."""
    return _recurrence(a, x, h0, reverse, _gpu_call, interpret)


def tpu_recurrence(
    a: jax.Array, x: jax.Array, h0: jax.Array, reverse: bool = False, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Mosaic kernel: one program for each sequence, 1,024 channels and 256 steps; h stays in VMEM."""
    return _recurrence(a, x, h0, reverse, _tpu_call, interpret)


# Launches a kernel: (step, arrays [B, L, D], () or (h [B, L, D], h0 [B, D]), carry [B, D], reverse,
# number of outputs, interpret) -> outputs [B, L, D] and the last carry [B, D].
Call = Callable[..., tuple[list[jax.Array], jax.Array]]
Step = Callable[..., tuple[jax.Array, ...]]


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _recurrence(
    a: jax.Array, x: jax.Array, h0: jax.Array, reverse: bool, call: Call, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    (h,), last = call(_advance, (a, x), (), h0, reverse, 1, interpret)
    return h, last


def _forward(
    a: jax.Array, x: jax.Array, h0: jax.Array, reverse: bool, call: Call, interpret: bool
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
    h, last = _recurrence(a, x, h0, reverse, call, interpret)
    return (h, last), (a, h, h0)


def _backward(
    reverse: bool,
    call: Call,
    interpret: bool,
    residuals: tuple[jax.Array, ...],
    h_bars: tuple[jax.Array, ...],
) -> tuple[jax.Array, ...]:
    (a, h, h0), (h_bar, last_bar) = residuals, h_bars
    outputs, h0_bar = call(_retreat, (a, h_bar), (h, h0), last_bar, not reverse, 2, interpret)
    return (*outputs, h0_bar)


_recurrence.defvjp(_forward, _backward)


def _advance(h: jax.Array, a: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One step of the recurrence: the next carry, and the row of h to write."""
    h = a * h + x
    return h, h


def _retreat(carry: jax.Array, a: jax.Array, h_bar: jax.Array, before: jax.Array) -> tuple[jax.Array, ...]:
    """One backward step: with g_t = h_bar_t + a_{t+1} g_{t+1}, the carry is a_t g_t, in the end h0_bar.

    `before` is h_{t-1}; the rows to write are a_bar and x_bar.
    """
    g = h_bar + carry
    return a * g, g * before, g


def _cost(arrays: tuple[jax.Array, ...], states: tuple[jax.Array, ...], n_outputs: int) -> pl.CostEstimate:
    """An addition and a product for each entry of h, and in the backward pass another product."""
    sequences = [*arrays, *states[:1], *arrays[:1] * n_outputs]
    return pl.CostEstimate(
        flops=(1 + n_outputs) * arrays[0].size,
        bytes_accessed=sum(x.size * x.dtype.itemsize for x in sequences),
        transcendentals=0,
    )


def _gpu_call(
    step: Step,
    arrays: tuple[jax.Array, ...],
    states: tuple[jax.Array, ...],
    carry: jax.Array,
    reverse: bool,
    n_outputs: int,
    interpret: bool,
) -> tuple[list[jax.Array], jax.Array]:
    batch, _, channels = arrays[0].shape
    return pl.pallas_call(
        partial(_gpu_kernel, step, reverse),
        out_shape=([shape_like(arrays[0])] * n_outputs, shape_like(carry)),
        grid=(batch, pl.cdiv(channels, GPU_CHANNELS)),
        compiler_params=plgpu.CompilerParams(num_warps=1),
        cost_estimate=_cost(arrays, states, n_outputs),
        interpret=interpret,
        name="linear_recurrence",
    )(arrays, states, carry)


def _gpu_kernel(
    step: Step, reverse: bool, inputs: tuple, states: tuple, carry_ref: Any, outputs: list, last_ref: Any
) -> None:
    _, length, channels = inputs[0].shape
    b, start = pl.program_id(0), pl.program_id(1) * GPU_CHANNELS
    columns = pl.ds(start, GPU_CHANNELS)
    inside = start + jnp.arange(GPU_CHANNELS) < channels

    def load(ref: Any, t: jax.Array) -> jax.Array:
        mask = inside & (t >= 0) & (t < length)
        row = plgpu.load(ref.at[b, t, columns], mask=mask, other=jnp.zeros((), ref.dtype))
        return row.astype(jnp.float32)

    def load_state(ref: Any) -> jax.Array:
        return plgpu.load(ref.at[b, columns], mask=inside, other=0.0)

    edge = load_state(states[1]) if states else None

    def block(i: jax.Array, carry: jax.Array) -> jax.Array:
        counts = [i * GPU_STEPS + j for j in range(GPU_STEPS)]
        times = [length - 1 - k if reverse else k for k in counts]
        rows = [[load(ref, t) for ref in inputs] for t in times]
        if states:  # the backward pass ends at the recurrence's first step, before which h is h0, the edge
            for row, k, t in zip(rows, counts, times, strict=True):
                before = load(states[0], t - 1 if reverse else t + 1)
                row.append(jnp.where(k == length - 1, edge, before))
        for row, k, t in zip(rows, counts, times, strict=True):
            following, *written = step(carry, *row)
            carry = jnp.where(k < length, following, carry)
            for ref, values in zip(outputs, written, strict=True):
                plgpu.store(ref.at[b, t, columns], values.astype(ref.dtype), mask=inside & (k < length))
        return carry

    last = jax.lax.fori_loop(0, pl.cdiv(length, GPU_STEPS), block, load_state(carry_ref))
    plgpu.store(last_ref.at[b, columns], last, mask=inside)


def _tpu_call(
    step: Step,
    arrays: tuple[jax.Array, ...],
    states: tuple[jax.Array, ...],
    carry: jax.Array,
    reverse: bool,
    n_outputs: int,
    interpret: bool,
) -> tuple[list[jax.Array], jax.Array]:
    batch, length, channels = arrays[0].shape
    n_tiles = pl.cdiv(length, TPU_TILE)
    steps, width = min(TPU_STEPS, n_tiles * TPU_TILE), min(TPU_CHANNELS, _round_up(channels))
    n_blocks = pl.cdiv(length, steps)

    def at(i: jax.Array) -> jax.Array:
        return n_blocks - 1 - i if reverse else i

    def beside(i: jax.Array) -> jax.Array:
        """The tile of h past the block in this direction: it holds the one row missing from the block."""
        tile = at(i) * (steps // TPU_TILE) - 1 if reverse else (at(i) + 1) * (steps // TPU_TILE)
        return jnp.clip(tile, 0, n_tiles - 1)

    sequence = pl.BlockSpec((None, steps, width), lambda b, d, i: (b, at(i), d))
    neighbour = pl.BlockSpec((None, TPU_TILE, width), lambda b, d, i: (b, beside(i), d))
    state = pl.BlockSpec((None, width // TPU_LANES, TPU_LANES), lambda b, d, i: (b, d, 0))
    cost, carry = _cost(arrays, states, n_outputs), _grouped(carry)
    if states:
        h, edge = states
        states = (h, h, _grouped(edge))
    outputs, last = pl.pallas_call(
        partial(_tpu_kernel, step, reverse, length, n_blocks),
        out_shape=([shape_like(arrays[0])] * n_outputs, shape_like(carry)),
        grid=(batch, pl.cdiv(channels, width), n_blocks),
        in_specs=((sequence,) * len(arrays), (sequence, neighbour, state)[: len(states)], state),
        out_specs=([sequence] * n_outputs, state),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=cost,
        interpret=interpret,
        name="linear_recurrence",
    )(arrays, states, carry)
    return outputs, last.reshape(batch, -1)[:, :channels]


def _round_up(channels: int) -> int:
    return pl.cdiv(channels, TPU_LANES) * TPU_LANES


def _grouped(x: jax.Array) -> jax.Array:
    """x [..., D] as groups of 128 channels [..., D/128, 128], filled up with zeros."""
    missing = _round_up(x.shape[-1]) - x.shape[-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)]).reshape(*x.shape[:-1], -1, TPU_LANES)


def _tpu_kernel(
    step: Step,
    reverse: bool,
    length: int,
    n_blocks: int,
    inputs: tuple,
    states: tuple,
    carry_ref: Any,
    outputs: list,
    last_ref: Any,
) -> None:
    block, steps = pl.program_id(2), inputs[0].shape[0]
    n_tiles, start = steps // TPU_TILE, (n_blocks - 1 - block if reverse else block) * steps

    @pl.when(block == 0)
    def _() -> None:
        last_ref[...] = carry_ref[...]  # last_ref stays in VMEM until the last block in time

    def tile(i: jax.Array, carry: jax.Array) -> jax.Array:
        i = n_tiles - 1 - i if reverse else i
        rows = pl.ds(pl.multiple_of(i * TPU_TILE, TPU_TILE), TPU_TILE)
        values = [ref[rows, :].astype(jnp.float32) for ref in inputs]
        if states:
            values.append(_tpu_before(*states[:2], i, reverse))
        values = [_grouped(v) for v in values]
        written = [[None] * TPU_TILE for _ in outputs]
        for j in reversed(range(TPU_TILE)) if reverse else range(TPU_TILE):
            t = start + i * TPU_TILE + j
            row = [v[j] for v in values]
            if states:
                row[-1] = jnp.where(t == (0 if reverse else length - 1), states[2][...], row[-1])
            following, *results = step(carry, *row)
            carry = jnp.where(t < length, following, carry)  # rows beyond L are arbitrary
            for column, result in zip(written, results, strict=True):
                column[j] = result
        for ref, column in zip(outputs, written, strict=True):
            ref[rows, :] = jnp.stack(column).reshape(TPU_TILE, -1).astype(ref.dtype)
        return carry

    last_ref[...] = jax.lax.fori_loop(0, n_tiles, tile, last_ref[...])


def _tpu_before(h_ref: Any, beside_ref: Any, i: jax.Array, reverse: bool) -> jax.Array:
    """h_{t-1} for the rows t of tile i [16, D] if the backward pass runs in reverse, else h_{t+1}."""
    last_tile = h_ref.shape[0] // TPU_TILE - 1

    def load(ref: Any, tile: jax.Array | int) -> jax.Array:
        return ref[pl.ds(pl.multiple_of(tile * TPU_TILE, TPU_TILE), TPU_TILE), :].astype(jnp.float32)

    here, beside = load(h_ref, i), load(beside_ref, 0)
    if reverse:
        edge = jnp.where(i == 0, beside, load(h_ref, jnp.maximum(i - 1, 0)))
        return jnp.concatenate([edge[-1:], here[:-1]])
    edge = jnp.where(i == last_tile, beside, load(h_ref, jnp.minimum(i + 1, last_tile)))
    return jnp.concatenate([here[1:], edge[:1]])
