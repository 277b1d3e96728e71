"""Language models of HazyResearch/safari, and HyenaDNA (2306.15794), whose names are the same.

Axes: D channels, N order, E features of a position, L longest sequence.
"""

import re
from pathlib import Path

import numpy as np

from hyena_jax.config import CKConvFilterConfig, HyenaConfig, ImplicitFilterConfig, LanguageModelConfig
from hyena_jax.config.models import MAX_CHANNELS, MAX_LAYERS, MAX_POSITIONS, MAX_SYMBOLS
from hyena_jax.data.tokenizers import DnaTokenizer
from hyena_jax.filters.long_filter import decay_rates
from hyena_jax.interop.family import Options, Settings, Source, Table, settings_of, without_prefix
from hyena_jax.interop.tensors import Tensors
from hyena_jax.interop.transforms import Transform, dense, layer_norm, reshaped, same, taps, transposed
from hyena_jax.system.errors import UserError, printable, require

DELTAS = re.compile(r"backbone\.layers\.\d+\.mixer\.filter_fn\.modulation\.deltas")
REMATERIALISED = re.compile(r"\.(mixer|mlp)\.layer\.")
STANDALONE_SHIFT = 0.05
"""The window's shift in HyenaDNA's standalone file; its training code has 0, and no config says which."""


def read(source: Path, tensors: Tensors, options: Options) -> Source:
    """A language model of safari; `--config` is its config, which checkpoints do not hold.

    The config is that of the model, or a file that has it under `model` or `model_config`.
    """
    options.refuse_windows()
    settings = settings_of(source, options)
    for name in ("model", "model_config"):
        if isinstance(settings.values.get(name), dict):
            settings = settings.inner(name)
    model = _from_settings(settings, options, 0.0)
    tensors = _renamed(tensors)
    _check_positions(model, tensors)
    return Source(model, _table(model), tensors)


def read_hyenadna(source: Path, tensors: Tensors, options: Options) -> Source:
    """HyenaDNA: one id for each letter; logits by the shared embedding."""
    options.refuse_windows(but="window_shift")
    shift = STANDALONE_SHIFT if options.window_shift is None else options.window_shift
    settings = settings_of(source, options)
    # With more, the standalone file orders the channels of filters differently from the training code.
    settings.inner("layer").require("order", 2)
    model = _from_settings(settings, options, shift)
    tensors = _renamed(tensors)
    head = next((name for name in tensors if name.startswith("head.")), None)
    require(head is None, "tensor", head, "no classifier's: only the language model is read")
    _check_positions(model, tensors)
    return Source(model, _table(model), tensors, tokenizer=DnaTokenizer())


def _renamed(tensors: Tensors) -> Tensors:
    """The tensors without Lightning's prefix, and without the `layer` of rematerialised layers."""
    if any(name.startswith("model.backbone.") for name in tensors):
        others = [name for name in tensors if not name.startswith("model.")]
        if others:
            raise UserError(f"the tensor {printable(others[0])} is unexpected: all names must begin alike")
        tensors = without_prefix(tensors, "model.")
    renamed = {REMATERIALISED.sub(r".\1.", name): tensor for name, tensor in tensors.items()}
    if len(renamed) != len(tensors):
        raise UserError("source has tensors with and without `.layer` in their names")
    return renamed


def _check_positions(model: LanguageModelConfig, tensors: Tensors) -> None:
    """Refuses other sizes than the file's early: to build the model is to compute these features."""
    name = "backbone.layers.0.mixer.filter_fn.pos_emb.z"
    shape = (1, model.max_len, model.pattern[0].filter.emb_dim)
    if name not in tensors:
        raise UserError(f"the tensor {name} {shape} is missing")
    require(tensors[name].shape == shape, f"the tensor {name}", tensors[name].shape, f"{shape} by the config")


