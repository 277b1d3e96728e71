"""Configs of long filters, and the filters of this package by name."""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from hyena_jax.config.checks import Above, AtLeast, AtMost, Below, Between, Checked
from hyena_jax.config.registry import Registry, register
from hyena_jax.system.errors import require

NormAxis = Literal["none", "channels", "length"]
# Programs are unrolled over hidden layers; these sizes are larger than can be computed.
MAX_HIDDEN = 64
MAX_FEATURES = 2**16
# With documents, programs are unrolled over the taps.
MAX_FEW_TAPS = 128


class FilterConfig(Checked):
    """Base class of the configs of long filters.

    Register a subclass, a frozen dataclass, with the Linen module that it describes:

        Module(n_filters, d_model, max_len, config)
        __call__(length) -> h [N, D, length], for any length up to max_len: the first taps of h at max_len

    A filter that is the impulse response of a small recurrence has a method
    `recurrence() -> hyena_jax.filters.Modes`, and decoding runs it. The config of a filter of few taps
    overrides `reach`. An oracle is a function
    (params, n_filters, length, max_len, config) -> h on NumPy float64 arrays.
    """

    registry: ClassVar[Registry] = Registry("filter", is_module=True)

    @property
    def reach(self) -> int | None:
        """Taps after which a filter is zero, if so few that both forms sum them directly; None if long."""
        return None

    def check(self, max_len: int) -> None:
        """Refuses a length that does not fit; the base class refuses none."""


@dataclass(frozen=True)
class _WindowConfig(FilterConfig):
    """A window that decays exponentially, faster from channel to channel."""

    fast_decay: float = 0.3
    """Fastest channel: fraction of max_len at which its window has decayed to `decay_target`."""
    slow_decay: float = 1.5
    """Slowest channel: fraction of max_len at which its window has decayed to `decay_target`."""
    decay_target: Annotated[float, Between(1e-30, 1, "[)")] = 0.01
    """Window value that defines the two fractions above."""

    def __post_init__(self) -> None:
        super().__post_init__()
        slow, fast = self.slow_decay, self.fast_decay
        # A window that underflows to 0 at lag 1 would give infinity times 0.
        require(1e-6 <= fast <= slow, "fast_decay", fast, f"in [1e-6, slow_decay={slow}]")


@dataclass(frozen=True)
class CKConvFilterConfig(FilterConfig):
    """A sine network of the time index, without a window (Romero et al. 2021, arXiv 2102.02611)."""

    emb_dim: Annotated[int, AtMost(MAX_FEATURES)] = 33
    """Positional features, an odd number: time, and (emb_dim - 1) / 2 pairs of cosine and sine."""
    width: Annotated[int, AtLeast(1), AtMost(MAX_FEATURES)] = 64
    """Hidden width of the sine network."""
    n_hidden: Annotated[int, AtLeast(0), AtMost(MAX_HIDDEN)] = 2
    """Hidden layers after the first; 2 makes the paper's four dense layers."""
    sine_frequency: float = 14.0
    """Initial value w of the frequencies in sin(w x)."""
    train_sine_frequency: bool = True
    """Train the frequencies, one vector for all layers."""
    features: Literal["published", "harmonics"] = "published"
    """`published`: frequencies linspace(1e-4, bands - 1) and -sin; `harmonics`: 0..bands-1 and +sin."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.emb_dim >= 3 and self.emb_dim % 2 == 1, "emb_dim", self.emb_dim, "odd and at least 3")


@dataclass(frozen=True)
class ImplicitFilterConfig(_WindowConfig, CKConvFilterConfig):
    """A sine network of the time index times a decaying window (Hyena, section 3.3)."""

    window_shift: float = 0.0
    """Constant added to the window, so that it does not decay to 0."""
    train_decay: bool = False
    """Train the decay rates of the window."""
    norm_axis: NormAxis = "none"
    """Divide the filter by its L1 norm over all filter channels at each lag, or over the lags."""


@dataclass(frozen=True)
class _SirenConfig(FilterConfig):
    """A sine network of time alone."""

    width: Annotated[int, AtLeast(1), AtMost(MAX_FEATURES)] = 64
    """Hidden width of the network."""
    n_hidden: Annotated[int, AtLeast(0), AtMost(MAX_HIDDEN)] = 4
    """Hidden layers after the first."""
    frequency: Annotated[float, Above(0)] = 300.0
    """Constant w of the first layer's sin(w x); the other layers have sin(x)."""


