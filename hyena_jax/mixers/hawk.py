"""The recurrent block of Hawk and Griffin.

Axes: B batch, L length, T new tokens, D channels, W recurrence width, H blocks of the gates, I = W / H
channels of a block, K taps.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.linen.dtypes import promote_dtype
from flax.typing import Initializer

from hyena_jax.config import HawkConfig
from hyena_jax.initializers import initializers
from hyena_jax.mixers.dense import SplitDense
from hyena_jax.mixers.inputs import Shared, check_input, check_next, check_state_length, is_real, sums_dtype
from hyena_jax.mixers.mixing import Mixing, impulse_responses
from hyena_jax.ops.dense import block_dense
from hyena_jax.ops.documents import documents
from hyena_jax.ops.linear_recurrence import default_method
from hyena_jax.ops.rg_lru import RATE_SCALE, factors, rg_lru
from hyena_jax.ops.sequence_parallel import rg_lru_from_start, short_convolution
from hyena_jax.ops.sequence_shards import sharded
from hyena_jax.ops.short_conv import advance_history, empty_history, short_conv


class HawkState(NamedTuple):
    """The first real position of each row [B], FIR inputs [B, W, K-1] and recurrent state [B, W], float32."""

    shared: Shared
    first: jax.Array
    short_history: jax.Array
    h: jax.Array


class Hawk(nn.Module):
    """The recurrent block of Hawk and Griffin (De et al. 2024, arXiv 2402.19427, section 2.3, figure 2c).

    y = W_o ( GELU(W_g x) ⊙ RGLRU( FIR_K(W_r x) ) ), and the RG-LRU of u (section 2.4) is

        r_t = sigmoid(W_a u_t + b_a),  i_t = sigmoid(W_x u_t + b_x),  log a_t = -8 r_t softplus(p),
        h_t = a_t ⊙ h_{t-1} + sqrt(1 - a_t^2) ⊙ (i_t ⊙ u_t).

    Not in the paper: `config.sign` replaces a_t in the last line, by 2 a_t - 1 with `shifted`, and by
    tanh(W_s u_t + b_s) a_t with `gate`.

    Attributes:
      d_model: D.
      max_len: longest sequence; the state does not grow with it.
      config: see `HawkConfig`.
      n_layers: depth of the residual stack; scales the initial output projection by sqrt(2 / n_layers).
      dtype: of the activations and of all dense layers, including the gates'; None follows the input. The
        gates' sigmoids, the recurrence and the state stay in float32.
      sequence_axis: mesh axis over which L is sharded in `__call__`, or None.
      platform: see `ops.linear_recurrence.default_method`.

    Parameters:
      in_proj/kernel [D, 2*W]: columns are the GELU branch (W_g), the recurrent branch (W_r), W each.
      in_proj/bias [2*W]: with projection_bias.
      short_taps [W, K]: tap 0 meets the current input (libraries that cross-correlate store them reversed).
      short_bias [W]
      recurrence_gate/kernel [H, W//H, W//H]: block j maps channels j W/H .. (j+1) W/H - 1.
      recurrence_gate/bias [W]: with gate_bias.
      input_gate/kernel [H, W//H, W//H]: as recurrence_gate/kernel.
      input_gate/bias [W]: with gate_bias.
      sign_gate/kernel [H, W//H, W//H]: W_s, with sign `gate`; as recurrence_gate/kernel.
      sign_gate/bias [W]: b_s, with sign `gate`.
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
    platform: str | None = None

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
        self.short_taps = self.param("short_taps", fir_init, (width, taps), jnp.float32)
        self.short_bias = self.param("short_bias", nn.initializers.zeros, (width,), jnp.float32)
        self.recurrence_gate = BlockDense(config.gate_bias, self.dtype)
        self.input_gate = BlockDense(config.gate_bias, self.dtype)
        if config.sign == "gate":
            self.sign_gate = BlockDense(True, self.dtype)
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
        starts = (jnp.arange(x.shape[1], dtype=jnp.int32) == 0) & self.config.reset_at_start
        starts, ids = jnp.broadcast_to(starts, x.shape[:2]), None
        if segment_ids is not None:
            found = documents(segment_ids)
            starts, ids = starts | found.changes, found.number[..., None]
        gate, u = self._branches(x)
        recurrence, u = self._recurrence(u, starts, ids)
        return self._output(gate, recurrence(u))

    def mixing_matrix(self, x: jax.Array) -> Mixing:
        """One matrix for each channel, from u, behind the FIR, to the output projection.

        M_{t,s} = GELU(W_g x_t) a_t .. a_{s+1} sqrt(1 - a_s^2) i_s, channel by channel.
        """
        starts = (jnp.arange(x.shape[1], dtype=jnp.int32) == 0) & self.config.reset_at_start
        gate, u = self._branches(x)
        recurrence, u = self._recurrence(u, jnp.broadcast_to(starts, x.shape[:2]), None)

        def operator(u: jax.Array) -> jax.Array:  # of [B, L, W]
            return self._activated(gate) * _join(recurrence(self._blocks(u)))

        u = _join(u)
        return Mixing(impulse_responses(operator, u, 1, True), u[..., None])

    def gates(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """r, i and the state's factors a of x [B, L, D], each [B, L, W], float32; without resets."""
        u = self._fir(self._branches(x)[1], None)
        r, i, s = self._gates(u, self.sequence_axis)
        a, _ = factors(r, self._blocks(self.rate[None, None]), s, self.config.sign == "shifted")
        return _join(r), _join(i), _join(a)

    def _fir(self, u: jax.Array, ids: jax.Array | None) -> jax.Array:
        """The FIR of u [H, B, L, I]."""
        in_axes = ("HBLI", "KH11I", "H11I", "BL1")
        fir = sharded(partial(short_convolution, axis=-2), self.sequence_axis, in_axes, "HBLI")
        return fir(u, *self._short_filter(), ids)

    def _recurrence(
        self, u: jax.Array, starts: jax.Array, ids: jax.Array | None
    ) -> tuple[Callable[[jax.Array], jax.Array], jax.Array]:
        """The RG-LRU with the gates of u [H, B, L, I] behind the FIR, linear in its input; and that u."""
        u = self._fir(u, ids)
        in_axes = ("HBLI", "HBLI", "HBLI", "H11I", "BL", "HBLI")
        shifted = self.config.sign == "shifted"
        run = partial(rg_lru_from_start, method=default_method(self.platform), shifted=shifted)
        recurrence = sharded(run, self.sequence_axis, in_axes, "HBLI")
        (r, i, s), rate = self._gates(u, self.sequence_axis), self._blocks(self.rate[None, None])
        return lambda u: recurrence(u, r, i, rate, starts, s), u

    def init_state(self, batch_size: int, max_len: int) -> HawkState:
        """The state before the first token of a sequence of at most `max_len` tokens."""
        check_state_length(max_len, self.max_len)
        dtype = sums_dtype(self.short_taps.dtype)
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
        lengths = check_next(x, self.d_model, self.max_len, len(state.first), lengths)
        n_tokens, real = x.shape[1], is_real(lengths, x.shape[1])
        first = state.first if lengths is None else n_tokens - lengths
        positions = state.shared.position + jnp.arange(n_tokens, dtype=jnp.int32)
        starts = (positions == first[:, None]) & self.config.reset_at_start
        gate, u = self._branches(x)
        if real is not None:
            u = jnp.where(real[..., None], u, 0)
        before = self._blocks(state.short_history.swapaxes(1, 2))
        history = advance_history(before, u, 2)
        u = short_conv(u, *self._short_filter(), 2, before)
        if real is not None:  # the FIR added its bias to the padding
            u = jnp.where(real[..., None], u, 0)
        rate, h0 = self._blocks(self.rate[None, None]), self._blocks(state.h)
        r, i, s = self._gates(u, None)
        method, shifted = default_method(self.platform), self.config.sign == "shifted"
        h, h_last = rg_lru(u, r, i, rate, h0, starts, method, s, shifted)
        y = self._output(gate, h)
        history, h_last = _join(history).swapaxes(1, 2), _join(h_last)
        return HawkState(Shared(state.shared.position + n_tokens), first, history, h_last), y

    def step(self, state: HawkState, x: jax.Array) -> tuple[HawkState, jax.Array]:
        """The next token x [B, D], in constant time."""
        state, y = self.prefill(state, x[:, None])
        return state, y[:, 0]

    def _branches(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The GELU branch [B, T, W], and the recurrent branch in blocks [H, B, T, I].

        The gates' blocks come first from here to `_output`: their products then read every array in order,
        where XLA for CPUs would recompute an array while it transposes it.
        """
        gate, u = self.in_proj(x)
        return gate, self._blocks(u)

    def _short_filter(self) -> tuple[jax.Array, jax.Array]:
        """Taps [K, H, 1, 1, I] and bias [H, 1, 1, I] of the FIR."""
        taps, bias = self._blocks(self.short_taps.T[:, None, None]), self._blocks(self.short_bias[None, None])
        return taps.swapaxes(0, 1), bias

    def _gates(
        self, u: jax.Array, sequence_axis: str | None
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """r, i, and with sign `gate` s, of u, [H, B, T, I], float32; T may be sharded over a mesh axis."""
        r, i = self.recurrence_gate(u, sequence_axis), self.input_gate(u, sequence_axis)
        dtype = sums_dtype(self.rate.dtype)
        r, i = jax.nn.sigmoid(r.astype(dtype)), jax.nn.sigmoid(i.astype(dtype))
        if self.config.sign != "gate":
            return r, i, None
        return r, i, jnp.tanh(self.sign_gate(u, sequence_axis).astype(dtype))

    def _output(self, gate: jax.Array, h: jax.Array) -> jax.Array:
        """y [B, T, D] of the GELU branch [B, T, W] and the recurrence's states [H, B, T, I]."""
        return self.out_proj(self._activated(gate) * _join(h))

    def _activated(self, gate: jax.Array) -> jax.Array:
        return jax.nn.gelu(gate, approximate=self.config.gelu == "tanh")

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
    def __call__(self, x: jax.Array, sequence_axis: str | None = None) -> jax.Array:
        """y [H, B, T, I] of x [H, B, T, I], whose T may be sharded over a mesh axis."""

        def product(x: jax.Array, kernel: jax.Array, axis_name: str | None) -> jax.Array:
            return block_dense(x.reshape(n_blocks, -1, width), kernel).reshape(x.shape)

        n_blocks, width = x.shape[0], x.shape[-1]
        kernel = self.param(
            "kernel", nn.initializers.normal(width**-0.5), (n_blocks, width, width), jnp.float32
        )
        bias = (
            self.param("bias", nn.initializers.zeros, (n_blocks * width,), jnp.float32)
            if self.use_bias
            else None
        )
        x, kernel, bias = promote_dtype(x, kernel, bias, dtype=self.dtype)
        # On each device by itself: where rows and length are both sharded, XLA cannot merge them.
        y = sharded(product, sequence_axis, ("HBLI", "HIJ"), "HBLI")(x, kernel)
        return y if bias is None else y + bias.reshape(n_blocks, 1, 1, width)


def ring_init(config: HawkConfig) -> Initializer:
    """The initialiser of p: a = exp(-softplus(p)), or a^c, is uniform by area between `config`'s radii."""

    def init(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype = jnp.float32) -> jax.Array:
        # Uniform by area: the square of the radius a is uniform.
        squared = jax.random.uniform(key, shape, dtype, config.min_radius**2, config.max_radius**2)
        log_a = 0.5 * jnp.log(squared)
        if config.ring == "a_to_c":
            log_a = log_a / RATE_SCALE
        return jnp.log(jnp.expm1(-log_a))  # the inverse of softplus

    return init
