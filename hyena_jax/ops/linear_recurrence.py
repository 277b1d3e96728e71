"""The linear recurrence h_t = a_t ⊙ h_{t-1} + x_t.

Axes: B batch, L length, D channels. Time is axis 1, as in the activations of a model. Every form computes
in float32 (float64 stays float64), whatever the dtypes of its inputs and outputs.
"""

from collections.abc import Callable
from functools import wraps

import jax
import jax.numpy as jnp

from hyena_jax.ops.fast.derivatives import linear_solve

# One form of the recurrence: (a [B, L, D], x [B, L, D], h0 [B, D], reverse) -> h [B, L, D], last h [B, D].
# a and x are of one dtype, which h gets; h0 and the last h are float32, or float64 where x is.
Recurrence = Callable[[jax.Array, jax.Array, jax.Array, bool], tuple[jax.Array, jax.Array]]


def linear_recurrence(
    a: jax.Array,
    x: jax.Array,
    h0: jax.Array | None = None,
    reverse: bool = False,
    method: Recurrence | None = None,
) -> tuple[jax.Array, jax.Array]:
    """h_t = a_t ⊙ h_{t-1} + x_t for t = 0..L-1, with h_{-1} = h0.

    The backward pass of every form but `scan_recurrence` is one recurrence in the other direction, which
    keeps a, h and h0. All forms are differentiable in both modes and any number of times, except the kernels,
    which have only reverse mode.

    Args:
      a, x: of one shape [B, L, D], L > 0, and real, else ValueError.
      h0: [B, D]; None is 0.
      reverse: run from t = L-1 down to 0: h_t = a_t ⊙ h_{t+1} + x_t, with h_L = h0.
      method: a form: `scan_recurrence`, `loop_recurrence`, `associative_recurrence`, or one of
        `kernels.recurrence`; None is `forms_for().recurrence`.

    Returns:
      h [B, L, D] in the dtype of x, and the state after the last step [B, D], float32 or float64.

    >>> a, x = jnp.full((1, 4, 1), 0.5), jnp.ones((1, 4, 1))
    >>> h, last = linear_recurrence(a, x)
    >>> h[0, :, 0].tolist()
    [1.0, 1.5, 1.75, 1.875]
    """
    if a.shape != x.shape or x.ndim != 3 or x.shape[1] == 0:
        raise ValueError(f"a and x must be [B, L, D] with L >= 1: a is {a.shape}, x is {x.shape}")
    if jnp.iscomplexobj(a) or jnp.iscomplexobj(x):
        raise ValueError(f"a and x must be real: a is {a.dtype}, x is {x.dtype}")
    if h0 is None:
        h0 = jnp.zeros_like(x[:, 0])
    elif h0.shape != x[:, 0].shape:
        raise ValueError(f"h0 must be [B, D] = {x[:, 0].shape}, got {h0.shape}")
    dtype = jnp.float64 if jnp.float64 in (a.dtype, x.dtype, h0.dtype) else jnp.float32
    x_dtype = x.dtype
    if a.dtype != x.dtype or dtype == jnp.float64:
        a, x = a.astype(dtype), x.astype(dtype)
    if method is None:
        from hyena_jax.ops.forms import forms_for  # which imports this module

        method = forms_for().recurrence
    h, last = method(a, x, h0.astype(dtype), reverse)
    return h.astype(x_dtype), last


