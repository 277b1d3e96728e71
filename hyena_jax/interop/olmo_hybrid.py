"""Olmo Hybrid of huggingface/transformers: three gated delta layers to one of attention.

Axes: D channels, H heads of queries and keys, G heads of values, K channels of a key, V channels of a value.
"""

import re
from pathlib import Path
from typing import Any

import numpy as np

from hyena_jax.config import AttentionConfig, GatedDeltaConfig, LanguageModelConfig, MixerConfig
from hyena_jax.config.models import MAX_CHANNELS, MAX_LAYERS, MAX_SYMBOLS
from hyena_jax.interop.family import Options, Settings, Source, Table, blocks, settings_of
from hyena_jax.interop.tensors import Tensor, Tensors
from hyena_jax.interop.transforms import Transform, attention_sizes, less_one, qkv, same, taps, transposed
from hyena_jax.system.errors import UserError, printable, require

BOS = None
"""Texts of the released model begin with no token of their own."""
ENDS = {"eos_token_id": 100_257, "pad_token_id": 100_277}
RELEASED_VOCABULARY = 100_352
OTHER_NAMES = {
    "attention_layer_norm.weight": "input_layernorm.weight",
    "feedforward_layer_norm.weight": "post_attention_layernorm.weight",
    "linear_attn.out_proj.weight": "linear_attn.o_proj.weight",
    "linear_attn.norm.weight": "linear_attn.o_norm.weight",
}
"""Names in files, and the module's names in transformers; its own files have the first two, and the taps of
queries, keys and values apart."""
LAYER = re.compile(r"(model\.layers\.\d+)\.(.+)")
NORM_EPS = 1e-5
"""Of the delta layers' outputs: a constant of transformers."""


def read(source: Path, tensors: Tensors, options: Options) -> Source:
    """The model in a folder of `transformers`, by any of the names that such files have."""
    options.refuse_windows()
    settings = settings_of(source, options)
    model = from_settings(settings)
    model = options.applied(model, settings.size("max_position_embeddings", 65_536))
    table = transformers_table(model)
    return Source(model, table, _renamed(tensors), bos=settings.values.get("bos_token_id", BOS))


