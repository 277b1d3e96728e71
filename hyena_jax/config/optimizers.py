"""The configs of optimizers, and of the schedules of their learning rates."""

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from hyena_jax.config.checks import MAX_COUNT, RUNTIME, Above, AtLeast, AtMost, Between, Checked
from hyena_jax.config.registry import Registry, register
from hyena_jax.system.errors import require


class ScheduleConfig(Checked):
    """Base class of the configs of learning rate schedules.

    Register a subclass, a frozen dataclass, with a function that makes the schedule it describes:

        make(config, peak, total_steps) -> optax.Schedule

    `peak` is `optimizer.learning_rate` and `total_steps` is `training.steps`; the schedule maps the number of
    updates so far, int32 [], to the learning rate.
    """

    registry: ClassVar[Registry] = Registry("schedule", is_module=False)

    def check(self, peak: float) -> None:
        """Refuses a peak rate that does not fit; the base class refuses none."""


@dataclass(frozen=True)
class WarmupScheduleConfig(ScheduleConfig):
    """Base class of schedules with a linear warm-up to the peak."""

    warmup_steps: Annotated[int, AtLeast(0)] = 100
    """Steps of linear warm-up."""
    initial_fraction: Annotated[float, Between(0, 1)] = 0.0
    """Learning rate at the first step of the warm-up, as a fraction of the peak."""

    def __post_init__(self) -> None:
        super().__post_init__()
        fits = self.warmup_steps > 0 or self.initial_fraction == 0
        require(fits, "initial_fraction", self.initial_fraction, "0 without warmup_steps")


@dataclass(frozen=True)
class DecayScheduleConfig(WarmupScheduleConfig):
    """Base class of schedules that decay from the peak to a final rate and stay there."""

    decay_steps: Annotated[int | None, AtMost(MAX_COUNT)] = None
    """Step at which the decay ends; None takes training.steps."""
    final_fraction: Annotated[float, Between(0, 1)] = 0.1
    """Learning rate at the end, as a fraction of the peak."""
    final_learning_rate: float | None = None
    """Learning rate at the end, instead of `final_fraction`; None uses that."""

    def __post_init__(self) -> None:
        super().__post_init__()
        end, allowed = self.decay_steps, f"above warmup_steps={self.warmup_steps}"
        require(end is None or end > self.warmup_steps, "decay_steps", end, allowed)

    def check(self, peak: float) -> None:
        final = self.final_learning_rate
        require(
            final is None or 0 <= final <= peak, "final_learning_rate", final, f"in 0..learning_rate={peak}"
        )


@dataclass(frozen=True)
class CosineConfig(DecayScheduleConfig):
    """Cosine decay (Loshchilov and Hutter 2017, arXiv 1608.03983, equation 5)."""


@dataclass(frozen=True)
class LinearConfig(DecayScheduleConfig):
    """Linear decay."""


@dataclass(frozen=True)
class ConstantConfig(WarmupScheduleConfig):
    """The peak rate after the warm-up."""


@dataclass(frozen=True)
class WarmupStableDecayConfig(DecayScheduleConfig):
    """The peak rate, then linear decay (Haegele et al. 2024, arXiv 2405.18392, section 3)."""

    decay_fraction: Annotated[float, Between(0, 1, "(]")] = 0.2
    """Fraction of the steps up to `decay_steps` during which the rate decays."""


@dataclass(frozen=True)
class OptimizerConfig(Checked):
    """Base class of the configs of optimizers.

    Register a subclass, a frozen dataclass, with a function that makes the optimizer it describes:

        make(config, schedule, params) -> optax.GradientTransformation

    `schedule` is the `optax.Schedule` of the learning rate; `params` are the parameters, or their shapes
    (`jax.ShapeDtypeStruct`). Its gradients are already averaged over devices and accumulation steps. A
    function that calls `hyena_jax.training.optimizer.in_groups` also has parameter groups, weight decay and
    clipping; its config derives from `GroupedOptimizerConfig`.
    """

    registry: ClassVar[Registry] = Registry("optimizer", is_module=False)

    learning_rate: Annotated[float, Above(0)] = 2e-3
    """Peak learning rate."""
    schedule: ScheduleConfig = CosineConfig()
    """Schedule of the learning rate."""
    accumulation_steps: Annotated[int, AtLeast(1)] = 1
    """Parts of a batch, computed one after the other; their gradients are averaged for one update."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.schedule.check(self.learning_rate)


@dataclass(frozen=True)
class ParameterGroup(Checked):
    """A learning rate and weight decay for the parameters whose path matches `pattern`."""

    pattern: str
    """Regular expression, searched in paths such as `blocks_0/mixer/filter/dense_0/kernel`."""
    learning_rate: Annotated[float | None, AtLeast(0)] = None
    """Peak learning rate, 0 to keep the parameters constant; None takes the optimizer's."""
    weight_decay: Annotated[float | None, AtLeast(0)] = None
    """Decoupled weight decay; None takes the optimizer's."""
    optional: bool = field(default=False, metadata=RUNTIME)
    """Allow the group to match nothing, for parameters that only some mixers have."""


# As in the published Hyena code: a low rate for positional features, no decay of filters, biases and scales.
NO_DECAY = ParameterGroup(r"/(bias|scale|skip|short_taps|short_bias)$", weight_decay=0.0)
HYENA_GROUPS = (
    ParameterGroup(r"filter/positions$", learning_rate=1e-5, weight_decay=0.0, optional=True),
    ParameterGroup(r"/filter/", weight_decay=0.0, optional=True),
    NO_DECAY,
)