@dataclass(frozen=True)
class SirenFilterConfig(_WindowConfig, _SirenConfig):
    """A sine network of time alone (SIREN, 2006.09661) times a decaying window, as in irhum/hyena."""


@dataclass(frozen=True)
class WindowedFilterConfig(_WindowConfig):
    """Free taps times a trainable window exp(alpha t) + b, as in the annotated variant of Hyena."""

    window_shift: float = 0.0
    """Initial value b."""
    train_decay: bool = True
    """Train alpha, one for each channel."""
    train_shift: bool = True
    """Train b, one for each channel."""
    norm_axis: NormAxis = "channels"
    """Divide each filter by its L1 norm over the channels at each lag, or over the lags."""


@dataclass(frozen=True)
class ExplicitFilterConfig(FilterConfig):
    """Free taps: the plain convolution."""

    n_taps: Annotated[int | None, AtLeast(1)] = None
    """Taps M; later lags are zero. None takes max_len."""

    def check(self, max_len: int) -> None:
        most = f"at most max_len={max_len}"
        require(self.n_taps is None or self.n_taps <= max_len, "n_taps", self.n_taps, most)


@dataclass(frozen=True)
class ShortFilterConfig(FilterConfig):
    """Free taps at the first lags alone: no Fourier transform, a state of the last inputs, and documents."""

    n_taps: Annotated[int, Between(1, MAX_FEW_TAPS)] = 7
    """Taps M; later lags are zero."""
    decay: tuple[float, float] | None = None
    """Smallest and largest rate r of a constant window exp(-r t / (max_len - 1)) on the taps; the rates are
    spaced logarithmically over the channels. None has no window."""
    deviation: Annotated[float | None, Between(0, 1000, "(]")] = None
    """Standard deviation of the normal initial taps; None draws them uniformly from ±1/sqrt(n_taps)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.decay is not None:
            slow, fast = self.decay
            require(1e-6 <= slow <= fast <= 1e6, "decay", self.decay, "two rates in [1e-6, 1e6], ascending")

    @property
    def reach(self) -> int:
        return self.n_taps

    def check(self, max_len: int) -> None:
        require(self.n_taps <= max_len, "n_taps", self.n_taps, f"at most max_len={max_len}")


@dataclass(frozen=True)
class FNOFilterConfig(FilterConfig):
    """The lowest modes of the filter's Fourier transform over max_len (Li et al. 2021, arXiv 2010.08895)."""

    n_modes: Annotated[int, AtLeast(1)] = 64
    """Learned modes, at most max_len // 2 + 1."""


@dataclass(frozen=True)
class TransferFunctionFilterConfig(FilterConfig):
    """A rational transfer function, evaluated by FFT over max_len and so aliased modulo max_len."""

    n_state: Annotated[int, AtLeast(1)] = 32
    """Coefficients n in the numerator and in the denominator."""

    def check(self, max_len: int) -> None:
        require(self.n_state < max_len, "n_state", self.n_state, f"below max_len={max_len}")


