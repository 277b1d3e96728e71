"""Configs of mixers, and the mixers of this package by name."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal, NamedTuple

from hyena_jax.config.checks import (
    RUNTIME,
    Above,
    AtLeast,
    AtMost,
    Below,
    Between,
    Checked,
    require_divisor,
    require_sizes,
)
from hyena_jax.config.filters import (
    ExplicitFilterConfig,
    FilterConfig,
    ImplicitFilterConfig,
    LookupFilterConfig,
    S4DFilterConfig,
    WindowedFilterConfig,
)
from hyena_jax.config.registry import Registry, register
from hyena_jax.system.errors import require

Init = Literal["gpt2", "griffin", "torch", "xavier", "rwkv7"]
# Programs are unrolled over the gates and the taps of a short filter: more would never compile.
MAX_GATES = 64
MAX_TAPS = 1024
# Larger sizes cannot be computed and may overflow integers.
MAX_CHANNELS = 2**20
MAX_STEPS = 2**24
# A chunk of tokens is inverted by halves, in a program that is unrolled.
MAX_CHUNK = 4096
# Where an output is all zeros, a smaller eps of a norm gives gradients that are not finite in float32.
MIN_EPS = 1e-20


class MixerConfig(Checked):
    """Base class of the configs of mixers.

    Register a subclass, a frozen dataclass, with the Linen module that it describes:

        Module(d_model, max_len, config, n_layers, dtype)
        __call__(x [B, L, D], segment_ids, deterministic) -> y [B, L, D]

    `hyena_jax.mixers` says which methods a module adds to decode with a state, and which field to run with
    its length sharded over devices. An oracle is a function (config, params, x, max_len, segment_ids) -> y on
    NumPy float64 arrays; if the config has a field `filter`, it also gets the filter's oracle as the keyword
    argument `long_filter`. `hyena_jax.reference` describes these arguments.
    """

    registry: ClassVar[Registry] = Registry("mixer", is_module=True)

    causal: ClassVar[bool] = True
    """Whether no output depends on a later input; language models need causal mixers."""

    def check(self, d_model: int, max_len: int) -> None:
        """Refuses a width or a length that does not fit this mixer or its filter."""
        require_sizes(d_model, max_len)
        if hasattr(self, "filter"):
            self.filter.check(max_len)


@dataclass(frozen=True)
class HeadsConfig(MixerConfig):
    """Base class of the configs of mixers whose heads have equal parts of the width."""

    n_heads: Annotated[int, Between(1, MAX_CHANNELS)] = 4
    """Heads; must divide d_model."""

    def check(self, d_model: int, max_len: int) -> None:
        super().check(d_model, max_len)
        require_divisor("n_heads", self.n_heads, "d_model", d_model)


@dataclass(frozen=True)
class HyenaConfig(MixerConfig):
    """Gated long convolutions (Poli et al. 2023, arXiv 2302.10866); options as in the published code."""

    order: Annotated[int, AtMost(MAX_GATES)] = 2
    """Gating projections N. `conv_first` has N long filters, `gate_first` N - 1."""
    gating: Literal["conv_first", "gate_first"] = "gate_first"
    """`conv_first`: the paper's equation 6; `gate_first`: the published PyTorch code and checkpoints."""
    short_filter_len: Annotated[int, Between(0, MAX_TAPS)] = 3
    """Taps of the depthwise causal FIR filter on the projections; 0 has none."""
    n_heads: Annotated[int, AtLeast(1)] = 1
    """Heads H, which share the same W / H filters; W = inner_factor * d_model."""
    filter_groups: Annotated[int | None, AtLeast(1)] = None
    """Distinct filters in a head; each serves as many neighbouring channels. None: one for each channel."""
    inner_factor: Annotated[int, AtLeast(1), AtMost(MAX_GATES)] = 1
    """Width of projections and filters, as a multiple of d_model."""
    n_blocks: Annotated[int, AtLeast(1)] = 1
    """Blocks of max_len / n_blocks tokens, each convolved separately."""
    outer_mixing: bool = False
    """Gate with the sum of the gate over each head's channels instead of the gate."""
    post_order_ffn: bool = False
    """Mix the heads after each convolution."""
    activation: Literal["none", "gelu", "gelu_tanh", "relu", "silu", "tanh", "sigmoid"] = "none"
    """Applied before the output projection; `gelu` is the erf form."""
    skip: bool = True
    """Add the long convolutions' own inputs, each channel with its weight."""
    in_bias: bool = True
    """Bias of the input projection."""
    short_bias: bool = True
    """Bias of the FIR filter on the projections."""
    short_init: Literal["uniform", "lecun_normal"] = "uniform"
    """Initialisation of this filter: taps and biases uniform in ±1/sqrt(taps), PyTorch's default, or LeCun's
    normal taps and biases 0, Flax's."""
    out_bias: bool = True
    """Bias of the output projection."""
    init: Init = "gpt2"
    """Initialisation of the two projections, named after the code that uses it."""
    dropout: Annotated[float, Between(0, 1, "[)")] = 0.0
    """Dropout rate on the input of each long convolution."""
    out_dropout: Annotated[float, Between(0, 1, "[)")] = 0.0
    """Dropout rate on the input of the output projection."""
    bidirectional: bool = False
    """Also convolve over the future, with separate filters: not causal."""
    filter: FilterConfig = ImplicitFilterConfig()

    def __post_init__(self) -> None:
        super().__post_init__()
        least = 2 if self.gating == "gate_first" else 1
        require(self.order >= least, "order", self.order, f"at least {least} with gating {self.gating!r}")
        has_fir = self.short_filter_len > 0
        require(has_fir or self.short_bias, "short_bias", self.short_bias, "True with short_filter_len 0")
        allowed = "'uniform' with short_filter_len 0"
        require(has_fir or self.short_init == "uniform", "short_init", self.short_init, allowed)

    @property
    def causal(self) -> bool:
        return not self.bidirectional

    def check(self, d_model: int, max_len: int) -> None:
        super().check(d_model, max_len)
        width = self.inner_factor * d_model
        require_divisor("n_heads", self.n_heads, "inner_factor * d_model", width)
        if self.filter_groups is not None:
            head_dim = width // self.n_heads
            require_divisor("filter_groups", self.filter_groups, "the channels of a head", head_dim)
        require_divisor("n_blocks", self.n_blocks, "max_len", max_len)


