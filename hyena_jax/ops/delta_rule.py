"""The delta rule: a matrix memory that decays, in which values are erased and written by key.

At each token the memory S [K, V] of a head decays, S <- diag(a) S; each of the token's updates then changes
it, S <- S - e (S^T r)^T + k v^T; and each of its queries reads it, o = S^T q. The rules of the field are

                                            r             e           v         log a of each
    delta rule, 2406.06484                  beta k        k           beta v    (0)
    gated delta rule, 2412.06464, eq. 10    beta k        k           beta v    head
    Mamba-2, 2405.21060                                               dt x      head
    KDA, 2510.26692                         beta k        k           beta v    channel of a key
    gated delta rule 2, 2605.22791          b ⊙ k         k           w ⊙ v     channel of a key
    RWKV-7, 2503.14456                      kappa / w     a ⊙ kappa   v         channel of a key
    Mamba-3, 2603.15569                                               x         head

where the papers' memory is S^T, with a row for each channel of a value. Several updates of a token are those
of DeltaProduct (2502.10297), and the several inputs of Mamba-3.

Axes: B batch, L tokens, n updates and m queries of a token, H heads of queries and keys, G heads of values,
of which R = G / H read the same keys, K channels of a key, V channels of a value, C tokens of a chunk, N
chunks. Everything is computed in float32 (float64 stays).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from hyena_jax.ops.fast.derivatives import linear_solve

SMALL = 8
"""Matrices of up to this size are multiplied elementwise, which is faster than a product for each."""

# A form of `delta_rule`, with its arguments and results.
DeltaRule = Callable[..., tuple[jax.Array | None, jax.Array]]


def delta_rule(
    q: jax.Array | None,
    k: jax.Array,
    v: jax.Array,
    log_a: jax.Array,
    read: jax.Array | None,
    write: jax.Array | None,
    state: jax.Array,
    starts: jax.Array | None = None,
    chunk: int = 64,
) -> tuple[jax.Array | None, jax.Array]:
    """The outputs o [B, m L, G, V], and the memory after the last token [B, G, K, V].

    Within a chunk, what is erased solves a triangular system, so that all work is matrix products, and only
    the memory passes from chunk to chunk (2406.06484, section 3.2). The backward pass keeps the N memories
    between the chunks, and recomputes the rest chunk by chunk.

    Args:
      q: queries [B, m L, H, K], scaled by the caller, a token's m queries one after the other; None computes
        the memory alone, and returns None for o.
      k: keys [B, n L, H, K], a token's n keys one after the other.
      v: values [B, n L, G, V]; head g has the queries and keys of head g // R.
      log_a: log a, finite and at most 0: [B, L, G] of each head, or [B, L, G, K] of each channel of a key.
      read: r [B, n L, G, K], for what is erased; None erases nothing. The memory diverges if the rule turns
        and stretches it, as r = beta k does where beta |k|^2 exceeds 2.
      write: e [B, n L, G, K], where it is erased; None is k.
      state: the memory before the first token [B, G, K, V].
      starts: boolean [B, L], True at a document's first token, where the memory is reset to 0.
      chunk: C; with a decay of each channel, the next power of 2. It changes the speed, and the results only
        by rounding: most where keys are equal and r^T k is close to 2, where float32 was wrong by 2e-5 of the
        largest output at C = 16 and by 1e-4 at 64.

    In log_a, read and write, G may also be H: they then belong to the keys.

    >>> k = jnp.eye(2)[jnp.array([0, 1, 0])].reshape(1, 3, 1, 2)  # writes 5 at key 0, 6 at key 1, 7 at key 0
    >>> v = jnp.array([5.0, 6, 7]).reshape(1, 3, 1, 1)
    >>> o, memory = delta_rule(k, k, v, jnp.zeros((1, 3, 1)), k, None, no_memory(k, v))
    >>> memory[0, 0, :, 0].tolist()  # 7 has replaced 5
    [7.0, 6.0]
    """
    arrays = (q, k, v, log_a, read, write, state)
    is_double = any(x is not None and x.dtype == jnp.float64 for x in arrays)
    (batch, length), heads = log_a.shape[:2], k.shape[2]
    kind, size = HeadDecay, min(chunk, length)
    if log_a.ndim == 4:
        kind, size = ChannelDecay, 1 << (size - 1).bit_length()
    n_chunks, n_padded = -(-length // size), -length % size

    def chunks(x: jax.Array | None) -> jax.Array | None:
        """[B, n L, heads, ...] as [N, B, H, heads / H, n C, ...]; padded tokens change no memory."""
        if x is None:
            return None
        n = x.shape[1] // length
        x = jnp.pad(x, [(0, 0), (0, n_padded * n), *[(0, 0)] * (x.ndim - 2)])
        x = x.reshape(batch, n_chunks, size * n, min(heads, x.shape[2]), -1, *x.shape[3:])
        return jnp.moveaxis(x, (1, 2), (0, 4))

    def of_chunk(memory: jax.Array, chunk: tuple) -> tuple[jax.Array, jax.Array | None]:
        q, k, v, log_a, read, write, starts = chunk
        decay = kind(log_a, starts)
        if read is None:
            written = [(k, v)]
        elif write is None:
            known = v - decay.recall(read, memory)
            written = [(k, solve_unit_triangular(jnp.tril(decay.products(read, k), -1), known))]
        else:
            known = decay.recall(read, memory) + jnp.tril(decay.products(read, k), -1) @ v
            erased = solve_unit_triangular(jnp.tril(decay.products(read, write), -1), known)
            written = [(k, v), (write, -erased)]
        after = decay.keep(memory) + sum(decay.store(*pair) for pair in written)
        if q is None:
            return after, None
        return after, decay.recall(q, memory) + sum(decay.products(q, key) @ value for key, value in written)

    dtype = jnp.float64 if is_double else jnp.float32
    *inputs, state = (None if x is None else x.astype(dtype) for x in arrays)
    inputs.append(None if starts is None else starts[..., None])
    memory = state.reshape(batch, heads, -1, *state.shape[2:])
    # Inside a scan nothing can be reused before it is recomputed, so that no barrier is needed.
    step = jax.checkpoint(of_chunk, prevent_cse=False)
    memory, o = jax.lax.scan(step, memory, tuple(map(chunks, inputs)))
    if o is not None:  # [N, B, H, R, m C, V]
        o = jnp.moveaxis(o, (0, 4), (1, 2)).reshape(batch, -1, *v.shape[2:])[:, : q.shape[1]]
    return o, memory.reshape(state.shape)


def no_memory(k: jax.Array, v: jax.Array) -> jax.Array:
    """The memory before the first token [B, G, K, V], for k [B, n L, H, K] and v [B, n L, G, V]."""
    dtype = jnp.float64 if jnp.float64 in (k.dtype, v.dtype) else jnp.float32
    return jnp.zeros_like(v, shape=(len(v), v.shape[2], k.shape[3], v.shape[3]), dtype=dtype)


def transfer(
    k: jax.Array,
    v: jax.Array,
    log_a: jax.Array,
    read: jax.Array | None,
    write: jax.Array | None,
    starts: jax.Array | None,
    chunk: int = 64,
) -> tuple[jax.Array, jax.Array]:
    """A [B, G, K, K] and S [B, G, K, V]: the tokens turn any memory M before them into A M + S.

    A is what the rule makes of the identity without values. k, v, log_a, read, write, starts and chunk are as
    in `delta_rule`.
    """
    memory, width = no_memory(k, v), v.shape[3]
    identity = jnp.broadcast_to(jnp.eye(k.shape[3], dtype=memory.dtype), (*memory.shape[:3], k.shape[3]))
    if read is not None:
        both = jnp.concatenate([memory, identity], axis=-1)
        v = jnp.pad(v, [(0, 0), (0, 0), (0, 0), (0, k.shape[3])])
        after = delta_rule(None, k, v, log_a, read, write, both, starts, chunk)[1]
        return after[..., width:], after[..., :width]
    decay = jnp.exp(log_a.astype(memory.dtype).sum(axis=1))
    decay = decay if decay.ndim == 3 else decay[..., None]
    if starts is not None:
        decay = jnp.where(starts.any(axis=1)[:, None, None], 0, decay)
    decay = jnp.repeat(decay, v.shape[2] // decay.shape[1], axis=1)
    after = delta_rule(None, k, v, log_a, None, None, memory, starts, chunk)[1]
    return decay[..., None] * identity, after


class HeadDecay:
    """Products within a chunk of vectors [..., n C, K], n of each token, and of a memory M [..., K, V].

    One decay a for all channels of a head: log_a [..., C]; starts [..., C] or None.
    """

    def __init__(self, log_a: jax.Array, starts: jax.Array | None):
        self.between, self.entering = decays(log_a, starts)

    def products(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """x_i^T diag(a from the token after y_j's to x_i's) y_j [..., m C, n C]; 0 where y_j comes later."""
        m, n = (z.shape[-2] // self.entering.shape[-1] for z in (x, y))
        return jnp.repeat(jnp.repeat(self.between, m, axis=-2), n, axis=-1) * (x @ y.mT)

    def recall(self, x: jax.Array, memory: jax.Array) -> jax.Array:
        """x_i^T diag(a from the first token to x_i's) M [..., n C, V]."""
        return self._rows(self.entering, x) * (x @ memory)

    def store(self, y: jax.Array, values: jax.Array) -> jax.Array:
        """The sum of diag(a from the token after y_j's to the last) y_j values_j^T [..., K, V]."""
        return y.mT @ (self._rows(self.between[..., -1, :], y) * values)

    def keep(self, memory: jax.Array) -> jax.Array:
        """diag(a from the first token to the last) M."""
        return self.entering[..., -1:, None] * memory

    def _rows(self, of_tokens: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.repeat(of_tokens, x.shape[-2] // of_tokens.shape[-1], axis=-1)[..., None]


class ChannelDecay:
    """As `HeadDecay`, with a decay for each channel of a key: log_a [..., C, K], C a power of 2.

    The decay between two tokens is no longer one number, by which a product could be multiplied, and as
    exp(total_i) exp(-total_j), with running sums of log a, it overflows. But below the two diagonal blocks,
    of the first and the second half of a chunk, all products are one product of matrices,

        products_ij = sum_c  x_ic exp(sum of log a over the second half up to token i)
                             y_jc exp(sum of log a over the first half after token j),

    and each diagonal block is such a chunk again. All exponents are sums of log a, thus at most 0. Nothing is
    subtracted, so that no digits are lost at any decay, and the start of a document is log a = -inf.
    """

    def __init__(self, log_a: jax.Array, starts: jax.Array | None):
        log_a = log_a if starts is None else jnp.where(starts[..., None], -jnp.inf, log_a)
        self.size = log_a.shape[-2]
        # log a in each token's block [..., blocks, tokens of a block, K], summed up to it and after it.
        up_to, after, self.halves = log_a[..., None, :], jnp.zeros_like(log_a[..., None, :]), []
        while up_to.shape[-2] < self.size:
            first, second = up_to[..., ::2, :, :], up_to[..., 1::2, :, :]
            rest, later = after[..., ::2, :, :], after[..., 1::2, :, :]
            self.halves.append((jnp.exp(second), jnp.exp(rest)))
            up_to = jnp.concatenate([first, second + first[..., -1:, :]], axis=-2)
            after = jnp.concatenate([rest + second[..., -1:, :], later], axis=-2)
        self.entering, self.leaving = jnp.exp(up_to[..., 0, :, :]), jnp.exp(after[..., 0, :, :])

    def products(self, x: jax.Array, y: jax.Array) -> jax.Array:
        m, n = (z.shape[-2] // self.size for z in (x, y))
        found = _product(_blocks(x, self.size), _blocks(y, self.size).mT)
        lead = jnp.broadcast_shapes(found.shape[:-3], self.entering.shape[:-2])
        found = jnp.broadcast_to(found, (*lead, *found.shape[-3:]))
        for up_to, after in self.halves:
            half = up_to.shape[-2]
            below = _blocks(x, self.size // half)[..., 1::2, :, :] * jnp.repeat(up_to, m, axis=-2)
            above = _blocks(y, self.size // half)[..., ::2, :, :] * jnp.repeat(after, n, axis=-2)
            corner, first, second = _product(below, above.mT), found[..., ::2, :, :], found[..., 1::2, :, :]
            top = jnp.pad(first, [(0, 0)] * (first.ndim - 1) + [(0, half * n)])
            found = jnp.concatenate([top, jnp.concatenate([corner, second], axis=-1)], axis=-2)
        return found[..., 0, :, :]

    def recall(self, x: jax.Array, memory: jax.Array) -> jax.Array:
        return (jnp.repeat(self.entering, x.shape[-2] // self.size, axis=-2) * x) @ memory

    def store(self, y: jax.Array, values: jax.Array) -> jax.Array:
        return (jnp.repeat(self.leaving, y.shape[-2] // self.size, axis=-2) * y).mT @ values

    def keep(self, memory: jax.Array) -> jax.Array:
        return self.entering[..., -1, :, None] * memory


def decays(log_a: jax.Array, starts: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Products of a over the tokens of a chunk, of log_a [..., C].

    The first result [..., C, C] is from the token after the column's to the row's, 0 above the diagonal; the
    second [..., C] from the first token to each. `starts` broadcasts against log_a, True where everything
    earlier is forgotten.
    """
    total = jnp.cumsum(log_a, axis=-1)
    # What rounding takes from the sums. Without it, all weights of the chunk after a token with log a = -1000
    # would be wrong by 1e-4.
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
    # One axis for all matrices: XLA's CPU backend fails at products of many axes.
    flat = jax.lax.stop_gradient(lower).reshape(-1, *lower.shape[-2:])
    inverse = unit_triangular_inverse(flat).reshape(lower.shape)

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
    """(I + lower)^-1 of strictly lower triangular [n, c, c], by halves: as stable as substitution.

    If A and D are the diagonal blocks of I + lower, and B is the block below A, then the inverse has the
    diagonal blocks A^-1 and D^-1, and the block -D^-1 B A^-1 below A^-1.
    """
    size = lower.shape[-1]
    if size == 1:
        return jnp.ones_like(lower)
    half = 1 << (size - 1).bit_length() - 1  # the largest power of 2 below size
    above, below = lower[..., :half, :half], lower[..., half:, half:]
    if size == 2 * half:
        above, below = jnp.split(unit_triangular_inverse(jnp.concatenate([above, below])), 2)
    else:
        above, below = unit_triangular_inverse(above), unit_triangular_inverse(below)
    corner = -_product(below, _product(lower[..., half:, :half], above))
    top = jnp.pad(above, [(0, 0)] * (lower.ndim - 1) + [(0, size - half)])
    return jnp.concatenate([top, jnp.concatenate([corner, below], axis=-1)], axis=-2)


def _product(x: jax.Array, y: jax.Array) -> jax.Array:
    if y.shape[-1] > SMALL:
        return jnp.matmul(x, y, precision="highest")
    return (x[..., None] * y[..., None, :, :]).sum(axis=-2)


def _blocks(x: jax.Array, n_blocks: int) -> jax.Array:
    """The rows of x [..., rows, K] in blocks: [..., n_blocks, rows / n_blocks, K]."""
    return x.reshape(*x.shape[:-2], n_blocks, -1, x.shape[-1])
