"""RWKV-7's time mixer.

Axes: B batch, T tokens, D channels, H heads, K = D / H channels of a head, R the rank of a low-rank layer.
"""

from collections.abc import Callable
from functools import partial
from math import exp

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.typing import Initializer

from hyena_jax.config import RWKV7Config
from hyena_jax.mixers.inputs import sums_dtype
from hyena_jax.mixers.layers import HeadLayerNorm
from hyena_jax.mixers.mixer import Mixer
from hyena_jax.mixers.sequence import Sequence
from hyena_jax.ops.fast.dense import dense_dot_general

# Least log of a decay: all decays are above exp(LEAST_LOG) = 0.545, so that dividing by them is safe.
LEAST_LOG = -exp(-0.5)
# Least length by which a key is divided, as in the published code.
LEAST_LENGTH = 1e-12


class RWKV7(Mixer):
    """The time mixer of RWKV-7 (Peng et al. 2025, arXiv 2503.14456, section 4).

    Six inputs x_c = x + mu_c ⊙ (x' - x), c in r, w, k, v, a, g, mix a token x with the one before, x'; then

        r, k, v = W_r x_r, W_k x_k, W_v x_v,  log w = -e^(-1/2) sigmoid(w0 + W_w2 tanh(W_w1 x_w)),
        a = sigmoid(a0 + W_a2 W_a1 x_a),  g = W_g2 sigmoid(W_g1 x_g),
        v <- v + (v_first - v) ⊙ sigmoid(v0 + W_v2 W_v1 x_v),  where v_first is v of the model's first layer,
        kappa = k ⊙ removal, of each head divided by its length,  k <- k ⊙ (1 + (a - 1) ⊙ booster),
        S_t = (diag(w) - (a ⊙ kappa) kappa^T) S_{t-1} + k v^T,  o = S_t^T r  (`ops.delta_rule`),
        y = W_o ( g ⊙ ( LayerNorm(o) + (r ⊙ k ⊙ bonus summed over the head) v ) ),

    with LayerNorm over the channels of each head. The first layer mixes no other values into its own.

    Parameters:
      shift_mix [6, D]: mu of r, w, k, v, a, g.
      r_proj/kernel [D, D]: columns head after head, as of all below.
      k_proj/kernel [D, D]:
      v_proj/kernel [D, D]:
      decay/down/kernel [D, Rw]: W_w1.
      decay/up/kernel [Rw, D]: W_w2.
      decay/bias [D]: w0.
      rate/down/kernel [D, Ra]: W_a1.
      rate/up/kernel [Ra, D]: W_a2.
      rate/bias [D]: a0.
      value/down/kernel [D, Rv]: W_v1; not in the first layer, as the next two.
      value/up/kernel [Rv, D]: W_v2.
      value/bias [D]: v0.
      gate/down/kernel [D, Rg]: W_g1.
      gate/up/kernel [Rg, D]: W_g2.
      removal [D]: k_k in the published code.
      booster [D]: k_a.
      bonus [H, K]: r_k.
      norm/scale [D]:
      norm/bias [D]:
      out_proj/kernel [D, D]: W_o.
    """

    config: RWKV7Config = RWKV7Config()
    has_constant_state = True

    def setup(self) -> None:
        config, ranks, width = self.config, self.config.ranks(self.d_model), self.d_model
        config.check(width, self.max_len)
        # The products that read x are followed by activations: see `ops.fast.dense`.
        dense = partial(nn.Dense, width, use_bias=False, dtype=self.dtype, dot_general=dense_dot_general)
        orthogonal, constant = nn.initializers.orthogonal, nn.initializers.constant
        self.shift_mix = self.param("shift_mix", self._shift_init, (6, width), jnp.float32)
        self.r_proj, self.v_proj = dense(kernel_init=orthogonal()), dense(kernel_init=orthogonal())
        self.k_proj = dense(kernel_init=orthogonal(0.1))
        channel = np.arange(width)
        line = channel / max(width - 1, 1)
        in_head = 2 * (channel % self.head_dim) / max(self.head_dim - 1, 1) - 1
        bent, depth = in_head * np.abs(in_head), self.layer / max(self.n_layers - 1, 1)
        low_rank = partial(LowRank, width, dtype=self.dtype)
        self.decay = low_rank(
            ranks.decay, jnp.tanh, _exactly(-5.5 + 6 * line ** (1 + depth**0.3) + 2.5 * bent)
        )
        self.rate = low_rank(ranks.rate, bias_init=_exactly(-0.19 + 0.3 * bent + 0.4 * (line - 0.5)))
        # Its parameters are made where it is called, which the first layer does not.
        self.value = low_rank(ranks.value, bias_init=_exactly(0.73 - 0.4 * (line - 0.5)))
        self.gate = low_rank(ranks.gate, jax.nn.sigmoid)
        self.removal = self.param("removal", _exactly(0.71 - 0.1 * (line - 0.5)), (width,), jnp.float32)
        self.booster = self.param("booster", constant(1.02), (width,), jnp.float32)
        heads = (config.n_heads, self.head_dim)
        self.bonus = self.param("bonus", constant(-0.04), heads, jnp.float32)
        self.norm = HeadLayerNorm(config.norm_eps, constant(((self.layer + 1) / self.n_layers) ** 0.7))
        self.out_proj = nn.Dense(width, use_bias=False, dtype=self.dtype, kernel_init=nn.initializers.zeros)

    @property
    def head_dim(self) -> int:
        """K."""
        return self.d_model // self.config.n_heads

    def _shift_init(self, key: jax.Array, shape: tuple[int, int], dtype: jnp.dtype) -> jax.Array:
        """1 - (c / D)^p of channel c, with powers p that fall with the depth."""
        fraction = jnp.arange(self.d_model, dtype=dtype) / self.d_model
        powers = jnp.asarray([0.2, 0.9, 0.7, 0.7, 0.9, 0.2], dtype) * (1 - self.layer / self.n_layers)
        return 1 - fraction ** powers[:, None]

    def mix(self, x: jax.Array, seq: Sequence, deterministic: bool) -> jax.Array:
        config, rows = self.config, x.shape[:2]
        change = seq.shift(x) - x
        of_r, of_w, of_k, of_v, of_a, of_g = (x + mu * change for mu in self.shift_mix.astype(x.dtype))
        r, k, v = self.r_proj(of_r), self.k_proj(of_k), self.v_proj(of_v)
        activations, dtype = v.dtype, sums_dtype(v.dtype)
        log_w = LEAST_LOG * jax.nn.sigmoid(self.decay(of_w))
        a, g = jax.nn.sigmoid(self.rate(of_a)), self.gate(of_g)
        v_first = seq.of_first_layer("rwkv7_v", v)
        is_first = v_first is v
        r, k, v, v_first = (z.astype(dtype) for z in (r, k, v, v_first))
        if not is_first:
            v = v + (v_first - v) * jax.nn.sigmoid(self.value(of_v))
        removed = k * self.removal.astype(dtype)
        k = k * (1 + (a - 1) * self.booster.astype(dtype))

        def of_heads(z: jax.Array) -> jax.Array:
            return z.reshape(*rows, config.n_heads, self.head_dim)

        r, k, v, a, log_w, kappa = map(of_heads, (r, k, v, a, log_w, removed))
        square = jnp.square(kappa).sum(axis=-1, keepdims=True)
        kappa = kappa * jax.lax.rsqrt(jnp.maximum(square, LEAST_LENGTH**2))
        v = seq.values(v, "BTHd")
        # What is erased is read before the decay, which the rule applies first.
        o = seq.update(r, k, v, log_w, kappa * jnp.exp(-log_w), a * kappa, config.chunk)
        o = self.norm(seq.mixed(o, "BTHd"))
        o = o + (r * k * self.bonus.astype(dtype)).sum(axis=-1, keepdims=True) * v
        return self.out_proj((g * o.reshape(g.shape)).astype(activations))