@dataclass(frozen=True)
class AnnotatedHyenaConfig(MixerConfig):
    """The annotated variant of Hyena: normalised gates and three inner residual connections."""

    order: Annotated[int, Between(1, MAX_GATES)] = 2
    """Gates and long filters N."""
    short_filter_len: Annotated[int, Between(1, MAX_TAPS)] = 3
    """Taps of the depthwise causal FIR filter on the projections."""
    filter: FilterConfig = WindowedFilterConfig()


@dataclass(frozen=True)
class GatedHyenaConfig(MixerConfig):
    """The gated variant of Hyena: a gate interpolates between a long and a short convolution."""

    short_filter_len: Annotated[int, Between(1, MAX_TAPS)] = 3
    """Taps of the depthwise FIR filter."""
    causal: bool = True
    """False centres the FIR, as its source does, so that it reads (short_filter_len - 1) / 2 tokens ahead."""
    filter: FilterConfig = LookupFilterConfig()

    def __post_init__(self) -> None:
        super().__post_init__()
        taps = self.short_filter_len
        require(self.causal or taps % 2 == 1, "short_filter_len", taps, "odd when causal is False")


@dataclass(frozen=True)
class HawkConfig(MixerConfig):
    """The RG-LRU recurrent block of Hawk and Griffin (De et al. 2024, arXiv 2402.19427)."""

    width: Annotated[int | None, AtLeast(1), AtMost(MAX_CHANNELS)] = None
    """Recurrence width W; None takes d_model."""
    gate_blocks: Annotated[int, AtLeast(1)] = 1
    """Diagonal blocks of the gates' weight matrices; 1 is dense."""
    projection_bias: bool = False
    """Biases in the three dense layers of the block."""
    gate_bias: bool = False
    """Biases in the two gates."""
    short_filter_len: Annotated[int, Between(1, MAX_TAPS)] = 4
    """Taps of the depthwise causal FIR filter."""
    ring: Literal["a", "a_to_c"] = "a"
    """Which is initialised uniformly by area between the radii: a (released code), or a^c (paper)."""
    min_radius: float = 0.9
    """Smallest initial value; with sign `shifted` it must be smaller than the default, 0.3 for instance."""
    max_radius: Annotated[float, Below(1)] = 0.999
    """Largest initial value, below 1."""
    reset_at_start: bool = False
    """Treat the first token as a document start, whose input is not scaled (released code)."""
    gelu: Literal["erf", "tanh"] = "erf"
    """Form of the GELU on the gate branch; the released code has `tanh`."""
    sign: Literal["none", "shifted", "gate"] = "none"
    """How the recurrence's factors a_t in (0, 1) become signed, to track states such as parity. `shifted`:
    2 a_t - 1 (as in 2411.12537); `gate`: multiplied by the tanh of a third gate."""

    def __post_init__(self) -> None:
        super().__post_init__()
        most = f"in (0, max_radius={self.max_radius}]"
        require(0 < self.min_radius <= self.max_radius, "min_radius", self.min_radius, most)
        negative = "below 0.9 with sign 'shifted' (try 0.3), or few factors can turn negative"
        require(self.sign != "shifted" or self.min_radius < 0.9, "min_radius", self.min_radius, negative)

    def check(self, d_model: int, max_len: int) -> None:
        super().check(d_model, max_len)
        require_divisor("gate_blocks", self.gate_blocks, "width", self.width or d_model)


