"""Mamba-2 and Mamba-3.

Axes: B batch, T tokens, D channels, W inner width, H heads, P = W / H channels of a head, G groups of heads
that share B and C, N state size, J taps; of Mamba-3, R inputs of a token, S planes that turn.
"""

from functools import partial
from math import pi

import flax.linen as nn
import jax
import jax.numpy as jnp

from hyena_jax.config import Mamba2Config, Mamba3Config
from hyena_jax.mixers.inputs import sums_dtype
from hyena_jax.mixers.layers import GroupRMSNorm
from hyena_jax.mixers.mixer import Mixer
from hyena_jax.mixers.sequence import Sequence
from hyena_jax.ops import shards
from hyena_jax.ops.delta_rule import no_memory
from hyena_jax.ops.fast.dense import dense_dot_general
from hyena_jax.ops.initializers import a_log_init, dt_bias_init, uniform_fan_in

# Least decay rate of Mamba-3, as in the published code.
MIN_RATE = 1e-4


class Mamba2(Mixer):
    """Mamba-2 (Dao and Gu 2024, arXiv 2405.21060, sections 5 to 7, figure 6).

    y = W_o RMSNorm( o ⊙ SiLU(z) ), with z, x, B, C, dt = W_i x and x, B, C <- SiLU( FIR_J(x, B, C) ), and for
    each head the memory h [P, N] and the output are

        h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T,  o_t = h_t C_t + skip x_t,
        A = -exp(a_log),  dt = softplus(dt + dt_bias).

    This is the rule of `ops.delta_rule` without erasing: queries C, keys B, values dt x.

    Parameters:
      in_proj/kernel [D, 2*W + 2*G*N + H]: columns are z, x, B, C, dt; x head after head, B and C group after
        group.
      short_taps [W + 2*G*N, J]: of x, B, C; tap 0 meets the current input.
      short_bias [W + 2*G*N]:
      a_log [H]:
      dt_bias [H]:
      skip [H]: weight of a head's x in its output (D in the published code).
      norm/scale [W]:
      out_proj/kernel [W, D]:
    """

    config: Mamba2Config = Mamba2Config()
    has_constant_state = True

    def setup(self) -> None:
        config, width = self.config, self.width
        config.check(self.d_model, self.max_len)
        heads, channels = config.n_heads, width + 2 * config.n_groups * config.d_state
        dense = partial(nn.Dense, use_bias=False, dtype=self.dtype)
        # The product is followed by activations: see `ops.fast.dense`.
        self.in_proj = dense(
            width + channels + heads,
            kernel_init=uniform_fan_in(self.d_model),
            dot_general=dense_dot_general,
        )
        # The published code divides the initial weights by the square root of the depth.
        self.out_proj = dense(self.d_model, kernel_init=uniform_fan_in(self.n_layers * width))
        fir_init = uniform_fan_in(config.short_filter_len)
        self.short_taps = self.param("short_taps", fir_init, (channels, config.short_filter_len))
        self.short_bias = self.param("short_bias", fir_init, (channels,))
        self.a_log = self.param("a_log", a_log_init(1, 16), (heads,))
        self.dt_bias = self.param("dt_bias", dt_bias_init, (heads,))
        self.skip = self.param("skip", nn.initializers.ones, (heads,), jnp.float32)
        self.norm = GroupRMSNorm(config.n_groups, config.norm_eps)

    @property
    def width(self) -> int:
        """W."""
        return self.config.inner_factor * self.d_model

    def mix(self, x: jax.Array, seq: Sequence, deterministic: bool) -> jax.Array:
        config, width, (batch, length, _) = self.config, self.width, x.shape
        states = config.n_groups * config.d_state
        z, u, dt = jnp.split(self.in_proj(x), [width, 2 * (width + states)], axis=-1)
        activations, dtype = u.dtype, sums_dtype(u.dtype)
        u = seq.fir(u, self.short_taps, self.short_bias)
        u, b, c = jnp.split(nn.silu(u).astype(dtype), [width, width + states], axis=-1)
        b, c = (part.reshape(batch, length, config.n_groups, config.d_state) for part in (b, c))
        u = seq.values(u.reshape(batch, length, config.n_heads, -1), "BTHd")
        dt = jax.nn.softplus(dt.astype(dtype) + self.dt_bias.astype(dtype))
        if config.dt_limit is not None:
            dt = jnp.clip(dt, *config.dt_limit)
        log_a = -jnp.exp(self.a_log.astype(dtype)) * dt
        o = seq.update(c, b, dt[..., None] * u, log_a, chunk=config.chunk)
        o = seq.mixed(o + self.skip.astype(dtype)[:, None] * u, "BTHd").reshape(batch, length, width)
        y = self.norm(o * nn.silu(z.astype(dtype)))
        return self.out_proj(y.astype(activations))


