"""The gated variant of Hyena. Axes: B batch, L length, T new tokens, D channels, K taps."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from hyena_jax.config import GatedHyenaConfig, require
from hyena_jax.filters import build_filter, is_recurrent
from hyena_jax.initializers import initializers, uniform_fan_in
from hyena_jax.mixers import long_memory
from hyena_jax.mixers.channels_first import FromChannelsFirst, ToChannelsFirst, short_filtered
from hyena_jax.mixers.inputs import (
    check_causal,
    check_input,
    check_next,
    check_state_length,
    check_token,
    refuse_segments,
)
from hyena_jax.mixers.long_memory import Convolve, LongState


class GatedHyena(nn.Module):
    """A gate that interpolates between a long and a short convolution.

    v, g = split(W_in x); y = (k * v) ⊙ g + s ⊙ (1 - g), with k one long filter without skip and s a depthwise
    FIR of x itself; a dense layer of y is the output. The source centres the FIR, so that it reads
    (K-1)/2 steps ahead; `causal=False` does so, and the default does not.

    Attributes:
      d_model: D.
      max_len: Lmax, the longest sequence; filters are defined relative to it.
      config: see `GatedHyenaConfig`.
      n_layers: of no effect: the published initialisation does not depend on the depth.
      dtype: of the activations; None follows the input. Filters, FFTs and states stay in float32.
      sequence_axis: mesh axis over which L is shared out; None: each device has it whole.

    Parameters:
      in_proj/kernel [D, 2*D]: columns are v, then g.
      in_proj/bias [2*D]:
      short_taps [D, K]: tap 0 meets the current input; of a centred FIR, the input (K-1)/2 steps ahead.
      short_bias [D]:
      filter/*: one filter of D channels.
      out_proj/kernel [D, D]:
      out_proj/bias [D]:
    """

    d_model: int
    max_len: int
    config: GatedHyenaConfig = GatedHyenaConfig()
    n_layers: int = 1
    dtype: jnp.dtype | None = None
    sequence_axis: str | None = None

    @staticmethod
    def is_unbounded(config: GatedHyenaConfig) -> bool:
        """Decoding may continue beyond max_len where the filter is decoded as a recurrence."""
        return is_recurrent(config.filter)

    def setup(self) -> None:
        config, width = self.config, self.d_model
        config.check(width, self.max_len)
        taps = config.short_filter_len
        init = initializers("torch", self.n_layers, width, width)
        self.in_proj = ToChannelsFirst(width, 2, self.dtype, init.kernel, init.bias)
        self.short_taps = self.param("short_taps", uniform_fan_in(taps), (width, taps))
        self.short_bias = self.param("short_bias", uniform_fan_in(taps), (width,))
        self.filter = build_filter(1, width, self.max_len, config.filter)
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
        causal = self.config.causal or self.sequence_axis is None
        require(causal, "causal", self.config.causal, "True with a sequence_axis")
        convolve = long_memory.parallel(self.filter(x.shape[1]), None, sequence_axis=self.sequence_axis)
        return self._mix(x, None, None, convolve, deterministic)[0]

    def init_state(self, batch_size: int, max_len: int) -> LongState:
        """The state before the first token of a sequence of at most `max_len` tokens."""
        check_causal(self.config)
        check_state_length(max_len, self.max_len)
        shape = (batch_size, max_len, self.d_model)
        return long_memory.init_state(self.filter, None, shape, self.short_taps.shape)

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
        """The operator around its long convolution: y, and the memories after x [B, T, D]."""
        v, gate = self.in_proj(x)
        u = x.transpose(2, 0, 1).astype(v.dtype)
        if real is not None:
            v = jnp.where(real, v, 0)
        long, memory = convolve(v, 0)
        # Of a centred FIR, output t is that of a causal one at t + ahead.
        ahead = 0 if self.config.causal else (self.config.short_filter_len - 1) // 2
        padded = jnp.pad(u, [(0, 0), (0, 0), (0, ahead)])
        (short,), short_history = short_filtered(
            [padded], self.short_taps, self.short_bias, short_history, real, self.sequence_axis
        )
        y = self.out_proj(long * gate + short[..., ahead:] * (1 - gate))
        return y, short_history, (memory,)
