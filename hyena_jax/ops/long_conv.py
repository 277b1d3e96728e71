"""Causal convolution with a filter as long as the sequence: y_t = sum_{s=0..t} h_s u_{t-s}.

Axes: B batch, D channels, L length. Time is the last axis; the axes before it broadcast, so that
u [B, D, L] and h [D, L] give y [B, D, L]. Every form computes in float32 (float64 stays float64) and
returns the dtype of u.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

Convolution = Callable[[jax.Array, jax.Array], jax.Array]


def long_conv(
    u: jax.Array, h: jax.Array, skip: jax.Array | None = None, method: Convolution | None = None
) -> jax.Array:
    """y = h * u + skip ⊙ u, causal.

    Args:
      u: input [..., L].
      h: filter [..., L], broadcast against u before the last axis.
      skip: weight of the input itself [...]; it is added to h_0, which is the same and costs nothing.
      method: `fft_conv`, `toeplitz_conv` or `direct_conv`; None is `fft_conv`.

    Returns:
      y, with the broadcast shape of u and h and the dtype of u.

    Raises:
      ValueError: if u and h differ in length.
    """
    if u.shape[-1] != h.shape[-1]:
        raise ValueError(f"h must have the length of u: u is {u.shape}, h is {h.shape}")
    if skip is not None:
        h = jnp.asarray(h)
        h = h.at[..., 0].add(jnp.asarray(skip, h.dtype))
    dtype = jnp.float64 if jnp.float64 in (u.dtype, h.dtype) else jnp.float32
    return (method or fft_conv)(u.astype(dtype), h.astype(dtype)).astype(u.dtype)


def direct_conv(u: jax.Array, h: jax.Array) -> jax.Array:
    """The definition: one shifted product a lag, O(L^2). Differentiable in both modes."""
    length = u.shape[-1]
    padded = jnp.pad(u, [(0, 0)] * (u.ndim - 1) + [(length - 1, 0)])

    def add_lag(y: jax.Array, lag: jax.Array) -> tuple[jax.Array, None]:
        shifted = jax.lax.dynamic_slice_in_dim(padded, length - 1 - lag, length, axis=-1)
        return y + jnp.take(h, lag, axis=-1)[..., None] * shifted, None

    zero = jnp.zeros(jnp.broadcast_shapes(u.shape, h.shape), u.dtype)
    return jax.lax.scan(add_lag, zero, jnp.arange(length))[0]


def toeplitz_conv(u: jax.Array, h: jax.Array) -> jax.Array:
    """y = S_h u, the product with the filter's Toeplitz matrix: for short sequences."""
    return jnp.einsum("...ts,...s->...t", toeplitz(h), u)


def toeplitz(h: jax.Array) -> jax.Array:
    """S_h [..., L, L] with S_h[t, s] = h_{t-s} for s <= t and 0 above the diagonal."""
    *lead, length = h.shape
    # Column s of S_h is h moved down by s. Writing (h, 0) of 2L entries L times and reading that back in
    # rows of 2L - 1 moves row s right by s: no gather, whose derivative would be a slow scatter.
    padded = jnp.concatenate([h, jnp.zeros_like(h)], axis=-1)
    repeated = jnp.broadcast_to(padded[..., None, :], (*lead, length, 2 * length)).reshape(*lead, -1)
    skewed = repeated[..., : length * (2 * length - 1)].reshape(*lead, length, 2 * length - 1)
    return jnp.swapaxes(skewed[..., :length], -1, -2)


@jax.custom_vjp
def fft_conv(u: jax.Array, h: jax.Array) -> jax.Array:
    """The same through real FFTs of n >= 2L - 1 points, O(L log L).

    JAX transposes `rfft` through a full complex FFT, so this has its own derivative rule: two real
    transforms for each input. The rule serves reverse mode only; for forward mode or second
    derivatives use `direct_conv` or `toeplitz_conv`.
    """
    return _fft_conv_forward(u, h)[0]


def _fft_conv_forward(u: jax.Array, h: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    length = u.shape[-1]
    n = fft_len(2 * length - 1)
    u_spectrum, h_spectrum = jnp.fft.rfft(u, n), jnp.fft.rfft(h, n)
    y = jnp.fft.irfft(u_spectrum * h_spectrum, n)[..., :length]
    return y, (u_spectrum, h_spectrum)


def _fft_conv_backward(spectra: tuple[jax.Array, jax.Array], y_bar: jax.Array) -> tuple[jax.Array, jax.Array]:
    u_spectrum, h_spectrum = spectra
    length = y_bar.shape[-1]
    n = fft_len(2 * length - 1)
    y_spectrum = jnp.fft.rfft(y_bar, n)

    def correlate(other: jax.Array, like: jax.Array) -> jax.Array:
        product = _sum_to(y_spectrum * jnp.conj(other), like.shape)
        return jnp.fft.irfft(product, n)[..., :length]

    return correlate(h_spectrum, u_spectrum), correlate(u_spectrum, h_spectrum)


fft_conv.defvjp(_fft_conv_forward, _fft_conv_backward)


def _sum_to(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Sums x over the axes along which an array of `shape` was broadcast."""
    extra = x.ndim - len(shape)
    axes = tuple(range(extra)) + tuple(
        i + extra for i, size in enumerate(shape) if size == 1 and x.shape[i + extra] != 1
    )
    return x.sum(axes, keepdims=True).reshape(shape)


def fft_len(least: int) -> int:
    """The smallest even number >= least without a prime factor above 5: sizes that FFTs are fast at."""
    n = least + least % 2
    while not _is_smooth(n):
        n += 2
    return n


def _is_smooth(n: int) -> bool:
    for prime in (2, 3, 5):
        while n % prime == 0:
            n //= prime
    return n == 1
