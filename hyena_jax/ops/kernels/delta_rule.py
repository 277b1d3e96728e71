"""The chunked delta rule as Pallas kernels for TPUs (Mosaic): `fused_delta_rule`, one kernel each way.

Axes: as in `ops.delta_rule`; a kernel sees one chunk of C tokens of one head.

The arithmetic is that of `ops.delta_rule`, kept in VMEM: inputs, outputs, and the N memories between the
chunks, from which the backward kernel recomputes each chunk, cross HBM once each. The memory is held as S^T
[V, K], so that the decay of a channel is one lane. Decays between tokens are products by halves (see
`ChannelDecay`), for a decay of each head too. Halves, and blocks of the triangular system, are masks of whole
tiles [C, C] rather than slices: more products, and nothing that moves within a register. The backward kernel
is JAX's derivative of the forward kernel's chunk.

On a CPU the kernels run only with `interpret=True`. They compile for TPU v5e and v5p, and are not measured
on a device yet. x64 is not supported.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from hyena_jax.ops.delta_rule import delta_rule
from hyena_jax.ops.fast.derivatives import own_derivative

SUBLANES = 8
LOG_A = 3
"""The place of log a among the arguments."""
RESET = -1e30
"""log a at the first token of a document: exp of it, and of all sums with it, is 0, and no product is NaN."""


class Rule(NamedTuple):
    """What a kernel is compiled for.

    Attributes:
      by_channel: log a is given for each channel of a key.
      reads: something is erased.
      writes: it is erased elsewhere than at the key.
      chunk: C, a power of 2.
    """

    by_channel: bool
    reads: bool
    writes: bool
    chunk: int


def fused_delta_rule(
    q: jax.Array | None,
    k: jax.Array,
    v: jax.Array,
    log_a: jax.Array,
    read: jax.Array | None,
    write: jax.Array | None,
    state: jax.Array,
    starts: jax.Array | None = None,
    chunk: int = 64,
    interpret: bool = False,
) -> tuple[jax.Array | None, jax.Array]:
    """`ops.delta_rule.delta_rule` as one kernel, with the same arguments and results.

    Its gradients in reverse mode are one kernel as well; forward mode and second derivatives are those of the
    plain form. That form also takes what the kernel does not: several updates or queries of a token, no
    queries, single tokens, and float64.
    """
    arrays, length = (q, k, v, log_a, read, write, state), log_a.shape[1]
    is_double = any(x is not None and x.dtype == jnp.float64 for x in arrays)
    if q is None or is_double or length == 1 or not q.shape[1] == k.shape[1] == length:
        return delta_rule(*arrays, starts, chunk)
    size = max(SUBLANES, 1 << (min(chunk, length) - 1).bit_length())
    rule = Rule(log_a.ndim == 4, read is not None, write is not None, size)
    is_there = [x is not None for x in arrays]
    given = [x.astype(jnp.float32) for x in arrays if x is not None]

    def plain(starts: jax.Array | None, *given: jax.Array) -> tuple[jax.Array, jax.Array]:
        found = iter(given)
        return delta_rule(*(next(found) if one else None for one in is_there), starts, chunk)

    @jax.custom_jvp
    def kernel(starts: jax.Array | None, *given: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        return _forward(rule, given, starts, interpret)

    @kernel.defjvp
    def _(primals: tuple, tangents: tuple) -> tuple:
        found = kernel(*primals)
        # The memories between the chunks are for `pull_back` alone, which is not differentiated.
        y_dot = jax.jvp(partial(plain, primals[0]), primals[1:], tangents[1:])[1]
        return found, (*y_dot, jnp.zeros_like(found[2]))

    def forward(starts: jax.Array | None, *given: jax.Array) -> tuple[tuple, tuple]:
        *y, memories = kernel(starts, *given)
        return tuple(y), (starts, given, memories)

    def pull_back(residuals: tuple, y_bar: tuple) -> tuple:
        starts, given, memories = residuals
        return tuple(_backward(rule, given, starts, memories, y_bar, interpret))

    return own_derivative(forward, pull_back, starts)(*given)


def _forward(
    rule: Rule, given: tuple, starts: jax.Array | None, interpret: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """o [B, L, G, V], the memory after the last token [B, G, K, V], and before each chunk [B, G, N, V, K]."""
    *sequences, state = given
    inputs = _inputs(rule, sequences, starts)
    (batch, heads, n_keys, n_values), n_chunks = state.shape, inputs[0].shape[2]
    o, after, memories = _call(
        partial(_forward_kernel, rule),
        [*inputs, state.mT],
        [
            (batch, heads, n_chunks, rule.chunk, n_values),
            (batch, heads, n_values, n_keys),
            (batch, heads, n_chunks, n_values, n_keys),
        ],
        interpret=interpret,
    )
    length = sequences[0].shape[1]
    return o.reshape(batch, heads, -1, n_values).swapaxes(1, 2)[:, :length], after.mT, memories


def _backward(
    rule: Rule,
    given: tuple,
    starts: jax.Array | None,
    memories: jax.Array,
    y_bar: tuple[jax.Array, jax.Array],
    interpret: bool,
) -> list[jax.Array]:
    (*sequences, _), (o_bar, after_bar) = given, y_bar
    inputs = _inputs(rule, sequences, starts)
    batch, heads, n_chunks = memories.shape[:3]
    *gradients, state_bar = _call(
        partial(_backward_kernel, rule),
        [*inputs, memories, _chunks(rule, o_bar), after_bar.mT],
        [*((batch, heads, *x.shape[2:]) for x in inputs), after_bar.mT.shape],
        reverse=True,
        interpret=interpret,
    )

    def as_given(gradient: jax.Array, x: jax.Array) -> jax.Array:
        """A gradient [B, G, N, ...] with the heads of x, and without padding."""
        gradient = gradient.reshape(batch, x.shape[2], heads // x.shape[2], n_chunks * rule.chunk, -1)
        return gradient.sum(axis=2).swapaxes(1, 2)[:, : x.shape[1]].reshape(x.shape)

    found = [as_given(*both) for both in zip(gradients, sequences, strict=True)]
    if starts is not None:
        found[LOG_A] = _where(starts, 0, found[LOG_A])
    return [*found, state_bar.mT]


def _inputs(rule: Rule, sequences: list[jax.Array], starts: jax.Array | None) -> list[jax.Array]:
    """A kernel's sequences [B, heads, N, C, channels]; the decay of a head is a row of lanes, [1, C]."""
    found = list(sequences)
    if starts is not None:
        found[LOG_A] = _where(starts, RESET, found[LOG_A])
    if rule.by_channel:
        return [_chunks(rule, x) for x in found]
    return [_chunks(rule, x[..., None]).mT if i == LOG_A else _chunks(rule, x) for i, x in enumerate(found)]


