"""The base class of the mixers whose memory is a matrix for each head, and their decoding state.

Axes: B batch, L length, T new tokens, D channels, C channels and J taps of the short FIR; as in
`ops.delta_rule`, H heads of queries and keys, G heads of values, K channels of a key, V channels of a value.

Such a mixer writes its `setup` and one method,

    mix(x [B, T, D], short, update) -> y [B, T, D], the last inputs of the FIR, the memory

`short` runs the FIR and `update` the rule: over a whole sequence, or continuing a state.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.typing import Initializer

from hyena_jax.config import MixerConfig
from hyena_jax.mixers.inputs import Shared, check_input, check_next, check_state_length, is_real, sums_dtype
from hyena_jax.ops.delta_rule import delta_rule
from hyena_jax.ops.documents import documents
from hyena_jax.ops.sequence_parallel import gated_delta_rule, short_convolution
from hyena_jax.ops.sequence_shards import sharded
from hyena_jax.ops.short_conv import advance_history, empty_history, short_conv

# (u [B, T, C], taps [C, J], bias [C]) -> the FIR of u, and its last inputs [B, C, J-1] if a state continues.
Short = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array | None]]
# (q, k, v, log_a, beta) of `ops.delta_rule` -> o [B, T, G, V], and the memory if a state continues.
Update = Callable[..., tuple[jax.Array, jax.Array | None]]


class MatrixState(NamedTuple):
    """The last inputs of the FIR [B, C, J-1] and the memory [B, G, K, V], float32."""

    shared: Shared
    short_history: jax.Array
    memory: jax.Array


class MatrixMemoryMixer(nn.Module):
    """A mixer around a matrix memory; a subclass adds the default of `config`, `setup`, and what is below.

    Attributes:
      d_model: D.
      max_len: longest sequence; the state does not grow with it.
      config: the mixer's options; `chunk` is the number of tokens that are computed at once.
      n_layers: depth of the residual stack, on which some initialisations depend.
      dtype: of the activations; None follows the input. The decay, the rule and the state stay in float32.
      sequence_axis: mesh axis over which L is sharded in `__call__`, or None.
    """

    d_model: int
    max_len: int
    config: MixerConfig
    n_layers: int = 1
    dtype: jnp.dtype | None = None
    sequence_axis: str | None = None

    @staticmethod
    def is_unbounded(config: MixerConfig) -> bool:
        """Decoding may continue beyond max_len: the state does not grow."""
        return True

    @property
    def memory_shape(self) -> tuple[int, int, int]:
        """G, K, V."""
        raise NotImplementedError

    def mix(
        self, x: jax.Array, short: Short, update: Update
    ) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
        """y [B, T, D] of x [B, T, D], and what `short` and `update` return for the state."""
        raise NotImplementedError

    def __call__(
        self, x: jax.Array, segment_ids: jax.Array | None = None, deterministic: bool = True
    ) -> jax.Array:
        """y [B, L, D] of x [B, L, D]; each run of equal segment_ids [B, L] is a document.

        Raises:
          ValueError: for a wrong rank, width or length of x.
        """
        check_input(x, self.d_model, self.max_len, segment_ids)
        starts = ids = None
        if segment_ids is not None:
            found = documents(segment_ids)
            starts, ids = found.changes, found.number[..., None]

        def short(u: jax.Array, taps: jax.Array, bias: jax.Array) -> tuple[jax.Array, None]:
            local = partial(short_convolution, axis=-2)
            convolve = sharded(local, self.sequence_axis, ("BLI", "JI", "I", "BL1"), "BLI")
            return convolve(u, taps.T, bias, ids), None

        def update(*rows: jax.Array | None) -> tuple[jax.Array, None]:
            local = partial(gated_delta_rule, chunk=self.config.chunk)
            in_axes = ("BLHK", "BLHK", "BLGV", "BLG", "BLG", "BL")
            return sharded(local, self.sequence_axis, in_axes, "BLGV")(*rows, starts), None

        return self.mix(x, short, update)[0]

    def init_state(self, batch_size: int, max_len: int) -> MatrixState:
        """The state before the first token of a sequence of at most `max_len` tokens."""
        check_state_length(max_len, self.max_len)
        channels, n_taps = self.short_taps.shape
        dtype = sums_dtype(self.short_taps.dtype)
        return MatrixState(
            shared=Shared(jnp.zeros((), jnp.int32)),
            short_history=empty_history(batch_size, channels, n_taps, dtype),
            memory=jnp.zeros((batch_size, *self.memory_shape), dtype),
        )

    def prefill(
        self, state: MatrixState, x: jax.Array, lengths: jax.Array | None = None
    ) -> tuple[MatrixState, jax.Array]:
        """The next T tokens x [B, T, D] at once."""
        lengths = check_next(x, self.d_model, self.max_len, len(state.memory), lengths)
        real = is_real(lengths, x.shape[1])

        def short(u: jax.Array, taps: jax.Array, bias: jax.Array) -> tuple[jax.Array, jax.Array]:
            if real is not None:
                u = jnp.where(real[..., None], u, 0)
            before = state.short_history.swapaxes(1, 2)
            after = advance_history(before, u, 1).swapaxes(1, 2)
            return short_conv(u, taps.T, bias, 1, before), after

        def update(
            q: jax.Array, k: jax.Array, v: jax.Array, log_a: jax.Array, beta: jax.Array | None
        ) -> tuple[jax.Array, jax.Array]:
            if real is not None:  # a FIR with a bias makes values of padding
                v = jnp.where(jnp.repeat(real, v.shape[1] // x.shape[1], axis=1)[..., None, None], v, 0)
            return delta_rule(q, k, v, log_a, beta, state.memory, chunk=self.config.chunk)

        y, history, memory = self.mix(x, short, update)
        return MatrixState(Shared(state.shared.position + x.shape[1]), history, memory), y

    def step(self, state: MatrixState, x: jax.Array) -> tuple[MatrixState, jax.Array]:
        """The next token x [B, D], in constant time."""
        state, y = self.prefill(state, x[:, None])
        return state, y[:, 0]


class GroupRMSNorm(nn.Module):
    """scale ⊙ x / sqrt(mean(x^2) + eps), the mean over each of `n_groups` groups of the channels.

    Parameters are [C] for x [..., C], and start at 1. Computed in the dtype of x.
    """

    n_groups: int
    epsilon: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """y [..., C] of x [..., C]."""
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), jnp.float32).astype(x.dtype)
        groups = x.reshape(*x.shape[:-1], self.n_groups, -1)
        mean_square = jnp.square(groups).mean(axis=-1, keepdims=True)
        return scale * (groups * jax.lax.rsqrt(mean_square + self.epsilon)).reshape(x.shape)


def a_log_init(low: float, high: float) -> Initializer:
    """The log of a number that is uniform in (low, high]."""

    def init(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype = jnp.float32) -> jax.Array:
        return jnp.log(high - (high - low) * jax.random.uniform(key, shape, dtype))

    return init


def dt_bias_init(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """softplus(dt_bias) is log-uniform in [0.001, 0.1]."""
    dt = jnp.exp(jax.random.uniform(key, shape, dtype, jnp.log(0.001), jnp.log(0.1)))
    return dt + jnp.log(-jnp.expm1(-dt))
