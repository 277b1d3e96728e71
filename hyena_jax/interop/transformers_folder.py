"""A run as a folder that huggingface/transformers loads, if its model is of one of FAMILIES."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hyena_jax import config
from hyena_jax.config import (
    Experiment,
    GatedDeltaConfig,
    HawkConfig,
    HyenaConfig,
    LanguageModelConfig,
    MixerConfig,
    ModelConfig,
    TextConfig,
    name_of,
)
from hyena_jax.data.tokenizers import BpeTokenizer, SentencePieceTokenizer
from hyena_jax.interop import lfm2, olmo_hybrid, recurrentgemma
from hyena_jax.interop.family import Settings
from hyena_jax.system import files
from hyena_jax.system.errors import UserError, require
from hyena_jax.system.trees import named_leaves

FAMILIES = {HawkConfig: recurrentgemma, HyenaConfig: lfm2, GatedDeltaConfig: olmo_hybrid}
"""The families by the mixer that they have in addition to attention."""
# Options that a trained model's values do not depend on.
FREE = ("init", "dropout", "max_len", "dtype", "remat", "loss_chunk")
FREE_OF_MIXERS = ("init", "ring", "min_radius", "max_radius")


def settings_of(model: ModelConfig) -> tuple[Any, dict[str, Any]]:
    """The family of a model, one of FAMILIES, and the values of its `config.json`.

    UserError names the options in which the model differs from those that a family can say.
    """
    if not isinstance(model, LanguageModelConfig):
        raise UserError("format transformers needs a language model")
    families = [
        family for kind, family in FAMILIES.items() if any(isinstance(mixer, kind) for mixer in model.pattern)
    ]
    if len(families) != 1:
        raise UserError(
            "format transformers can write patterns of RecurrentGemma (hawk, local_attention), LFM2 (hyena,"
            " attention) and Olmo Hybrid (gated_delta, attention); got a pattern of"
            f" {', '.join(sorted(set(map(name_of, model.pattern))))}; --format safetensors writes any model"
        )
    family = families[0]
    values = family.to_settings(model)
    theirs = _comparable(family.from_settings(Settings("config.json", values)), model)
    ours, data = _comparable(model, model), TextConfig(seq_len=1)  # which fits every model
    differences = config.identity_differences(Experiment(ours, data), Experiment(theirs, data))
    if differences:
        name = values["architectures"][0]
        raise UserError(
            f"{name} of transformers cannot say this model, which differs from one that it can by"
            f" {'; '.join(differences[:5])}; --format safetensors writes any model"
        )
    return family, values


def end_of(model: ModelConfig, bos: int | None) -> int | None:
    """The token that ends a text of a run's export; None: none is known, or there can be no export."""
    try:
        family, _ = settings_of(model)
    except UserError:
        return None
    return _ends(family, model, bos)["eos_token_id"]


def _ends(family: Any, model: LanguageModelConfig, bos: int | None) -> dict[str, int | None]:
    """The other special tokens, known if vocabulary and `bos` are those of the released models."""
    is_released = bos == family.BOS and model.vocab_size == family.RELEASED_VOCABULARY
    return family.ENDS if is_released else dict.fromkeys(family.ENDS)


def _comparable(model: LanguageModelConfig, free: LanguageModelConfig) -> LanguageModelConfig:
    """The model with defaults filled in, and from `free` what its values do not depend on."""
    pattern = [model.pattern[i % len(model.pattern)] for i in range(model.n_layers)]
    others = [free.pattern[i % len(free.pattern)] for i in range(model.n_layers)]
    mixers = tuple(_filled(mixer, other, model) for mixer, other in zip(pattern, others, strict=True))
    scale = model.d_model**0.5
    is_exact = model.scale_embedding and float(np.asarray(scale, "bfloat16")) == scale
    return replace(
        model,
        pattern=mixers,
        norm_places=tuple(model.norm_places[i % len(model.norm_places)] for i in range(model.n_layers)),
        norm_eps=1e-6 if model.norm_eps is None and model.norm == "rms" else model.norm_eps,
        first_ffn=None if model.first_ffn == model.ffn else model.first_ffn,
        vocab_multiple=1 if model.vocab_size % model.vocab_multiple == 0 else model.vocab_multiple,
        round_embedding_scale=model.round_embedding_scale or is_exact,
        **{name: getattr(free, name) for name in FREE},
    )


def _filled(mixer: MixerConfig, other: MixerConfig, model: LanguageModelConfig) -> MixerConfig:
    found = {}
    if isinstance(mixer, HawkConfig):
        found["width"] = mixer.width or model.d_model
    if isinstance(mixer, GatedDeltaConfig):
        sizes = mixer.sizes(model.d_model)
        found |= {"n_value_heads": sizes.values, "key_dim": sizes.key_dim, "value_dim": sizes.value_dim}
    if hasattr(mixer, "n_kv_heads"):
        found["n_kv_heads"] = mixer.n_kv_heads or mixer.n_heads
    if type(mixer) is type(other):
        found |= {name: getattr(other, name) for name in FREE_OF_MIXERS if hasattr(other, name)}
    return replace(mixer, **found)


def write(folder: Path, model: LanguageModelConfig, params: Any, encoding: Any, card: str) -> None:
    """Writes `folder`, which must not exist or be empty: config, weights, tokenizer, card.

    Args:
      params: float32 arrays.
      encoding: the run's tokenizer; one with a file of its own is written in its format.
      card: the text of README.md.

    If writing fails, there is no folder.
    """
    family, values = settings_of(model)
    bos = getattr(encoding, "bos", None)
    ends, metadata = _ends(family, model, bos), {}
    if family is recurrentgemma:
        values, metadata = recurrentgemma.exported(values, model)
    values = {**values, "bos_token_id": bos, **ends}
    leaves, tensors = named_leaves(params), {}
    for path, transform in family.transformers_table(model).transforms.items():
        arrays = transform.write(leaves[path])
        tensors |= dict(zip(transform.names, arrays, strict=True))
    with files.new_folder(folder) as draft:
        files.write_safetensors(draft / "model.safetensors", tensors, {"format": "pt", **metadata})
        _write_json(draft / "config.json", values)
        if isinstance(encoding, BpeTokenizer):
            _write_tokenizer(draft, encoding, ends["eos_token_id"])
        elif isinstance(encoding, SentencePieceTokenizer):
            (draft / "tokenizer.model").write_bytes(encoding.definition)
        (draft / "README.md").write_text(card, encoding="utf-8")


def _write_tokenizer(folder: Path, encoding: BpeTokenizer, eos: int | None) -> None:
    """It adds `bos` before every text and no other token, as the model reads it."""
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing

    definition = Tokenizer.from_str(encoding.definition)
    names = {
        f"{name}_token": definition.id_to_token(token)
        for name, token in (("bos", encoding.bos), ("eos", eos))
        if token is not None and definition.id_to_token(token) is not None
    }
    text = encoding.definition
    wanted = [] if encoding.bos is None else [encoding.bos]
    if definition.encode("").ids != wanted:
        bos = names.get("bos_token")
        require(bos is not None or encoding.bos is None, "data.bos", encoding.bos, "the id of a piece")
        special = [] if bos is None else [(bos, encoding.bos)]
        definition.post_processor = TemplateProcessing("$A" if bos is None else f"{bos} $A", None, special)
        text = definition.to_str(pretty=True)
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    about = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    _write_json(folder / "tokenizer_config.json", about)


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
