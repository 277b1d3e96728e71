"""The config of an experiment, and its parts for training: losses, optimizers, steps, devices, logging."""

import math
import re
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from hyena_jax.config.checks import MAX_COUNT, RUNTIME, Above, AtLeast, AtMost, Between, Checked
from hyena_jax.config.data import DataConfig, TextConfig
from hyena_jax.config.models import LanguageModelConfig, ModelConfig
from hyena_jax.config.registry import Registry, name_of, register
from hyena_jax.system.errors import UserError, require

# A host name, an IPv4 address, or an IPv6 address in brackets; a label of a name has at most 63 characters.
ADDRESS = re.compile(r"([a-zA-Z0-9_-]{1,63}(\.[a-zA-Z0-9_-]{1,63})*\.?|\[[0-9a-fA-F:.]+\]):[0-9]{1,5}")


class LossConfig(Checked):
    """Base class of the configs of losses.

    Register a subclass, a frozen dataclass, with a function that computes the loss at each target:

        loss(config, logits, targets) -> values

    with floating point `values` in the shape of `targets`; training minimises their mean, weighted if the
    data have weights. Logits are [B, L, V] for targets [B, L], and [B, V] for targets [B], unless model and
    data define other shapes. It may be called on parts of the length, so each value must depend only on its
    own target and logits.
    """

    registry: ClassVar[Registry] = Registry("loss", is_module=False)

    @property
    def in_nats(self) -> bool:
        """Whether the loss is the negative log-likelihood in nats, so that exp(loss) is a perplexity."""
        return False


@dataclass(frozen=True)
class CrossEntropyConfig(LossConfig):
    """Negative log-likelihood of the targets, in nats."""

    label_smoothing: Annotated[float, Between(0, 1, "[)")] = 0.0
    """Fraction of the target's probability that is spread evenly over all V classes (Szegedy et al. 2016,
    arXiv 1512.00567, section 7)."""

    @property
    def in_nats(self) -> bool:
        """True without label smoothing."""
        return self.label_smoothing == 0


class MetricConfig(Checked):
    """Base class of the configs of metrics, which are averaged over targets like the loss.

    Register a subclass, a frozen dataclass, with a function that computes the metric at each target:

        metric(config, logits, targets) -> values

    as for `LossConfig`; `values` may also be integers or bools. A metric is not differentiated.
    """

    registry: ClassVar[Registry] = Registry("metric", is_module=False)

    @property
    def label(self) -> str:
        """Name of its column, by default the registered name; unique within a run."""
        return self.registry.part_of(type(self)).name


@dataclass(frozen=True)
class AccuracyConfig(MetricConfig):
    """Fraction of targets that are the most probable class."""


@dataclass(frozen=True)
class TopKAccuracyConfig(MetricConfig):
    """Fraction of targets that are among the k most probable classes."""

    k: Annotated[int, AtLeast(1)] = 5
    """Number of most probable classes that count."""

    @property
    def label(self) -> str:
        """`top_{k}_accuracy`."""
        return f"top_{self.k}_accuracy"


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
        """Refuses a final rate above the peak."""
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