def from_settings(settings: Settings) -> LanguageModelConfig:
    """The model that a `config.json` describes."""
    settings.require("model_type", "olmo_hybrid")
    settings.require("hidden_act", "silu")
    settings.require("attention_bias", False)
    d_model = settings.size("hidden_size", most=MAX_CHANNELS)
    n_layers = settings.size("num_hidden_layers", most=MAX_LAYERS)
    n_heads = settings.size("num_attention_heads")
    settings.expect(d_model % n_heads == 0, "num_attention_heads", n_heads, f"a divisor of {d_model}")
    settings.require("head_dim", d_model // n_heads)
    kinds = settings.names(
        "layer_types",
        ("linear_attention", "full_attention"),
        ["linear_attention" if (i + 1) % 4 else "full_attention" for i in range(n_layers)],
    )
    settings.expect(len(kinds) == n_layers, "layer_types", len(kinds), f"{n_layers} layers")
    key_heads = settings.size("linear_num_key_heads", n_heads)
    value_heads = settings.size("linear_num_value_heads", n_heads)
    fits, allowed = value_heads % key_heads == 0, f"a multiple of linear_num_key_heads={key_heads}"
    settings.expect(fits, "linear_num_value_heads", value_heads, allowed)
    key_dim = settings.size("linear_key_head_dim", int(0.75 * d_model / key_heads), MAX_CHANNELS)
    delta = GatedDeltaConfig(
        n_heads=key_heads,
        n_value_heads=None if value_heads == key_heads else value_heads,
        key_dim=key_dim,
        value_dim=settings.size("linear_value_head_dim", 2 * key_dim, MAX_CHANNELS),
        negative_eigenvalues=settings.flag("linear_allow_neg_eigval", True),
        short_filter_len=settings.size("linear_conv_kernel_dim", 4),
        norm_eps=NORM_EPS,
    )
    eps = settings.number("rms_norm_eps", 1e-6)
    # A config that is silent is refused: transformers 5 takes null for rotary positions with its default
    # base, while the released model, whose layers of attention have none, was made with null.
    rope = settings.values.get("rope_parameters")
    is_said = isinstance(rope, dict) and "rope_theta" in rope
    must = "an object with rope_theta: null without rotary positions, as in the released model, or their base"
    settings.expect(is_said, "rope_parameters", rope, must)
    rotary = settings.rotary()
    rotary.require("partial_rotary_factor", 1.0, 1)
    base = None if rope["rope_theta"] is None else rotary.number("rope_theta")
    attention = AttentionConfig(
        n_heads=n_heads,
        n_kv_heads=settings.size("num_key_value_heads", n_heads),
        rotary_fraction=0.0 if base is None else 1.0,
        rotary_base=AttentionConfig.rotary_base if base is None else base,
        qk_norm_eps=eps,
        qk_norm="all",
        qkv_bias=False,
        out_bias=False,
    )
    is_delta = [kind == "linear_attention" for kind in kinds]
    return LanguageModelConfig(
        pattern=tuple(delta if one else attention for one in is_delta),
        n_layers=n_layers,
        d_model=d_model,
        ffn="swiglu",
        ffn_bias=False,
        d_ff=settings.size("intermediate_size", most=MAX_CHANNELS),
        norm="rms",
        norm_places=tuple("before" if one else "after" for one in is_delta),
        final_norm="rms",
        norm_eps=eps,
        tied_head=settings.flag("tie_word_embeddings", False),
        vocab_size=settings.size("vocab_size", most=MAX_SYMBOLS),
    )


def to_settings(model: LanguageModelConfig) -> dict[str, Any]:
    """The `config.json` of a model like this; see `lfm2.to_settings`."""
    require(model.ffn != "none", "model.ffn", model.ffn, "'swiglu' for transformers")
    mixers = [model.pattern[i % len(model.pattern)] for i in range(model.n_layers)]
    delta = next(mixer for mixer in model.pattern if isinstance(mixer, GatedDeltaConfig))
    attention = next((mixer for mixer in mixers if isinstance(mixer, AttentionConfig)), None)
    if attention is None or not any(isinstance(mixer, GatedDeltaConfig) for mixer in mixers):
        raise UserError("OlmoHybridForCausalLM of transformers needs layers of gated_delta and of attention")
    sizes = delta.sizes(model.d_model)
    return {
        "architectures": ["OlmoHybridForCausalLM"],
        "model_type": "olmo_hybrid",
        "vocab_size": model.vocab_size,
        "hidden_size": model.d_model,
        "intermediate_size": model.d_ff,
        "num_hidden_layers": model.n_layers,
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_kv_heads or attention.n_heads,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": model.max_len,
        "rms_norm_eps": 1e-6 if model.norm_eps is None else model.norm_eps,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": attention.rotary_base if attention.rotary_fraction else None,
        },
        "layer_types": [
            "linear_attention" if isinstance(mixer, GatedDeltaConfig) else "full_attention"
            for mixer in mixers
        ],
        "linear_num_key_heads": sizes.keys,
        "linear_num_value_heads": sizes.values,
        "linear_key_head_dim": sizes.key_dim,
        "linear_value_head_dim": sizes.value_dim,
        "linear_conv_kernel_dim": delta.short_filter_len,
        "linear_allow_neg_eigval": delta.negative_eigenvalues,
        "tie_word_embeddings": model.tied_head,
        "torch_dtype": "float32",
    }