class HeadSizes(NamedTuple):
    """Heads of keys H and of values G, and the channels of a key K and of a value V."""

    keys: int
    values: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class DeltaRuleConfig(MixerConfig):
    """Base class of the configs of mixers with a matrix memory in which values are replaced by key."""

    n_heads: Annotated[int, Between(1, MAX_CHANNELS)] = 4
    """Heads of queries and keys."""
    n_value_heads: Annotated[int | None, Between(1, MAX_CHANNELS)] = None
    """Heads of values, a multiple of n_heads; None takes n_heads."""
    key_dim: Annotated[int | None, Between(1, MAX_CHANNELS)] = None
    """Channels of a query or key; None takes d_model / n_heads."""
    value_dim: Annotated[int | None, Between(1, MAX_CHANNELS)] = None
    """Channels of a value; None takes key_dim."""

    def __post_init__(self) -> None:
        super().__post_init__()
        heads = self.n_value_heads or self.n_heads
        require(heads % self.n_heads == 0, "n_value_heads", heads, f"a multiple of n_heads={self.n_heads}")

    def sizes(self, d_model: int) -> HeadSizes:
        key_dim = self.key_dim or d_model // self.n_heads
        value_heads = self.n_value_heads or self.n_heads
        return HeadSizes(self.n_heads, value_heads, key_dim, self.value_dim or key_dim)

    def check(self, d_model: int, max_len: int) -> None:
        super().check(d_model, max_len)
        if self.key_dim is None:
            require_divisor("n_heads", self.n_heads, "d_model", d_model)


@dataclass(frozen=True)
class GatedDeltaConfig(DeltaRuleConfig):
    """Gated DeltaNet (2412.06464): a matrix memory that decays, and in which values are replaced by key."""

    decay: bool = True
    """Let the memory decay; False is DeltaNet (2406.06484)."""
    gate: bool = True
    """Gate the output by SiLU of a projection."""
    negative_eigenvalues: bool = False
    """Update with strengths in (0, 2) instead of (0, 1), to track states such as parity (2411.12537)."""
    factors: Annotated[int, Between(1, MAX_GATES)] = 1
    """Keys and values of a token, which update the memory in turn (DeltaProduct, 2502.10297)."""
    short_filter_len: Annotated[int, Between(1, MAX_TAPS)] = 4
    """Taps of the depthwise causal FIR filter on queries, keys and values."""
    norm_eps: Annotated[float, Between(MIN_EPS, 1, "[]")] = 1e-5
    """Added to the mean square of a head's outputs in their norm."""
    chunk: Annotated[int, Between(1, MAX_CHUNK)] = field(default=64, metadata=RUNTIME)
    """Tokens that are computed at once, by matrix products; results differ only by rounding."""


