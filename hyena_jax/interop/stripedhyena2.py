"""StripedHyena 2, Evo 2 (2503.01868) by the names of Zymrael/vortex.

Axes: D channels, H heads, d channels of a head, G groups of filters, N modes, K taps.
"""

import re
from pathlib import Path

from hyena_jax.config import (
    AttentionConfig,
    HyenaConfig,
    LanguageModelConfig,
    MixerConfig,
    RealModalFilterConfig,
    ShortFilterConfig,
)
from hyena_jax.config.models import MAX_CHANNELS, MAX_LAYERS, MAX_SYMBOLS
from hyena_jax.data.tokenizers import BytesTokenizer
from hyena_jax.interop.family import Options, Settings, Source, Table, settings_of
from hyena_jax.interop.tensors import Tensors
from hyena_jax.interop.transforms import (
    Transform,
    dense,
    filter_taps,
    less_one,
    log_rates,
    reshaped,
    same,
    transposed,
)
from hyena_jax.system.errors import UserError

CONVOLVED_FROM = 128
"""Taps from which vortex convolves with a filter, and adds its input; with fewer it cross-correlates."""


def read(source: Path, tensors: Tensors, options: Options) -> Source:
    """The model in a PyTorch file of vortex; its config is YAML. The tokens are bytes."""
    options.refuse_windows()
    settings = settings_of(source, options, ("config.yml", "config.yaml", "config.json"))
    model = _from_settings(settings)
    model = options.applied(model, settings.size("max_seqlen", settings.get("seqlen", 8192)))
    return Source(model, _table(model), tensors, tokenizer=BytesTokenizer())


def _from_settings(settings: Settings) -> LanguageModelConfig:
    settings.require("interleave", True)
    settings.require("column_split", True)
    settings.require("column_split_hyena", False)
    settings.require("hyena_flip_x1x2", False)
    settings.require("proj_groups", 1)
    settings.require("final_norm", True)
    settings.require("tie_embeddings", True)
    settings.require("short_filter_bias", False)
    settings.require("qkv_proj_bias", False)
    settings.require("mlp_activation", "gelu")
    settings.require("smeared_gqa", False)
    for name in ("interleave", "column_split_hyena"):
        settings.get(name)  # must be there: without it vortex takes the other value
    settings.require("long_fir_threshold", None)
    n_layers = settings.size("num_layers", most=MAX_LAYERS)
    d_model = settings.size("hidden_size", most=MAX_CHANNELS)
    attention = AttentionConfig(
        n_heads=settings.size("num_attention_heads"),
        rotary_fraction=1.0,
        rotary_base=settings.number("rotary_emb_base", 1e6),
        rotary_scaling=(
            settings.number("rotary_emb_scaling_factor", 1.0)
            if settings.flag("use_interpolated_rotary_pos_emb", False)
            else 1.0
        ),
        qkv_bias=False,
        out_bias=settings.flag("mha_out_proj_bias", True),
    )
    kinds: dict[str, MixerConfig] = {
        "attn_layer_idxs": attention,
        "hcs_layer_idxs": _convolution(settings, d_model, "hcs"),
        "hcm_layer_idxs": _convolution(settings, d_model, "hcm"),
        "hcl_layer_idxs": _convolution(settings, d_model, "hcl"),
    }
    layers: dict[int, MixerConfig] = {}
    for name, mixer in kinds.items():
        for i in settings.indices(name, n_layers, []):
            settings.expect(i not in layers, name, i, "layers that no other list has")
            layers[i] = mixer
    missing = sorted(set(range(n_layers)) - layers.keys())
    if missing:
        raise UserError(f"{settings.source}: layer {missing[0]} is in none of {', '.join(kinds)}")
    evo2_style = settings.flag("evo2_style_activations", False)
    return LanguageModelConfig(
        pattern=tuple(layers[i] for i in range(n_layers)),
        n_layers=n_layers,
        d_model=d_model,
        ffn="bilinear" if evo2_style else "geglu_erf",
        first_ffn="geglu_erf" if evo2_style else None,
        ffn_bias=False,
        d_ff=settings.size("inner_mlp_size"),
        norm="rms_eps_outside",
        final_norm="rms_eps_outside",
        norm_eps=settings.number("eps", 1e-6),
        vocab_size=settings.size("vocab_size", most=MAX_SYMBOLS),
    )


