"""The recurrent block of Hawk and Griffin.

Axes: B batch, L length, T new tokens, D channels, W recurrence width, H blocks of the gates, I = W / H
channels of a block, K taps.
"""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype
from flax.typing import Initializer

from hyena_jax.config import HawkConfig
from hyena_jax.initializers import initializers
from hyena_jax.mixers.inputs import Shared, check_input, check_next, check_state_length, documents, is_real
from hyena_jax.mixers.projections import SplitDense
from hyena_jax.ops.dense import block_dense
from hyena_jax.ops.rg_lru import RATE_SCALE, rg_lru
from hyena_jax.ops.sequence_parallel import linear_recurrence, short_convolution
from hyena_jax.ops.sequence_shards import over_shards
from hyena_jax.ops.short_conv import advance_history, empty_history, short_conv


class HawkState(NamedTuple):
    """The first real position of each row [B], FIR inputs [B, W, K-1] and recurrent state [B, W], float32.

    The last two are None in the parallel form, which starts from nothing.
    """

    shared: Shared
    first: jax.Array
    short_history: jax.Array | None
    h: jax.Array | None


class Hawk(nn.Module):
    """The recurrent block of Hawk and Griffin (De et al. 2024, arXiv 2402.19427, section 2.3, figure 2c).

    y = W_o ( GELU(W_g x) ⊙ RGLRU( FIR_K(W_r x) ) ), and the RG-LRU of u (section 2.4) is

        r_t = sigmoid(W_a u_t + b_a),  i_t = sigmoid(W_x u_t + b_x),  log a_t = -8 r_t softplus(p),
        h_t = a_t ⊙ h_{t-1} + sqrt(1 - a_t^2) ⊙ (i_t ⊙ u_t).

    Attributes:
      d_model: D.
      max_len: longest sequence; the state does not grow with it.
      config: see `HawkConfig`.
      n_layers: depth of the residual stack; scales the initial output projection by sqrt(2 / n_layers).
      dtype: of the activations and the dense layers, those of the gates among them; None follows the input.
        From the gates' sigmoids on, recurrence and state stay in float32.
      sequence_axis: mesh axis over which L is shared out; None: each device has it whole.

    Parameters:
      in_proj/kernel [D, 2*W]: columns are the GELU branch (W_g), the recurrent branch (W_r), W each.
      in_proj/bias [2*W]: with projection_bias.
      short_taps [W, K]: tap 0 meets the current input (libraries that cross-correlate store them reversed).
      short_bias [W]
      recurrence_gate/kernel [H, W//H, W//H]: block j maps channels j W/H .. (j+1) W/H - 1.
      recurrence_gate/bias [W]: with gate_bias.
      input_gate/kernel [H, W//H, W//H]: as recurrence_gate/kernel.
      input_gate/bias [W]: with gate_bias.
      rate [W]: p; a = exp(-softplus(p)) in (0, 1).
      out_proj/kernel [W, D]
      out_proj/bias [D]: with projection_bias.
    """

    d_model: int
    max_len: int
    config: HawkConfig = HawkConfig()
    n_layers: int = 1
    dtype: jnp.dtype | None = None
    sequence_axis: str | None = None

    @staticmethod
    def is_unbounded(config: HawkConfig) -> bool:
        """Decoding may continue beyond max_len: the state does not grow."""
        return True

    def setup(self) -> None:
        config, width = self.config, self.width
        config.check(self.d_model, self.max_len)
        init = initializers("griffin", self.n_layers, self.d_model, width)
        bias, taps = config.projection_bias, config.short_filter_len
        self.in_proj = SplitDense(width, 2, bias, self.dtype, init.kernel)
        fir_init = nn.initializers.normal((0.01 / taps) ** 0.5)
        self.short_taps = self.param("short_taps", fir_init, (width, taps))
        self.short_bias = self.param("short_bias", nn.initializers.zeros, (width,))
        self.recurrence_gate = BlockDense(config.gate_bias, self.dtype)
        self.input_gate = BlockDense(config.gate_bias, self.dtype)
        self.rate = self.param("rate", ring_init(config), (width,))
        self.out_proj = nn.Dense(self.d_model, use_bias=bias, dtype=self.dtype, kernel_init=init.out_kernel)

    @property
    def width(self) -> int:
        """W."""
        return self.config.width or self.d_model

    def __call__(
        self, x: jax.Array, segment_ids: jax.Array | None = None, deterministic: bool = True
    ) -> jax.Array:
        """y [B, L, D] of x [B, L, D]; neither FIR nor recurrence crosses a change of segment_ids [B, L].

        After a change of id the input of the recurrence is not scaled down (a_t = 0, and 1 in place of
        sqrt(1 - a_t^2)); at the first token of a row it is, unless `config.reset_at_start`.

        Raises:
          ValueError: for a wrong rank, width or length of x.
        """
        check_input(x, self.d_model, self.max_len, segment_ids)
        state = self.init_state(x.shape[0], x.shape[1])._replace(short_history=None, h=None)
        starts = self._starts(state, x.shape[1])
        if segment_ids is not None:
            segment_ids = documents(segment_ids)
            changes = segment_ids[:, 1:] != segment_ids[:, :-1]
            starts = starts | jnp.pad(changes, ((0, 0), (1, 0)))
        return self._mix(state, x, starts, None, segment_ids)[1]

    def init_state(self, batch_size: int, max_len: int) -> HawkState:
        """The state before the first token of a sequence of at most `max_len` tokens."""
        check_state_length(max_len, self.max_len)
        dtype = self.short_taps.dtype
        return HawkState(
            shared=Shared(jnp.zeros((), jnp.int32)),
            first=jnp.zeros(batch_size, jnp.int32),
            short_history=empty_history(batch_size, self.width, self.config.short_filter_len, dtype),
            h=jnp.zeros((batch_size, self.width), dtype),
        )

    def prefill(
        self, state: HawkState, x: jax.Array, lengths: jax.Array | None = None
    ) -> tuple[HawkState, jax.Array]:
        """The next T tokens x [B, T, D] at once."""
        check_next(x, self.d_model, self.max_len, len(state.first), lengths)
        n_tokens = x.shape[1]
        if lengths is not None:
            state = state._replace(first=n_tokens - lengths)
        return self._mix(state, x, self._starts(state, n_tokens), is_real(lengths, n_tokens), None)

    def step(self, state: HawkState, x: jax.Array) -> tuple[HawkState, jax.Array]:
        """The next token x [B, D], in constant time."""
        state, y = self.prefill(state, x[:, None])
        return state, y[:, 0]

    def _starts(self, state: HawkState, n_tokens: int) -> jax.Array:
        """Mask [B, T]: which of the next tokens are the first of their row, if those count as starts."""
        positions = state.shared.position + jnp.arange(n_tokens, dtype=jnp.int32)
        return (positions == state.first[:, None]) & self.config.reset_at_start

    def _mix(
        self,
        state: HawkState,
        x: jax.Array,
        starts: jax.Array,
        real: jax.Array | None,
        segment_ids: jax.Array | None,
    ) -> tuple[HawkState, jax.Array]:
        """The state after x [B, T, D], and y [B, T, D]."""
        gate, u = self.in_proj(x)
        # The blocks of the gates come first, [H, B, T, I], in what follows: their products then find every
        # array in order, where XLA for CPUs would recompute it while it transposes.
        u = self._blocks(u)
        if real is not None:
            u = jnp.where(real[..., None], u, 0)
        before = None if state.short_history is None else self._blocks(state.short_history.swapaxes(1, 2))
        ids = None if segment_ids is None else segment_ids[..., None]
        taps, bias = self._blocks(self.short_taps.T[:, None, None]), self._blocks(self.short_bias[None, None])
        history = advance_history(before, u, 2)
        u = self._fir(u, taps.swapaxes(0, 1), bias, before, ids)
        if real is not None:  # the FIR's bias got into the padding
            u = jnp.where(real[..., None], u, 0)
        gates = (self.recurrence_gate(u), self.input_gate(u))
        r, i = (jax.nn.sigmoid(z.astype(self.rate.dtype)) for z in gates)
        h0 = None if state.h is None else self._blocks(state.h)
        h, h_last = self._rg_lru(u, r, i, self._blocks(self.rate[None, None]), h0, starts)
        y = self.out_proj(jax.nn.gelu(gate, approximate=self.config.gelu == "tanh") * _join(h))
        if history is not None:
            history, h_last = _join(history).swapaxes(1, 2), _join(h_last)
        return HawkState(Shared(state.shared.position + x.shape[1]), state.first, history, h_last), y

    def _fir(
        self,
        u: jax.Array,
        taps: jax.Array,
        bias: jax.Array,
        before: jax.Array | None,
        ids: jax.Array | None,
    ) -> jax.Array:
        """The FIR of u [H, B, T, I], after nothing on all devices of the sequence axis."""
        axis = self.sequence_axis
        if axis is None or before is not None:
            return short_conv(u, taps, bias, 2, before, ids)

        def local(u: jax.Array, taps: jax.Array, bias: jax.Array, ids: jax.Array | None) -> jax.Array:
            return short_convolution(u, taps, bias, ids, -2, axis)

        in_axes = ("HBLI", "KH11I", "H11I", "BL1")
        return over_shards(local, axis, in_axes, "HBLI")(u, taps, bias, ids)

    def _rg_lru(
        self,
        u: jax.Array,
        r: jax.Array,
        i: jax.Array,
        rate: jax.Array,
        h0: jax.Array | None,
        starts: jax.Array,
    ) -> tuple[jax.Array, jax.Array | None]:
        """`rg_lru`, from nothing on all devices of the sequence axis."""
        axis = self.sequence_axis
        if axis is None or h0 is not None:
            return rg_lru(u, r, i, rate, h0, starts)

        def local(u: jax.Array, r: jax.Array, i: jax.Array, rate: jax.Array, starts: jax.Array) -> jax.Array:
            return rg_lru(u, r, i, rate, None, starts, linear_recurrence(axis))[0]

        in_axes = ("HBLI", "HBLI", "HBLI", "H11I", "BL")
        return over_shards(local, axis, in_axes, "HBLI")(u, r, i, rate, starts), None

    def _blocks(self, x: jax.Array) -> jax.Array:
        """x [..., W] as [H, ..., I]."""
        n_blocks = self.config.gate_blocks
        return jnp.moveaxis(x.reshape(*x.shape[:-1], n_blocks, self.width // n_blocks), -2, 0)


def _join(x: jax.Array) -> jax.Array:
    """[H, ..., I] as [..., W]."""
    x = jnp.moveaxis(x, 0, -2)
    return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])


