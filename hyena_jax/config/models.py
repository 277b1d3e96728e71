"""Configs of models: a stack of blocks between an embedding and a head."""

import re
from dataclasses import dataclass, field, fields
from typing import Annotated, ClassVar, Literal

from hyena_jax.config.checks import RUNTIME, Above, AtLeast, AtMost, Between, Checked
from hyena_jax.config.data import MAX_SYMBOLS, InputKind, input_kind
from hyena_jax.config.mixers import MAX_CHANNELS, MIN_EPS, HyenaConfig, Init, MixerConfig
from hyena_jax.config.registry import Registry, name_of, register
from hyena_jax.system.errors import UserError, require

# Programs are unrolled over the layers, and windows of filters are stored for each channel.
MAX_LAYERS = 1024
# Up to here, all times t / (max_len - 1) are different in float32.
MAX_POSITIONS = 2**23
MAX_SIDE = 2**15

Norm = Literal["none", "layer", "rms", "rms_eps_outside"]
NORM_EPS = {"layer": 1e-5, "rms": 1e-6, "rms_eps_outside": 1e-6}
"""The default eps of a norm: of LayerNorm as in GPT-2 and PyTorch (Flax's own default is 1e-6)."""
NormPlace = Literal["before", "after"]
FeedForward = Literal["gelu", "gelu_tanh", "relu", "squared_relu", "geglu", "geglu_erf", "swiglu", "bilinear"]


class ModelConfig(Checked):
    """Base class of the configs of models.

    Register a subclass, a frozen dataclass, with the Linen module that it describes:

        Module(config)
        __call__(inputs, segment_ids, deterministic) -> logits

    with logits [B, L, V] of tokens int [B, L], or [B, classes] of images float [B, height, width, colours].
    Fields `vocab_size`, `image_size`, `channels` and `n_classes` that are None are filled in by the data.
    `hyena_jax.models` says what else a module may have. An oracle is a function (params, inputs, config,
    mixers) -> logits on NumPy float64 arrays; `mixers` are the oracles (params, x) -> y of the config's
    pattern, if it has one.
    """

    registry: ClassVar[Registry] = Registry("model", is_module=True)

    inputs: ClassVar[str] = "tokens"
    """What the model reads: `tokens`, `images`, or another word; must equal the data config's `inputs`."""

    @property
    def input_kind(self) -> InputKind:
        return input_kind(self.inputs)

    def input_row(self) -> tuple[tuple[int, ...], str]:
        """Shape and dtype of the longest row of inputs; here max_len token ids."""
        if not hasattr(self, "max_len"):
            name = type(self).__name__
            raise UserError(f"{name} must have a field max_len, or a method input_row() -> (shape, dtype)")
        return (self.max_len,), "int32"


