"""RWKV-7 (2503.14456) by the names of BlinkDL/RWKV-LM, and by those of transformers (flash-linear-attention).

Axes: D channels, F width of the channel mixer, R rank of a low-rank layer.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from hyena_jax.config import LanguageModelConfig, RWKV7Config
from hyena_jax.config.models import MAX_CHANNELS, MAX_LAYERS, MAX_SYMBOLS
from hyena_jax.interop.family import Options, Settings, Source, Table, settings_of
from hyena_jax.interop.tensors import Tensors
from hyena_jax.interop.transforms import Transform, layer_norm, reshaped, same, transposed
from hyena_jax.system.errors import UserError, require

MAX_LEN = 4096
"""Length at which the released models were trained, which no file of RWKV-LM says."""
SHIFTS = "rwkvag"
"""Our order of the inputs that are mixed with the token before."""
MAX_LISTED = 4
"""Tensors without effect that are named."""
LOW_RANKS = {"decay": "w", "rate": "a", "value": "v", "gate": "g"}


def read(source: Path, tensors: Tensors, options: Options) -> Source:
    """A file of RWKV-LM, whose shapes are its config, or a folder of transformers."""
    options.refuse_windows()
    if "emb.weight" not in tensors:
        settings = settings_of(source, options)
        model = from_settings(settings)
        model = options.applied(model, settings.size("max_position_embeddings", 2048))
        return Source(model, transformers_table(model), tensors, bos=settings.values.get("bos_token_id"))
    require(options.config is None, "config", str(options.config), "None: the shapes of this file say all")
    model = from_shapes({name: tensor.shape for name, tensor in tensors.items()})
    model = options.applied(model, MAX_LEN)
    table = rwkv_table(model)
    unused = sorted(name for name in tensors if table.ignored.fullmatch(name))
    listed = ", ".join(unused[:MAX_LISTED]) + (
        f" and {len(unused) - MAX_LISTED} more" if unused[MAX_LISTED:] else ""
    )
    return Source(
        model, table, tensors, note=f"left out, as RWKV-7 never reads them: {listed}" if unused else None
    )


def language_model(
    mixer: RWKV7Config, n_layers: int, d_model: int, d_ff: int, vocab_size: int
) -> LanguageModelConfig:
    """The model with these sizes."""
    return LanguageModelConfig(
        pattern=(mixer,),
        n_layers=n_layers,
        d_model=d_model,
        ffn="squared_relu",
        ffn_shift=True,
        ffn_bias=False,
        d_ff=d_ff,
        embedding_norm="layer",
        tied_head=False,
        vocab_size=vocab_size,
        init="rwkv7",
    )


def from_shapes(shapes: Mapping[str, tuple[int, ...]]) -> LanguageModelConfig:
    """The model of a file of RWKV-LM."""

    def of(name: str, n_axes: int) -> tuple[int, ...]:
        if name not in shapes:
            raise UserError(f"the tensor {name} is missing, whose shape says a size of the model")
        require(len(shapes[name]) == n_axes, f"the tensor {name}", shapes[name], f"of {n_axes} axes")
        return shapes[name]

    size, d_model = of("emb.weight", 2)
    indices = [name.split(".")[1] for name in shapes if name.startswith("blocks.")]
    n_layers = 1 + max((int(index) for index in indices if index.isdecimal() and len(index) < 6), default=0)
    require(n_layers <= MAX_LAYERS, "the number of blocks", n_layers, f"at most {MAX_LAYERS}")
    ranks = {}
    for ours, theirs in LOW_RANKS.items():
        layer = 1 if ours == "value" else 0
        if layer < n_layers:
            ranks[f"{ours}_rank"] = of(f"blocks.{layer}.att.{theirs}1", 2)[1]
    mixer = RWKV7Config(of("blocks.0.att.r_k", 2)[0], **ranks)
    return language_model(mixer, n_layers, d_model, of("blocks.0.ffn.key.weight", 2)[0], size)


def from_settings(settings: Settings) -> LanguageModelConfig:
    """The model that a `config.json` describes."""
    settings.require("model_type", "rwkv7")
    settings.require("hidden_act", "sqrelu")
    settings.require("norm_first", True)
    settings.require("norm_bias", True)
    settings.require("attn", None)
    settings.require("tie_word_embeddings", False)
    d_model = settings.size("hidden_size", most=MAX_CHANNELS)
    n_layers = settings.size("num_hidden_layers", most=MAX_LAYERS)
    widths = settings.get("value_dim", d_model)
    fits = all(width == d_model for width in (widths if isinstance(widths, list) else [widths]))
    settings.expect(fits, "value_dim", widths, f"hidden_size={d_model} in all layers: no other is supported")
    head_dim = settings.size("head_dim", 64)
    settings.expect(d_model % head_dim == 0, "head_dim", head_dim, f"a divisor of hidden_size={d_model}")
    eps = settings.number("norm_eps", 1e-5)
    mixer = RWKV7Config(
        n_heads=d_model // head_dim,
        decay_rank=settings.size("decay_low_rank_dim", 64, MAX_CHANNELS),
        rate_rank=settings.size("a_low_rank_dim", 64, MAX_CHANNELS),
        value_rank=settings.size("v_low_rank_dim", 16, MAX_CHANNELS),
        gate_rank=settings.size("gate_low_rank_dim", 128, MAX_CHANNELS),
        norm_eps=head_dim * eps,
    )
    width = settings.get("intermediate_size", None)
    if width is None:
        width = 32 * -(-int(d_model * settings.number("hidden_ratio", 4)) // 32)
    settings.expect(type(width) is int and 1 <= width <= MAX_CHANNELS, "intermediate_size", width, "a width")
    model = language_model(mixer, n_layers, d_model, width, settings.size("vocab_size", 32_000, MAX_SYMBOLS))
    return replace(model, norm_eps=eps)


def rwkv_table(model: LanguageModelConfig) -> Table:
    """The names of RWKV-LM, whose demo gives every block the `ln0` that the first alone reads."""
    width = model.d_model
    found = _outer("emb", "blocks.0.ln0", "ln_out", "head")
    for i in range(model.n_layers):
        ours, theirs = f"blocks_{i}", f"blocks.{i}"
        names = ("receptance", "key", "value", "output")
        found |= _inner(ours, theirs, ("ln1", "ln2", "att.ln_x"), "att", names, width)
        found[f"{ours}/mlp_shift/mu"] = _vector(f"{theirs}.ffn.x_k", width)
        for part, name in (("removal", "k_k"), ("booster", "k_a")):
            found[f"{ours}/mixer/{part}"] = _vector(f"{theirs}.att.{name}", width)
        for part, name in _low_ranks(i):
            layer = f"{ours}/mixer/{part}"
            found[f"{layer}/down/kernel"] = same(f"{theirs}.att.{name}1")
            found[f"{layer}/up/kernel"] = same(f"{theirs}.att.{name}2")
            if part != "gate":
                found[f"{layer}/bias"] = _vector(f"{theirs}.att.{name}0", width)
    return Table(found, ignored=re.compile(r"blocks\.0\.att\.v[012]|blocks\.[1-9]\d*\.ln0\.(weight|bias)"))


def transformers_table(model: LanguageModelConfig) -> Table:
    """The names of flash-linear-attention's `RWKV7ForCausalLM`."""
    found = _outer("model.embeddings", "model.layers.0.pre_norm", "model.norm", "lm_head")
    for i in range(model.n_layers):
        ours, theirs = f"blocks_{i}", f"model.layers.{i}"
        norms, names = ("attn_norm", "ffn_norm", "attn.g_norm"), ("r_proj", "k_proj", "v_proj", "o_proj")
        found |= _inner(ours, theirs, norms, "attn", names, model.d_model)
        found[f"{ours}/mlp_shift/mu"] = same(f"{theirs}.ffn.x_k")
        for part, name in (("removal", "k_k"), ("booster", "k_a")):
            found[f"{ours}/mixer/{part}"] = same(f"{theirs}.attn.{name}")
        for part, name in _low_ranks(i):
            layer, low_rank = f"{ours}/mixer/{part}", f"{theirs}.attn.{name}_lora.lora"
            found[f"{layer}/down/kernel"] = transposed(f"{low_rank}.0.weight")
            found[f"{layer}/up/kernel"] = transposed(f"{low_rank}.2.weight")
            if part != "gate":
                found[f"{layer}/bias"] = same(f"{low_rank}.2.bias")
    return Table(found, ignored=re.compile(r"model\.layers\.0\.attn\.v_lora\..*"))


