"""RecurrentGemma (2404.07839): of huggingface/transformers, and of google-deepmind's Flax code.

Axes: D channels, W recurrence width, H heads, which are also the blocks of the gates, F width of the MLP.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hyena_jax.config import HawkConfig, LanguageModelConfig, LocalAttentionConfig
from hyena_jax.config.models import MAX_CHANNELS, MAX_LAYERS, MAX_SYMBOLS
from hyena_jax.interop.family import Options, Settings, Source, Table, blocks, settings_of, without_prefix
from hyena_jax.interop.tensors import Tensors, is_orbax, metadata_of
from hyena_jax.interop.transforms import (
    Transform,
    attention_sizes,
    columns,
    dense,
    joined,
    qkv,
    reshaped,
    same,
    taps,
)
from hyena_jax.system.errors import UserError, require

BOS, RELEASED_VOCABULARY = 2, 256_000
ENDS = {"eos_token_id": 1, "pad_token_id": 0}
OWN_WINDOW = "hyena_jax.window"
"""Key in the metadata of an export: the window of the run, which transformers is told one more."""
TRAINED_LEN = 8192
WINDOW, SOFT_CAP = 2048, 30.0
"""Of both released sizes; the Flax checkpoints do not say them."""


def read(source: Path, tensors: Tensors, options: Options) -> Source:
    """The model in a folder of `transformers`, or in an Orbax folder of DeepMind's Flax code.

    The released weights were trained with DeepMind's code, where a token sees `attention_window_size` earlier
    ones, as with our `window`; transformers 5 shows it one less, which no file says: see
    `Options.window_of`.
    """
    options.refuse_windows(but="window_of")
    note = None
    if source.is_dir() and is_orbax(source):
        require(options.config is None, "config", str(options.config), "None: an Orbax folder has its shapes")
        is_theirs = options.window_of in (None, "deepmind")
        require(is_theirs, "window_of", options.window_of, "'deepmind', whose folder it is")
        tensors = without_prefix(tensors, "params.")
        model = _from_shapes(tensors)
        table = flax_table
        bos = BOS
    else:
        settings = settings_of(source, options)
        model, bos = from_settings(settings), settings.values.get("bos_token_id", BOS)
        model, note = _with_window(source, model, options.window_of)
        table = transformers_table
    model = options.applied(model, TRAINED_LEN)
    return Source(model, table(model), tensors, bos=bos, note=note)


def from_settings(settings: Settings, gate_blocks: int | None = None) -> LanguageModelConfig:
    """The model that a `config.json` describes; `gate_blocks` None: as many as heads."""
    settings.require("model_type", "recurrent_gemma")
    settings.require("hidden_activation", "gelu_pytorch_tanh")
    settings.require("attention_bias", False)
    settings.require("tie_word_embeddings", True)
    settings.require("embeddings_scale_by_sqrt_dim", True)
    settings.require("rms_norm_eps", 1e-6)
    rope = settings.rotary()
    n_heads, twice = settings.size("num_attention_heads"), settings.size("intermediate_size")
    require(twice % 2 == 0, f"{settings.source}: intermediate_size", twice, "even: twice the MLP's width")
    d_model = settings.size("hidden_size", most=MAX_CHANNELS)
    fraction = settings.number("partial_rotary_factor", 0.5)
    mixers = {
        "recurrent": HawkConfig(
            width=settings.size("lru_width", d_model),
            gate_blocks=gate_blocks or n_heads,
            projection_bias=True,
            gate_bias=True,
            short_filter_len=settings.size("conv1d_width", 4),
            reset_at_start=True,
            gelu="tanh",
        ),
        "attention": LocalAttentionConfig(
            n_heads=n_heads,
            n_kv_heads=settings.size("num_key_value_heads", n_heads),
            rotary_fraction=rope.number("partial_rotary_factor", fraction),
            rotary_base=rope.number("rope_theta", settings.number("rope_theta", 1e4)),
            window=settings.size("attention_window_size", WINDOW),
        ),
    }
    kinds = settings.names("block_types", tuple(mixers), ["recurrent", "recurrent", "attention"])
    return LanguageModelConfig(
        pattern=tuple(mixers[kind] for kind in kinds),
        n_layers=settings.size("num_hidden_layers", most=MAX_LAYERS),
        d_model=d_model,
        ffn="geglu",
        d_ff=twice // 2,
        norm="rms",
        final_norm="rms",
        init="griffin",
        vocab_size=settings.size("vocab_size", most=MAX_SYMBOLS),
        scale_embedding=True,
        round_embedding_scale=True,
        soft_cap=settings.number("logits_soft_cap", SOFT_CAP),
    )


def _with_window(
    source: Path, model: LanguageModelConfig, window_of: str | None
) -> tuple[LanguageModelConfig, str | None]:
    """The model with the window of a run's export, or of the code that it was trained with; and a note."""
    file = source / "model.safetensors" if source.is_dir() else source
    own = metadata_of(file).get(OWN_WINDOW) if file.suffix == ".safetensors" and file.exists() else None
    stated = next((mixer.window for mixer in model.pattern if isinstance(mixer, LocalAttentionConfig)), None)
    if own is None and (window_of == "deepmind" or stated is None):
        return model, None
    if own is None and window_of is None:
        other = f"transformers shows it {stated - 1}, for a model trained there: --window-of transformers"
        return model, f"a token sees {stated} earlier ones, as in DeepMind's code; {other}"
    allowed = f"attention_window_size - 1, {stated - 1}"
    require(own in (None, str(stated - 1)), f"{OWN_WINDOW} of {file.name}", own, allowed)
    require(own is None or window_of is None, "window_of", window_of, "None: the export says its window")
    pattern = tuple(
        replace(mixer, window=stated - 1) if isinstance(mixer, LocalAttentionConfig) else mixer
        for mixer in model.pattern
    )
    return replace(model, pattern=pattern), None


