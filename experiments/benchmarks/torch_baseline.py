"""The mixers in plain PyTorch, with our parameters, as a PyTorch user would write them.

For configs with default options. Import only where PyTorch is installed. Axes: B batch, L length, D channels,
H heads, d head_dim.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
import torch
import torch.nn.functional as F

from hyena_jax.config import AttentionConfig, FIRConfig, HawkConfig, HyenaConfig, ImplicitFilterConfig
from hyena_jax.filters.long_filter import decay_rates

Tensors = dict[str, Any]
# (config, max_len, params, x [B, L, D]) -> y [B, L, D].
Forward = Callable[[Any, int, Tensors, torch.Tensor], torch.Tensor]


def fft_conv(u: torch.Tensor, h: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
    """h * u + skip u for u [B, D, L], h [D, L], skip [D], in float32, through real FFTs of 2 L points."""
    n, length, dtype = 2 * u.shape[-1], u.shape[-1], u.dtype
    u = u.float()
    y = torch.fft.irfft(torch.fft.rfft(u, n) * torch.fft.rfft(h, n), n)[..., :length]
    return (y + skip[:, None] * u).to(dtype)


def implicit_filter(
    config: ImplicitFilterConfig, max_len: int, params: Tensors, n_filters: int, channels: int, length: int
) -> torch.Tensor:
    """The sine network under its window, h [N, D, L]."""
    hidden = params["positions"][:length]
    for layer in range(config.n_hidden + 1):
        hidden = torch.sin(params["sine_frequency"] * dense(params[f"dense_{layer}"], hidden))
    h = hidden @ params[f"dense_{config.n_hidden + 1}"]["kernel"]
    decay = torch.as_tensor(np.abs(decay_rates(config, n_filters * channels)), dtype=h.dtype, device=h.device)
    time = torch.arange(length, dtype=h.dtype, device=h.device) / max(max_len - 1, 1)
    h = h * (torch.exp(-time[:, None] * decay) + config.window_shift)
    return h.reshape(length, channels, n_filters).permute(2, 1, 0)


def hyena(config: HyenaConfig, max_len: int, params: Tensors, x: torch.Tensor) -> torch.Tensor:
    """Gate-first Hyena of any order, with an implicit filter or one free tap per position."""
    order, width, length = config.order, x.shape[2], x.shape[1]
    z = causal_conv(params, dense(params["in_proj"], x).transpose(1, 2))
    *gates, v = z.chunk(order + 1, dim=1)
    if "taps" in params["filter"]:
        h = params["filter"]["taps"][..., :length]
    else:
        h = implicit_filter(config.filter, max_len, params["filter"], order - 1, width, length)
    for o in range(order - 1):
        v = fft_conv(v * gates[order - 1 - o], h[o], params["skip"][o])
    return dense(params["out_proj"], (v * gates[0]).transpose(1, 2))


def fir(config: FIRConfig, max_len: int, params: Tensors, x: torch.Tensor) -> torch.Tensor:
    """One FFT convolution with free taps between two dense layers."""
    u = dense(params["in_proj"], x).transpose(1, 2)
    y = fft_conv(u, params["filter"]["taps"][0, :, : x.shape[1]], params["skip"][0])
    return dense(params["out_proj"], y.transpose(1, 2))


def attention(config: AttentionConfig, max_len: int, params: Tensors, x: torch.Tensor) -> torch.Tensor:
    """Causal attention through `scaled_dot_product_attention`."""
    heads = dense(params["qkv_proj"], x).reshape(*x.shape[:2], 3, config.n_heads, -1)
    q, k, v = heads.permute(2, 0, 3, 1, 4)  # each [B, H, L, d]
    o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return dense(params["out_proj"], o.transpose(1, 2).reshape(x.shape))


def hawk(config: HawkConfig, max_len: int, params: Tensors, x: torch.Tensor) -> torch.Tensor:
    """Hawk's block; the recurrence as a loop over time."""
    gate, u = dense(params["in_proj"], x).chunk(2, dim=-1)
    u = causal_conv(params, u.transpose(1, 2)).transpose(1, 2)
    kernels = (params[name]["kernel"][0] for name in ("recurrence_gate", "input_gate"))
    r, i = (torch.sigmoid((u @ kernel.to(u.dtype)).float()) for kernel in kernels)
    a = torch.exp(-8 * r * F.softplus(params["rate"]))
    inputs = torch.sqrt(1 - a**2) * i * u.float()
    state, states = torch.zeros_like(inputs[:, 0]), []
    for a_t, x_t in zip(a.unbind(1), inputs.unbind(1), strict=True):
        state = a_t * state + x_t
        states.append(state)
    return dense(params["out_proj"], F.gelu(gate) * torch.stack(states, dim=1).to(gate.dtype))


MIXERS: dict[str, Forward] = {"hyena": hyena, "fir": fir, "attention": attention, "hawk": hawk}


def causal_conv(params: Tensors, x: torch.Tensor) -> torch.Tensor:
    """The depthwise FIR on x [B, D, L]; PyTorch cross-correlates, so the taps are reversed."""
    kernel, bias = params["short_taps"].flip(1)[:, None], params["short_bias"]
    padded = F.pad(x, (kernel.shape[-1] - 1, 0))
    return F.conv1d(padded, kernel.to(x.dtype), bias.to(x.dtype), groups=x.shape[1])


def dense(params: Tensors, x: torch.Tensor) -> torch.Tensor:
    """x W + b, in the dtype of x."""
    bias = params.get("bias")
    return F.linear(x, params["kernel"].T.to(x.dtype), None if bias is None else bias.to(x.dtype))


def to_torch(x: jax.Array) -> torch.Tensor:
    """A tensor of the same values and dtype, on a GPU if both JAX and PyTorch can use one."""
    on_gpu = jax.default_backend() == "gpu" and torch.cuda.is_available()
    dtype = getattr(torch, str(x.dtype))
    return torch.tensor(np.asarray(x, np.float32), dtype=dtype, device="cuda" if on_gpu else "cpu")


def programs(mixer: str, config: Any, max_len: int, params: dict, x: jax.Array, cotangent: jax.Array) -> dict:
    """Functions without arguments, `forward` and `forward_backward`; they return when the result is ready.

    The second returns y, and the gradients of x and of all parameters.
    """
    tensors = jax.tree.map(lambda leaf: to_torch(leaf).requires_grad_(), params)
    x, cotangent = to_torch(x).requires_grad_(), to_torch(cotangent)
    apply = partial(MIXERS[mixer], config, max_len)
    leaves = [x, *jax.tree.leaves(tensors)]

    def wait() -> None:
        if x.is_cuda:
            torch.cuda.synchronize()

    def forward() -> torch.Tensor:
        with torch.no_grad():
            y = apply(tensors, x)
        wait()
        return y

    def forward_backward() -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        y = apply(tensors, x)
        gradients = torch.autograd.grad(y, leaves, cotangent)
        wait()
        return y, gradients

    return {"forward": forward, "forward_backward": forward_backward}


def value_and_gradient(
    config: Any, params: dict, x: jax.Array, cotangent: jax.Array, max_len: int, mixer: str
) -> tuple[np.ndarray, np.ndarray]:
    """y, and the gradient of x [B, L, D] given a cotangent of y; for the check before timing."""
    y, gradients = programs(mixer, config, max_len, params, x, cotangent)["forward_backward"]()
    return tuple(z.detach().float().cpu().numpy() for z in (y, gradients[0]))
