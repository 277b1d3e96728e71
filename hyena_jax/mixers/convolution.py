"""One long convolution, without gates. Axes: B batch, L length, T new tokens, D channels."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from hyena_jax.config import FIRConfig, S4DConfig
from hyena_jax.filters import build_filter, is_recurrent
from hyena_jax.initializers import initializers
from hyena_jax.mixers import long_memory
from hyena_jax.mixers.channels_first import FromChannelsFirst, ToChannelsFirst
from hyena_jax.mixers.inputs import check_input, check_next, check_state_length, check_token, refuse_segments
from hyena_jax.mixers.long_memory import Convolve, LongState

# There is no short filter in front.
NO_FIR = (0, 1)


class FIR(nn.Module):
    """y = W_o (h * (W_i x) + skip ⊙ (W_i x)): the plain convolution baseline.

    Attributes:
      d_model: D.
      max_len: Lmax, the longest sequence.
      config: see `FIRConfig`.
      n_layers: depth of the residual stack; scales the initial output projection by 1/sqrt(2 n_layers).
      dtype: of the activations; None follows the input. Filters, FFTs and states stay in float32.
      sequence_axis: mesh axis over which L is shared out; None: each device has it whole.

    Parameters:
      in_proj/kernel [D, D]:
      in_proj/bias [D]:
      filter/*: one filter of D channels.
      skip [1, D]: weight of the convolution's own input.
      out_proj/kernel [D, D]:
      out_proj/bias [D]:
    """

    d_model: int
    max_len: int
    config: FIRConfig | S4DConfig = FIRConfig()
    n_layers: int = 1
    dtype: jnp.dtype | None = None
    sequence_axis: str | None = None

    @staticmethod
    def is_unbounded(config: FIRConfig | S4DConfig) -> bool:
        """Decoding may continue beyond max_len where the filter is decoded as a recurrence."""
        return is_recurrent(config.filter)

    def setup(self) -> None:
        self._set_up_convolution()
        init = initializers("gpt2", self.n_layers, self.d_model, self.d_model)
        self.in_proj = ToChannelsFirst(self.d_model, 1, self.dtype, init.kernel)
        self.out_proj = FromChannelsFirst(self.d_model, self.dtype, init.out_kernel)

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
        return long_memory.init_state(self.filter, self.skip, (batch_size, max_len, self.d_model), NO_FIR)

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

    def _set_up_convolution(self) -> None:
        self.config.check(self.d_model, self.max_len)
        self.filter = build_filter(1, self.d_model, self.max_len, self.config.filter)
        self.skip = self.param("skip", nn.initializers.normal(1.0), (1, self.d_model))

    def _mix(
        self,
        x: jax.Array,
        short_history: jax.Array | None,
        real: jax.Array | None,
        convolve: Convolve,
        deterministic: bool,
    ) -> tuple[jax.Array, jax.Array | None, tuple[jax.Array | None, ...]]:
        """The layers around the long convolution: y, and the memories after x [B, T, D]."""
        u = self._before(x)
        if real is not None:
            u = jnp.where(real, u, 0)
        y, memory = convolve(u, 0)
        return self._after(y), short_history, (memory,)

    def _before(self, x: jax.Array) -> jax.Array:
        """u [D, B, T] of x [B, T, D]."""
        return self.in_proj(x)[0]

    def _after(self, y: jax.Array) -> jax.Array:
        """The output [B, T, D] of y [D, B, T]."""
        return self.out_proj(y)


class S4D(FIR):
    """y = GLU(W_o GELU(h * x + skip ⊙ x)), h a diagonal state space (Gu et al. 2022, arXiv 2206.11893).

    GLU(a, b) = a ⊙ sigmoid(b); GELU by erf, as in the published layer.

    Attributes:
      config: see `S4DConfig`.

    Parameters:
      filter/*: one filter of D channels.
      skip [1, D]: weight of the convolution's own input.
      out_proj/kernel [D, 2*D]: columns are a, then b.
      out_proj/bias [2*D]:
    """

    config: S4DConfig = S4DConfig()

    def setup(self) -> None:
        self._set_up_convolution()
        init = initializers("gpt2", self.n_layers, self.d_model, self.d_model)
        self.out_proj = FromChannelsFirst(2 * self.d_model, self.dtype, init.out_kernel)

    def _before(self, x: jax.Array) -> jax.Array:
        return (x if self.dtype is None else x.astype(self.dtype)).transpose(2, 0, 1)

    def _after(self, y: jax.Array) -> jax.Array:
        return nn.glu(self.out_proj(nn.gelu(y, approximate=False)))