def to_settings(model: LanguageModelConfig) -> dict[str, Any]:
    """The `config.json` of a model like this (see `lfm2`), with the window as DeepMind counts it."""
    require(model.ffn != "none", "model.ffn", model.ffn, "'geglu' for transformers")
    recurrence = next(mixer for mixer in model.pattern if isinstance(mixer, HawkConfig))
    default = LocalAttentionConfig(n_heads=recurrence.gate_blocks, window=WINDOW)
    attention = next((mixer for mixer in model.pattern if isinstance(mixer, LocalAttentionConfig)), default)
    return {
        "architectures": ["RecurrentGemmaForCausalLM"],
        "model_type": "recurrent_gemma",
        "vocab_size": model.vocab_size,
        "hidden_size": model.d_model,
        "intermediate_size": 2 * model.d_ff,
        "num_hidden_layers": model.n_layers,
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_kv_heads or attention.n_heads,
        "lru_width": recurrence.width or model.d_model,
        "attention_window_size": attention.window,
        "conv1d_width": recurrence.short_filter_len,
        "logits_soft_cap": model.soft_cap or SOFT_CAP,
        "rms_norm_eps": 1e-6,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_theta": attention.rotary_base,
        "partial_rotary_factor": attention.rotary_fraction,
        "attention_bias": False,
        "block_types": [
            "recurrent" if isinstance(mixer, HawkConfig) else "attention" for mixer in model.pattern
        ],
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }


def exported(values: dict[str, Any], model: LanguageModelConfig) -> tuple[dict[str, Any], dict[str, str]]:
    """The settings for transformers 5, which counts the current token into its window, and the metadata."""
    windows = [mixer.window for mixer in model.pattern if isinstance(mixer, LocalAttentionConfig)]
    metadata = {OWN_WINDOW: str(windows[0])} if windows else {}
    return {**values, "attention_window_size": values["attention_window_size"] + 1}, metadata