def _from_settings(settings: Settings, options: Options, window_shift: float) -> LanguageModelConfig:
    layer = settings.inner("layer")
    settings.require("_name_", "lm", None)
    settings.require("attn_layer_idx", None, [])
    settings.require("max_position_embeddings", 0)
    layer.require("_name_", "hyena", None)
    layer.require("num_heads", 1)
    layer.require("inner_factor", 1)
    layer.require("num_blocks", 1)
    layer.require("outer_mixing", False)
    layer.require("post_order_ffn", False)
    layer.require("activation", "id")
    layer.require("bidirectional", False)
    layer.require("normalized", False)
    layer.require("filter_cls", "hyena-filter")
    layer.require("bias", True)
    layer.require("train_freq", True)
    length = layer.size("l_max", most=MAX_POSITIONS)
    fits, allowed = options.max_len in (None, length), f"{length}, of which the filters are functions"
    require(fits, "max_len", options.max_len, allowed)
    order, d_model = layer.size("order", 2), settings.size("d_model", most=MAX_CHANNELS)
    filter_options = {
        "emb_dim": layer.size("emb_dim", 3),
        "width": layer.size("filter_order", 64),
        "n_hidden": layer.size("num_inner_mlps", 2),
        "sine_frequency": layer.number("w", 1),
    }
    if layer.flag("modulate", True):
        long_filter = ImplicitFilterConfig(
            **filter_options,
            fast_decay=layer.number("fast_decay_pct", 0.3),
            slow_decay=layer.number("slow_decay_pct", 1.5),
            decay_target=layer.number("target", 1e-2),
            window_shift=layer.number("shift", window_shift, or_zero=True),
        )
    else:
        allowed = "None: these filters have no window"
        require(options.window_shift is None, "window_shift", options.window_shift, allowed)
        long_filter = CKConvFilterConfig(**filter_options)
    # order and short_filter_order 3 taps: the standalone file knows no other.
    short = layer.size("short_filter_order", 3)
    return LanguageModelConfig(
        pattern=(HyenaConfig(order=order, short_filter_len=short, filter=long_filter),),
        n_layers=settings.size("n_layer", most=MAX_LAYERS),
        d_model=d_model,
        ffn="gelu_tanh",
        d_ff=settings.size("d_inner", 4 * d_model),
        norm="layer",
        final_norm="layer",
        norm_eps=settings.number("layer_norm_epsilon", 1e-5),
        max_len=length,
        vocab_size=settings.size("vocab_size", most=MAX_SYMBOLS),
        vocab_multiple=settings.size("pad_vocab_size_multiple", 1),
        dtype=options.dtype,
    )


def _table(model: LanguageModelConfig) -> Table:
    mixer, d_model, length = model.pattern[0], model.d_model, model.max_len
    long_filter, n_filters = mixer.filter, mixer.order - 1
    embedding = "backbone.embeddings.word_embeddings.weight"
    found: dict[str, Transform] = {"embedding/embedding": same(embedding)}
    found |= layer_norm("final_norm", "backbone.ln_f")
    copies, constants = {"lm_head.weight": embedding}, {}
    times = np.linspace(0, 1, length)[None, :, None]
    # Stored even where the window is not used.
    has_window = isinstance(long_filter, ImplicitFilterConfig)
    rates = decay_rates(long_filter, n_filters * d_model)[None, None] if has_window else None
    for i in range(model.n_layers):
        ours, theirs = f"blocks_{i}", f"backbone.layers.{i}"
        found |= layer_norm(f"{ours}/mixer_norm", f"{theirs}.norm1")
        found |= layer_norm(f"{ours}/mlp_norm", f"{theirs}.norm2")
        found |= dense(f"{ours}/mixer/in_proj", f"{theirs}.mixer.in_proj")
        found |= dense(f"{ours}/mixer/out_proj", f"{theirs}.mixer.out_proj")
        found |= dense(f"{ours}/mlp/in_proj", f"{theirs}.mlp.fc1")
        found |= dense(f"{ours}/mlp/out_proj", f"{theirs}.mlp.fc2")
        found[f"{ours}/mixer/short_taps"] = taps(f"{theirs}.mixer.short_filter.weight")
        found[f"{ours}/mixer/short_bias"] = same(f"{theirs}.mixer.short_filter.bias")
        filter_fn = f"{theirs}.mixer.filter_fn"
        found[f"{ours}/mixer/skip"] = _skip(f"{filter_fn}.bias", d_model, n_filters)
        shape = (length, long_filter.emb_dim)
        found[f"{ours}/mixer/filter/positions"] = reshaped(f"{filter_fn}.pos_emb.z", (1, *shape), shape)
        constants[f"{filter_fn}.pos_emb.t"] = times
        network, width = f"{filter_fn}.implicit_filter", long_filter.width
        frequency = f"{network}.1.freq"
        found[f"{ours}/mixer/filter/sine_frequency"] = reshaped(frequency, (1, width), (width,))
        for layer in range(long_filter.n_hidden + 1):
            found |= dense(f"{ours}/mixer/filter/dense_{layer}", f"{network}.{2 * layer}")
            if layer > 0:  # one tensor serves all layers, and is stored with each
                copies[f"{network}.{2 * layer + 1}.freq"] = frequency
        last = long_filter.n_hidden + 1
        found[f"{ours}/mixer/filter/dense_{last}/kernel"] = transposed(f"{network}.{2 * last}.weight")
        if has_window:
            constants[f"{filter_fn}.modulation.deltas"] = rates
    return Table(found, copies, constants, None if has_window else DELTAS)


def _skip(name: str, d_model: int, n_filters: int) -> Transform:
    """Weights [D N], channel by channel, as [N, D]."""
    return Transform(
        (name,), lambda x: x.reshape(d_model, n_filters).T, lambda x: (x.T.reshape(d_model * n_filters),)
    )
