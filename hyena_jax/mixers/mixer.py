"""The base class of all mixers: from `setup` and `mix` it derives training, decoding, packing and sharding.

Axes: B batch, L length, T new tokens, D channels.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from hyena_jax.config import MixerConfig, name_of
from hyena_jax.filters import has_constant_state
from hyena_jax.mixers.inputs import check_input, check_next, check_state_length, check_token, within
from hyena_jax.mixers.online import MixerState, Online, map_histories
from hyena_jax.mixers.parallel import Parallel
from hyena_jax.mixers.sequence import Handed, Sequence
from hyena_jax.ops import online_conv
from hyena_jax.ops.forms import Forms
from hyena_jax.system.errors import UserError, require


class Mixer(nn.Module):
    """A mixer; a subclass adds the default of `config`, its parameters, and `mix`.

    Attributes:
      d_model: D.
      max_len: the longest sequence.
      config: the mixer's options.
      n_layers: depth of the residual stack, on which some initialisations depend.
      dtype: of the activations; None follows the input. Memories and sums stay in float32.
      sequence_axis: mesh axis over which L is sharded in `__call__`, or None.
      forms: which form each operator takes, where it has several; None: those of JAX's default backend,
        without kernels.
      layer: which of the n_layers this is, from 0, on which some initialisations depend. A mixer of your own
        that reads it nowhere else says so by the class attribute `reads_layer = False`: a model then traces
        its blocks of this mixer once.

    In the methods, `handed` is what earlier layers hand on to later ones (`Sequence.of_first_layer`): a dict
    that the first layer fills. None: this mixer is the first layer.
    """

    d_model: int
    max_len: int
    config: MixerConfig
    n_layers: int = 1
    dtype: jnp.dtype | None = None
    sequence_axis: str | None = None
    forms: Forms | None = None
    layer: int = 0

    has_constant_state = False
    """Whether the state does not grow, and no table limits the position."""

    @classmethod
    def is_unbounded(cls, config: MixerConfig) -> bool:
        """Whether decoding may continue beyond max_len."""
        return cls.has_constant_state

    def mix(self, x: jax.Array, seq: Sequence, deterministic: bool) -> jax.Array:
        """y [B, T, D] of x [B, T, D]; `seq` has the operators along T, and all else is token by token."""
        raise UserError(f"{type(self).__name__} must define mix(self, x, seq, deterministic)")

    def __call__(
        self,
        x: jax.Array,
        segment_ids: jax.Array | None = None,
        deterministic: bool = True,
        handed: Handed | None = None,
    ) -> jax.Array:
        """y [B, L, D] of x [B, L, D]; each run of equal segment_ids [B, L] is a document.

        Raises:
          UserError: for a wrong rank, width or length of x; and for segment_ids, if the mixer cannot keep
            documents apart.
        """
        check_input(x, self.d_model, self.max_len, segment_ids)
        seq = Parallel(x.shape[:2], segment_ids, self.sequence_axis, self.forms, handed)
        return self.mix(x, seq, deterministic)

    def init_state(self, batch_size: int, max_len: int) -> MixerState:
        """The state before the first token of a sequence of at most `max_len` tokens.

        Raises:
          UserError: for a mixer that is not causal, or a max_len above the module's.
        """
        require(self.config.causal, "mixer", name_of(self.config), "causal to decode")
        check_state_length(max_len, self.max_len)
        # Each operator makes its memory where `mix` calls it, for any token; XLA drops all else that it does.
        dtypes = [
            leaf.dtype for leaf in jax.tree.leaves(self.variables) if jnp.isdtype(leaf.dtype, "real floating")
        ]
        dtype = self.dtype or max(dtypes, key=lambda dtype: dtype.itemsize, default=jnp.float32)
        seq = Online.start(batch_size, max_len, self.forms)
        self.mix(jnp.zeros((batch_size, 1, self.d_model), dtype), seq, True)
        return seq.initial()

    def prefill(
        self,
        state: MixerState,
        x: jax.Array,
        lengths: jax.Array | None = None,
        handed: Handed | None = None,
    ) -> tuple[MixerState, jax.Array]:
        """The next T tokens x [B, T, D] at once; open tiles are closed.

        Args:
          lengths: integers [B], in a sequence's first prefill: row b is right-aligned, and only its last
            lengths[b] tokens are real. None: all are. In a later prefill they make the outputs NaN.

        Raises:
          UserError: for a wrong shape of x or lengths, or more tokens than the state has room for.
        """
        lengths = check_next(x, self.d_model, self.max_len, len(state.first), lengths)
        state = map_histories(online_conv.close_tiles, state)
        seq = Online(state, x.shape[1], lengths, self.forms, handed=handed)
        y = self.mix(x, seq, True)
        return seq.state(), y if lengths is None else within(y, state.shared.position, 0)

    def step(
        self, state: MixerState, x: jax.Array, handed: Handed | None = None
    ) -> tuple[MixerState, jax.Array]:
        """The next token x [B, D]."""
        check_token(x, self.d_model, len(state.first))
        seq = Online(state, 1, None, self.forms, is_step=True, handed=handed)
        y = self.mix(x[:, None], seq, True)
        return seq.state(), y[:, 0]


class LongConvolutionMixer(Mixer):
    """A mixer around long convolutions with the filters of `config.filter`.

    Between its dense layers the channels are the first axis, [W, B, T]: `ops.fast.dense` says why.
    """

    @staticmethod
    def is_unbounded(config: MixerConfig) -> bool:
        """Whether the filter's state does not grow."""
        return has_constant_state(config.filter)
