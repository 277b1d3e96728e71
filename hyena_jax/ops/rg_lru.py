"""The coefficients of the real-gated linear recurrent unit (RG-LRU).

    h_t = a_t ⊙ h_{t-1} + sqrt(1 - a_t^2) ⊙ (i_t ⊙ x_t),  log a_t = -8 r_t softplus(rate)

De et al. 2024, arXiv 2402.19427, section 2.4, equations 3 and 4. `ops.linear_recurrence` computes h.
"""

import jax
import jax.numpy as jnp

# "c" of the paper: a_t = a^c at r_t = 1, where the state is forgotten fastest.
RATE_SCALE = 8.0
# Bound of the derivative of sqrt(1 - a^2), as in the released code.
MAX_SQRT_DERIVATIVE = 1000.0


def factors(
    r: jax.Array, rate: jax.Array, s: jax.Array | None = None, shifted: bool = False
) -> tuple[jax.Array, jax.Array]:
    """The factors a_t of the state, and 1 - a_t^2; all arguments are of one dtype and broadcast.

    Not in the paper: factors of either sign, without which a recurrence cannot track parity (Grazzi et al.
    2024, arXiv 2411.12537). They replace a_t in both places of the equation: h keeps its inputs' variance.

    Args:
      r: recurrence gate [B, L, D], in [0, 1]: 0 keeps the state.
      rate: [D]; the paper's a is exp(-softplus(rate)), the factor a_t at r_t = 1/8.
      s: sign gate [B, L, D], in [-1, 1], by which a_t is multiplied; None is 1.
      shifted: the factors are 2 a_t - 1, in (-1, 1).

    >>> from hyena_jax.ops.linear_recurrence import linear_recurrence
    >>> x, r, i = jnp.ones((1, 5, 8)), jnp.full((1, 5, 8), 0.5), jnp.ones((1, 5, 8))  # [B, L, D]
    >>> a, rest = factors(r, jnp.zeros(8))
    >>> h, state = linear_recurrence(a, bounded_sqrt(rest) * i * x)
    >>> h.shape, state.shape
    ((1, 5, 8), (1, 8))
    """
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