def _where(starts: jax.Array, fill: float, x: jax.Array) -> jax.Array:
    """x [B, L, ...] with `fill` where documents start."""
    return jnp.where(starts.reshape(*starts.shape, *(1 for _ in x.shape[2:])), fill, x)


def _chunks(rule: Rule, x: jax.Array) -> jax.Array:
    """x [B, L, heads, channels] as [B, heads, N, C, channels]; padded tokens change no memory."""
    x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % rule.chunk), (0, 0), (0, 0)]).swapaxes(1, 2)
    return x.reshape(*x.shape[:2], -1, rule.chunk, x.shape[3])


def _call(
    kernel: Callable,
    inputs: list[jax.Array],
    outputs: list[tuple[int, ...]],
    reverse: bool = False,
    interpret: bool = False,
) -> list[jax.Array]:
    """Launches a kernel on the chunks of each head, in order or in reverse.

    Arrays of chunks are [B, heads, N, ...], and of states [B, G, V, K], the last of inputs and outputs.
    """
    (batch, heads), n_chunks = inputs[-1].shape[:2], inputs[0].shape[2]

    def spec(shape: tuple[int, ...]) -> pl.BlockSpec:
        # Queries, keys and decays may belong to several heads of values. Not divided by `//`, whose signs
        # Mosaic lowers only where there is a TPU.
        per_head = np.int32(heads // shape[1])
        if len(shape) == 4:
            return pl.BlockSpec((None, None, *shape[2:]), lambda b, g, n: (b, g, 0, 0))

        def at(b: jax.Array, g: jax.Array, n: jax.Array) -> tuple:
            return b, jax.lax.div(g, per_head), n_chunks - 1 - n if reverse else n, 0, 0

        return pl.BlockSpec((None, None, None, *shape[3:]), at)

    varies = jax.typeof(sum(x.reshape(-1)[0] for x in inputs)).manual_axis_type
    return pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32, manual_axis_type=varies) for shape in outputs],
        grid=(batch, heads, n_chunks),
        in_specs=[spec(x.shape) for x in inputs],
        out_specs=[spec(shape) for shape in outputs],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=interpret,
        name="delta_rule",
    )(*inputs)