@dataclass(frozen=True)
class LoRAConfig(Checked):
    """Low-rank adaptation of a trained model: kernels W become W + s A B, and only A and B are trained."""

    rank: Annotated[int | None, AtLeast(1)] = None
    """Rank r of the update of each target, at most the smaller side of its kernel; None trains all
    parameters."""
    alpha: Annotated[float, Above(0)] = 16.0
    """The update is scaled by s = alpha / r."""
    rank_stabilised: bool = False
    """Scale by s = alpha / sqrt(r) instead."""
    targets: str = r"(in_proj|gate_proj|out_proj|qkv_proj)/kernel"
    """Regular expression, searched in the paths of dense kernels such as `blocks_0/mixer/in_proj/kernel`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            re.compile(self.targets)
        except (re.error, OverflowError, RecursionError) as error:
            raise UserError(
                f"must be a regular expression, got {self.targets!r}: {error}", "targets"
            ) from error
        for option in fields(self):
            value, allowed = getattr(self, option.name), f"{option.default!r} without lora.rank"
            require(self.rank is not None or value == option.default, option.name, value, allowed)

    @property
    def scale(self) -> float:
        """The factor s of the update."""
        return self.alpha / (self.rank**0.5 if self.rank_stabilised else self.rank)


@dataclass(frozen=True)
class BackboneConfig(ModelConfig):
    """`n_layers` blocks: x <- x + mixer(norm(x)), then x <- x + ffn(norm(x))."""

    pattern: tuple[MixerConfig, ...] = (HyenaConfig(),)
    """Mixers of the first layers, repeated up to n_layers."""
    n_layers: Annotated[int, AtLeast(1), AtMost(MAX_LAYERS)] = 4
    """Number of blocks."""
    d_model: Annotated[int, AtLeast(1), AtMost(MAX_CHANNELS)] = 128
    """Width D of the residual stream."""
    ffn: Literal["none", FeedForward] = "gelu_tanh"
    """Feed-forward layer of a block; `gelu` is the erf form. Gated are `geglu` (by the tanh form of GELU),
    `geglu_erf`, `swiglu` (by SiLU) and `bilinear` (by a product without activation)."""
    first_ffn: FeedForward | None = None
    """Feed-forward layer of the first block; None takes ffn."""
    ffn_shift: bool = False
    """Token shift: the feed-forward layers mix each input with that of the token before, channel by channel.
    With ffn `squared_relu` and without biases this is RWKV-7's channel mixer."""
    ffn_bias: bool = True
    """Biases in the feed-forward layers."""
    d_ff: Annotated[int | None, AtLeast(1), AtMost(MAX_CHANNELS)] = 512
    """Hidden width of the feed-forward layer; None if and only if ffn is `none`."""
    norm: Norm = "layer"
    """Norm at each mixer and feed-forward layer: LayerNorm, RMSNorm with factor 1 + scale, or RMSNorm
    whose eps is added to the root instead of the mean square."""
    final_norm: Norm = "layer"
    """Norm after the last block."""
    norm_places: tuple[NormPlace, ...] = ("before",)
    """Where the norms of a block are: `before`, x + f(norm(x)), or `after`, x + norm(f(x)). One place for all
    blocks, or one for each mixer of the pattern."""
    norm_eps: Annotated[float | None, Between(MIN_EPS, 1, "[]")] = None
    """Eps of these norms; None is 1e-5 in LayerNorm and 1e-6 in RMSNorm."""
    residual: bool = True
    """Residual paths around mixers and feed-forward layers; False requires norm and ffn `none`."""
    learned_positions: bool = False
    """Add a learned position embedding (attention needs it or rotary positions; convolutions do not)."""
    dropout: Annotated[float, Between(0, 1, "[)")] = 0.0
    """Dropout rate on the embedding and on what mixers and feed-forward layers add to the residual stream."""
    init: Init = "gpt2"
    """Initialisation of embeddings, feed-forward layers and head, named after the code that uses it."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of activations; parameters, FFTs, norms and the loss stay in float32."""
    remat: Literal["none", "block", "filters", "dots", "dots_no_batch"] = field(
        default="none", metadata=RUNTIME
    )
    """What the backward pass recomputes of a block. `block`: everything; `filters`: everything but the long
    filters; `dots`: everything but matrix products; `dots_no_batch`: but matrix products without batch
    axes."""
    lora: LoRAConfig = LoRAConfig()

    def __post_init__(self) -> None:
        super().__post_init__()
        require(len(self.pattern) >= 1, "pattern", self.pattern, "at least one mixer")
        allowed = f"{'None' if self.ffn == 'none' else 'a width'} with ffn {self.ffn!r}"
        require((self.d_ff is None) == (self.ffn == "none"), "d_ff", self.d_ff, allowed)
        has_ffn = self.ffn != "none"
        require(has_ffn or self.first_ffn is None, "first_ffn", self.first_ffn, "None with ffn 'none'")
        require(has_ffn or not self.ffn_shift, "ffn_shift", self.ffn_shift, "False with ffn 'none'")
        require(has_ffn or self.ffn_bias, "ffn_bias", self.ffn_bias, "True with ffn 'none'")
        has_norm = {self.norm, self.final_norm, getattr(self, "embedding_norm", "none")} != {"none"}
        require(has_norm or self.norm_eps is None, "norm_eps", self.norm_eps, "None without norms")
        places, n_mixers = self.norm_places, len(self.pattern)
        each = "" if n_mixers == 1 else f", or one for each of the pattern's {n_mixers} mixers"
        require(len(places) in (1, n_mixers), "norm_places", places, f"one place{each}")
        can_be = self.norm != "none" or places == ("before",)
        require(can_be, "norm_places", places, "('before',) with norm 'none'")
        bare = (self.norm, self.ffn) == ("none", "none")
        require(self.residual or bare, "residual", self.residual, "True unless norm and ffn are 'none'")

    def check_mixers(self, max_len: int) -> None:
        """Refuses mixers that do not fit the width or the length."""
        for mixer in self.pattern:
            mixer.check(self.d_model, max_len)