@dataclass(frozen=True)
class S4DFilterConfig(FilterConfig):
    """The impulse response of a diagonal state-space model, bilinear (Gu et al. 2022, arXiv 2206.11893)."""

    n_state: Annotated[int, AtMost(MAX_FEATURES)] = 64
    """Real size of the state, an even number: n_state / 2 complex modes."""
    init: Literal["lin", "inv"] = "lin"
    """Initial frequencies: S4D-Lin (pi n) or S4D-Inv (the inverse law)."""
    dt_min: float = 1e-3
    """Smallest initial step size."""
    dt_max: float = 1e-1
    """Largest initial step size; steps are log-uniform between the two."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.n_state >= 2 and self.n_state % 2 == 0, "n_state", self.n_state, "even and at least 2")
        require(0 < self.dt_min <= self.dt_max, "dt_min", self.dt_min, f"in (0, dt_max={self.dt_max}]")


@dataclass(frozen=True)
class ModalFilterConfig(FilterConfig):
    """h_0 free, h_t = Re sum_n R_n lambda_n^(t-1): trained directly in recurrent form."""

    n_modes: Annotated[int, AtLeast(1), AtMost(MAX_FEATURES)] = 16
    """Complex modes n."""
    min_radius: float = 0.9
    """Smallest initial |lambda|."""
    max_radius: Annotated[float, Below(1)] = 0.999
    """Largest initial |lambda|, below 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        most = f"in (0, max_radius={self.max_radius}]"
        require(0 < self.min_radius <= self.max_radius, "min_radius", self.min_radius, most)


@dataclass(frozen=True)
class RealModalFilterConfig(FilterConfig):
    """h_t = sum_n R_n e^(-r_n t) with real R_n and rates r_n > 0 (StripedHyena 2, arXiv 2503.01868)."""

    n_modes: Annotated[int, AtLeast(1), AtMost(MAX_FEATURES)] = 16
    """Real modes n."""
    min_rate: float = 0.0036
    """Smallest initial rate; rates are uniform between the two. The defaults are those of the released code,
    0.01/e and 0.1/e."""
    max_rate: float = 0.0368
    """Largest initial rate."""

    def __post_init__(self) -> None:
        super().__post_init__()
        least = f"in (0, max_rate={self.max_rate}]"
        require(0 < self.min_rate <= self.max_rate, "min_rate", self.min_rate, least)


@dataclass(frozen=True)
class LookupFilterConfig(FilterConfig):
    """A learned table over time, mapped to the channels by a small MLP (the gated variant of Hyena)."""

    width: Annotated[int, AtLeast(1), AtMost(MAX_FEATURES)] = 64
    """Rows F of the table [F, max_len]."""


@dataclass(frozen=True)
class STUFilterConfig(FilterConfig):
    """Learned sums of the fixed vectors of spectral filtering (Agarwal et al. 2023, arXiv 2312.06837)."""

    n_vectors: Annotated[int, AtLeast(1), AtMost(MAX_FEATURES)] = 16
    """Vectors K, those of the largest eigenvalues. Published models take 24 with max_len 8192; how many can
    be told from rounding errors grows with max_len: 18 at 41, 25 at 256."""
    alternating: Literal["separate", "shared", "none"] = "separate"
    """Weights of the second branch, whose vectors alternate in sign. `shared`: those of the first, as in the
    published code of the tensordot form, where all odd lags vanish."""

    def check(self, max_len: int) -> None:
        """There are not more vectors than lags; the module says how many are resolved."""
        require(self.n_vectors <= max_len, "n_vectors", self.n_vectors, f"at most max_len={max_len}")


FILTER_CONFIGS = FilterConfig.registry
for _name, _config_class, _module in (
    ("implicit", ImplicitFilterConfig, "implicit:ImplicitFilter"),
    ("siren", SirenFilterConfig, "implicit:SirenFilter"),
    ("windowed", WindowedFilterConfig, "explicit:WindowedFilter"),
    ("explicit", ExplicitFilterConfig, "explicit:ExplicitFilter"),
    ("short", ShortFilterConfig, "explicit:ShortFilter"),
    ("ckconv", CKConvFilterConfig, "implicit:CKConvFilter"),
    ("fno", FNOFilterConfig, "spectral:FNOFilter"),
    ("transfer_function", TransferFunctionFilterConfig, "spectral:TransferFunctionFilter"),
    ("s4d", S4DFilterConfig, "state_space:S4DFilter"),
    ("modal", ModalFilterConfig, "state_space:ModalFilter"),
    ("real_modal", RealModalFilterConfig, "state_space:RealModalFilter"),
    ("lookup", LookupFilterConfig, "implicit:LookupFilter"),
    ("stu", STUFilterConfig, "spectral:STUFilter"),
):
    register(_name, _config_class, f"hyena_jax.filters.{_module}", f"hyena_jax.reference.filters:{_name}")
