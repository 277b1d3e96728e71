"""The gated delta rule: a matrix memory that decays, and in which a new value replaces the old one at a key.

    S_t = a_t (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T,    o_t = S_t^T q_t

Yang et al. 2024, arXiv 2412.06464, equation 10, transposed: the paper's memory is S_t^T, with a row for each
channel of a value, and its output is the memory times q_t. With a_t = 1 it is DeltaNet's rule (2406.06484);
without the matrix in brackets, and with beta_t = 1, Mamba-2's (2405.21060); with several such updates a
token, DeltaProduct's (2502.10297).

Axes: B batch, L tokens, n updates a token, H heads of queries and keys, G heads of values, of which R = G / H
read the same keys, K channels of a key, V channels of a value, C tokens of a chunk, N chunks. Everything is
computed in float32 (float64 stays).
"""

import jax
import jax.numpy as jnp

from hyena_jax.ops.fast.derivatives import linear_solve

SMALL = 8
"""Matrices of up to this size are multiplied elementwise, which is faster than a product for each."""


def delta_rule(
    q: jax.Array | None,
    k: jax.Array,
    v: jax.Array,
    log_a: jax.Array,
    beta: jax.Array | None,
    state: jax.Array,
    starts: jax.Array | None = None,
    chunk: int = 64,
) -> tuple[jax.Array | None, jax.Array]:
    """The outputs o [B, L, G, V], and the memory after the last token [B, G, K, V].

    At each token S <- a S; then, for each of the token's n updates, S <- S + k u^T with u = beta (v - S^T k);
    then o = S^T q. The values of head g belong to the keys of head g // R.

    Within a chunk the u solve a triangular system, so that all work is matrix products, and only the memory
    passes from chunk to chunk (2406.06484, section 3.2). The backward pass keeps the N memories between the
    chunks, and recomputes the rest chunk by chunk.

    Args:
      q: queries [B, L, H, K], scaled by the caller; None computes the memory alone, and returns None for o.
      k: keys [B, n L, H, K], the n keys of a token one after the other. If beta exceeds 1, keys longer than
        sqrt(2 / beta) make the memory diverge.
      v: values [B, n L, G, V].
      log_a: log a [B, L, G], finite and at most 0.
      beta: [B, n L, G], in [0, 2]; None adds k v^T and erases nothing.
      state: the memory before the first token [B, G, K, V].
      starts: boolean [B, L], True at the first token of a document, where the memory is reset to 0; None is
        False.
      chunk: C. It changes the speed, and the results only by rounding: most where keys are equal and beta is
        close to 2, where float32 was wrong by 2e-5 of the largest output at C = 16 and by 1e-4 at 64.
    """
    inputs = [x for x in (q, k, v, log_a, beta, state) if x is not None]
    dtype = jnp.float64 if any(x.dtype == jnp.float64 for x in inputs) else jnp.float32
    batch, length, _ = log_a.shape
    heads, n_updates = k.shape[2], k.shape[1] // length
    size = min(chunk, length)
    n_chunks, n_padded = -(-length // size), -length % size

    def chunks(x: jax.Array | None, rows: int = 1) -> jax.Array | None:
        """[B, L rows, heads, ...] as [N, B, H, heads / H, C rows, ...]; padded tokens change no memory."""
        if x is None:
            return None
        x = jnp.pad(x, [(0, 0), (0, n_padded * rows), *[(0, 0)] * (x.ndim - 2)])
        x = x.reshape(batch, n_chunks, size * rows, min(heads, x.shape[2]), -1, *x.shape[3:])
        return jnp.moveaxis(x, (1, 2), (0, 4))

    def of_chunk(memory: jax.Array, chunk: tuple) -> tuple[jax.Array, jax.Array | None]:
        q, k, v, log_a, beta, starts = chunk
        decay, entering = decays(log_a, starts)
        decay = jnp.repeat(decay, n_updates, axis=-1)  # from each update to each token
        if beta is None:
            u = v
        else:
            beta, before = beta[..., None], jnp.repeat(entering, n_updates, axis=-1)[..., None]
            erased = beta * jnp.repeat(decay, n_updates, axis=-2) * (k @ k.mT)
            u = solve_unit_triangular(jnp.tril(erased, -1), beta * (v - before * (k @ memory)))
        after = entering[..., -1:, None] * memory + k.mT @ (decay[..., -1, :, None] * u)
        if q is None:
            return after, None
        return after, entering[..., None] * (q @ memory) + (decay * (q @ k.mT)) @ u

    q, k, v, log_a, beta, state = (
        None if x is None else x.astype(dtype) for x in (q, k, v, log_a, beta, state)
    )
    starts = None if starts is None else starts[..., None]
    rows = (chunks(q), chunks(k, n_updates), chunks(v, n_updates), chunks(log_a), chunks(beta, n_updates))
    memory = state.reshape(batch, heads, -1, *state.shape[2:])
    # Inside a scan nothing can be reused before it is recomputed, so that no barrier is needed.
    step = jax.checkpoint(of_chunk, prevent_cse=False)
    memory, o = jax.lax.scan(step, memory, (*rows, chunks(starts)))
    if o is not None:  # [N, B, H, R, C, V]
        o = jnp.moveaxis(o, (0, 4), (1, 2)).reshape(batch, -1, *v.shape[2:])[:, :length]
    return o, memory.reshape(state.shape)


def no_memory(k: jax.Array, v: jax.Array) -> jax.Array:
    """The memory before the first token [B, G, K, V], for k [B, n L, H, K] and v [B, n L, G, V]."""
    dtype = jnp.float64 if jnp.float64 in (k.dtype, v.dtype) else jnp.float32
    return jnp.zeros_like(v, shape=(len(v), v.shape[2], k.shape[3], v.shape[3]), dtype=dtype)


def transfer(
    k: jax.Array,
    v: jax.Array,
    log_a: jax.Array,
    beta: jax.Array | None,
    starts: jax.Array | None,
    chunk: int = 64,
) -> tuple[jax.Array, jax.Array]:
    """A [B, G, K, K] and S [B, G, K, V]: the tokens turn any memory M before them into A M + S.

    A is what the rule makes of the identity without values. The arguments are those of `delta_rule`.
    """
    memory, width = no_memory(k, v), v.shape[3]
    identity = jnp.broadcast_to(jnp.eye(k.shape[3], dtype=memory.dtype), (*memory.shape[:3], k.shape[3]))
    if beta is not None:
        both = jnp.concatenate([memory, identity], axis=-1)
        v = jnp.pad(v, [(0, 0), (0, 0), (0, 0), (0, k.shape[3])])
        after = delta_rule(None, k, v, log_a, beta, both, starts, chunk)[1]
        return after[..., width:], after[..., :width]
    decay = jnp.exp(log_a.astype(memory.dtype).sum(axis=1))
    if starts is not None:
        decay = jnp.where(starts.any(axis=1)[:, None], 0, decay)
    return decay[..., None, None] * identity, delta_rule(None, k, v, log_a, None, memory, starts, chunk)[1]


def decays(log_a: jax.Array, starts: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Products of a over the tokens of a chunk.

    Args:
      log_a: [..., C].
      starts: broadcast against log_a; True where everything earlier is forgotten.

    Returns:
      [..., C, C], from the token after the column's to the row's; 0 above the diagonal.
      [..., C], from the first token to each.
    """
    total = jnp.cumsum(log_a, axis=-1)
    # What rounding takes from the sums. Without it a difference of two sums has the rounding error of the
    # sums: after a token with log a = -1000, all later weights of the chunk would be wrong by 1e-4.
    steps = total - jnp.pad(total[..., :-1], [(0, 0)] * (total.ndim - 1) + [(1, 0)])
    lost = jax.lax.stop_gradient(jnp.cumsum(log_a - steps, axis=-1))
    between = (total[..., :, None] - total[..., None, :]) + (lost[..., :, None] - lost[..., None, :])
    visible = jnp.tri(log_a.shape[-1], dtype=bool)
    before = total + lost
    if starts is not None:
        document = jnp.cumsum(starts, axis=-1, dtype=jnp.int32)
        visible = visible & (document[..., :, None] == document[..., None, :])
        before = jnp.where(document == 0, before, -jnp.inf)
    # Masked before the exponential, which overflows above the diagonal: its gradient would be NaN.
    return jnp.exp(jnp.where(visible, between, -jnp.inf)), jnp.exp(before)


def solve_unit_triangular(lower: jax.Array, b: jax.Array) -> jax.Array:
    """x [..., c, V] with (I + lower) x = b, for strictly lower triangular [..., c, c].

    By the inverse: on CPUs `jax.scipy.linalg.solve_triangular` calls a library for each small system, which
    is many times slower. Not by the product (I - M) (I + M^2) (I + M^4) ..., which is right on paper alone:
    equal keys make the powers of M so large that the solution is wrong by a factor of 1e5 to 1e20.
    """
    inverse = unit_triangular_inverse(jax.lax.stop_gradient(lower))

    def product(matrix: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.matmul(matrix, x, precision="highest")

    return linear_solve(
        lambda lower, x: x + lower @ x,
        lambda b: product(inverse, b),
        lambda x_bar: product(inverse.mT, x_bar),
        lower,
        b,
    )


def unit_triangular_inverse(lower: jax.Array) -> jax.Array:
    """(I + lower)^-1 of strictly lower triangular [..., c, c], by halves: as stable as substitution.

    If A and D are the diagonal blocks of I + lower, and B is the block below A, then the inverse has the
    diagonal blocks A^-1 and D^-1, and the block -D^-1 B A^-1 below A^-1.
    """
    size = lower.shape[-1]
    if size == 1:
        return jnp.ones_like(lower)
    half = 1 << (size - 1).bit_length() - 1  # the largest power of 2 below size
    above, below = lower[..., :half, :half], lower[..., half:, half:]
    if size == 2 * half:
        above, below = unit_triangular_inverse(jnp.stack([above, below]))
    else:
        above, below = unit_triangular_inverse(above), unit_triangular_inverse(below)
    corner = -_product(below, _product(lower[..., half:, :half], above))
    top = jnp.pad(above, [(0, 0)] * (lower.ndim - 1) + [(0, size - half)])
    return jnp.concatenate([top, jnp.concatenate([corner, below], axis=-1)], axis=-2)


def _product(x: jax.Array, y: jax.Array) -> jax.Array:
    """x y [..., i, k] of x [..., i, j] and y [..., j, k]."""
    if y.shape[-1] > SMALL:
        return jnp.matmul(x, y, precision="highest")
    return (x[..., None] * y[..., None, :, :]).sum(axis=-2)
