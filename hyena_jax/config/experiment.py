"""The config of an experiment: model, data, loss, optimizer, training, devices, logging."""

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

from hyena_jax.config.checks import RUNTIME, AtLeast, Checked
from hyena_jax.config.data import DataConfig, TextConfig
from hyena_jax.config.losses import CrossEntropyConfig, LossConfig, MetricConfig
from hyena_jax.config.models import LanguageModelConfig, ModelConfig
from hyena_jax.config.optimizers import AdamWConfig, OptimizerConfig
from hyena_jax.errors import UserError, require


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
    """Steps between checks of several processes on whether any of them was asked to stop."""
    check_replicas_every: Annotated[int | None, AtLeast(1)] = None
    """Steps between bitwise comparisons of the devices' copies of the state; None does not compare."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, without in (("data", None), ("fsdp", 1), ("sequence", 1)):
            value, allowed = getattr(self, name), f"{without} unless strategy is 'sharded'"
            require(self.strategy == "sharded" or value == without, name, value, allowed)


@dataclass(frozen=True)
class LoggingConfig(Checked):
    """TensorBoard events, and samples or pictures at the end of a run."""

    tensorboard: bool = True
    """Write TensorBoard event files."""
    sample_tokens: Annotated[int, AtLeast(0)] = 256
    """Tokens to generate at the end of a run on text; 0 for none."""
    sample_prompt: str | None = None
    """Prompt of this sample; None takes the start of the held-out text."""
    sample_images: Annotated[int, AtLeast(0)] = 40
    """Held-out images to draw with their predictions at the end of a run on images; 0 for none."""


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
            names = type(self.model).__name__, type(self.data).__name__
            raise UserError(
                f"must be what the model reads ({self.model.inputs}), got {names[0]} and {names[1]}"
                f" ({self.data.inputs})",
                "data",
            )
        if not self.data.input_kind.is_tokens:
            prompt = self.logging.sample_prompt
            require(prompt is None, "logging.sample_prompt", prompt, "None with data that are not tokens")
        elif hasattr(self.data, "seq_len") and hasattr(self.model, "max_len"):
            most = f"at most model.max_len={self.model.max_len} (or raise model.max_len)"
            require(self.data.seq_len <= self.model.max_len, "data.seq_len", self.data.seq_len, most)
