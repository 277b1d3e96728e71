"""The mixers as one would first write them in Flax, with our parameters: a baseline for the faster forms.

Plain autodiff throughout, `nn.Conv` with one group per channel, `jnp.fft` over axis 1 of [B, L, D], and a
plain `jax.lax.associative_scan`. For configs with default options.

Axes: B batch, L length, D channels, H heads.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from hyena_jax.config import AttentionConfig, HawkConfig, HyenaConfig, MixerConfig
from hyena_jax.filters import build_filter


class NaiveHyena(nn.Module):
    """Gate-first Hyena of any order."""

    config: HyenaConfig
    max_len: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """y [B, L, D] of x [B, L, D]."""
        order, width, length = self.config.order, x.shape[2], x.shape[1]
        z = nn.Dense((order + 1) * width, dtype=self.dtype, name="in_proj")(x)
        z = causal_conv(z, self.config.short_filter_len, self.dtype)
        *gates, v = jnp.split(z, order + 1, axis=-1)
        h = build_filter(order - 1, width, self.max_len, self.config.filter).copy(name="filter")(length)
        skip = self.param("skip", nn.initializers.normal(1.0), (order - 1, width))
        for o in range(order - 1):
            v = v * gates[order - 1 - o]
            u = v.astype(jnp.float32)
            spectrum = jnp.fft.rfft(u, 2 * length, axis=1) * jnp.fft.rfft(h[o].T, 2 * length, axis=0)
            v = (jnp.fft.irfft(spectrum, 2 * length, axis=1)[:, :length] + skip[o] * u).astype(self.dtype)
        return nn.Dense(width, dtype=self.dtype, name="out_proj")(v * gates[0])


class NaiveHawk(nn.Module):
    """Hawk's block with dense gates."""

    config: HawkConfig
    max_len: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """y [B, L, D] of x [B, L, D]."""
        width = x.shape[2]
        dense = {"use_bias": False, "dtype": self.dtype}
        gate, u = jnp.split(nn.Dense(2 * width, **dense, name="in_proj")(x), 2, axis=-1)
        u = causal_conv(u, self.config.short_filter_len, self.dtype)
        gates = (nn.Dense(width, **dense, name=name)(u) for name in ("recurrence_gate", "input_gate"))
        r, i = (nn.sigmoid(z.astype(jnp.float32)) for z in gates)
        rate = self.param("rate", nn.initializers.normal(1.0), (width,))
        a = jnp.exp(-8 * r * nn.softplus(rate))
        inputs = jnp.sqrt(1 - a**2) * i * u.astype(jnp.float32)

        def compose(early: tuple, late: tuple) -> tuple[jax.Array, jax.Array]:
            return late[0] * early[0], late[0] * early[1] + late[1]

        h = jax.lax.associative_scan(compose, (a, inputs), axis=1)[1].astype(self.dtype)
        return nn.Dense(width, **dense, name="out_proj")(nn.gelu(gate, approximate=False) * h)


class NaiveAttention(nn.Module):
    """Causal multi-head attention by two einsums, with all weights in memory."""

    config: AttentionConfig
    max_len: int
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """y [B, L, D] of x [B, L, D]."""
        qkv = nn.Dense(3 * x.shape[2], dtype=self.dtype, name="qkv_proj")(x)
        q, k, v = jnp.split(qkv.reshape(*x.shape[:2], 3 * self.config.n_heads, -1), 3, axis=2)
        logits = jnp.einsum("bthd,bshd->bhts", q, k).astype(jnp.float32) / q.shape[-1] ** 0.5
        visible = jnp.tri(x.shape[1], dtype=bool)
        weights = nn.softmax(jnp.where(visible, logits, -jnp.inf)).astype(self.dtype)
        o = jnp.einsum("bhts,bshd->bthd", weights, v).reshape(x.shape)
        return nn.Dense(x.shape[2], dtype=self.dtype, name="out_proj")(o)


MIXERS: dict[str, type[nn.Module]] = {"hyena": NaiveHyena, "hawk": NaiveHawk, "attention": NaiveAttention}


def causal_conv(x: jax.Array, n_taps: int, dtype: jnp.dtype) -> jax.Array:
    """The depthwise FIR of x [B, L, D], as a layer of the module that calls this."""
    return nn.Conv(
        x.shape[2],
        (n_taps,),
        padding=((n_taps - 1, 0),),
        feature_group_count=x.shape[2],
        dtype=dtype,
        name="short_conv",
    )(x)


def convert_params(params: dict) -> dict:
    """Our parameters in the layout of Flax's layers: taps [D, K] reversed as a kernel [K, 1, D]."""
    converted = {name: value for name, value in params.items() if not name.startswith("short_")}
    if "short_taps" in params:
        kernel = params["short_taps"][:, ::-1].T[:, None]
        converted["short_conv"] = {"kernel": kernel, "bias": params["short_bias"]}
    for name in ("recurrence_gate", "input_gate"):
        if name in params:  # one block
            converted[name] = {"kernel": params[name]["kernel"][0]}
    return converted


def build(mixer: str, config: MixerConfig, max_len: int, dtype: jnp.dtype) -> nn.Module:
    """The naive module; `convert_params` makes its parameters from ours."""
    return MIXERS[mixer](config, max_len, dtype)


def value_and_gradient(
    config: MixerConfig, params: dict, x: jax.Array, cotangent: jax.Array, max_len: int, mixer: str
) -> tuple[jax.Array, jax.Array]:
    """y, and the gradient of x [B, L, D] given a cotangent of y; for the check before timing."""
    module = build(mixer, config, max_len, x.dtype)
    converted = convert_params(params)

    def run(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y, pullback = jax.vjp(lambda x: module.apply({"params": converted}, x), x)
        return y, pullback(cotangent)[0]

    return jax.jit(run)(x)
