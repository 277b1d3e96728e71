"""Every form of an operator, plain, fast or a kernel, beside its float64 loop.

Axes: B batch, L length, D and C channels, H heads.
"""

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from hyena_jax.benchmark.verify import relative_error
from hyena_jax.check.facts import Check, Fact, against_oracle
from hyena_jax.ops import long_conv, online_conv
from hyena_jax.ops.attention import Visible, plain_attention
from hyena_jax.ops.delta_rule import delta_rule
from hyena_jax.ops.fast.blocked_attention import BLOCK_ROWS, cpu_attention
from hyena_jax.ops.fast.matmul_fft import matmul_fft_conv
from hyena_jax.ops.linear_recurrence import (
    associative_recurrence,
    linear_recurrence,
    loop_recurrence,
    scan_recurrence,
)
from hyena_jax.reference import attention, convolution
from hyena_jax.reference.delta_rule import delta_rule as exact_delta_rule
from hyena_jax.reference.recurrence import linear_recurrence as exact_recurrence


def operator_cases(platform: str) -> Iterator[tuple[str, Check]]:
    """The forms by name. The kernels are those of the platform; a CPU interprets all of them."""
    from hyena_jax.ops.kernels.delta_rule import fused_delta_rule  # Pallas imports slowly
    from hyena_jax.ops.kernels.long_conv import fused_conv
    from hyena_jax.ops.kernels.recurrence import gpu_recurrence, tpu_recurrence

    options = {"interpret": True} if platform == "cpu" else {}
    on = {name: platform in ("cpu", name) for name in ("gpu", "tpu")}
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    # The last blocks of the kernels, of steps and of channels, are not full.
    u, h = normal(3, 130, 131), normal(3, 1, 131) * np.exp(-np.arange(131, dtype=np.float32) / 30)
    for form in (long_conv.fft_conv, long_conv.direct_conv, long_conv.toeplitz_conv, matmul_fft_conv):
        yield form.__name__, partial(against_oracle, form, _convolution, (u, h))
    if on["tpu"]:
        form = partial(fused_conv, **options)
        yield "fused_conv", partial(against_oracle, form, _convolution, (u, h))

    for block_len in (None, 48):
        name = "online_conv" if block_len is None else f"online_conv in blocks of {block_len}"
        yield name, partial(_decoded_with_tiles, u[:, :2], h, block_len)

    rows = np.float32(rng.uniform(0.5, 1, (2, 67, 37))), normal(2, 67, 37), normal(2, 37)
    kernels = [kernel for kernel in (gpu_recurrence, tpu_recurrence) if on[kernel.__name__[:3]]]
    for form in (loop_recurrence, scan_recurrence, associative_recurrence, *kernels):
        is_kernel = form in kernels
        method = partial(form, **options) if is_kernel else form
        for reverse in (False, True):
            name = form.__name__ + " in reverse" * reverse
            ours = partial(linear_recurrence, reverse=reverse, method=method)
            exact = partial(exact_recurrence, reverse=reverse)
            yield name, partial(against_oracle, ours, exact, rows, not is_kernel)

    for by_channel in (False, True):
        given = _delta_rule_arrays(rng, by_channel)
        starts = np.zeros((1, 67), bool)
        starts[:, 5] = True  # before which the state has not decayed yet
        kernels = [(fused_delta_rule, options)] if on["tpu"] else []
        for form, of_form in ((delta_rule, {}), *kernels):

            def ours(q, k, v, log_a, read, state, form=form, of_form=of_form, starts=starts) -> tuple:
                return form(q, k, v, log_a, read, None, state, starts, **of_form)

            def exact(q, k, v, log_a, read, state, starts=starts) -> tuple:
                return exact_delta_rule(q, k, v, log_a, read, None, state, starts)

            name = f"{form.__name__} with decays of each {'channel' if by_channel else 'head'}"
            yield name, partial(against_oracle, ours, exact, given)

    for window in (None, 13):
        length = BLOCK_ROWS + 1 if platform == "cpu" else 67
        arrays = normal(1, length, 2, 8), normal(1, length, 1, 8), normal(1, length, 1, 8)
        forms = (plain_attention, cpu_attention) if platform == "cpu" else (plain_attention,)
        exact = partial(attention.softmax_attention, segment_ids=np.zeros((1, length)), window=window)
        for form in forms:
            name = form.__name__ + ("" if window is None else f" over {window} keys")
            visible = Visible(is_causal=True, window=window)
            yield name, partial(against_oracle, partial(form, visible=visible), exact, arrays)


def _convolution(u: np.ndarray, h: np.ndarray) -> np.ndarray:
    """u [C, B, L] and h [C, 1, L]: the rows of a channel have its filter."""
    return convolution.long_conv(u.swapaxes(0, 1), h[:, 0], np.zeros(len(u))).swapaxes(0, 1)


def _decoded_with_tiles(u: np.ndarray, h: np.ndarray, block_len: int | None) -> Iterator[Fact]:
    """Steps over u [C, 2, L], of which one row begins later, beside the convolution of each block."""
    first, length = np.array([0, 5], np.int32), u.shape[-1]
    u = np.where(np.arange(length) < first[:, None], 0, u)
    expected, size = np.zeros(u.shape), block_len or length
    for row, begin in enumerate(first):
        for block in (slice(at, min(at + size, length)) for at in range(begin, length, size)):
            part = u[:, row : row + 1, block]
            expected[:, row : row + 1, block] = _convolution(part, h[..., : part.shape[-1]])
    taps = online_conv.filter_taps(jnp.asarray(h[:, 0]), None, block_len)
    empty = online_conv.no_inputs(taps, 2, len(u))
    history = online_conv.open_tiles(online_conv.History(taps, jnp.zeros((), int), first, empty, None))
    step, absorb = jax.jit(online_conv.step), jax.jit(online_conv.absorb, static_argnums=1)
    found = []
    for t in range(length):
        y, inputs = step(history, u[..., t : t + 1])
        history = history._replace(position=history.position + 1, inputs=inputs)
        if tile := online_conv.due_size(t + 1):
            history = absorb(history, tile)
        found.append(y)
    yield Fact("decoding", relative_error(np.concatenate(found, axis=-1), expected))


def _delta_rule_arrays(rng: np.random.Generator, by_channel: bool) -> tuple[np.ndarray, ...]:
    """q, k, v, log_a, read and a state: over a chunk of 64 tokens, two heads of values for one of keys."""
    shapes = (1, 67, 1, 8), (1, 67, 1, 8), (1, 67, 2, 8), (1, 2, 8, 8)
    q, k, v, state = (rng.standard_normal(shape, np.float32) for shape in shapes)
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    log_a = -rng.exponential(0.3, (1, 67, 2, *[8] * by_channel))
    read = rng.uniform(0, 1, (1, 67, 2, 1)) * np.repeat(k, 2, axis=2)
    return q, k, v, np.float32(log_a), np.float32(read), state
