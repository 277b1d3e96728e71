"""The residual block, for every model, and its feed-forward part.

Axes: B batch, L length, T new tokens, D channels.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

import flax.linen as nn
import flax.linen.module as flax_module
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from hyena_jax.config import BackboneConfig, MixerConfig, ModelConfig, name_of
from hyena_jax.config.models import NormPlace
from hyena_jax.config.registry import parts_in
from hyena_jax.mixers import Mixer, mixer_class
from hyena_jax.mixers.layers import make_norm
from hyena_jax.mixers.sequence import FILTER, Handed, Sequence
from hyena_jax.ops.fast.dense import dense_dot_general
from hyena_jax.ops.forms import Layout, forms_for
from hyena_jax.ops.initializers import initializers
from hyena_jax.system.errors import require

Arrays = Any
"""A tree of arrays."""

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


class BlockState(NamedTuple):
    """The state of a block with token shift in its feed-forward part: the mixer's, and the shift's."""

    mixer: Any
    shift: Any


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
        config = self.config
        init = initializers(config.init, config.n_layers, config.d_model, config.d_ff)
        dense = partial(nn.Dense, use_bias=config.ffn_bias, dtype=self.dtype)
        inner = partial(
            dense, config.d_ff, kernel_init=init.kernel, bias_init=init.bias, dot_general=dense_dot_general
        )
        hidden = inner(name="in_proj")(x)
        match config.ffn:
            case "gelu":
                hidden = nn.gelu(hidden, approximate=False)
            case "gelu_tanh":
                hidden = nn.gelu(hidden, approximate=True)
            case "relu":
                hidden = nn.relu(hidden)
            case "squared_relu":
                hidden = jnp.square(nn.relu(hidden))
            case gated:
                hidden = GATES[gated](inner(name="gate_proj")(x)) * hidden
        out_proj = dense(x.shape[-1], kernel_init=init.out_kernel, bias_init=init.out_bias, name="out_proj")
        return out_proj(hidden)


@dataclass(frozen=True)
class TokenShiftConfig(MixerConfig):
    """Token shift has no options."""


class TokenShift(Mixer):
    """x + mu ⊙ (x' - x), where x' is the token before x, 0 before a document's first (RWKV, 2305.13048).

    A block may have it before its feed-forward part.

    Parameters:
      mu [D]: starts at 1 - (c / D)^(q^4) in channel c, q = 1 - layer / n_layers, as in RWKV-7's code.
    """

    config: TokenShiftConfig = TokenShiftConfig()
    has_constant_state = True

    def setup(self) -> None:
        def init(key: jax.Array, shape: tuple[int], dtype: jnp.dtype) -> jax.Array:
            fraction = jnp.arange(self.d_model, dtype=dtype) / self.d_model
            return 1 - fraction ** ((1 - self.layer / self.n_layers) ** 4)

        self.mu = self.param("mu", init, (self.d_model,), jnp.float32)

    def mix(self, x: jax.Array, seq: Sequence, deterministic: bool) -> jax.Array:
        return x + self.mu.astype(x.dtype) * (seq.shift(x) - x)


class Block(nn.Module):
    """x <- x + mixer(norm(x)), then x <- x + mlp(norm(x)); or the bare mixer, x <- mixer(x).

    With `norm_place` "after", x <- x + norm(mixer(x)), then x <- x + norm(mlp(x)). With `ffn_shift`, mlp
    reads u + mu ⊙ (u' - u) of its input u, where u' is that of the token before.

    Decoding follows the mixer contract: the block's state is its mixer's, or a `BlockState`. `dtype`,
    `sequence_axis` and `handed` are as of `Mixer`.

    Attributes:
      model: the config of the model that the block is part of.
      layer: which of the model's blocks this is, from 0.
      layout: the devices that the model is compiled for.

    Parameters:
      mixer_norm/scale [D]: the factor of LayerNorm, or the factor less 1 of RMSNorm.
      mixer_norm/bias [D]: only of LayerNorm.
      mixer/*: see the mixer.
      mlp_norm/scale [D]: as mixer_norm/scale.
      mlp_norm/bias [D]: only of LayerNorm.
      mlp_shift/mu [D]: with ffn_shift.
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
    norm_place: NormPlace = "before"
    layer: int = 0

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
        self.hands_on = issubclass(mixer, Mixer)
        if self.hands_on:
            options["layer"] = self.layer
        self.mixer = mixer(
            model.d_model, model.max_len, self.mixer_config, model.n_layers, self.dtype, **options
        )
        if model.ffn != "none":
            self.mlp_norm = make_norm(model.norm, self.dtype, model.norm_eps)
            self.mlp = MLP(model, self.dtype)
        if model.ffn_shift:
            axis = None if self.is_initializing() else self.sequence_axis
            self.mlp_shift = TokenShift(
                model.d_model,
                model.max_len,
                TokenShiftConfig(),
                model.n_layers,
                self.dtype,
                axis,
                layer=self.layer,
            )
        self.dropout = nn.Dropout(model.dropout)

    def __call__(
        self, x: jax.Array, segment_ids: jax.Array | None = None, deterministic: bool = True
    ) -> jax.Array:
        """y [B, L, D] of x [B, L, D], as the first block."""
        return self.feed_forward(self.mix(x, segment_ids, deterministic, {}), segment_ids, deterministic)

    def mix(
        self, x: jax.Array, segment_ids: jax.Array | None, deterministic: bool, handed: Handed
    ) -> jax.Array:
        """The first half: x + mixer(norm(x)), x + norm(mixer(x)), or mixer(x)."""
        u = self._before(self.mixer_norm, x)
        y = self.mixer(u, segment_ids, deterministic, **self._options(handed))
        self._check_output(x, y)
        return self._after(self.mixer_norm, x, y, deterministic)

    def _before(self, norm: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
        return norm(x) if self.norm_place == "before" else x

    def _after(
        self, norm: Callable[[jax.Array], jax.Array], x: jax.Array, y: jax.Array, deterministic: bool
    ) -> jax.Array:
        """What a half of the block returns, given its input x and the output y of its mixer or MLP."""
        y = norm(y) if self.norm_place == "after" else y
        return x + self.dropout(y, deterministic) if self.model.residual else y

    def _options(self, handed: Handed) -> dict[str, Handed]:
        """Keyword arguments of the mixer's methods; a module that is not a `Mixer` knows no `handed`."""
        return {"handed": handed} if self.hands_on else {}

    def _check_output(self, x: jax.Array, y: Any) -> None:
        """Refuses what a mixer may not make of x [B, L, D] or [B, D]: the mixer may be the user's."""
        what = f"the output of mixer {type(self.mixer).__name__}"
        require(isinstance(y, jax.Array), what, type(y).__name__, "an array [B, L, D]")
        require(y.shape == x.shape, what, y.shape, f"of the shape of its input, {x.shape}")
        require(jnp.issubdtype(y.dtype, jnp.floating), what, y.dtype.name, "real floating point")

    def feed_forward(self, x: jax.Array, segment_ids: jax.Array | None, deterministic: bool) -> jax.Array:
        """The second half: x + mlp(norm(x)), x + norm(mlp(x)), or x."""
        if self.model.ffn == "none":
            return x
        u = self._before(self.mlp_norm, x)
        if self.model.ffn_shift:
            u = self.mlp_shift(u, segment_ids)
        return self._after(self.mlp_norm, x, self.mlp(u), deterministic)

    def init_state(self, batch_size: int, max_len: int) -> Any:
        """The state before the first token."""
        state = self.mixer.init_state(batch_size, max_len)
        if self.model.ffn_shift:
            return BlockState(state, self.mlp_shift.init_state(batch_size, max_len))
        return state

    def decode(
        self, method: str, state: Any, x: jax.Array, handed: Handed, *arguments: jax.Array | None
    ) -> tuple[Any, jax.Array]:
        """`prefill` with the next tokens x [B, T, D] and their lengths, or `step` with the next, [B, D]."""
        has_shift = self.model.ffn_shift
        of_mixer, of_shift = state if has_shift else (state, None)
        u = self._before(self.mixer_norm, x)
        of_mixer, y = getattr(self.mixer, method)(of_mixer, u, *arguments, **self._options(handed))
        self._check_output(x, y)
        x = self._after(self.mixer_norm, x, y, True)
        if self.model.ffn == "none":
            return of_mixer, x
        u = self._before(self.mlp_norm, x)
        if has_shift:
            of_shift, u = getattr(self.mlp_shift, method)(of_shift, u, *arguments)
        x = self._after(self.mlp_norm, x, self.mlp(u), True)
        return BlockState(of_mixer, of_shift) if has_shift else of_mixer, x


def sequence_layout(config: MixerConfig, sequence_axis: str | None) -> dict[str, str]:
    """The keyword argument that gives a mixer's module the sequence axis, or ValueError if it has none; empty
    without an axis."""
    if sequence_axis is None:
        return {}
    module = mixer_class(config)
    can = "sequence_axis" in module.__dataclass_fields__
    require(can, "pattern", name_of(config), "of mixers that can shard a sequence over devices")
    return {"sequence_axis": sequence_axis}


def make_blocks(
    config: ModelConfig, dtype: jnp.dtype | None, sequence_axis: str | None, layout: Layout
) -> list[Block]:
    """The n_layers blocks of a model; the pattern of mixers repeats, and the first block has `first_ffn`."""
    first = config if config.first_ffn is None else replace(config, ffn=config.first_ffn)
    repeated = zip(cycle(config.pattern), cycle(config.norm_places), range(config.n_layers), strict=False)
    return [
        Block(mixer, config if i else first, dtype, sequence_axis, layout, place, layer=i)
        for mixer, place, i in repeated
    ]


def apply_blocks(
    blocks: list[Block], x: jax.Array, segment_ids: jax.Array | None, deterministic: bool
) -> jax.Array:
    """The blocks, one after the other, each kind of block traced once.

    With `remat`, the backward pass recomputes half a block at a time: the mixer or the feed-forward part.
    Each half gathers its own sharded parameters, in the backward pass again.
    """
    handed: Handed = {}
    for block in blocks:
        x, handed = _once(_whole, block, (deterministic,), x, handed, segment_ids)
    return x


def _whole(
    block: Block, deterministic: bool, x: jax.Array, handed: Handed, segment_ids: jax.Array | None
) -> tuple[jax.Array, Handed]:
    """Both halves of a block, in training and evaluation."""

    def mix(block: Block, inputs: tuple[jax.Array, jax.Array | None, Handed]) -> tuple[jax.Array, Handed]:
        x, segment_ids, handed = *inputs[:2], dict(inputs[2])  # a copy, which the mixer may add to
        return block.mix(x, segment_ids, deterministic, handed), handed

    def feed_forward(block: Block, inputs: tuple[jax.Array, jax.Array | None]) -> jax.Array:
        return block.feed_forward(*inputs, deterministic)

    x, handed = _apply(mix, block, (x, segment_ids, handed))
    return _apply(feed_forward, block, (x, segment_ids)), handed


def init_states(blocks: list[Block], batch_size: int, max_len: int) -> tuple[Any, ...]:
    """The blocks' states before the first token."""
    return tuple(_once(Block.init_state, block, (batch_size, max_len)) for block in blocks)


def decode_blocks(
    blocks: list[Block], method: str, states: tuple[Any, ...], x: jax.Array, *arguments: jax.Array | None
) -> tuple[tuple[Any, ...], jax.Array]:
    """The states after the next tokens x, and the last block's output; see `Block.decode`."""
    after, handed = [], {}
    for block, state in zip(blocks, states, strict=True):
        state, x, handed = _once(_next, block, (method,), state, x, handed, *arguments)
        after.append(state)
    return tuple(after), x


def _next(
    block: Block, method: str, state: Any, x: jax.Array, handed: Handed, *arguments: jax.Array | None
) -> tuple[Any, jax.Array, Handed]:
    handed = dict(handed)  # a copy, which the mixer may add to
    return *block.decode(method, state, x, handed, *arguments), handed


def _once(function: Callable, block: Block, static: tuple, *arrays: Arrays) -> Arrays:
    """function(block, *static, *arrays), which JAX traces once for blocks that differ in parameters alone.

    A start then does not grow with depth; XLA inlines the calls. A block that an interceptor watches, or that
    has variables beside its parameters, is traced in its place.
    """
    scope, mixer = block.scope, mixer_class(block.mixer_config)
    has_more = scope.mutable or set(block.variables) - {"params"}
    # Flax has no public name for the interceptors that are at work.
    if block.is_initializing() or has_more or flax_module._global_interceptor_stack:
        return function(block, *static, *arrays)
    # The mixers of this package read `layer` in initialisers alone; a user's may read it anywhere.
    is_own = mixer.__module__.startswith("hyena_jax.")
    reads_layer = issubclass(mixer, Mixer) and getattr(mixer, "reads_layer", not is_own)
    kind = block.clone(parent=None, name=None, layer=block.layer if reads_layer else 0)
    parts = tuple(parts_in(block.mixer_config))  # which a notebook may have defined again
    rngs = {name: block.make_rng(name) for name in scope.rngs}
    return _traced(function, kind, parts, static, block.variables, rngs, *arrays)


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _traced(
    function: Callable,
    kind: Block,
    parts: tuple,
    static: tuple,
    variables: Arrays,
    rngs: Arrays,
    *arrays: Arrays,
) -> Arrays:
    return nn.apply(lambda block: function(block, *static, *arrays), kind)(variables, rngs=rngs)


def _apply(half: Callable[[Block, Arrays], Arrays], block: Block, x: Arrays) -> Arrays:
    """half(block, x), pinned, gathered and recomputed as the block's layout and model ask for.

    x is a tuple that begins with the residual stream [B, L, D], of arrays [B, L, ...].
    """
    layout = block.layout
    if block.is_initializing():
        return half(block, x)
    x = jax.tree.map(layout.pin, x)
    if layout.gathers:  # XLA drops the parameters of the other half
        half = nn.map_variables(half, "params", lambda params: checkpoint_name(layout.gather(params), WHOLE))
    if block.model.remat != "none" and block.scope.path == ():  # in `_traced`
        y = _recomputed(half, block, x)
    elif block.model.remat != "none" or layout.gathers:
        y = _remat(half, block)(block, x)
    else:
        y = half(block, x)
    return jax.tree.map(layout.pin, y)


def _remat(half: Callable[[Block, Arrays], Arrays], block: Block) -> Callable:
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


def _recomputed(half: Callable[[Block, Arrays], Arrays], block: Block, x: Arrays) -> Arrays:
    """half(block, x), which the backward pass recomputes once its output gradient is available.

    At most one half's activations are then live. With `nn.remat` alone, XLA for CPUs recomputes all halves
    first, which saves nothing: see `wait_for`, and tests/models/test_recomputed_memory.py. Reverse mode only;
    for forward mode set `remat="none"`.
    """

    kind, recomputing = block.clone(parent=None, name=None), _remat(half, block)
    counters = block.dropout.scope.rng_counters  # the masks drawn so far: one of the other half is another
    drawn = dict(counters)

    def applied(half: Callable, variables: Arrays, x: Arrays, rngs: Arrays) -> Arrays:
        def counted(block: Block) -> Arrays:
            block.dropout.scope.rng_counters.update(drawn)
            y = half(block, x)
            counters.update(block.dropout.scope.rng_counters)
            return y

        return nn.apply(counted, kind)(variables, rngs=rngs)

    # All arrays are arguments, keys too: one that a derivative closes over would be of another trace.
    apply = jax.custom_vjp(partial(applied, half))

    def forward(variables: Arrays, x: Arrays, rngs: Arrays) -> tuple[Arrays, Callable]:
        return jax.vjp(lambda variables, x: applied(recomputing, variables, x, rngs), variables, x)

    def backward(pull_back: Callable, y_bar: Arrays) -> tuple[Any, Arrays, None]:
        # The leaves of `pull_back` are the stored arrays, from which it recomputes the half.
        of_stream = jax.tree.leaves(y_bar)[0]
        return *jax.tree.map(lambda stored: wait_for(of_stream, stored), pull_back)(y_bar), None

    apply.defvjp(forward, backward)
    return apply(block.variables, x, {name: rng.as_jax_rng() for name, rng in block.scope.rngs.items()})


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