def _convolution(settings: Settings, d_model: int, kind: str) -> HyenaConfig:
    """`hcs` and `hcm`, explicit filters of few taps; `hcl`, sums of decaying exponentials."""
    groups = settings.size(f"{kind}_filter_groups", d_model)
    if kind == "hcl":
        long_filter, has_skip = RealModalFilterConfig(settings.size("state_size", 16)), True
        settings.expect(groups == d_model, "hcl_filter_groups", groups, f"hidden_size={d_model}")
    else:
        n_taps = settings.size(f"{kind}_filter_length", {"hcs": 7, "hcm": 128}[kind])
        long_filter, has_skip = ShortFilterConfig(n_taps), n_taps >= CONVOLVED_FROM
    return HyenaConfig(
        short_filter_len=settings.size("short_filter_length", 3),
        filter_groups=None if groups == d_model else groups,
        skip=has_skip,
        in_bias=False,
        short_bias=False,
        out_bias=settings.flag("hyena_out_proj_bias", True),
        filter=long_filter,
    )


def _table(model: LanguageModelConfig) -> Table:
    found: dict[str, Transform] = {
        "embedding/embedding": same("embedding_layer.weight"),
        "final_norm/scale": less_one("norm.scale"),
    }
    for i in range(model.n_layers):
        ours, theirs, mixer = f"blocks_{i}", f"blocks.{i}", model.pattern[i]
        found[f"{ours}/mixer_norm/scale"] = less_one(f"{theirs}.pre_norm.scale")
        found[f"{ours}/mlp_norm/scale"] = less_one(f"{theirs}.post_norm.scale")
        if isinstance(mixer, AttentionConfig):
            found |= _attention(mixer, f"{ours}/mixer", f"{theirs}.inner_mha_cls", model.d_model)
        else:
            found |= _hyena(mixer, f"{ours}/mixer", theirs, model.d_model)
        for part, name in (("gate_proj", "l1"), ("in_proj", "l2"), ("out_proj", "l3")):
            found[f"{ours}/mlp/{part}/kernel"] = transposed(f"{theirs}.mlp.{name}.weight")
    # A buffer that is computed from the config, and the FP8 statistics of Transformer Engine.
    ignored = re.compile(r".*\.rotary_emb\.inv_freq|(.*\.)?_extra_state")
    return Table(found, {"unembed.weight": "embedding_layer.weight"}, ignored=ignored)


def _attention(mixer: AttentionConfig, ours: str, theirs: str, d_model: int) -> dict[str, Transform]:
    heads, channels = mixer.n_heads, d_model // mixer.n_heads

    def swap(x, first, second):
        """Rows [first, second, d] of a kernel [3D, D] as [second, first, d]."""
        x = x.reshape(first, second, channels, d_model).swapaxes(0, 1)
        return x.reshape(3 * d_model, d_model)

    found = {
        # The file has q, k and v of each head together; vortex reorders them when it loads.
        f"{ours}/qkv_proj/kernel": Transform(
            (f"{theirs}.Wqkv.weight",), lambda x: swap(x, heads, 3).T, lambda x: (swap(x.T, 3, heads),)
        ),
    }
    return found | dense(f"{ours}/out_proj", f"{theirs}.out_proj", mixer.out_bias)


def _hyena(mixer: HyenaConfig, ours: str, theirs: str, d_model: int) -> dict[str, Transform]:
    found = {
        f"{ours}/in_proj/kernel": Transform(
            (f"{theirs}.projections.weight",),
            lambda x: _interleaved(x, d_model, 3).T,
            lambda x: (_interleaved(x.T, 3, d_model),),
        ),
        f"{ours}/short_taps": Transform(
            (f"{theirs}.filter.short_filter_weight",),
            lambda x: _interleaved(x[:, 0, ::-1], d_model, 3),
            lambda x: (_interleaved(x, 3, d_model)[:, None, ::-1],),
        ),
        **dense(f"{ours}/out_proj", f"{theirs}.out_filter_dense", mixer.out_bias),
    }
    if isinstance(mixer.filter, ShortFilterConfig):
        is_reversed = mixer.filter.n_taps < CONVOLVED_FROM
        found[f"{ours}/filter/taps"] = filter_taps(f"{theirs}.filter.h", is_reversed)
    else:
        shape = (d_model, mixer.filter.n_modes)
        found[f"{ours}/filter/log_rate"] = log_rates(f"{theirs}.filter.log_poles")
        found[f"{ours}/filter/residue"] = reshaped(f"{theirs}.filter.residues", shape, (1, *shape))
    if mixer.skip:
        found[f"{ours}/skip"] = reshaped(f"{theirs}.filter.D", (d_model,), (1, d_model))
    return found


def _interleaved(x, first: int, second: int):
    """Rows [first, second] of x [first * second, ...] as [second, first]."""
    return x.reshape(first, second, *x.shape[1:]).swapaxes(0, 1).reshape(x.shape)
