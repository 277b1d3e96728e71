"""LFM2 (2511.23404) of huggingface/transformers. Axes: D channels, F width of the MLP."""

from pathlib import Path
from typing import Any

from hyena_jax.config import AttentionConfig, HyenaConfig, LanguageModelConfig, MixerConfig, ShortFilterConfig
from hyena_jax.config.models import MAX_CHANNELS, MAX_LAYERS, MAX_SYMBOLS
from hyena_jax.interop.family import Options, Settings, Source, Table, blocks, settings_of
from hyena_jax.interop.tensors import Tensors
from hyena_jax.interop.transforms import (
    Transform,
    attention_sizes,
    filter_taps,
    less_one,
    qkv,
    same,
    transposed,
)
from hyena_jax.system.errors import require

BOS, RELEASED_VOCABULARY = 1, 65_536
ENDS = {"eos_token_id": 7, "pad_token_id": 0}
"""Special tokens of the released models, in addition to BOS."""


def read(source: Path, tensors: Tensors, options: Options) -> Source:
    """The model in a folder of `transformers`."""
    options.refuse_windows()
    settings = settings_of(source, options)
    model = from_settings(settings)
    model = options.applied(model, settings.size("max_position_embeddings", 128_000))
    return Source(model, transformers_table(model), tensors, bos=settings.values.get("bos_token_id", BOS))


def convolution(n_taps: int) -> HyenaConfig:
    """y = W_o (C ⊙ FIR(B ⊙ v)), with C, B, v the columns of the input projection."""
    return HyenaConfig(
        filter=ShortFilterConfig(n_taps), short_filter_len=0, skip=False, in_bias=False, out_bias=False
    )


def from_settings(settings: Settings) -> LanguageModelConfig:
    """The model that a `config.json` describes; UserError for options that ours lacks."""
    settings.require("model_type", "lfm2")
    settings.require("conv_bias", False)
    settings.require("tie_word_embeddings", True)
    settings.require("tie_embedding", True)
    rope = settings.rotary()
    n_layers = settings.size("num_hidden_layers", most=MAX_LAYERS)
    n_heads = settings.size("num_attention_heads")
    if settings.get("layer_types", None) is None:
        attention_layers = settings.indices("full_attn_idxs", n_layers, list(range(n_layers)))
    else:
        kinds = settings.names("layer_types", ("conv", "full_attention"))
        settings.expect(len(kinds) == n_layers, "layer_types", len(kinds), f"{n_layers} layers")
        attention_layers = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
    eps = settings.number("norm_eps", 1e-5)
    attention = AttentionConfig(
        n_heads=n_heads,
        n_kv_heads=settings.size("num_key_value_heads", 8),
        rotary_fraction=1.0,
        rotary_base=rope.number("rope_theta", settings.number("theta", settings.get("rope_theta", 1e6))),
        qk_norm_eps=eps,
        qkv_bias=False,
        out_bias=False,
    )
    conv = convolution(settings.size("conv_L_cache", 3))
    return LanguageModelConfig(
        pattern=tuple(attention if i in attention_layers else conv for i in range(n_layers)),
        n_layers=n_layers,
        d_model=settings.size("hidden_size", most=MAX_CHANNELS),
        ffn="swiglu",
        ffn_bias=False,
        d_ff=_ffn_width(settings),
        norm="rms",
        final_norm="rms",
        norm_eps=eps,
        vocab_size=settings.size("vocab_size", most=MAX_SYMBOLS),
    )