class LowRank(nn.Module):
    """W_2 f(W_1 x) + bias, float32 at least; `dtype` is of the products.

    W_1 has `rank` columns and W_2 `width`; f is `activation`, or the identity. No bias without `bias_init`.
    """

    width: int
    rank: int
    activation: Callable[[jax.Array], jax.Array] | None = None
    bias_init: Initializer | None = None
    dtype: jnp.dtype | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """y [..., D] of x [..., D]."""
        dense = partial(nn.Dense, use_bias=False, dtype=self.dtype, dot_general=dense_dot_general)
        hidden = dense(self.rank, kernel_init=nn.initializers.zeros, name="down")(x)
        if self.activation is not None:
            hidden = self.activation(hidden)
        # The published code takes the ratio of inputs to outputs here, as it stores these kernels transposed.
        gain = 0.1 * max(1, self.rank / self.width) ** 0.5
        y = dense(self.width, kernel_init=nn.initializers.orthogonal(gain), name="up")(hidden)
        y = y.astype(sums_dtype(y.dtype))
        if self.bias_init is None:
            return y
        return y + self.param("bias", self.bias_init, (self.width,), jnp.float32).astype(y.dtype)


def _exactly(values: np.ndarray) -> Initializer:
    return lambda key, shape, dtype=jnp.float32: jnp.asarray(values, dtype)
