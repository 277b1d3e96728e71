"""The linear recurrence h_t = a_t ⊙ h_{t-1} + x_t.

Axes: B batch, L length, D channels. Time is axis 1, as in the activations of a model. Every form computes
in float32 (float64 stays float64).
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

# One form of the recurrence: (a [B, L, D], x [B, L, D], h0 [B, D], reverse) -> h [B, L, D].
Recurrence = Callable[[jax.Array, jax.Array, jax.Array, bool], jax.Array]


def linear_recurrence(
    a: jax.Array,
    x: jax.Array,
    h0: jax.Array | None = None,
    reverse: bool = False,
    method: Recurrence | None = None,
) -> tuple[jax.Array, jax.Array]:
    """h_t = a_t ⊙ h_{t-1} + x_t for t = 0..L-1, with h_{-1} = h0.

    Its derivative is one recurrence in the other direction; only a, h and h0 are kept for it. The rule
    serves reverse mode alone; for forward mode call a form directly, which is its own plain derivative.

    Args:
      a: factors [B, L, D].
      x: inputs [B, L, D].
      h0: state before the first step [B, D]; None is 0.
      reverse: run from t = L-1 down to 0: h_t = a_t ⊙ h_{t+1} + x_t, with h_L = h0.
      method: `scan_recurrence` or `associative_recurrence`; None is `default_method()`.

    Returns:
      h [B, L, D] in the dtype of x, and the state after the last step [B, D], float32 or float64.

    Raises:
      ValueError: if a and x differ in shape, h0 is not [B, D], or L is 0.
    """
    if a.shape != x.shape or x.ndim != 3 or x.shape[1] == 0:
        raise ValueError(f"a and x must be [B, L, D] with L >= 1: a is {a.shape}, x is {x.shape}")
    if h0 is None:
        h0 = jnp.zeros_like(x[:, 0])
    elif h0.shape != x[:, 0].shape:
        raise ValueError(f"h0 must be [B, D] = {x[:, 0].shape}, got {h0.shape}")
    dtype = jnp.float64 if jnp.float64 in (a.dtype, x.dtype, h0.dtype) else jnp.float32
    h = _recurrence(a.astype(dtype), x.astype(dtype), h0.astype(dtype), reverse, method or default_method())
    return h.astype(x.dtype), h[:, 0 if reverse else -1]


def default_method() -> Recurrence:
    """The form for the default backend: on a CPU the parallel one is about four times slower."""
    return scan_recurrence if jax.default_backend() == "cpu" else associative_recurrence


def scan_recurrence(a: jax.Array, x: jax.Array, h0: jax.Array, reverse: bool = False) -> jax.Array:
    """The definition, one step after the other. Differentiable in both modes."""

    def advance(h: jax.Array, inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        a_t, x_t = inputs
        h = a_t * h + x_t
        return h, h

    steps = (a.swapaxes(0, 1), x.swapaxes(0, 1))
    return jax.lax.scan(advance, h0, steps, reverse=reverse)[1].swapaxes(0, 1)


def associative_recurrence(a: jax.Array, x: jax.Array, h0: jax.Array, reverse: bool = False) -> jax.Array:
    """The same in O(log L) parallel steps (Blelloch 1990, section 1.4.1). Differentiable in both modes.

    Two neighbouring steps h -> a h + x and h -> a' h + x' are one step, h -> (a' a) h + (a' x + x').
    """

    def compose(
        early: tuple[jax.Array, jax.Array], late: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        return late[0] * early[0], late[0] * early[1] + late[1]

    start = -1 if reverse else 0
    x = x.at[:, start].add(a[:, start] * h0)
    return jax.lax.associative_scan(compose, (a, x), reverse=reverse, axis=1)[1]


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _recurrence(a: jax.Array, x: jax.Array, h0: jax.Array, reverse: bool, method: Recurrence) -> jax.Array:
    return method(a, x, h0, reverse)


def _forward(
    a: jax.Array, x: jax.Array, h0: jax.Array, reverse: bool, method: Recurrence
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    h = method(a, x, h0, reverse)
    return h, (a, h, h0)


def _backward(
    reverse: bool, method: Recurrence, residuals: tuple[jax.Array, ...], h_bar: jax.Array
) -> tuple[jax.Array, ...]:
    """With g_t the derivative by h_t, all its uses counted: g_t = h_bar_t + a_{t+1} g_{t+1}."""
    a, h, h0 = residuals
    zero = jnp.zeros_like(h0)
    g = method(_delay(a, zero, not reverse), h_bar, zero, not reverse)
    first = -1 if reverse else 0
    return g * _delay(h, h0, reverse), g, g[:, first] * a[:, first]


_recurrence.defvjp(_forward, _backward)


def _delay(x: jax.Array, start: jax.Array, reverse: bool) -> jax.Array:
    """x_{t-1} at t, with start [B, D] at t = 0; in reverse x_{t+1} at t, with start at t = L-1."""
    if reverse:
        return jnp.concatenate([x[:, 1:], start[:, None]], axis=1)
    return jnp.concatenate([start[:, None], x[:, :-1]], axis=1)
