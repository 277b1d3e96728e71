"""The annotated variant of Hyena. Axes: B batch, L length, T new tokens, D channels, N gates, K taps."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from hyena_jax.config import AnnotatedHyenaConfig
from hyena_jax.filters import build_filter, is_recurrent
from hyena_jax.initializers import initializers, uniform_fan_in
from hyena_jax.mixers import long_memory
from hyena_jax.mixers.channels_first import FromChannelsFirst, ToChannelsFirst, short_filtered
from hyena_jax.mixers.inputs import check_input, check_next, check_state_length, check_token, refuse_segments
from hyena_jax.mixers.long_memory import Convolve, LongState
from hyena_jax.ops.broadcasting import sum_products
from hyena_jax.ops.derivatives import own_derivative

# Least norm that a gate is divided by.
EPSILON = 1e-12


class AnnotatedHyena(nn.Module):
    """Hyena with normalised gates and residual paths inside, to be stacked without any between blocks.

    z = FIR(W u + b) is split into x_1 .. x_N, v; v <- v + u; for n = 1..N,
    v <- v + x_n / max(||x_n||_2, 1e-12) ⊙ (h_n * v + b_n ⊙ v), the norm over channels; y = v + W_o v + b_o.

    Attributes:
      d_model: D.
      max_len: Lmax, the longest sequence; filters are defined relative to it.
      config: see `AnnotatedHyenaConfig`.
      n_layers: of no effect: the published initialisation does not depend on the depth.
      dtype: of the activations; None follows the input. Filters, FFTs, norms and states stay in float32.
      sequence_axis: mesh axis over which L is shared out; None: each device has it whole.

    Parameters:
      in_proj/kernel [D, (N+1)*D]: columns are x_1 .. x_N, v, D each.
      in_proj/bias [(N+1)*D]:
      short_taps [(N+1)*D, K]: tap 0 meets the current input (libraries that cross-correlate reverse them).
      short_bias [(N+1)*D]:
      filter/*: N filters of D channels; filter n acts with gate x_{n+1}.
      skip [N, D]: weight b_n of the convolution's own input.
      out_proj/kernel [D, D]:
      out_proj/bias [D]:
    """

    d_model: int
    max_len: int
    config: AnnotatedHyenaConfig = AnnotatedHyenaConfig()
    n_layers: int = 1
    dtype: jnp.dtype | None = None
    sequence_axis: str | None = None

    @staticmethod
    def is_unbounded(config: AnnotatedHyenaConfig) -> bool:
        """Decoding may continue beyond max_len where the filter is decoded as a recurrence."""
        return is_recurrent(config.filter)

    def setup(self) -> None:
        config, width = self.config, self.d_model
        config.check(width, self.max_len)
        n_parts, taps = config.order + 1, config.short_filter_len
        channels = n_parts * width
        init = initializers("torch", self.n_layers, width, width)
        self.in_proj = ToChannelsFirst(width, n_parts, self.dtype, init.kernel, init.bias)
        self.short_taps = self.param("short_taps", uniform_fan_in(taps), (channels, taps))
        self.short_bias = self.param("short_bias", uniform_fan_in(taps), (channels,))
        self.filter = build_filter(config.order, width, self.max_len, config.filter)
        self.skip = self.param("skip", nn.initializers.normal(1.0), (config.order, width))
        self.out_proj = FromChannelsFirst(width, self.dtype, init.out_kernel, init.out_bias)

    def __call__(
        self, x: jax.Array, segment_ids: jax.Array | None = None, deterministic: bool = True
    ) -> jax.Array:
        """y [B, L, D] of x [B, L, D].

        Raises:
          ValueError: for a wrong rank, width or length of x; and with segment_ids, since a long filter
            reaches across document boundaries.
        """
        check_input(x, self.d_model, self.max_len)
        refuse_segments(segment_ids)
        convolve = long_memory.parallel(self.filter(x.shape[1]), self.skip, sequence_axis=self.sequence_axis)
        return self._mix(x, None, None, convolve, deterministic)[0]

    def init_state(self, batch_size: int, max_len: int) -> LongState:
        """The state before the first token of a sequence of at most `max_len` tokens."""
        check_state_length(max_len, self.max_len)
        shape = (batch_size, max_len, self.d_model)
        return long_memory.init_state(self.filter, self.skip, shape, self.short_taps.shape)

    def prefill(
        self, state: LongState, x: jax.Array, lengths: jax.Array | None = None
    ) -> tuple[LongState, jax.Array]:
        """The next T tokens x [B, T, D] at once."""
        check_next(x, self.d_model, self.max_len, len(state.first), lengths)
        return long_memory.prefill(self._mix, state, x, lengths)

    def step(self, state: LongState, x: jax.Array) -> tuple[LongState, jax.Array]:
        """The next token x [B, D]; see `long_memory.step` for its cost."""
        check_token(x, self.d_model, len(state.first))
        return long_memory.step(self._mix, state, x)

    def _mix(
        self,
        x: jax.Array,
        short_history: jax.Array | None,
        real: jax.Array | None,
        convolve: Convolve,
        deterministic: bool,
    ) -> tuple[jax.Array, jax.Array | None, tuple[jax.Array | None, ...]]:
        """The operator around its long convolutions: y, and the memories after x [B, T, D]."""
        (*gates, v), short_history = short_filtered(
            self.in_proj(x), self.short_taps, self.short_bias, short_history, real, self.sequence_axis
        )
        v = v + x.transpose(2, 0, 1).astype(v.dtype)
        if real is not None:
            v = jnp.where(real, v, 0)
        memories = []
        for n, gate in enumerate(gates):
            long, memory = convolve(v, n)
            v = v + normalized(gate) * long
            memories.append(memory)
        return v.transpose(1, 2, 0) + self.out_proj(v), short_history, tuple(memories)


def normalized(gate: jax.Array) -> jax.Array:
    """gate [D, B, L] divided by max(its norm over D, 1e-12); a gate of zeros has finite gradients.

    The backward pass is written by hand for its sum over D (see `sum_products`).
    """
    return own_derivative(_normalized, _normalized_pull_back)(gate)


def _normalized(gate: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    wide = gate.astype(jnp.float64 if gate.dtype == jnp.float64 else jnp.float32)
    square = sum_products(wide**2, 0)
    return (wide * jax.lax.rsqrt(jnp.maximum(square, EPSILON**2))).astype(gate.dtype), (gate, square)


def _normalized_pull_back(residuals: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array]:
    gate, square = residuals
    factor = jax.lax.rsqrt(jnp.maximum(square, EPSILON**2))
    y, wide_dy = gate.astype(square.dtype) * factor, dy.astype(square.dtype)
    along = jnp.where(square > EPSILON**2, sum_products(y * wide_dy, 0), 0)
    return ((factor * (wide_dy - y * along)).astype(gate.dtype),)