@dataclass(frozen=True)
class ChannelDecayConfig(DeltaRuleConfig):
    """Base class of the configs of delta rules with a decay for each channel of a key."""

    gate_rank: Annotated[int | None, Between(1, MAX_CHANNELS)] = None
    """Inner width of the projections to the decays and to the output's gate; None takes value_dim."""
    gate_bias: bool = True
    """A bias of the output's gate, as in flash-linear-attention; Kimi Linear has none."""
    negative_eigenvalues: bool = False
    """Erase with strengths in (0, 2) instead of (0, 1), to track states such as parity (2411.12537)."""
    short_filter_len: Annotated[int, Between(1, MAX_TAPS)] = 4
    """Taps of the depthwise causal FIR filter on queries, keys and values."""
    norm_eps: Annotated[float, Between(MIN_EPS, 1, "[]")] = 1e-5
    """Added to the mean square of a head's outputs in their norm."""
    chunk: Annotated[int, Between(1, MAX_CHUNK)] = field(default=64, metadata=RUNTIME)
    """Tokens that are computed at once, by matrix products; results differ only by rounding."""


@dataclass(frozen=True)
class KDAConfig(ChannelDecayConfig):
    """Kimi Delta Attention (2510.26692): a gated delta rule with a decay for each channel of a key."""

    decay_bound: Annotated[float | None, Between(-20, 0, "[)")] = None
    """Least log of a decay: the decays are exp(decay_bound * sigmoid(...)); None bounds nothing."""


@dataclass(frozen=True)
class GatedDelta2Config(ChannelDecayConfig):
    """Gated DeltaNet-2 (2605.22791): what is erased and what is written have strengths for each channel."""

    gate: Literal["silu", "sigmoid"] = "silu"
    """Activation of the output's gate; flash-linear-attention has sigmoid."""


class LowRanks(NamedTuple):
    """Inner widths of the low-rank layers that make decays, rates, the share of first values, and gates."""

    decay: int
    rate: int
    value: int
    gate: int


@dataclass(frozen=True)
class RWKV7Config(HeadsConfig):
    """The time mixer of RWKV-7 (2503.14456): a delta rule with vectors of its own for what is erased."""

    n_heads: int = 4
    """Heads; must divide d_model. Published models have heads of 64 channels."""
    decay_rank: Annotated[int | None, Between(1, MAX_CHANNELS)] = None
    """Inner width of the projection to the decays; None takes 2.5 sqrt(d_model), rounded to a multiple of
    32."""
    rate_rank: Annotated[int | None, Between(1, MAX_CHANNELS)] = None
    """Inner width of the projection to the rates, a, by which values are replaced; None as of decay_rank."""
    value_rank: Annotated[int | None, Between(1, MAX_CHANNELS)] = None
    """Inner width of the projection to the share of the first layer's values; None takes 1.7 sqrt(d_model),
    likewise."""
    gate_rank: Annotated[int | None, Between(1, MAX_CHANNELS)] = None
    """Inner width of the projection to the output's gate; None takes 5 sqrt(d_model), likewise."""
    norm_eps: Annotated[float, Between(MIN_EPS, 1, "[]")] = 64e-5
    """Added to the variance of a head's outputs in their norm."""
    chunk: Annotated[int, Between(1, MAX_CHUNK)] = field(default=64, metadata=RUNTIME)
    """Tokens that are computed at once, by matrix products; results differ only by rounding."""

    def ranks(self, d_model: int) -> LowRanks:
        """The inner widths at a width of the model."""

        def of(factor: float) -> int:
            return max(32, 32 * round(factor * d_model**0.5 / 32))

        return LowRanks(
            self.decay_rank or of(2.5),
            self.rate_rank or of(2.5),
            self.value_rank or of(1.7),
            self.gate_rank or of(5),
        )