def _from_shapes(tensors: Tensors) -> LanguageModelConfig:
    """The sizes by the shapes of a Flax checkpoint, as in `GriffinConfig.from_flax_params_or_variables`."""

    def shape(name: str, rank: int) -> tuple[int, ...]:
        if name not in tensors:
            raise UserError(f"source holds no tensor {name}, as DeepMind's Flax checkpoints do")
        found = tensors[name].shape
        require(len(found) == rank and min(found) >= 1, f"tensor {name}", found, f"of {rank} axes")
        return found

    kinds: list[str] = []
    names = {0: "recurrent", 1: "attention"}
    while True:
        first = f"blocks.{len(kinds)}."
        has = [any(name.startswith(f"{first}{kind}_block.") for name in tensors) for kind in names.values()]
        if has not in ([True, False], [False, True]):
            break
        kinds.append(names[has.index(True)])
    require(len({*kinds}) == 2, "source", " ".join(kinds) or "no blocks", "blocks of both kinds, from 0")
    vocab_size, d_model = shape("embedder.input_embedding", 2)
    _, _, d_ff = shape("blocks.0.mlp_block.ffw_up.w", 3)
    recurrent = f"blocks.{kinds.index('recurrent')}.recurrent_block"
    n_blocks, block, _ = shape(f"{recurrent}.rg_lru.a_gate.w", 3)
    _, head_dim = shape(f"blocks.{kinds.index('attention')}.attention_block.proj_k.kernel", 2)
    require(d_model % head_dim == 0, "width of proj_k", head_dim, f"a divisor of the model's {d_model}")
    values = {
        "block_types": kinds,
        "num_hidden_layers": len(kinds),
        "vocab_size": vocab_size,
        "hidden_size": d_model,
        "intermediate_size": 2 * d_ff,
        "lru_width": n_blocks * block,
        "conv1d_width": shape(f"{recurrent}.conv_1d.w", 2)[0],
        "num_attention_heads": d_model // head_dim,
        "num_key_value_heads": 1,
    }
    return from_settings(Settings("source", values), n_blocks)


def transformers_table(model: LanguageModelConfig) -> Table:
    """The names of `RecurrentGemmaForCausalLM`."""
    d_model, found = model.d_model, {}
    found["embedding/embedding"] = same("model.embed_tokens.weight")
    found["final_norm/scale"] = same("model.final_norm.weight")  # this family, too, stores factors less 1
    for ours, theirs, mixer in blocks(model, "model.layers"):
        found[f"{ours}/mixer_norm/scale"] = same(f"{theirs}.temporal_pre_norm.weight")
        found[f"{ours}/mlp_norm/scale"] = same(f"{theirs}.channel_pre_norm.weight")
        block = f"{theirs}.temporal_block"
        if isinstance(mixer, HawkConfig):
            width = mixer.width or d_model
            gates = mixer.gate_blocks, width // mixer.gate_blocks
            found[f"{ours}/mixer/in_proj/kernel"] = columns(_branches(block, "weight"), (width, width))
            found[f"{ours}/mixer/in_proj/bias"] = joined(_branches(block, "bias"), (width, width))
            found[f"{ours}/mixer/short_taps"] = taps(f"{block}.conv_1d.weight")
            found[f"{ours}/mixer/short_bias"] = same(f"{block}.conv_1d.bias")
            found[f"{ours}/mixer/rate"] = same(f"{block}.rg_lru.recurrent_param")
            for gate, name in (("recurrence_gate", "recurrent_gate"), ("input_gate", "input_gate")):
                found[f"{ours}/mixer/{gate}/kernel"] = same(f"{block}.rg_lru.{name}_weight")
                found[f"{ours}/mixer/{gate}/bias"] = reshaped(f"{block}.rg_lru.{name}_bias", gates, (width,))
            found |= dense(f"{ours}/mixer/out_proj", f"{block}.linear_out")
        else:
            found[f"{ours}/mixer/qkv_proj/kernel"] = qkv(block, attention_sizes(mixer, d_model))
            found |= dense(f"{ours}/mixer/out_proj", f"{block}.o_proj")
        for part, name in (("gate_proj", "gate_proj"), ("in_proj", "up_proj"), ("out_proj", "down_proj")):
            found |= dense(f"{ours}/mlp/{part}", f"{theirs}.mlp_block.{name}")
    return Table(found, copies={"lm_head.weight": "model.embed_tokens.weight"})