@dataclass(frozen=True)
class TrainingConfig(Checked):
    """How long to train and how often to evaluate and save; may change on resume."""

    steps: Annotated[int, AtLeast(1)] = 2000
    """Steps to train; may grow when a run is resumed."""
    eval_every: Annotated[int, AtLeast(1)] = 250
    """Steps between evaluations on the held-out data."""
    eval_batch_size: Annotated[int, AtLeast(1)] = 64
    """Sequences or images evaluated at once; does not change the result."""
    eval_windows: Annotated[int | None, AtLeast(1)] = None
    """Evaluate on this many evenly spaced held-out windows or images; None takes all."""
    checkpoint_every: Annotated[int, AtLeast(1)] = 500
    """Steps between checkpoints."""
    checkpoint_minutes: Annotated[float | None, Above(0)] = None
    """Also save once the last save is this long ago, looked up every `parallel.stop_every` steps; the save
    that follows replaces such a checkpoint. None saves by steps alone."""
    log_every: Annotated[int, AtLeast(1)] = 10
    """Steps between rows of training metrics."""
    keep_checkpoints: Annotated[int, AtLeast(1)] = 2
    """Latest checkpoints to keep; the best one is kept in addition, and with 1 also the one before the
    latest, in case writing the latest is interrupted."""
    until: str | None = None
    """Stop at the first evaluation that reaches NAME=VALUE, such as `accuracy=0.99`: at least that value; of
    loss, perplexity and bits_per_byte at most."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.until is not None:
            parse_target(self.until)


def parse_target(text: str) -> tuple[str, float]:
    """The name and the value of a target `NAME=VALUE`. Raises UserError if it is not one."""
    name, _, value = text.partition("=")
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    allowed = "NAME=VALUE with a finite VALUE, such as accuracy=0.99"
    require(name != "" and math.isfinite(number), "until", text, allowed)
    return name, number


@dataclass(frozen=True)
class ParallelConfig(Checked):
    """How a step is distributed over devices and processes."""

    strategy: Literal["pmap", "sharded"] = "pmap"
    """`pmap`: every device holds all parameters. `sharded`: `jit` over a mesh (data, fsdp, sequence)."""
    devices: Annotated[int | None, AtLeast(1)] = None
    """Local devices that each process uses; None takes all."""
    data: Annotated[int | None, AtLeast(1)] = None
    """Mesh axis (sharded): parameter replicas, over which rows are sharded; None takes remaining devices."""
    fsdp: Annotated[int, AtLeast(1)] = 1
    """Mesh axis (sharded): devices over which rows, parameters and optimizer state are sharded."""
    sequence: Annotated[int, AtLeast(1)] = 1
    """Mesh axis (sharded): devices over which the sequence length is sharded."""
    kernels: Literal["auto", "on", "off"] = "auto"
    """Pallas kernels. `auto`: on a TPU, if they equal the plain forms there; not on a GPU, where they have no
    forward mode and are not measured."""
    heartbeat_timeout: Annotated[int, AtLeast(1)] = 100
    """Seconds without an answer after which the other processes give up on a process."""
    stop_every: Annotated[int, AtLeast(1)] = 10
    """Steps between checks of several processes on whether any of them was asked to stop, and of
    `training.checkpoint_minutes`."""
    check_replicas_every: Annotated[int | None, AtLeast(1)] = None
    """Steps between bitwise comparisons of the devices' copies of the state; None does not compare."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, without in (("data", None), ("fsdp", 1), ("sequence", 1)):
            value, allowed = getattr(self, name), f"{without} unless strategy is 'sharded'"
            require(self.strategy == "sharded" or value == without, name, value, allowed)


class TrackerConfig(Checked):
    """Base class of the configs of trackers, which are given the rows of `metrics.jsonl` as they are written.

    Register a subclass, a frozen dataclass, with a class of `hyena_jax.training.trackers.Tracker`:

        make(config, start) -> Tracker
    """

    registry: ClassVar[Registry] = Registry("tracker", is_module=False)


@dataclass(frozen=True)
class TensorBoardConfig(TrackerConfig):
    """Event files in the folder `tensorboard` of the run's folder."""


@dataclass(frozen=True)
class WandbConfig(TrackerConfig):
    """Weights & Biases; needs the extra `wandb`: pip install 'hyena_jax[wandb]'.

    It takes the account from `wandb login` or WANDB_API_KEY.
    """

    project: str = "hyena_jax"
    """Project that the run belongs to."""
    entity: str | None = None
    """User or team that owns the project; None takes the account's default."""
    group: str | None = None
    """Group of runs within the project, such as a sweep."""
    mode: Literal["online", "offline"] | None = None
    """`offline` keeps the rows in the folder `wandb` of the run's folder, for `wandb sync`. None takes
    WANDB_MODE, or `online`."""


