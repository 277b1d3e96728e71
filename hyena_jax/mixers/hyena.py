"""The Hyena operator. Axes: B batch, L length, T new tokens, D channels, N gates, F filters, K taps."""

from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from hyena_jax.config import HyenaConfig, require
from hyena_jax.filters import ImplicitFilter
from hyena_jax.mixers.initializers import uniform_fan_in
from hyena_jax.mixers.inputs import check_input, check_state_length, is_real
from hyena_jax.ops.long_conv import long_conv
from hyena_jax.ops.short_conv import advance_history, empty_history, short_conv


class Shared(NamedTuple):
    """What the batch has in common: filters with the skips in lag 0 [F, D, max_len], tokens seen []."""

    filters: jax.Array
    position: jax.Array


class HyenaState(NamedTuple):
    """FIR inputs [B, (N+1) D, K-1] and the inputs of each long convolution [B, F, D, max_len], float32."""

    shared: Shared
    short_history: jax.Array
    long_history: jax.Array


# One long convolution: (u [B, D, T], filter index) -> (y [B, D, T], history after u or None).
Convolve = Callable[[jax.Array, int], tuple[jax.Array, jax.Array | None]]


class Hyena(nn.Module):
    """Order-N gated long convolutions (Poli et al. 2023, arXiv 2302.10866).

    A dense projection to (N+1) D channels and a depthwise FIR give the gates x_i and the signal v:

    - `conv_first` (equation 6), gates x_1..x_N: v <- x_n ⊙ (h_n * v + b_n ⊙ v) for n = 1..N; F = N;
    - `gate_first` (the published code), gates x_0..x_{N-1}: for o = 0..N-2,
      g = v ⊙ x_{N-1-o}, v <- h_o * g + b_o ⊙ g; then v <- v ⊙ x_0; F = N - 1;

    and a dense projection of v is the output.

    Attributes:
      d_model: D.
      max_len: Lmax, the longest sequence; filters are defined relative to it.
      config: see `HyenaConfig`.
      n_layers: depth of the residual stack; scales the initial output projection by 1/sqrt(2 n_layers).
      dtype: of the activations; None follows the input. Filters, FFTs and states stay in float32.
    """

    d_model: int
    max_len: int
    config: HyenaConfig = HyenaConfig()
    n_layers: int = 1
    dtype: jnp.dtype | None = None

    def setup(self) -> None:
        config, width = self.config, self.d_model
        taps = config.short_filter_len
        self.in_proj = nn.Dense(
            (config.order + 1) * width, dtype=self.dtype, kernel_init=nn.initializers.normal(0.02)
        )
        self.short_taps = self.param("short_taps", uniform_fan_in(taps), ((config.order + 1) * width, taps))
        self.short_bias = self.param("short_bias", uniform_fan_in(taps), ((config.order + 1) * width,))
        self.filter = ImplicitFilter(self.n_filters, width, self.max_len, config.filter)
        self.skip = self.param("skip", nn.initializers.normal(1.0), (self.n_filters, width))
        self.out_proj = nn.Dense(
            width, dtype=self.dtype, kernel_init=nn.initializers.normal(0.02 / (2 * self.n_layers) ** 0.5)
        )

    @property
    def n_filters(self) -> int:
        """F."""
        return self.config.order if self.config.gating == "conv_first" else self.config.order - 1

    def __call__(
        self, x: jax.Array, segment_ids: jax.Array | None = None, deterministic: bool = True
    ) -> jax.Array:
        """y [B, L, D] of x [B, L, D].

        Raises:
          ValueError: for a wrong rank, width or length of x; and with segment_ids, since a long filter
            reaches across document boundaries.
        """
        check_input(x, self.d_model, self.max_len)
        require(segment_ids is None, "segment_ids", segment_ids, "None: a long filter crosses boundaries")
        h = self.filter(x.shape[1])
        start = empty_history(x.shape[0], self.short_taps.shape[0], self.config.short_filter_len)

        def convolve(u: jax.Array, o: int) -> tuple[jax.Array, None]:
            return long_conv(u, h[o], self.skip[o]), None

        return self._mix(x, start, None, convolve)[0]

    def init_state(self, batch_size: int, max_len: int) -> HyenaState:
        """The state before the first token of a sequence of at most `max_len` tokens."""
        check_state_length(max_len, self.max_len)
        filters = self.filter(max_len).at[..., 0].add(self.skip)
        return HyenaState(
            shared=Shared(filters, jnp.zeros((), jnp.int32)),
            short_history=empty_history(batch_size, self.short_taps.shape[0], self.config.short_filter_len),
            long_history=jnp.zeros((batch_size, *filters.shape), filters.dtype),
        )

    def prefill(
        self, state: HyenaState, x: jax.Array, lengths: jax.Array | None = None
    ) -> tuple[HyenaState, jax.Array]:
        """The next T tokens x [B, T, D] at once: an FFT over the whole history."""
        check_input(x, self.d_model, state.long_history.shape[-1])
        filters, position = state.shared

        def convolve(u: jax.Array, o: int) -> tuple[jax.Array, jax.Array]:
            history = _write(state.long_history[:, o], u, position)
            y = long_conv(history, filters[o])
            return jax.lax.dynamic_slice_in_dim(y, position, u.shape[-1], axis=-1).astype(u.dtype), history

        y, *memory = self._mix(x, state.short_history, is_real(lengths, x.shape[1]), convolve)
        return HyenaState(Shared(filters, position + x.shape[1]), *memory), y

    def step(self, state: HyenaState, x: jax.Array) -> tuple[HyenaState, jax.Array]:
        """The next token x [B, D]: one product with the history for each filter, O(max_len)."""
        filters, position = state.shared

        def convolve(u: jax.Array, o: int) -> tuple[jax.Array, jax.Array]:
            history = _write(state.long_history[:, o], u, position)
            # Lag 0 of the reversed filter moves to `position`; what wraps round meets zeros.
            kernel = jnp.roll(filters[o][:, ::-1], position + 1, axis=-1)
            return jnp.einsum("bdl,dl->bd", history, kernel)[..., None].astype(u.dtype), history

        y, *memory = self._mix(x[:, None], state.short_history, None, convolve)
        return HyenaState(Shared(filters, position + 1), *memory), y[:, 0]

    def _mix(
        self, x: jax.Array, short_history: jax.Array, real: jax.Array | None, convolve: Convolve
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """The operator around its long convolutions: y, and both histories after x [B, T, D]."""
        z = self.in_proj(x).swapaxes(1, 2)  # [B, (N+1) D, T]
        if real is not None:
            z = jnp.where(real[:, None], z, 0)
        *gates, v = jnp.split(
            short_conv(z, self.short_taps, self.short_bias, short_history), self.config.order + 1, axis=1
        )
        if real is not None:
            v = jnp.where(real[:, None], v, 0)
        histories = []
        for o in range(self.n_filters):
            if self.config.gating == "conv_first":
                v, history = convolve(v, o)
                v = gates[o] * v
            else:
                v, history = convolve(v * gates[self.n_filters - o], o)
            histories.append(history)
        if self.config.gating == "gate_first":
            v = v * gates[0]
        long_history = None if histories[0] is None else jnp.stack(histories, axis=1)
        return self.out_proj(v.swapaxes(1, 2)), advance_history(short_history, z), long_history


def _write(history: jax.Array, u: jax.Array, position: jax.Array) -> jax.Array:
    """history [B, D, max_len] with u [B, D, T] from `position` on."""
    return jax.lax.dynamic_update_slice_in_dim(history, u.astype(history.dtype), position, axis=-1)
