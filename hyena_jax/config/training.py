"""The config of an experiment, and its parts for training: losses, steps, devices, logging."""

import math
import re
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from hyena_jax.config.checks import RUNTIME, Above, AtLeast, Between, Checked
from hyena_jax.config.data import DataConfig, TextConfig
from hyena_jax.config.models import LanguageModelConfig, ModelConfig
from hyena_jax.config.optimizers import AdamWConfig, OptimizerConfig
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
        return f"top_{self.k}_accuracy"


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
            parse_until(self.until)


def parse_until(text: str) -> tuple[str, float]:
    """The name and the value of a target `NAME=VALUE`, which is checked."""
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