def _renamed(tensors: Tensors) -> Tensors:
    """The tensors by the names of the modules in transformers, with the taps in one; UserError if unclear."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        match = LAYER.fullmatch(name)
        new = name if match is None else f"{match[1]}.{OTHER_NAMES.get(match[2], match[2])}"
        if new in found:
            raise UserError(f"must have one tensor {new}, got two by different names", "source")
        found[new] = tensor
    for layer in dict.fromkeys(match[1] for match in map(LAYER.fullmatch, found) if match):
        # Other code than transformers has norms before attention and after gated delta layers.
        for mixer, norm, place in (
            ("linear_attn", "post_feedforward_layernorm", "before gated delta layers"),
            ("self_attn", "input_layernorm", "after attention"),
        ):
            is_there = f"{layer}.{norm}.weight" in found
            if is_there and any(name.startswith(f"{layer}.{mixer}.") for name in found):
                raise UserError(
                    f"must have its norms {place} and their MLPs, as in transformers, got {printable(layer)}"
                    f" with {mixer} and {norm}",
                    "source",
                )
        _join_taps(layer, found)
    return found


def _join_taps(layer: str, tensors: dict[str, Tensor]) -> None:
    """Taps of queries, keys and values as one tensor, in this order.

    Their sizes do not matter: transformers writes three parts of about equal size, wherever keys begin.
    """
    names = [f"{layer}.linear_attn.{part}_conv1d.weight" for part in "qkv"]
    whole = f"{layer}.linear_attn.conv1d.weight"
    if not all(name in tensors for name in names):
        return
    if whole in tensors:
        raise UserError(f"must have one tensor {whole}, got {names[0]}, .. as well", "source")
    parts = [tensors.pop(name) for name in names]
    fits = all(len(part.shape) == 3 and part.shape[1:] == parts[0].shape[1:] for part in parts)
    if not fits or len({part.dtype for part in parts}) > 1:
        listed = ", ".join(f"{part.shape} {printable(part.dtype)}" for part in parts)
        raise UserError(f"must have {names[0]}, .. of one width and dtype, got {listed}", "source")
    shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
    tensors[whole] = Tensor(shape, parts[0].dtype, lambda: np.concatenate([part.read() for part in parts]))


def transformers_table(model: LanguageModelConfig) -> Table:
    """The names of `OlmoHybridForCausalLM`. Its norms store whole factors, ours factors less 1."""
    found: dict[str, Transform] = {
        "embedding/embedding": same("model.embed_tokens.weight"),
        "final_norm/scale": less_one("model.norm.weight"),
    }
    for ours, theirs, mixer in blocks(model, "model.layers"):
        before = isinstance(mixer, GatedDeltaConfig)
        first = "input_layernorm" if before else "post_attention_layernorm"
        second = "post_attention_layernorm" if before else "post_feedforward_layernorm"
        found[f"{ours}/mixer_norm/scale"] = less_one(f"{theirs}.{first}.weight")
        found[f"{ours}/mlp_norm/scale"] = less_one(f"{theirs}.{second}.weight")
        found |= _mixer(mixer, f"{ours}/mixer", theirs, model.d_model)
        for part, name in (("gate_proj", "gate"), ("in_proj", "up"), ("out_proj", "down")):
            found[f"{ours}/mlp/{part}/kernel"] = transposed(f"{theirs}.mlp.{name}_proj.weight")
    if model.tied_head:
        return Table(found, copies={"lm_head.weight": "model.embed_tokens.weight"})
    return Table(found | {"head/kernel": transposed("lm_head.weight")})


def _mixer(mixer: MixerConfig, ours: str, theirs: str, d_model: int) -> dict[str, Transform]:
    if isinstance(mixer, AttentionConfig):
        attention = f"{theirs}.self_attn"
        return {
            f"{ours}/qkv_proj/kernel": qkv(attention, attention_sizes(mixer, d_model)),
            f"{ours}/q_norm/scale": less_one(f"{attention}.q_norm.weight"),
            f"{ours}/k_norm/scale": less_one(f"{attention}.k_norm.weight"),
            f"{ours}/out_proj/kernel": transposed(f"{attention}.o_proj.weight"),
        }
    delta, sizes = f"{theirs}.linear_attn", mixer.sizes(d_model)
    keys, values = sizes.keys * sizes.key_dim, sizes.values * sizes.value_dim
    return {
        f"{ours}/qkv_proj/kernel": qkv(delta, (keys, keys, values)),
        f"{ours}/short_taps": taps(f"{delta}.conv1d.weight"),
        f"{ours}/beta_proj/kernel": transposed(f"{delta}.b_proj.weight"),
        f"{ours}/decay_proj/kernel": transposed(f"{delta}.a_proj.weight"),
        f"{ours}/a_log": same(f"{delta}.A_log"),
        f"{ours}/dt_bias": same(f"{delta}.dt_bias"),
        f"{ours}/gate_proj/kernel": transposed(f"{delta}.g_proj.weight"),
        f"{ours}/norm/scale": same(f"{delta}.o_norm.weight"),
        f"{ours}/out_proj/kernel": transposed(f"{delta}.o_proj.weight"),
    }
