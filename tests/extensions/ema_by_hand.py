"""A mixer that has the four methods of the contract itself, without the base class `Mixer`."""

from collections import namedtuple
from dataclasses import dataclass

import flax.linen as nn
import jax.numpy as jnp

from hyena_jax.config import MixerConfig, register
from hyena_jax.mixers import inputs
from hyena_jax.ops.linear_recurrence import linear_recurrence


@dataclass(frozen=True)
class EMAConfig(MixerConfig):
    decay: float = 0.9
    """Initial decay a of every channel in y_t = a y_{t-1} + (1 - a) x_t."""


# The number of tokens seen, which the batch shares, and the last output y [B, D].
EMAState = namedtuple("EMAState", ["shared", "y"])


class EMA(nn.Module):
    d_model: int
    max_len: int
    config: EMAConfig = EMAConfig()
    n_layers: int = 1
    dtype: jnp.dtype | None = None

    def setup(self):
        self.decay = self.param("decay", nn.initializers.constant(self.config.decay), (self.d_model,))

    def __call__(self, x, segment_ids=None, deterministic=True):
        inputs.refuse_segments(segment_ids)
        return self.prefill(self.init_state(len(x), self.max_len), x)[1]

    def init_state(self, batch_size, max_len):
        inputs.check_state_length(max_len, self.max_len)
        return EMAState(inputs.Shared(jnp.int32(0)), jnp.zeros((batch_size, self.d_model), self.decay.dtype))

    def prefill(self, state, x, lengths=None):
        inputs.check_next(x, self.d_model, self.max_len, len(state.y), lengths)
        u = inputs.masked((1 - self.decay) * x.astype(self.decay.dtype), lengths)
        y, last = linear_recurrence(jnp.broadcast_to(self.decay, u.shape), u, state.y)
        return EMAState(inputs.Shared(state.shared.position + x.shape[1]), last), y.astype(x.dtype)

    def step(self, state, x):
        state, y = self.prefill(state, x[:, None])
        return state, y[:, 0]


def oracle(config, params, x, max_len, segment_ids):
    y, a = (1 - params["decay"]) * x, params["decay"]
    for t in range(1, x.shape[1]):
        y[:, t] += a * y[:, t - 1]
    return y


register("ema_by_hand", EMAConfig, EMA, oracle)