def flax_table(model: LanguageModelConfig) -> Table:
    """The names of DeepMind's Flax code, joined by dots; its kernels are [in, out], as ours."""
    d_model, found = model.d_model, {}
    found["embedding/embedding"] = same("embedder.input_embedding")
    found["final_norm/scale"] = same("final_norm.scale")
    for ours, theirs, mixer in blocks(model, "blocks"):
        found[f"{ours}/mixer_norm/scale"] = same(f"{theirs}.temporal_pre_norm.scale")
        found[f"{ours}/mlp_norm/scale"] = same(f"{theirs}.channel_pre_norm.scale")
        if isinstance(mixer, HawkConfig):
            block, width = f"{theirs}.recurrent_block", mixer.width or d_model
            gates = mixer.gate_blocks, width // mixer.gate_blocks
            found[f"{ours}/mixer/in_proj/kernel"] = joined(_branches(block, "kernel"), (width, width), 1)
            found[f"{ours}/mixer/in_proj/bias"] = joined(_branches(block, "bias"), (width, width))
            found[f"{ours}/mixer/short_taps"] = Transform(
                (f"{block}.conv_1d.w",), lambda x: x[::-1].T, lambda x: (x.T[::-1],)
            )
            found[f"{ours}/mixer/short_bias"] = same(f"{block}.conv_1d.b")
            found[f"{ours}/mixer/rate"] = same(f"{block}.rg_lru.a_param")
            for gate, name in (("recurrence_gate", "a_gate"), ("input_gate", "input_gate")):
                found[f"{ours}/mixer/{gate}/kernel"] = same(f"{block}.rg_lru.{name}.w")
                found[f"{ours}/mixer/{gate}/bias"] = reshaped(f"{block}.rg_lru.{name}.b", gates, (width,))
            final = f"{block}.linear_out"
        else:
            block = f"{theirs}.attention_block"
            names = tuple(f"{block}.proj_{part}.kernel" for part in "qkv")
            found[f"{ours}/mixer/qkv_proj/kernel"] = joined(names, attention_sizes(mixer, d_model), 1)
            final = f"{block}.proj_final"
        found[f"{ours}/mixer/out_proj/kernel"] = same(f"{final}.kernel")
        found[f"{ours}/mixer/out_proj/bias"] = same(f"{final}.bias")
        up = f"{theirs}.mlp_block.ffw_up"
        for i, part in enumerate(("gate_proj", "in_proj")):  # one tensor [2, D, F] holds both
            found[f"{ours}/mlp/{part}/kernel"] = _half(f"{up}.w", i, ())
            found[f"{ours}/mlp/{part}/bias"] = _half(f"{up}.b", i, (1, 1))
        found[f"{ours}/mlp/out_proj/kernel"] = same(f"{theirs}.mlp_block.ffw_down.kernel")
        found[f"{ours}/mlp/out_proj/bias"] = same(f"{theirs}.mlp_block.ffw_down.bias")
    return Table(found)


def _branches(block: str, end: str) -> tuple[str, str]:
    return f"{block}.linear_y.{end}", f"{block}.linear_x.{end}"


def _half(name: str, index: int, ones: tuple[int, ...]) -> Transform:
    """Element `index` of a tensor [2, *ones, ...]; its `write` gives the tensor with both halves alike."""
    return Transform(
        (name,),
        lambda x: x[(index, *(0 for _ in ones))],
        lambda x: (np.broadcast_to(x, (2, *ones, *x.shape)),),
    )
