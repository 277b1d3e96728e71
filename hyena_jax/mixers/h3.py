"""H3. Axes: B batch, L length, T new tokens, D channels, H heads, d head_dim, M taps of the shift filter."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from hyena_jax.config import H3Config
from hyena_jax.filters import build_filter, is_recurrent
from hyena_jax.initializers import initializers, uniform_fan_in
from hyena_jax.mixers import long_memory
from hyena_jax.mixers.channels_first import FromChannelsFirst, ToChannelsFirst, short_filtered
from hyena_jax.mixers.inputs import check_input, check_next, check_state_length, check_token, refuse_segments
from hyena_jax.mixers.long_memory import Convolve, LongState


class H3(nn.Module):
    """y = W_o (q ⊙ SSM_diag(SSM_shift(k) ⊙ v)) (Fu et al. 2023, arXiv 2212.14052, section 3.1).

    The shift state space is a FIR of M taps, taps_t = sum_i shift_c[i + t] shift_b[i], plus a skip. In heads
    of more than one channel the outer product of keys and values goes through the diagonal state space, one
    filter for each head, and is contracted with q over the key's channels.

    Attributes:
      d_model: D.
      max_len: Lmax, the longest sequence.
      config: see `H3Config`.
      n_layers: depth of the residual stack; scales the initial output projection by 1/sqrt(2 n_layers).
      dtype: of the activations; None follows the input. Filters, FFTs and states stay in float32.
      sequence_axis: mesh axis over which L is shared out; None: each device has it whole.

    Parameters:
      qkv_proj/kernel [D, 3*D]: columns are q, k, v, D each; head h has channels h*d .. (h+1)*d - 1.
      qkv_proj/bias [3*D]:
      shift_b [D, M]: what the shift register reads in; starts as 1, 0, 0, ...
      shift_c [D, M]: what it reads out.
      shift_skip [D]: weight of the key itself.
      filter/*: one filter of H channels, one for each head.
      skip [H]: weight of the second convolution's own input.
      out_proj/kernel [D, D]:
      out_proj/bias [D]:
    """

    d_model: int
    max_len: int
    config: H3Config = H3Config()
    n_layers: int = 1
    dtype: jnp.dtype | None = None
    sequence_axis: str | None = None

    @staticmethod
    def is_unbounded(config: H3Config) -> bool:
        """Decoding may continue beyond max_len where the filter is decoded as a recurrence."""
        return is_recurrent(config.filter)

    def setup(self) -> None:
        config, width = self.config, self.d_model
        config.check(width, self.max_len)
        n_taps, n_heads = config.n_taps, width // config.head_dim
        init = initializers("gpt2", self.n_layers, width, width)
        self.qkv_proj = ToChannelsFirst(width, 3, self.dtype, init.kernel)
        self.shift_b = self.param("shift_b", lambda _: jnp.zeros((width, n_taps)).at[:, 0].set(1))
        self.shift_c = self.param("shift_c", uniform_fan_in(n_taps), (width, n_taps))
        self.shift_skip = self.param("shift_skip", nn.initializers.normal(1.0), (width,))
        self.filter = build_filter(1, n_heads, self.max_len, config.filter)
        self.skip = self.param("skip", nn.initializers.normal(1.0), (n_heads,))
        self.out_proj = FromChannelsFirst(width, self.dtype, init.out_kernel)

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
        convolve = long_memory.parallel(
            self.filter(x.shape[1]), self.skip[None], sequence_axis=self.sequence_axis
        )
        return self._mix(x, None, None, convolve, deterministic)[0]

    def init_state(self, batch_size: int, max_len: int) -> LongState:
        """The state before the first token of a sequence of at most `max_len` tokens."""
        check_state_length(max_len, self.max_len)
        shape = (batch_size, max_len, self.d_model * self.config.head_dim)
        return long_memory.init_state(self.filter, self.skip[None], shape, self.shift_b.shape)

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
        q, k, v = self.qkv_proj(x)  # [D, B, T]
        if real is not None:
            v = jnp.where(real, v, 0)
        (shifted,), short_history = short_filtered(
            [k], self._shift_taps(), jnp.zeros_like(self.shift_skip), short_history, real, self.sequence_axis
        )
        q, shifted, values = (self._heads(part) for part in (q, shifted, v))
        # [d, d, H, B, T]: the head last among the channels, which share a filter across it.
        outer = shifted[:, None] * values
        z, memory = convolve(outer.reshape(-1, *v.shape[1:]), 0)
        y = (q[:, None] * z.reshape(outer.shape)).sum(0)
        y = self.out_proj(y.swapaxes(0, 1).reshape(v.shape))
        return y, short_history, (memory,)

    def _heads(self, x: jax.Array) -> jax.Array:
        """[D, B, T] -> [d, H, B, T]."""
        return x.reshape(-1, self.config.head_dim, *x.shape[1:]).swapaxes(0, 1)

    def _shift_taps(self) -> jax.Array:
        """Taps [D, M] of the shift filter: the correlation of c with b, and the skip in lag 0."""
        n_taps = self.config.n_taps
        padded = jnp.pad(self.shift_c, [(0, 0), (0, n_taps - 1)])
        windows = padded[:, jnp.arange(n_taps)[:, None] + jnp.arange(n_taps)]  # [D, lag, i]
        taps = jnp.einsum("dti,di->dt", windows, self.shift_b)
        return taps.at[:, 0].add(self.shift_skip)