def _forward_kernel(rule: Rule, *refs: Any) -> None:
    *inputs, state_ref, o_ref, after_ref, memories_ref = refs

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        after_ref[...] = state_ref[...]  # after_ref stays in VMEM until the head's last chunk

    memory = after_ref[...]
    memories_ref[...] = memory
    o_ref[...], after_ref[...] = _of_chunk(rule, *(ref[...] for ref in inputs), memory)


def _backward_kernel(rule: Rule, *refs: Any) -> None:
    n_inputs = len(refs) // 2 - 1
    inputs, (o_bar_ref, after_bar_ref) = refs[:n_inputs], refs[n_inputs : n_inputs + 2]
    *outputs, memory_bar_ref = refs[n_inputs + 2 :]

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        memory_bar_ref[...] = after_bar_ref[...]

    _, pull_back = jax.vjp(partial(_of_chunk, rule), *(ref[...] for ref in inputs))
    *gradients, memory_bar = pull_back((o_bar_ref[...], memory_bar_ref[...]))
    for ref, gradient in zip(outputs, gradients, strict=True):
        ref[...] = gradient
    memory_bar_ref[...] = memory_bar


def _of_chunk(
    rule: Rule, q: jax.Array, k: jax.Array, v: jax.Array, log_a: jax.Array, *rest: jax.Array
) -> tuple:
    """o [C, V], and the memory after the chunk [V, K].

    q and k [C, K], v [C, V], log_a [C, K], or [1, C] of a head; `rest` is r and e [C, K], as far as the rule
    has them, and the memory before the chunk [V, K].
    """
    *others, memory = rest
    decay = Decay(rule, log_a, k.shape[1])
    if not rule.reads:
        written = [(k, v)]
    elif not rule.writes:
        (read,) = others
        known = v - decay.recall(read, memory)
        written = [(k, _solve(decay.earlier(read, k), known))]
    else:
        read, write = others
        known = decay.recall(read, memory) + _dot(decay.earlier(read, k), v)
        written = [(k, v), (write, -_solve(decay.earlier(read, write), known))]
    after = memory * jnp.exp(decay.log_a.sum(axis=0, keepdims=True))
    o = decay.recall(q, memory)
    for key, value in written:
        o += _dot(decay.products(q, key), value)
        after += _dot(value, key * decay.leaving, contract=(0, 0))
    return o, after