class BlockDense(nn.Module):
    """A dense layer W -> W with a block-diagonal matrix: channels mix inside H groups.

    Starts as N(0, 1 / block width), bias 0.
    """

    use_bias: bool
    dtype: jnp.dtype | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """y [H, B, T, I] of x [H, B, T, I]."""
        n_blocks, width = x.shape[0], x.shape[-1]
        kernel = self.param("kernel", nn.initializers.normal(width**-0.5), (n_blocks, width, width))
        bias = self.param("bias", nn.initializers.zeros, (n_blocks * width,)) if self.use_bias else None
        x, kernel, bias = promote_dtype(x, kernel, bias, dtype=self.dtype)
        y = block_dense(x.reshape(n_blocks, -1, width), kernel).reshape(x.shape)
        return y if bias is None else y + bias.reshape(n_blocks, 1, 1, width)


def ring_init(config: HawkConfig) -> Initializer:
    """p such that a = exp(-softplus(p)), or a^c, is uniform by area between the radii of `config`."""

    def init(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype = jnp.float32) -> jax.Array:
        # By area, because a is a radius: its square is uniform.
        squared = jax.random.uniform(key, shape, dtype, config.min_radius**2, config.max_radius**2)
        log_a = 0.5 * jnp.log(squared)
        if config.ring == "a_to_c":
            log_a = log_a / RATE_SCALE
        return jnp.log(jnp.expm1(-log_a))  # the inverse of softplus

    return init