def _low_ranks(layer: int) -> list[tuple[str, str]]:
    """Our and their names; the first layer mixes no other values into its own."""
    return [(ours, theirs) for ours, theirs in LOW_RANKS.items() if layer > 0 or ours != "value"]


def _outer(embedding: str, embedding_norm: str, final_norm: str, head: str) -> dict[str, Transform]:
    return {
        "embedding/embedding": same(f"{embedding}.weight"),
        "head/kernel": transposed(f"{head}.weight"),
        **layer_norm("embedding_norm", embedding_norm),
        **layer_norm("final_norm", final_norm),
    }


def _inner(
    ours: str, theirs: str, norms: tuple[str, ...], attention: str, names: tuple[str, ...], width: int
) -> dict[str, Transform]:
    """The norms of a block, and what both forms name or store alike in its mixer and its channel mixer."""
    mixer, attention = f"{ours}/mixer", f"{theirs}.{attention}"
    places = zip((f"{mixer}_norm", f"{ours}/mlp_norm", f"{mixer}/norm"), norms, strict=True)
    projections = zip(("r_proj", "k_proj", "v_proj", "out_proj"), names, strict=True)
    return {
        **{k: x for place, norm in places for k, x in layer_norm(place, f"{theirs}.{norm}").items()},
        f"{mixer}/shift_mix": _rows(tuple(f"{attention}.x_{name}" for name in SHIFTS), width),
        f"{mixer}/bonus": same(f"{attention}.r_k"),
        **{f"{mixer}/{part}/kernel": transposed(f"{attention}.{name}.weight") for part, name in projections},
        f"{ours}/mlp/in_proj/kernel": transposed(f"{theirs}.ffn.key.weight"),
        f"{ours}/mlp/out_proj/kernel": transposed(f"{theirs}.ffn.value.weight"),
    }


def _vector(name: str, width: int) -> Transform:
    return reshaped(name, (1, 1, width), (width,))


def _rows(names: tuple[str, ...], width: int) -> Transform:
    """Vectors [1, 1, D] as the rows of one array."""
    return Transform(
        names,
        lambda *xs: np.concatenate([x.reshape(1, width) for x in xs]),
        lambda x: tuple(row.reshape(1, 1, width) for row in x),
    )