class Decay:
    """Products within a chunk, as in `ops.delta_rule.ChannelDecay`, of whole tiles.

    With one decay for the head, its products of the first unit vector with itself weight all products.
    """

    def __init__(self, rule: Rule, log_a: jax.Array, n_keys: int):
        self.size = rule.chunk
        self.row, self.column = (
            jax.lax.broadcasted_iota(jnp.int32, (self.size,) * 2, axis) for axis in (0, 1)
        )
        if not rule.by_channel:  # the row of lanes as a column, the same in all lanes
            diagonal = jnp.where(self.row == self.column, log_a, 0)
            log_a = _dot(diagonal, jnp.ones((self.size, n_keys), jnp.float32))
        self.log_a = log_a
        self.entering = self._sums(self.column <= self.row)
        self.leaving = self._sums(self.column > self.row)
        self.halves = []
        for level in _levels(self.size):
            # In the second half of a block the tokens up to the row's, in the first those after it.
            same = (self.row >> level) == (self.column >> level)
            is_first, up_to = (self.row >> level) & 1 == 0, self.column <= self.row
            self.halves.append(self._sums(same & (is_first ^ up_to)))
        self.between = None
        if not rule.by_channel:
            lane = jax.lax.broadcasted_iota(jnp.int32, (self.size, n_keys), 1)
            unit = jnp.where(lane == 0, 1.0, 0.0)
            self.between = self.products(unit, unit)

    def _sums(self, mask: jax.Array) -> jax.Array:
        """exp of the sums of log a over each row's tokens in a mask [C, C]: [C, K]."""
        return jnp.exp(_dot(jnp.where(mask, 1.0, 0.0), self.log_a))

    def products(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """x_i^T diag(a from the token after y_j's to x_i's) y_j [C, C]; 0 where y_j comes later."""
        if self.between is not None:
            return self.between * _dot(x, y, contract=(1, 1))
        found = jnp.where(self.row == self.column, (x * y).sum(axis=1, keepdims=True), 0)
        for level, weights in zip(_levels(self.size), self.halves, strict=True):
            corner = _dot(x * weights, y * weights, contract=(1, 1))
            found += jnp.where(_is_corner(self.row, self.column, level), corner, 0)
        return found

    def earlier(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """The products with the y of earlier tokens alone."""
        return jnp.where(self.column < self.row, self.products(x, y), 0)

    def recall(self, x: jax.Array, memory: jax.Array) -> jax.Array:
        """x_i^T diag(a from the first token to x_i's) S [C, V], of the memory S^T [V, K]."""
        return _dot(x * self.entering, memory, contract=(1, 1))


@jax.custom_vjp
def _solve(lower: jax.Array, b: jax.Array) -> jax.Array:
    """x [C, V] with (I + lower) x = b, for strictly lower triangular [C, C]."""
    return _dot(_inverse(lower), b)


def _solve_forward(lower: jax.Array, b: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    inverse = _inverse(lower)
    x = _dot(inverse, b)
    return x, (inverse, x)


def _solve_backward(residuals: tuple[jax.Array, jax.Array], x_bar: jax.Array) -> tuple[jax.Array, jax.Array]:
    inverse, x = residuals
    b_bar = _dot(inverse, x_bar, contract=(0, 0))
    return -_dot(b_bar, x, contract=(1, 1)), b_bar  # the caller's mask removes what is not below the diagonal


_solve.defvjp(_solve_forward, _solve_backward)


def _inverse(lower: jax.Array) -> jax.Array:
    """(I + lower)^-1, by halves as `ops.delta_rule.unit_triangular_inverse`, of whole tiles.

    The diagonal blocks' inverse T and the corners B between them give that of twice the size: T - T B T.
    """
    size = len(lower)
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (size,) * 2, axis) for axis in (0, 1))
    inverse = jnp.where(row == column, 1.0, 0.0)
    for level in _levels(size):
        corner = jnp.where(_is_corner(row, column, level), lower, 0)
        inverse -= _dot(inverse, _dot(corner, inverse))
    return inverse


def _levels(size: int) -> range:
    """Blocks of 2^(level + 1) tokens, up to a whole chunk, are two halves of 2^level."""
    return range(size.bit_length() - 1)


def _is_corner(row: jax.Array, column: jax.Array, level: int) -> jax.Array:
    """Whether a row is in the second, and a column in the first half of the same block of a level."""
    return (row >> level == (column >> level) + 1) & ((row >> level) & 1 == 1)


def _dot(x: jax.Array, y: jax.Array, contract: tuple[int, int] = (1, 0)) -> jax.Array:
    """The product over an axis of x and one of y, in float32."""
    axes = ((contract[0],), (contract[1],)), ((), ())
    return jax.lax.dot_general(x, y, axes, precision="highest", preferred_element_type=jnp.float32)
