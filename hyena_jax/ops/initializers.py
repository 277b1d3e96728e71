"""Initialisations of published models, by the names in configs."""

import math
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.typing import Initializer


class Initializers(NamedTuple):
    """An initialiser for each role in dense layers, and one for embeddings."""

    kernel: Initializer
    out_kernel: Initializer
    """For a layer whose output is added to the residual stream."""
    bias: Initializer
    out_bias: Initializer
    embedding: Initializer
    head: Initializer


def initializers(name: str, n_layers: int, fan_in: int, out_fan_in: int) -> Initializers:
    """The initialisers that `name`, one of `hyena_jax.config.Init`, stands for.

    - `gpt2`: N(0, 0.02^2); residual outputs N(0, 0.02^2 / (2 n_layers)); biases 0 (the published Hyena's);
    - `griffin`: variance 1 / fan_in; residual outputs 2 / (n_layers fan_in); biases 0; embeddings 1 / D;
    - `torch`: U(±1/sqrt(fan_in)), biases too; embeddings N(0, 1);
    - `xavier`: Xavier-uniform kernels; biases 0; embeddings N(0, 0.02^2);
    - `rwkv7`: orthogonal kernels times sqrt(max(1, outputs / inputs)), half of that in the head; residual
      outputs and biases 0; embeddings U(±1e-4).

    Args:
      fan_in: inputs of all layers but the last; for embeddings the width D.
      out_fan_in: inputs of the last layer, which is added to the residual stream.
    """
    normal, zeros = nn.initializers.normal, nn.initializers.zeros
    match name:
        case "gpt2":
            return Initializers(
                normal(0.02),
                normal(0.02 / (2 * n_layers) ** 0.5),
                zeros,
                zeros,
                normal(0.02),
                normal(0.02),
            )
        case "griffin":
            inner = normal(fan_in**-0.5)
            outer = normal((2 / (n_layers * out_fan_in)) ** 0.5)
            return Initializers(inner, outer, zeros, zeros, inner, inner)
        case "torch":
            inner, outer = uniform_fan_in(fan_in), uniform_fan_in(out_fan_in)
            return Initializers(inner, outer, inner, outer, normal(1.0), inner)
        case "xavier":
            xavier = nn.initializers.xavier_uniform()
            return Initializers(xavier, xavier, zeros, zeros, normal(0.02), xavier)
        case "rwkv7":
            small = uniform_within(1e-4)
            return Initializers(scaled_orthogonal(1), zeros, zeros, zeros, small, scaled_orthogonal(0.5))


def uniform_fan_in(fan_in: int) -> Initializer:
    """U(-1/sqrt(fan_in), 1/sqrt(fan_in)), PyTorch's default for dense and convolution layers."""
    return uniform_within(fan_in**-0.5)


def uniform_within(bound: float) -> Initializer:
    """U(-bound, bound)."""

    def init(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype = jnp.float32) -> jax.Array:
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init


def scaled_orthogonal(gain: float) -> Initializer:
    """Orthogonal kernels [*inputs, outputs] times gain sqrt(max(1, outputs / inputs)), as in RWKV's code."""

    def init(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype = jnp.float32) -> jax.Array:
        scale = gain * max(1, shape[-1] / math.prod(shape[:-1])) ** 0.5
        return nn.initializers.orthogonal(scale)(key, shape, dtype)

    return init


def a_log_init(low: float, high: float) -> Initializer:
    """The log of a number that is uniform in (low, high]: decay rates of Mamba-2 and Gated DeltaNet."""

    def init(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype = jnp.float32) -> jax.Array:
        return jnp.log(high - (high - low) * jax.random.uniform(key, shape, dtype))

    return init


def dt_bias_init(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """softplus(dt_bias) is log-uniform in [0.001, 0.1]: time steps of Mamba-2 and Gated DeltaNet."""
    dt = jnp.exp(jax.random.uniform(key, shape, dtype, jnp.log(0.001), jnp.log(0.1)))
    return dt + jnp.log(-jnp.expm1(-dt))