def to_settings(model: LanguageModelConfig) -> dict[str, Any]:
    """The `config.json` of a model like this; `from_settings` of it shows whether it says all of it."""
    require(model.ffn != "none", "model.ffn", model.ffn, "'swiglu' for transformers")
    mixers = [model.pattern[i % len(model.pattern)] for i in range(model.n_layers)]
    conv = next(mixer for mixer in model.pattern if isinstance(mixer, HyenaConfig))
    attention = next((mixer for mixer in mixers if isinstance(mixer, AttentionConfig)), AttentionConfig())
    return {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "vocab_size": model.vocab_size,
        "hidden_size": model.d_model,
        "intermediate_size": model.d_ff,
        "block_auto_adjust_ff_dim": False,
        "num_hidden_layers": model.n_layers,
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_kv_heads or attention.n_heads,
        "max_position_embeddings": model.max_len,
        "norm_eps": 1e-6 if model.norm_eps is None else model.norm_eps,
        "conv_L_cache": getattr(conv.filter, "n_taps", 3),
        "conv_bias": False,
        "rope_theta": attention.rotary_base,
        "layer_types": ["conv" if isinstance(mixer, HyenaConfig) else "full_attention" for mixer in mixers],
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }


def _ffn_width(settings: Settings) -> int:
    """F; older files say a width that is still to be adjusted, as in `Lfm2MLP`."""
    name = "intermediate_size" if settings.get("block_ff_dim", None) is None else "block_ff_dim"
    width = settings.size(name)
    if not settings.flag("block_auto_adjust_ff_dim", True):
        return width
    width = int(2 * width / 3)
    if settings.values.get("block_ffn_dim_multiplier", 1.0) is None:  # null, which is not the default here
        return width
    width = int(settings.number("block_ffn_dim_multiplier", 1.0) * width)
    multiple = settings.size("block_multiple_of", 256)
    return multiple * -(-width // multiple)


def transformers_table(model: LanguageModelConfig) -> Table:
    """The names of `Lfm2ForCausalLM`. Its norms store whole factors, ours factors less 1."""
    found: dict[str, Transform] = {
        "embedding/embedding": same("model.embed_tokens.weight"),
        "final_norm/scale": less_one("model.embedding_norm.weight"),
    }
    for ours, theirs, mixer in blocks(model, "model.layers"):
        found[f"{ours}/mixer_norm/scale"] = less_one(f"{theirs}.operator_norm.weight")
        found[f"{ours}/mlp_norm/scale"] = less_one(f"{theirs}.ffn_norm.weight")
        found |= _mixer(mixer, f"{ours}/mixer", theirs, model.d_model)
        for part, name in (("gate_proj", "w1"), ("in_proj", "w3"), ("out_proj", "w2")):
            found[f"{ours}/mlp/{part}/kernel"] = transposed(f"{theirs}.feed_forward.{name}.weight")
    return Table(found, copies={"lm_head.weight": "model.embed_tokens.weight"})


def _mixer(mixer: MixerConfig, ours: str, theirs: str, d_model: int) -> dict[str, Transform]:
    if isinstance(mixer, HyenaConfig):
        return {
            f"{ours}/in_proj/kernel": _gates(f"{theirs}.conv.in_proj.weight", d_model),
            f"{ours}/filter/taps": filter_taps(f"{theirs}.conv.conv.weight", is_reversed=True),
            f"{ours}/out_proj/kernel": transposed(f"{theirs}.conv.out_proj.weight"),
        }
    attention = f"{theirs}.self_attn"
    return {
        f"{ours}/qkv_proj/kernel": qkv(attention, attention_sizes(mixer, d_model)),
        f"{ours}/q_norm/scale": less_one(f"{attention}.q_layernorm.weight"),
        f"{ours}/k_norm/scale": less_one(f"{attention}.k_layernorm.weight"),
        f"{ours}/out_proj/kernel": transposed(f"{attention}.out_proj.weight"),
    }


def _gates(name: str, d_model: int) -> Transform:
    """Rows B, C, v [3D, D] as columns C, B, v: our order of gates has the one after the filter first."""
    order = [1, 0, 2]
    return Transform(
        (name,),
        lambda x: x.reshape(3, d_model, d_model)[order].reshape(3 * d_model, d_model).T,
        lambda x: (x.T.reshape(3, d_model, d_model)[order].reshape(3 * d_model, d_model),),
    )