@dataclass(frozen=True)
class GroupedOptimizerConfig(OptimizerConfig):
    """Base class of optimizers with clipping, decoupled weight decay and parameter groups."""

    clip_norm: Annotated[float | None, Above(0)] = 1.0
    """Largest global norm of the gradients; None does not clip."""
    weight_decay: Annotated[float, AtLeast(0)] = 0.1
    """Decoupled weight decay, unless a group sets another; multiplied by the learning rate."""
    groups: tuple[ParameterGroup, ...] = ()
    """The first group that matches a parameter applies; a group that matches none must be optional."""


@dataclass(frozen=True)
class AdamWConfig(GroupedOptimizerConfig):
    """AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101, algorithm 2)."""

    b1: Annotated[float, Between(0, 1, "[)")] = 0.9
    """Decay of the first moment."""
    b2: Annotated[float, Between(0, 1, "[)")] = 0.99
    """Decay of the second moment."""
    eps: Annotated[float, Above(0)] = 1e-8
    """Added to the square root of the second moment."""


@dataclass(frozen=True)
class LionConfig(GroupedOptimizerConfig):
    """Lion (Chen et al. 2023, arXiv 2302.06675): the sign of the momentum.

    Section 5 advises a learning rate 3 to 10 times lower than AdamW's and a decay as many times higher.
    """

    learning_rate: float = 5e-4
    weight_decay: float = 0.4
    b1: Annotated[float, Between(0, 1, "[)")] = 0.9
    """Weight of the momentum in the update."""
    b2: Annotated[float, Between(0, 1, "[)")] = 0.99
    """Decay of the momentum."""


@dataclass(frozen=True)
class AdafactorConfig(GroupedOptimizerConfig):
    """Adafactor without momentum, which needs little memory (Shazeer and Stern 2018, arXiv 1804.04235)."""

    learning_rate: float = 1e-2
    """Peak learning rate, relative to the size of each parameter with `multiply_by_parameter_scale`."""
    weight_decay: float = 0.02
    decay_rate: Annotated[float, Between(0, 1, "(]")] = 0.8
    """Exponent c of the second moment's decay 1 - t^-c at step t (section 7.2)."""
    clipping_threshold: Annotated[float | None, AtLeast(1)] = 1.0
    """Largest RMS of a parameter's update (section 6); None does not clip."""
    multiply_by_parameter_scale: bool = True
    """Multiply each parameter's update by its RMS, at least 1e-3 (section 8)."""
    min_dim_size_to_factor: Annotated[int, AtLeast(1)] = 128
    """Factor the second moment if the second largest axis is at least this long."""
    eps: Annotated[float, Above(0)] = 1e-30
    """Added to squared gradients."""


@dataclass(frozen=True)
class SGDConfig(GroupedOptimizerConfig):
    """Gradient descent with momentum and decoupled weight decay (arXiv 1711.05101, algorithm 1)."""

    learning_rate: float = 0.1
    weight_decay: float = 2e-3
    momentum: Annotated[float, Between(0, 1, "[)")] = 0.9
    """Decay of the momentum; 0 is plain gradient descent."""
    nesterov: bool = False
    """Use Nesterov momentum."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.momentum > 0 or not self.nesterov, "nesterov", True, "False without momentum")


@dataclass(frozen=True)
class MuonConfig(GroupedOptimizerConfig):
    """Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) for matrices, Adam for the rest.

    Its authors orthogonalize only updates of matrices in hidden layers, and leave embeddings, heads, gains
    and biases to Adam. Adam also updates filters here, whose networks map a time index, not hidden states. A
    matrix that computes several projections at once is orthogonalized as a whole.
    """

    matrices: str = r"blocks_\d+/(?!.*/filter/).*kernel$"
    """Regular expression, searched in paths: Muon updates matching arrays with at least two axes. The last
    two axes are the matrix [inputs, outputs]; the axes before them count matrices."""
    beta: Annotated[float, Between(0, 1, "[)")] = 0.95
    """Decay of the momentum that is orthogonalized."""
    nesterov: bool = True
    """Use Nesterov momentum."""
    ns_steps: Annotated[int, AtLeast(1)] = 5
    """Newton-Schulz iterations."""
    consistent_rms: Annotated[float | None, Above(0)] = 0.2
    """RMS of a matrix's update, close to AdamW's, so that AdamW's learning rate and decay fit (Liu et al.
    2025, arXiv 2502.16982, section 2.2); None multiplies by sqrt(max(1, outputs / inputs)) instead."""
    b1: Annotated[float, Between(0, 1, "[)")] = 0.9
    """Adam's decay of the first moment."""
    b2: Annotated[float, Between(0, 1, "[)")] = 0.99
    """Adam's decay of the second moment."""
    eps: Annotated[float, Above(0)] = 1e-8
    """Added to the norm of a matrix, and to the square root of Adam's second moment."""


SCHEDULE_CONFIGS = ScheduleConfig.registry
register("cosine", CosineConfig, "hyena_jax.training.optimizer:cosine")
register("linear", LinearConfig, "hyena_jax.training.optimizer:linear")
register("constant", ConstantConfig, "hyena_jax.training.optimizer:constant")
register("warmup_stable_decay", WarmupStableDecayConfig, "hyena_jax.training.optimizer:warmup_stable_decay")
OPTIMIZER_CONFIGS = OptimizerConfig.registry
register("adamw", AdamWConfig, "hyena_jax.training.optimizer:adamw")
register("lion", LionConfig, "hyena_jax.training.optimizer:lion")
register("adafactor", AdafactorConfig, "hyena_jax.training.optimizer:adafactor")
register("sgd", SGDConfig, "hyena_jax.training.optimizer:sgd")
register("muon", MuonConfig, "hyena_jax.training.optimizer:muon")