@dataclass(frozen=True)
class _StateSpaceConfig(MixerConfig):
    """Options that the Mamba mixers share."""

    n_heads: Annotated[int, Between(1, MAX_CHANNELS)] = 4
    """Heads; must divide the inner width, inner_factor * d_model."""
    inner_factor: Annotated[int, Between(1, MAX_GATES)] = 2
    """Inner width, as a multiple of d_model."""
    d_state: Annotated[int, Between(1, MAX_CHANNELS)] = 128
    """Size of each channel's state."""
    n_groups: Annotated[int, AtLeast(1)] = 1
    """Groups of heads that share their B and C; must divide n_heads."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_divisor("n_groups", self.n_groups, "n_heads", self.n_heads)

    def check(self, d_model: int, max_len: int) -> None:
        super().check(d_model, max_len)
        require_divisor("n_heads", self.n_heads, "inner_factor * d_model", self.inner_factor * d_model)


@dataclass(frozen=True)
class Mamba2Config(_StateSpaceConfig):
    """Mamba-2, or SSD: a state space with one decay for each head (Dao and Gu 2024, arXiv 2405.21060)."""

    short_filter_len: Annotated[int, Between(1, MAX_TAPS)] = 4
    """Taps of the depthwise causal FIR filter on x, B and C."""
    dt_limit: tuple[float, float] | None = None
    """Bounds of the time steps; None has none."""
    norm_eps: Annotated[float, Between(MIN_EPS, 1, "[]")] = 1e-5
    """Added to the mean square of a group's outputs in their norm."""
    chunk: Annotated[int, Between(1, MAX_CHUNK)] = field(default=64, metadata=RUNTIME)
    """Tokens that are computed at once, by matrix products; results differ only by rounding."""

    def __post_init__(self) -> None:
        super().__post_init__()
        limit, allowed = self.dt_limit, "two ordered numbers of at least 0"
        require(limit is None or 0 <= limit[0] <= limit[1], "dt_limit", limit, allowed)