@dataclass(frozen=True)
class LanguageModelConfig(BackboneConfig):
    """Token embedding, blocks of causal mixers, final norm and head."""

    max_len: Annotated[int, AtLeast(1), AtMost(MAX_POSITIONS)] = 256
    """Longest sequence, Lmax; filters and positions are defined relative to it."""
    vocab_size: Annotated[int | None, AtLeast(2), AtMost(MAX_SYMBOLS)] = None
    """Vocabulary size; None takes the tokenizer's."""
    vocab_multiple: Annotated[int, Between(1, 4096)] = 1
    """Embedding and head have rows up to a multiple of this number; no logits are computed from the rows
    beyond vocab_size."""
    scale_embedding: bool = False
    """Multiply the token embedding by sqrt(d_model)."""
    round_embedding_scale: bool = False
    """Round sqrt(d_model) to bfloat16, as RecurrentGemma's released code does."""
    embedding_norm: Norm = "none"
    """Norm of the embedding, before the first block."""
    tied_head: bool = True
    """Use the transposed embedding as the head."""
    head_bias: bool = False
    """Bias of an untied head."""
    logit_scale: Annotated[float, Above(0)] = 1.0
    """Factor on the logits, before soft_cap."""
    soft_cap: Annotated[float | None, Above(0)] = None
    """Bound c of the logits: c tanh(logits / c)."""
    loss_chunk: Annotated[int | None, AtLeast(1)] = field(default=None, metadata=RUNTIME)
    """Tokens of each row whose logits are in memory at a time in the loss; None takes as many as fit into
    2^26 logits, but at least 1,024 over the rows of a device."""

    def __post_init__(self) -> None:
        super().__post_init__()
        is_scaled = self.scale_embedding or not self.round_embedding_scale
        allowed = "False without scale_embedding"
        require(is_scaled, "round_embedding_scale", self.round_embedding_scale, allowed)
        require(not (self.tied_head and self.head_bias), "head_bias", self.head_bias, "False with tied_head")
        for mixer in self.pattern:
            require(mixer.causal, "pattern", name_of(mixer), "of causal mixers, to predict the next token")
        self.check_mixers(self.max_len)


@dataclass(frozen=True)
class ImageClassifierConfig(BackboneConfig):
    """Patches by a strided convolution, blocks of any mixers, final norm and head."""

    inputs: ClassVar[str] = "images"

    learned_positions: bool = True
    """Add a learned embedding for the position of each patch."""
    image_size: Annotated[tuple[int, int] | None, Between(1, MAX_SIDE)] = None
    """Height and width; None takes the data's."""
    channels: Annotated[int | None, AtLeast(1), AtMost(MAX_CHANNELS)] = None
    """Colours; None takes the data's."""
    n_classes: Annotated[int | None, AtLeast(2), AtMost(MAX_SYMBOLS)] = None
    """Classes; None takes the data's."""
    patch_size: Annotated[tuple[int, int], Between(1, MAX_SIDE)] = (4, 4)
    """Height and width of a patch; a border narrower than a patch is cropped."""
    head: Literal["average_pool", "per_token"] = "average_pool"
    """Classify the mean over the patches, or each patch separately."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.image_size is not None:
            fits = all(p <= n for p, n in zip(self.patch_size, self.image_size, strict=True))
            require(fits, "patch_size", self.patch_size, f"at most image_size={self.image_size}")
            self.check_mixers(self.max_len)

    @property
    def max_len(self) -> int:
        """Number of patches of an image."""
        require(self.image_size is not None, "image_size", self.image_size, "known when a model is built")
        height, width = (n // p for n, p in zip(self.image_size, self.patch_size, strict=True))
        return height * width

    def input_row(self) -> tuple[tuple[int, ...], str]:
        return (*self.image_size, self.channels), "float32"


@dataclass(frozen=True)
class AutoencoderConfig(BackboneConfig):
    """Token embedding, blocks of any mixers, and a decoder that reads the last output alone."""

    inputs: ClassVar[str] = "sequences_to_compress"

    max_len: Annotated[int, AtLeast(1), AtMost(MAX_POSITIONS)] = 256
    """Longest sequence, Lmax; filters and positions are defined relative to it."""
    vocab_size: Annotated[int | None, AtLeast(2), AtMost(MAX_SYMBOLS)] = None
    """Vocabulary size; None takes the data's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        even = self.d_model >= 4 and self.d_model % 2 == 0
        require(even, "d_model", self.d_model, "even and at least 4, for sines and cosines of positions")
        self.check_mixers(self.max_len)


MODEL_CONFIGS = ModelConfig.registry
for _name, _config_class, _module in (
    ("language_model", LanguageModelConfig, "language_model:LanguageModel"),
    ("image_classifier", ImageClassifierConfig, "image_classifier:ImageClassifier"),
    ("autoencoder", AutoencoderConfig, "autoencoder:Autoencoder"),
):
    register(_name, _config_class, f"hyena_jax.models.{_module}", f"hyena_jax.reference.models:{_name}")