@dataclass(frozen=True)
class LoggingConfig(Checked):
    """TensorBoard events, other trackers, and samples or pictures at the end of a run."""

    tensorboard: bool = True
    """Write TensorBoard event files, as the tracker `tensorboard` does."""
    trackers: tuple[TrackerConfig, ...] = ()
    """More that is given the rows of metrics, such as `wandb` or trackers of your own; '' for none."""
    sample_tokens: Annotated[int, AtLeast(0)] = 256
    """Tokens to generate at the end of a run on text; 0 for none."""
    sample_prompt: str | None = None
    """Prompt of this sample; None takes the start of the held-out text."""
    sample_images: Annotated[int, AtLeast(0)] = 40
    """Held-out images to draw with their predictions at the end of a run on images; 0 for none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        names = [TrackerConfig.registry.part_of(type(tracker)).name for tracker in self.trackers]
        require(len({*names}) == len(names), "trackers", ", ".join(names), "different from each other")

    @property
    def all_trackers(self) -> tuple[TrackerConfig, ...]:
        """The trackers, that of `tensorboard` among them."""
        first = (TensorBoardConfig(),) if self.tensorboard else ()
        return tuple(dict.fromkeys(first + self.trackers))


@dataclass(frozen=True)
class Cluster(Checked):
    """Training by several processes."""

    distributed: bool = False
    """Join the processes that the cluster's environment names (Slurm, Open MPI, Kubernetes, Cloud TPU)."""
    coordinator: str | None = None
    """HOST:PORT of process 0, given with --num-processes and --process-id, instead of --distributed."""
    num_processes: Annotated[int | None, AtLeast(1)] = None
    """Number of processes."""
    process_id: int | None = None
    """Index of this process, from 0."""
    join_timeout: Annotated[float, Above(0)] = 60.0
    """Seconds to wait for the other processes when training starts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        together = "given with coordinator, and only then"
        for name in ("num_processes", "process_id"):
            value = getattr(self, name)
            require((value is None) == (self.coordinator is None), name, value, together)
        if self.coordinator is None:
            return
        require(not self.distributed, "distributed", True, "False when coordinator is given")
        require_address("coordinator", self.coordinator)
        inside = 0 <= self.process_id < self.num_processes
        require(inside, "process_id", self.process_id, f"in 0..{self.num_processes - 1}")


def require_address(argument: str, value: str) -> None:
    """Raises UserError unless the value is HOST:PORT."""
    require(bool(ADDRESS.fullmatch(value)), argument, value, "HOST:PORT")
    port = int(value.rpartition(":")[2])
    require(1 <= port <= 65535, argument, value, "HOST:PORT with a port in 1..65535")


@dataclass(frozen=True)
class Experiment(Checked):
    """Everything that determines a run's result."""

    model: ModelConfig = LanguageModelConfig()
    data: DataConfig = TextConfig()
    loss: LossConfig = CrossEntropyConfig()
    metrics: tuple[MetricConfig, ...] = field(default=(), metadata=RUNTIME)
    """Measured in training and evaluation, in addition to the data's own metrics."""
    optimizer: OptimizerConfig = AdamWConfig()
    training: TrainingConfig = field(default=TrainingConfig(), metadata=RUNTIME)
    parallel: ParallelConfig = field(default=ParallelConfig(), metadata=RUNTIME)
    logging: LoggingConfig = field(default=LoggingConfig(), metadata=RUNTIME)
    seed: int = 0
    """Seed of all random numbers: initial parameters, order of the data, dropout."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.seed < 2**32, "seed", self.seed, "in [0, 2**32)")
        labels = [metric.label for metric in self.metrics]
        require(len({*labels}) == len(labels), "metrics", ", ".join(labels), "different from each other")
        if self.data.inputs != self.model.inputs:
            names = name_of(self.model), name_of(self.data)
            raise UserError(
                f"must be what the model reads ({self.model.inputs}), got {names[0]} and {names[1]}"
                f" ({self.data.inputs})",
                "data",
            )
        if not self.data.input_kind.is_tokens:
            prompt = self.logging.sample_prompt if self.logging.sample_tokens > 0 else None
            require(prompt is None, "logging.sample_prompt", prompt, "None with data that are not tokens")
        elif hasattr(self.data, "seq_len") and hasattr(self.model, "max_len"):
            most = f"at most model.max_len={self.model.max_len} (or raise model.max_len)"
            require(self.data.seq_len <= self.model.max_len, "data.seq_len", self.data.seq_len, most)


register("cross_entropy", CrossEntropyConfig, "hyena_jax.training.loss:cross_entropy_loss")
register("accuracy", AccuracyConfig, "hyena_jax.training.loss:accuracy")
register("top_k_accuracy", TopKAccuracyConfig, "hyena_jax.training.loss:top_k_accuracy")
register("tensorboard", TensorBoardConfig, "hyena_jax.training.trackers:EventFile")
register("wandb", WandbConfig, "hyena_jax.training.wandb:WandbTracker")
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
