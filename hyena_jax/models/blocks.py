"""The residual block, for every model. Axes: B batch, L length, T new tokens, D channels."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from hyena_jax.config import BackboneConfig, MixerConfig, ModelConfig, require
from hyena_jax.initializers import initializers
from hyena_jax.layout import Layout
from hyena_jax.mixers import mixer_class
from hyena_jax.mixers.sequence import FILTER
from hyena_jax.models.norms import make_norm
from hyena_jax.ops.fast.dense import dense_dot_general
from hyena_jax.ops.forms import forms_for

# The name by which `jax.checkpoint` policies know gathered parameters.
WHOLE = "whole_parameters"
# Primitives with real inputs and complex outputs.
MAKE_COMPLEX = ("complex", "fft")

# What is stored for the backward pass in addition to the inputs of mixers and feed-forward parts; the rest is
# recomputed.
REMAT_POLICIES = {
    "block": jax.checkpoint_policies.nothing_saveable,
    "filters": jax.checkpoint_policies.save_only_these_names(FILTER),
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots_no_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    # Without recomputation: everything but the parameters that a half has gathered.
    "none": jax.checkpoint_policies.save_anything_except_these_names(WHOLE),
}


# The activations of the gated feed-forward parts.
GATES = {
    "geglu": nn.gelu,
    "geglu_erf": partial(nn.gelu, approximate=False),
    "swiglu": nn.silu,
    "bilinear": lambda x: x,
}


class MLP(nn.Module):
    """The feed-forward part: dense -> activation -> dense, or a gated form of it.

    In gated forms the hidden layer is f(gate_proj(x)) ⊙ in_proj(x), with f the tanh form of GELU for `geglu`,
    its erf form for `geglu_erf`, SiLU for `swiglu`, and the identity for `bilinear` (Shazeer 2020, arXiv
    2002.05202).

    Attributes:
      config: its `ffn`, `ffn_bias`, `d_ff`, `init` and `n_layers` count.
      dtype: of the activations; None follows the input.
    """

    config: BackboneConfig
    dtype: jnp.dtype | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """y [..., D] of x [..., D]."""
        hidden = self._dense("in_proj", self.config.d_ff)(x)
        match self.config.ffn:
            case "gelu":
                hidden = nn.gelu(hidden, approximate=False)
            case "gelu_tanh":
                hidden = nn.gelu(hidden, approximate=True)
            case "relu":
                hidden = nn.relu(hidden)
            case gated:
                gate = self._dense("gate_proj", self.config.d_ff)(x)
                hidden = GATES[gated](gate) * hidden
        return self._dense("out_proj", x.shape[-1], is_last=True)(hidden)

    def _dense(self, name: str, width: int, is_last: bool = False) -> nn.Dense:
        config = self.config
        init = initializers(config.init, config.n_layers, config.d_model, config.d_ff)
        kernel, bias = (init.out_kernel, init.out_bias) if is_last else (init.kernel, init.bias)
        # The product of all layers but the last is followed by an activation: see `ops.fast.dense`.
        product = None if is_last else dense_dot_general
        return nn.Dense(
            width,
            use_bias=config.ffn_bias,
            dtype=self.dtype,
            kernel_init=kernel,
            bias_init=bias,
            dot_general=product,
            name=name,
        )


class Block(nn.Module):
    """x <- x + mixer(norm(x)), then x <- x + mlp(norm(x)); or the bare mixer, x <- mixer(x).

    Decoding follows the mixer contract: the block's state is its mixer's.

    Attributes:
      mixer_config: which mixer.
      model: the config of the model that the block is part of.
      dtype: of the activations; None follows the input.
      sequence_axis: mesh axis over which L is sharded in `__call__`, or None.
      layout: the devices that the model is compiled for.

    Parameters:
      mixer_norm/scale [D]: the factor of LayerNorm, or the factor less 1 of RMSNorm.
      mixer_norm/bias [D]: only of LayerNorm.
      mixer/*: see the mixer.
      mlp_norm/scale [D]: as mixer_norm/scale.
      mlp_norm/bias [D]: only of LayerNorm.
      mlp/in_proj/kernel [D, d_ff]: the layer before the activation, or in gated forms the gated one.
      mlp/in_proj/bias [d_ff]: with ffn_bias, as the other two biases.
      mlp/gate_proj/kernel [D, d_ff]: only of gated forms, the layer before the activation.
      mlp/gate_proj/bias [d_ff]:
      mlp/out_proj/kernel [d_ff, D]:
      mlp/out_proj/bias [D]:
    """

    mixer_config: MixerConfig
    model: ModelConfig
    dtype: jnp.dtype | None = None
    sequence_axis: str | None = None
    layout: Layout = Layout()

    def setup(self) -> None:
        model = self.model
        self.mixer_norm = make_norm(model.norm, self.dtype, model.norm_eps)
        # Parameters do not depend on the sequence axis, and are made before there is a mesh.
        options = {} if self.is_initializing() else sequence_layout(self.mixer_config, self.sequence_axis)
        mixer = mixer_class(self.mixer_config)
        if "forms" in mixer.__dataclass_fields__:
            options["forms"] = forms_for(self.layout.platform, self.layout.kernels)
        if "platform" in mixer.__dataclass_fields__:
            options["platform"] = self.layout.platform
        self.mixer = mixer(
            model.d_model, model.max_len, self.mixer_config, model.n_layers, self.dtype, **options
        )
        if model.ffn != "none":
            self.mlp_norm = make_norm(model.norm, self.dtype, model.norm_eps)
            self.mlp = MLP(model, self.dtype)
        self.dropout = nn.Dropout(model.dropout)

    def __call__(
        self, x: jax.Array, segment_ids: jax.Array | None = None, deterministic: bool = True
    ) -> jax.Array:
        """y [B, L, D] of x [B, L, D]."""
        return self.feed_forward(self.mix(x, segment_ids, deterministic), deterministic)

    def mix(self, x: jax.Array, segment_ids: jax.Array | None, deterministic: bool) -> jax.Array:
        """The first half: x + mixer(norm(x)), or mixer(x)."""
        y = self.mixer(self.mixer_norm(x), segment_ids, deterministic)
        self._check_output(x, y)
        return x + self.dropout(y, deterministic) if self.model.residual else y

    def _check_output(self, x: jax.Array, y: Any) -> None:
        """Refuses what a mixer may not make of x [B, L, D] or [B, D]: the mixer may be the user's."""
        what = f"the output of mixer {type(self.mixer).__name__}"
        require(isinstance(y, jax.Array), what, type(y).__name__, "an array [B, L, D]")
        require(y.shape == x.shape, what, y.shape, f"of the shape of its input, {x.shape}")
        require(jnp.issubdtype(y.dtype, jnp.floating), what, y.dtype.name, "real floating point")

    def feed_forward(self, x: jax.Array, deterministic: bool) -> jax.Array:
        """The second half: x + mlp(norm(x)), or x."""
        if self.model.ffn == "none":
            return x
        y = self.mlp(self.mlp_norm(x))
        return x + self.dropout(y, deterministic) if self.model.residual else y

    def init_state(self, batch_size: int, max_len: int) -> Any:
        """The mixer's state before the first token."""
        return self.mixer.init_state(batch_size, max_len)

    def prefill(self, state: Any, x: jax.Array, lengths: jax.Array | None = None) -> tuple[Any, jax.Array]:
        """The next T tokens x [B, T, D]."""
        state, y = self.mixer.prefill(state, self.mixer_norm(x), lengths)
        self._check_output(x, y)
        return state, self._after_mixer(x, y)

    def step(self, state: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        """The next token x [B, D]."""
        state, y = self.mixer.step(state, self.mixer_norm(x))
        self._check_output(x, y)
        return state, self._after_mixer(x, y)

    def _after_mixer(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """The block's output, given its input x and the mixer's output y."""
        return self.feed_forward(x + y if self.model.residual else y, True)


def sequence_layout(config: MixerConfig, sequence_axis: str | None) -> dict[str, str]:
    """The keyword argument that gives a mixer's module the sequence axis; empty without an axis.

    Raises:
      ValueError: if there is a sequence axis and the mixer has no such field.
    """
    if sequence_axis is None:
        return {}
    module = mixer_class(config)
    can = "sequence_axis" in module.__dataclass_fields__
    require(can, "pattern", type(config).__name__, "of mixers that can shard a sequence over devices")
    return {"sequence_axis": sequence_axis}


def make_blocks(
    config: ModelConfig, dtype: jnp.dtype | None, sequence_axis: str | None, layout: Layout
) -> list[Block]:
    """The n_layers blocks of a model; the pattern of mixers repeats, and the first block has `first_ffn`."""
    first = config if config.first_ffn is None else replace(config, ffn=config.first_ffn)
    mixers = (config.pattern[i % len(config.pattern)] for i in range(config.n_layers))
    return [
        Block(mixer, config if i else first, dtype, sequence_axis, layout) for i, mixer in enumerate(mixers)
    ]


def apply_blocks(
    blocks: list[Block], x: jax.Array, segment_ids: jax.Array | None, deterministic: bool
) -> jax.Array:
    """The blocks, one after the other.

    With `remat`, the backward pass recomputes half a block at a time: the mixer or the feed-forward part.
    Where parameters are sharded, each half gathers its own, and the backward pass gathers them again.
    """

    halves = (
        lambda block, x: block.mix(x, segment_ids, deterministic),
        lambda block, x: block.feed_forward(x, deterministic),
    )
    for block in blocks:
        for half in halves:
            x = _apply(half, block, x)
    return x


def _apply(half: Callable[[Block, jax.Array], jax.Array], block: Block, x: jax.Array) -> jax.Array:
    layout = block.layout
    if block.is_initializing():
        return half(block, x)
    x = layout.pin(x)
    if layout.gathers:  # XLA drops the parameters of the other half
        half = nn.map_variables(half, "params", lambda params: checkpoint_name(layout.gather(params), WHOLE))
    if block.model.remat != "none":
        y = _recomputed(half, block, x)
    elif layout.gathers:
        y = _remat(half, block)(block, x)
    else:
        y = half(block, x)
    return layout.pin(y)


def _remat(half: Callable[[Block, jax.Array], jax.Array], block: Block) -> Callable:
    """`half`, of which the policy of the model's `remat` decides what is stored; complex arrays never are.

    `jax.checkpoint` rounds what it stores by `reduce_precision`, which refuses complex numbers.
    """
    policy = REMAT_POLICIES[block.model.remat]

    def saves(primitive: Any, *inputs: Any, **params: Any) -> Any:
        dtypes = [*(x.dtype for x in inputs if hasattr(x, "dtype")), params.get("new_dtype", jnp.float32)]
        is_complex = any(jnp.issubdtype(dtype, jnp.complexfloating) for dtype in dtypes)
        if is_complex or primitive.name in MAKE_COMPLEX:
            return False
        return policy(primitive, *inputs, **params)

    return nn.remat(half, policy=saves)


def _recomputed(half: Callable[[Block, jax.Array], jax.Array], block: Block, x: jax.Array) -> jax.Array:
    """half(block, x), which the backward pass recomputes once its output gradient is available.

    At most one half's activations are then live. `nn.remat` alone decides what is stored, not when the rest
    is recomputed, and XLA for CPUs recomputes all halves first, which saves nothing: see `wait_for`, and
    tests/models/test_recomputed_memory.py, which fails without it. Reverse mode only; for forward mode set
    `remat="none"`.
    """

    def forward(block: Block, x: jax.Array) -> tuple[jax.Array, Callable]:
        return nn.vjp(_remat(half, block), block, x)

    def backward(pull_back: Callable, y_bar: jax.Array) -> tuple[Any, jax.Array]:
        # The leaves of `pull_back` are the stored arrays, from which it recomputes the half.
        return jax.tree.map(lambda stored: wait_for(y_bar, stored), pull_back)(y_bar)

    return nn.custom_vjp(half, forward, backward)(block, x)


def wait_for(gradient: jax.Array, x: jax.Array) -> jax.Array:
    """x, which XLA cannot compute before the gradient; NaN if the gradient contains NaN.

    XLA for CPUs drops an `optimization_barrier` before it schedules operations, but not a test for NaN.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return jnp.where(jnp.isnan(gradient.sum()), jnp.nan, x)


def activation_dtype(config: BackboneConfig) -> jnp.dtype | None:
    """The modules' `dtype`: None, which follows the parameters, unless activations are narrower."""
    return None if config.dtype == "float32" else jnp.dtype(config.dtype)