def scan_recurrence(
    a: jax.Array, x: jax.Array, h0: jax.Array, reverse: bool = False
) -> tuple[jax.Array, jax.Array]:
    """The definition, step by step, for a, x [B, L, D] and h0 [B, D]. Differentiable in both modes."""

    def advance(h: jax.Array, inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        a_t, x_t = inputs
        h = a_t.astype(h.dtype) * h + x_t.astype(h.dtype)
        return h, h.astype(x.dtype)

    steps = (a.swapaxes(0, 1), x.swapaxes(0, 1))
    last, h = jax.lax.scan(advance, h0, steps, reverse=reverse)
    return h.swapaxes(0, 1), last


def _as_solution(form: Recurrence) -> Recurrence:
    """`form` as the solution of a linear equation, so that JAX can differentiate it in both modes.

    The unknowns are h_{-1}, h and the last state: h_{-1} = h0, h_t - a_t h_{t-1} = x_t, last - h_{L-1} = 0.
    The transposed equation is a recurrence too, g_t - a_{t+1} g_{t+1} = h_bar_t, in the other direction.
    """

    @wraps(form)
    def recurrence(
        a: jax.Array, x: jax.Array, h0: jax.Array, reverse: bool = False
    ) -> tuple[jax.Array, jax.Array]:
        first, final = (-1, 0) if reverse else (0, -1)
        rest = (0, x.shape[1] - 1)

        def matvec(a: jax.Array, unknowns: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            start, h, last = unknowns
            wide = h.astype(start.dtype)
            before = _delay(wide, 0, reverse)
            before += jnp.pad(start[:, None], ((0, 0), rest[::-1] if reverse else rest, (0, 0)))
            return start, (wide - a.astype(start.dtype) * before).astype(h.dtype), last - wide[:, final]

        def solve(known: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            start, x, last = known
            h, end = form(a, x, start, reverse)
            return start, h, last + end

        def transpose_solve(known: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            start_bar, h_bar, last_bar = known
            # The factor 1 passes the gradient of the last state on unchanged.
            g, g_first = form(_delay(a, 1, not reverse), h_bar, last_bar, not reverse)
            return start_bar + g_first * a[:, first].astype(h0.dtype), g, last_bar

        return linear_solve(matvec, solve, transpose_solve, a, (h0, x, jnp.zeros_like(h0)))[1:]

    return recurrence


def _delay(x: jax.Array, start: float, reverse: bool) -> jax.Array:
    """x_{t-1}, or x_{t+1} in reverse, at t. Padded, as XLA's CPU code for a concatenation is much slower."""
    if reverse:
        return jnp.pad(x[:, 1:], ((0, 0), (0, 1), (0, 0)), constant_values=start)
    return jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0)), constant_values=start)


@_as_solution
def loop_recurrence(
    a: jax.Array, x: jax.Array, h0: jax.Array, reverse: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Step by step, each h_t overwriting x_t, for a, x [B, L, D] and h0 [B, D]: nothing is copied.

    Neither unrolled steps nor chunks of the sequence in parallel are faster (measured on a CPU).
    """
    length = x.shape[1]

    def advance(step: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        h, rows = carry
        t = length - 1 - step if reverse else step
        a_t, x_t = (jax.lax.dynamic_slice_in_dim(v, t, 1, axis=1).astype(h.dtype) for v in (a, rows))
        h = a_t * h + x_t
        return h, jax.lax.dynamic_update_slice_in_dim(rows, h.astype(rows.dtype), t, axis=1)

    last, h = jax.lax.fori_loop(0, length, advance, (h0[:, None], x))
    return h, last[:, 0]


@_as_solution
def associative_recurrence(
    a: jax.Array, x: jax.Array, h0: jax.Array, reverse: bool = False
) -> tuple[jax.Array, jax.Array]:
    """In O(log L) parallel steps, for a, x [B, L, D] and h0 [B, D] (Blelloch 1990, section 1.4.1).

    Two neighbouring steps h -> a h + x and h -> a' h + x' are one step, h -> (a' a) h + (a' x + x').
    """

    def compose(
        early: tuple[jax.Array, jax.Array], late: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        return late[0] * early[0], late[0] * early[1] + late[1]

    first, last = (-1, 0) if reverse else (0, -1)
    a, inputs = a.astype(h0.dtype), x.astype(h0.dtype)
    inputs = inputs.at[:, first].add(a[:, first] * h0)
    h = jax.lax.associative_scan(compose, (a, inputs), reverse=reverse, axis=1)[1]
    return h.astype(x.dtype), h[:, last]