class Mamba3(Mixer):
    """Mamba-3 (2026, arXiv 2603.15569): the trapezoidal rule, keys that turn, and several inputs of a token.

    With z, x, B, C, dt, A, trap, angle = W_i x, and for each head

        dt = softplus(dt + dt_bias),  A = -max( f(A), 1e-4 ),  lambda = sigmoid(trap),
        theta_t = theta_{t-1} + pi tanh(angle_t) dt_t,
        k, q = RMSNorm(B) + b_bias, RMSNorm(C) + c_bias, turned by theta in S planes,
        h_t = exp(dt_t A_t) ( h_{t-1} + (1 - lambda_t) dt_t k_{t-1} x_{t-1}^T ) + lambda_t dt_t k_t x_t^T,
        o_t = h_t^T q_t + skip x_t,

    y = W_o ( o ⊙ SiLU(z) ), where o may first be normalised. With R > 1 inputs ("MIMO"), a token has R keys
    and queries, which all meet in the one memory h; input r is x ⊙ mimo_x_r, and
    y = W_o sum_r ( mimo_o_r ⊙ o_r ⊙ SiLU(z ⊙ mimo_z_r) ). The planes are of neighbouring channels for R = 1,
    and of the channels i and i + N / 2 else, as in the published code.

    Parameters:
      in_proj/kernel [D, 2*W + 2*R*G*N + 3*H + S]: columns are z, x, B, C, dt, A, trap, angle; z and x head
        after head, B and C input after input, each group after group.
      dt_bias [H]:
      b_norm/scale [N]:
      c_norm/scale [N]:
      b_bias [H, R, N]:
      c_bias [H, R, N]:
      mimo_x [H, R, P]: with R > 1.
      mimo_z [H, R, P]: with R > 1.
      mimo_o [H, R, P]: with R > 1.
      skip [H]: weight of a head's input in its output (D in the published code).
      norm/scale [W]: with out_norm.
      out_proj/kernel [W, D]:
    """

    config: Mamba3Config = Mamba3Config()
    has_constant_state = True

    def setup(self) -> None:
        config, width = self.config, self.width
        config.check(self.d_model, self.max_len)
        heads, n_inputs = config.n_heads, config.n_inputs
        dense, ones = partial(nn.Dense, use_bias=False, dtype=self.dtype), nn.initializers.ones
        # The product is followed by activations: see `ops.fast.dense`.
        self.in_proj = dense(
            sum(self._columns()), kernel_init=uniform_fan_in(self.d_model), dot_general=dense_dot_general
        )
        # The published code divides the initial weights by the square root of the depth.
        self.out_proj = dense(self.d_model, kernel_init=uniform_fan_in(self.n_layers * width))
        self.dt_bias = self.param("dt_bias", dt_bias_init, (heads,))
        of_states = (heads, n_inputs, config.d_state)
        self.b_bias, self.c_bias = (
            self.param(name, ones, of_states, jnp.float32) for name in ("b_bias", "c_bias")
        )
        self.b_norm, self.c_norm = (GroupRMSNorm(1, config.norm_eps) for _ in range(2))
        if n_inputs > 1:
            of_channels = (heads, n_inputs, width // heads)
            mean = nn.initializers.constant(1 / n_inputs)
            self.mimo_x = self.param("mimo_x", mean, of_channels, jnp.float32)
            self.mimo_z = self.param("mimo_z", ones, of_channels, jnp.float32)
            self.mimo_o = self.param("mimo_o", mean, of_channels, jnp.float32)
        self.skip = self.param("skip", ones, (heads,), jnp.float32)
        if config.out_norm:
            self.norm = GroupRMSNorm(heads, config.norm_eps)

    @property
    def width(self) -> int:
        """W."""
        return self.config.inner_factor * self.d_model

    def _columns(self) -> list[int]:
        """Channels of z, x, B, C, dt, A, trap and angle."""
        config = self.config
        states = config.n_inputs * config.n_groups * config.d_state
        return [*2 * [self.width], *2 * [states], *3 * [config.n_heads], config.n_planes]

    def mix(self, x: jax.Array, seq: Sequence, deterministic: bool) -> jax.Array:
        config, rows, columns = self.config, x.shape[:2], self._columns()
        u = self.in_proj(x)
        activations, dtype = u.dtype, sums_dtype(u.dtype)
        ends = [sum(columns[: i + 1]) for i in range(len(columns) - 1)]
        z, v, b, c, dt, rate, trap, angle = jnp.split(u.astype(dtype), ends, axis=-1)
        z, v = (part.reshape(*rows, config.n_heads, -1) for part in (z, v))
        dt = seq.masked(jax.nn.softplus(dt + self.dt_bias.astype(dtype)))  # so that padding does nothing
        rate = jax.nn.softplus(rate) if config.rate == "softplus" else heavy_tail(rate)
        log_a, weight = -jnp.maximum(rate, MIN_RATE) * dt, jax.nn.sigmoid(trap)
        theta = running_angles(seq, pi * jnp.tanh(angle)[:, :, None] * dt[..., None])[:, :, None]

        def turned(y: jax.Array, norm: GroupRMSNorm, bias: jax.Array) -> jax.Array:
            """[B, T, R, H, N]."""
            y = norm(y.reshape(*rows, config.n_inputs, config.n_groups, config.d_state))
            y = jnp.repeat(y, config.n_heads // config.n_groups, axis=3) + bias.astype(dtype).swapaxes(0, 1)
            return turn(y, theta, config.n_inputs == 1)

        k, q = turned(b, self.b_norm, self.b_bias), turned(c, self.c_norm, self.c_bias)
        if config.n_inputs == 1:  # else there is no matrix for all channels of a head
            v = seq.values(v, "BTHd")
        v, z = v[:, :, None], z[:, :, None]
        if config.n_inputs > 1:
            of_inputs = (self.mimo_x, self.mimo_z, self.mimo_o)
            mimo_x, mimo_z, mimo_o = (w.astype(dtype).swapaxes(0, 1) for w in of_inputs)
            v, z = v * mimo_x, z * mimo_z
        o = trapezoid(seq, q, k, v, log_a, weight * dt, (1 - weight) * dt, config.chunk)
        o = o + self.skip.astype(dtype)[:, None] * v
        if config.n_inputs == 1:
            o = seq.mixed(o[:, :, 0], "BTHd")[:, :, None]
        if config.out_norm:
            o = self.norm(o.reshape(*rows, config.n_inputs, self.width)).reshape(o.shape)
        y = o * nn.silu(z)
        y = y[:, :, 0] if config.n_inputs == 1 else (y * mimo_o).sum(axis=2)
        return self.out_proj(y.reshape(*rows, self.width).astype(activations))


def trapezoid(
    seq: Sequence,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_a: jax.Array,
    now: jax.Array,
    before: jax.Array,
    chunk: int,
) -> jax.Array:
    """o_t = h_t^T q_t [B, T, R, H, P] of h_t = a_t (h_{t-1} + before_t k_{t-1} v_{t-1}^T) + now_t k_t v_t^T.

    An input is written once, with the weight of the next token as well, by the delta rule without erasing: a
    token asks for what earlier tokens have written, one token back, and its own part is added.

    Args:
      q, k: [B, T, R, H, N]. v: [B, T, R, H, P]. k v^T is the sum over the R inputs.
      log_a, now, before: [B, T, H].
      chunk: tokens that the rule computes at once.
    """
    v, starts = seq.masked(v), seq.starts(of_rows=False)
    a = jnp.exp(log_a)
    if starts is not None:
        a, before = (jnp.where(starts[..., None], 0, x) for x in (a, before))

    def next_token(x: jax.Array) -> jax.Array:
        return jnp.pad(x[:, 1:], [(0, 0), (0, 1), *[(0, 0)] * (x.ndim - 2)])

    def flat(x: jax.Array) -> jax.Array:
        return x.reshape(len(x), -1, *x.shape[3:])

    asked = a[:, :, None, :, None] * q
    keys = (now + next_token(before))[:, :, None, :, None] * k
    inputs = flat(next_token(asked)), flat(keys), flat(v), log_a, None, None
    own = jnp.einsum("btrhn,btshn,bth,btshp->btrhp", q, k, now, v)

    def with_own(first: jax.Array, o: jax.Array) -> jax.Array:
        return own + jnp.concatenate([first[:, None], o.reshape(v.shape)[:, :-1]], axis=1)

    def run(memory: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, tuple]:
        h, last_k, last_v = memory
        h = h + jnp.einsum("bh,brhn,brhp->bhnp", before[:, 0], last_k, last_v)
        first = jnp.einsum("brhn,bhnp->brhp", asked[:, 0], h)
        o, h = seq.forms.delta_rule(*inputs, h, chunk=chunk)
        return with_own(first, o), (h, k[:, -1], v[:, -1])

    def whole() -> jax.Array:
        o = shards.delta_rule(*inputs, starts, chunk, seq.sequence_axis, seq.forms.delta_rule)
        return with_own(jnp.zeros_like(v[:, 0]), o)

    def empty() -> tuple[jax.Array, jax.Array, jax.Array]:
        return no_memory(flat(k), flat(v)), jnp.zeros_like(k[:, 0]), jnp.zeros_like(v[:, 0])

    return seq.carry("trapezoid", empty, run, whole)


def running_angles(seq: Sequence, turns: jax.Array) -> jax.Array:
    """The sums of `turns` [B, T, H, S] from a document's start, modulo a whole turn to stay exact."""
    starts = seq.starts(of_rows=False)
    starts = jnp.zeros(turns.shape[:2], bool) if starts is None else starts

    def join(x: tuple[jax.Array, jax.Array], y: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        (total, has_start), (more, starts_anew) = x, y
        return jnp.where(starts_anew, more, jnp.mod(total + more, 2 * pi)), has_start | starts_anew

    def whole() -> jax.Array:
        return jax.lax.associative_scan(join, (turns, starts[..., None, None]), axis=1)[0]

    def run(before: jax.Array) -> tuple[jax.Array, jax.Array]:
        angles = jnp.mod(before[:, None] + whole(), 2 * pi)
        return angles, angles[:, -1]

    return seq.carry("angles", lambda: jnp.zeros_like(turns[:, 0]), run, whole)


def turn(x: jax.Array, angles: jax.Array, of_neighbours: bool) -> jax.Array:
    """x [..., N] with its first S planes turned by angles [..., S]; other channels stay.

    A plane has the channels 2 i and 2 i + 1 with `of_neighbours`, else i and i + N / 2.
    """
    n_still = x.shape[-1] // 2 - angles.shape[-1]
    still = [(0, 0)] * (angles.ndim - 1) + [(0, n_still)]
    cos, sin = jnp.pad(jnp.cos(angles), still, constant_values=1), jnp.pad(jnp.sin(angles), still)
    if of_neighbours:
        first, second = x[..., ::2], x[..., 1::2]
    else:
        first, second = jnp.split(x, 2, axis=-1)
    parts = first * cos - second * sin, first * sin + second * cos
    return jnp.stack(parts, axis=-1).reshape(x.shape) if of_neighbours else jnp.concatenate(parts, axis=-1)


def heavy_tail(x: jax.Array) -> jax.Array:
    """1 + x for x > 0, else 1 / (1 - x)."""
    return jnp.where(x > 0, 1 + x, 1 / (1 - jnp.minimum(x, 0)))
