"""The real-gated linear recurrent unit (RG-LRU).

De et al. 2024, arXiv 2402.19427, section 2.4. Axes: L length, D channels; any axes before them are batch
axes.
"""

import chex
import jax
import jax.numpy as jnp

from hyena_jax.ops.linear_recurrence import Recurrence, linear_recurrence

# "c" of the paper: with the gate fully open, a_t = a^c.
RATE_SCALE = 8.0
# Bound of the derivative of sqrt(1 - a^2), as in the released code.
MAX_SQRT_DERIVATIVE = 1000.0


def rg_lru(
    x: jax.Array,
    r: jax.Array,
    i: jax.Array,
    rate: jax.Array,
    h0: jax.Array | None = None,
    starts: jax.Array | None = None,
    method: Recurrence | None = None,
    s: jax.Array | None = None,
    shifted: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """h_t = a_t ⊙ h_{t-1} + sqrt(1 - a_t^2) ⊙ (i_t ⊙ x_t), log a_t = -8 r_t softplus(rate); equations 3, 4.

    Where a document starts, h_t = i_t ⊙ x_t: the state is reset and the input is not scaled.

    Not in the paper: factors of either sign, without which a recurrence cannot track parity (Grazzi et al.
    2024, arXiv 2411.12537). With `shifted` a_t is replaced by 2 a_t - 1, and with `s` multiplied by s_t, in
    both places where the equation has it, so that h keeps the variance of its inputs.

    Args:
      x: inputs [..., L, D].
      r: recurrence gate [..., L, D], in [0, 1]: 0 keeps the state.
      i: input gate [..., L, D], in [0, 1].
      rate: broadcast against x; the paper's a is exp(-softplus(rate)), the factor a_t at r_t = 1/8.
      h0: state before the first step [..., D]; None is 0.
      starts: boolean, broadcast against [..., L]; True at the first token of a document; None is False.
      method: form of the recurrence, see `linear_recurrence`.
      s: sign gate [..., L, D], in [-1, 1]; None is 1.
      shifted: use the factors 2 a_t - 1, in (-1, 1).

    Returns:
      h [..., L, D] in the dtype of x, and the state after the last step [..., D]. Both are computed in
      float32 (float64 stays float64).

    Raises:
      AssertionError: if x, r, i and s differ in shape, or h0 is not [..., D].
    """
    chex.assert_equal_shape([x, r, i] if s is None else [x, r, i, s])
    if h0 is not None:
        chex.assert_shape(h0, (*x.shape[:-2], x.shape[-1]))
    dtype = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    x_dtype = x.dtype
    x, r, i, rate = (v.astype(dtype) for v in (x, r, i, rate))
    a, rest = factors(r, rate, None if s is None else s.astype(dtype), shifted)
    multiplier = bounded_sqrt(rest)
    if starts is not None:
        a, multiplier = jnp.where(starts[..., None], 0, a), jnp.where(starts[..., None], 1, multiplier)
    rows = (-1, *x.shape[-2:])
    h0 = None if h0 is None else h0.reshape(-1, x.shape[-1])
    h, h_last = linear_recurrence(a.reshape(rows), (multiplier * (i * x)).reshape(rows), h0, method=method)
    return h.reshape(x.shape).astype(x_dtype), h_last.reshape(*x.shape[:-2], -1)


def factors(
    r: jax.Array, rate: jax.Array, s: jax.Array | None = None, shifted: bool = False
) -> tuple[jax.Array, jax.Array]:
    """The factors a_t of the state and 1 - a_t^2, [..., L, D]; arguments as in `rg_lru`, of one dtype."""
    log_a = -RATE_SCALE * r * jax.nn.softplus(rate)
    if shifted:  # 1 - (2 a - 1)^2 = 4 a (1 - a), written so that it cancels neither at a = 0 nor at a = 1
        a, rest = 1 + 2 * jnp.expm1(log_a), -4 * jnp.exp(log_a) * jnp.expm1(log_a)
    else:
        a, rest = jnp.exp(log_a), -jnp.expm1(2 * log_a)
    if s is not None:  # 1 - (s a)^2 = 1 - a^2 + a^2 (1 - s^2)
        a, rest = s * a, rest + a**2 * ((1 - s) * (1 + s))
    return a, rest


@jax.custom_jvp
def bounded_sqrt(z: jax.Array) -> jax.Array:
    """sqrt(z), whose derivative 1 / (2 sqrt(z)) is bounded by `MAX_SQRT_DERIVATIVE`."""
    return jnp.sqrt(z)


@bounded_sqrt.defjvp
def _bounded_sqrt_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    (z,), (z_dot,) = primals, tangents
    least = 1 / (2 * MAX_SQRT_DERIVATIVE) ** 2
    return bounded_sqrt(z), z_dot / (2 * bounded_sqrt(jnp.maximum(z, least)))