@dataclass(frozen=True)
class Mamba3Config(_StateSpaceConfig):
    """Mamba-3 (2603.15569): Mamba-2 with the trapezoidal rule, keys that turn, several inputs of a token."""

    d_state: Annotated[int, AtLeast(2)] = 128
    """Size of each channel's state; even."""
    n_inputs: Annotated[int, Between(1, MAX_GATES)] = 1
    """Inputs and outputs of a token that share a memory; above 1 it is the paper's MIMO."""
    rotary_fraction: Annotated[float, Between(0, 1, "(]")] = 0.5
    """Fraction of the state's channels that turn."""
    rate: Literal["softplus", "heavy_tail"] = "softplus"
    """The decay rate's function: softplus as released, or 1 + x above 0 and 1 / (1 - x) below, as published
    later."""
    out_norm: bool = False
    """Normalise each head's output before its gate."""
    norm_eps: Annotated[float, Between(MIN_EPS, 1, "[]")] = 1e-5
    """Added to the mean square in the norms of B, C and the output."""
    chunk: Annotated[int, Between(1, MAX_CHUNK)] = field(default=64, metadata=RUNTIME)
    """Tokens that are computed at once, by matrix products; results differ only by rounding."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.d_state % 2 == 0, "d_state", self.d_state, "even")
        least = f"at least 2 / d_state = {2 / self.d_state:g}"
        require(self.n_planes >= 1, "rotary_fraction", self.rotary_fraction, least)

    @property
    def n_planes(self) -> int:
        """S, the planes of two channels that turn."""
        return int(self.rotary_fraction * self.d_state) // 2


@dataclass(frozen=True)
class _SoftmaxConfig(HeadsConfig):
    """Options that the two kinds of softmax attention share."""

    n_heads: int = 4
    """Query heads; must divide d_model."""
    n_kv_heads: Annotated[int | None, AtLeast(1)] = None
    """Heads of keys and values, a divisor of n_heads; 1 is multi-query, None takes n_heads."""
    hard_alibi_heads: Annotated[int, AtLeast(0)] = 0
    """First heads, fewer than n_heads, that see few keys: head h = 0, 1, ... the query's own and the h before
    (Hard-ALiBi, 2402.01032)."""
    rotary_fraction: Annotated[float, Between(0, 1, "[]")] = 0.0
    """Fraction of each head's channels that rotary position embedding rotates; 0 is none."""
    rotary_base: Annotated[float, Above(1)] = 10_000.0
    """Base of the rotary frequencies."""
    rotary_scaling: Annotated[float, Between(1, MAX_STEPS, "[]")] = 1.0
    """Rotary positions are divided by this number, as in models whose context was extended."""
    qk_norm_eps: Annotated[float | None, Between(MIN_EPS, 1, "[]")] = None
    """RMSNorm of queries and keys, with this eps; None has no such norm."""
    qk_norm: Literal["head", "all"] = "head"
    """Channels over which queries and keys are normalised: those of each head, with the same factors for all
    heads, or those of all heads at once."""
    qkv_bias: bool = True
    """Biases of queries, keys and values."""
    out_bias: bool = True
    """Bias of the output projection."""
    init: Init = "gpt2"
    """Initialisation of the projections, named after the code that uses it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.n_kv_heads is not None:
            require_divisor("n_kv_heads", self.n_kv_heads, "n_heads", self.n_heads)
        few, shared = self.hard_alibi_heads, self.n_heads // (self.n_kv_heads or self.n_heads)
        fits = few < self.n_heads and few % shared == 0
        allowed = f"below n_heads={self.n_heads}, and a multiple of the {shared} heads that share keys"
        require(fits, "hard_alibi_heads", few, allowed)
        require(self.causal or few == 0, "hard_alibi_heads", few, "0 with causal False")
        fits = self.qk_norm_eps is not None or self.qk_norm == "head"
        require(fits, "qk_norm", self.qk_norm, "'head' without qk_norm_eps")
        fits = self.rotary_fraction > 0 or self.rotary_scaling == 1
        require(fits, "rotary_scaling", self.rotary_scaling, "1 with rotary_fraction 0")

    def check(self, d_model: int, max_len: int) -> None:
        super().check(d_model, max_len)
        turned = round(self.rotary_fraction * d_model / self.n_heads)
        fits = turned % 2 == 0 and (turned > 0 or self.rotary_fraction == 0)
        allowed = f"0, or such that pairs of the {d_model // self.n_heads} channels of a head are rotated"
        require(fits, "rotary_fraction", self.rotary_fraction, allowed)


@dataclass(frozen=True)
class AttentionConfig(_SoftmaxConfig):
    """Softmax attention: multi-head, grouped or multi-query, with or without rotary positions."""

    causal: bool = True
    """False lets a query see all keys."""


@dataclass(frozen=True)
class LocalAttentionConfig(_SoftmaxConfig):
    """Softmax attention to the last `window` keys and the current one (Griffin, section 2.3)."""

    window: Annotated[int, AtLeast(1), AtMost(MAX_STEPS)] = 1024
    """Keys that a query sees before its own: with its own it sees window + 1 keys. (AFT's window counts the
    query's own key.)"""
    n_kv_heads: int | None = 1
    rotary_fraction: float = 0.5
    qkv_bias: bool = False
    init: Init = "griffin"


@dataclass(frozen=True)
class FastmaxConfig(HeadsConfig):
    """Attention with a Taylor polynomial in place of exp (Gerami et al. 2024, arXiv 2402.07901)."""

    p: Annotated[int, Between(1, 4)] = 2
    """Degree of the polynomial, 1 to 4. With odd degrees a row's sum may vanish; it is kept away from 0."""
    standardize: bool = True
    """Standardise each query and key over the channels of its head."""
    scale: Annotated[float | None, Between(0, 1000, "(]")] = None
    """Factor on q.k; None is 1 / sqrt(head_dim)."""
    factorized: bool = True
    """Use polynomial features, linear in the length, instead of the quadratic form."""
    causal: bool = True
    """False lets a query see all keys."""
    qkv_bias: bool = False
    """Biases of queries, keys and values."""
    out_bias: bool = True
    """Bias of the output projection."""
    init: Init = "xavier"
    """Initialisation of the projections, named after the code that uses it."""


@dataclass(frozen=True)
class AFTFullConfig(MixerConfig):
    """Attention-free transformer with learned position biases (Zhai et al. 2021, arXiv 2105.14103)."""

    rank: Annotated[int, AtLeast(1), AtMost(MAX_CHANNELS)] = 64
    """Rank of the biases w [max_len, max_len]."""
    init: Init = "gpt2"
    """Initialisation of the projections, named after the code that uses it."""


@dataclass(frozen=True)
class AFTLocalConfig(AFTFullConfig):
    """AFT with position biases inside a window, and 0 outside."""

    window: Annotated[int, AtLeast(1), AtMost(MAX_STEPS)] = 32
    """Keys with a bias: the query's own and the window - 1 before it. (The window of local attention does not
    count the query's own key.)"""


@dataclass(frozen=True)
class AFTSimpleConfig(MixerConfig):
    """AFT without position biases: a running mean of the values, weighted by exp(key)."""

    init: Init = "gpt2"
    """Initialisation of the projections, named after the code that uses it."""


@dataclass(frozen=True)
class AFTConvConfig(HeadsConfig):
    """AFT whose position biases depend only on the lag: one key and one short filter for each head."""

    n_taps: Annotated[int, AtLeast(1), AtMost(MAX_STEPS)] = 32
    """Taps s of each filter."""
    init: Init = "gpt2"
    """Initialisation of the projections, named after the code that uses it."""


@dataclass(frozen=True)
class H3Config(MixerConfig):
    """Two state-space convolutions with multiplicative gates (Fu et al. 2023, arXiv 2212.14052)."""

    head_dim: Annotated[int, AtLeast(1)] = 1
    """Channels of a head, whose keys and values form an outer product; must divide d_model."""
    n_taps: Annotated[int, Between(1, MAX_TAPS)] = 64
    """Taps of the shift filter on the keys."""
    filter: FilterConfig = S4DFilterConfig()
    """The second filter, one for each head."""

    def check(self, d_model: int, max_len: int) -> None:
        super().check(d_model, max_len)
        require_divisor("head_dim", self.head_dim, "d_model", d_model)


@dataclass(frozen=True)
class S4DConfig(MixerConfig):
    """One diagonal state-space convolution, GELU and a gated output (Gu et al. 2022, arXiv 2206.11893)."""

    filter: FilterConfig = S4DFilterConfig()


@dataclass(frozen=True)
class FIRConfig(MixerConfig):
    """One long convolution between two projections, without gates: the plain convolution baseline."""

    filter: FilterConfig = ExplicitFilterConfig()


MIXER_CONFIGS = MixerConfig.registry
for _name, _config_class, _module, _oracle in (
    ("hyena", HyenaConfig, "hyena:Hyena", "hyena:hyena"),
    ("annotated_hyena", AnnotatedHyenaConfig, "hyena:AnnotatedHyena", "hyena:annotated_hyena"),
    ("gated_hyena", GatedHyenaConfig, "hyena:GatedHyena", "hyena:gated_hyena"),
    ("hawk", HawkConfig, "hawk:Hawk", "recurrence:hawk"),
    ("gated_delta", GatedDeltaConfig, "gated_delta:GatedDelta", "delta_rule:gated_delta"),
    ("kda", KDAConfig, "gated_delta:KDA", "delta_rule:kda"),
    ("gated_delta2", GatedDelta2Config, "gated_delta:GatedDelta2", "delta_rule:gated_delta2"),
    ("rwkv7", RWKV7Config, "rwkv7:RWKV7", "delta_rule:rwkv7"),
    ("mamba2", Mamba2Config, "mamba:Mamba2", "delta_rule:mamba2"),
    ("mamba3", Mamba3Config, "mamba:Mamba3", "delta_rule:mamba3"),
    ("attention", AttentionConfig, "attention:Attention", "attention:attention"),
    ("local_attention", LocalAttentionConfig, "attention:LocalAttention", "attention:attention"),
    ("fastmax", FastmaxConfig, "fastmax:Fastmax", "attention:fastmax_layer"),
    ("aft_full", AFTFullConfig, "aft:AFTFull", "aft:aft_full"),
    ("aft_local", AFTLocalConfig, "aft:AFTLocal", "aft:aft_local"),
    ("aft_simple", AFTSimpleConfig, "aft:AFTSimple", "aft:aft_simple"),
    ("aft_conv", AFTConvConfig, "aft:AFTConv", "aft:aft_conv"),
    ("h3", H3Config, "convolution:H3", "hyena:h3"),
    ("s4d", S4DConfig, "convolution:S4D", "hyena:s4d"),
    ("fir", FIRConfig, "convolution:FIR", "hyena:fir"),
):
    register(_name, _config_class, f"hyena_jax.mixers.{_module}", f"hyena_jax.reference.{_oracle}")
