"""What a model is trained to lower, and what else is measured of its answers."""

from dataclasses import dataclass
from typing import ClassVar

from hyena_jax.config.checks import Checked, require, require_at_least
from hyena_jax.config.registry import Registry, register


class LossConfig(Checked):
    """Base class of the configs of losses.

    Register a subclass, a frozen dataclass, with a function that computes the loss at each target:

        loss(config, logits, targets) -> values

    with `values` floating point, of the shape of `targets`; their mean is lowered, weighted where the data
    have weights. Logits are [B, L, V] for targets [B, L], and [B, V] for targets [B], unless the model and
    the data are of another kind. It may be called on parts of the length: each value must depend on its own
    target and logits alone.
    """

    registry: ClassVar[Registry] = Registry("loss", is_module=False)

    @property
    def in_nats(self) -> bool:
        """Whether the loss is the negative log-likelihood in nats, so that exp(loss) is a perplexity."""
        return False


@dataclass(frozen=True)
class CrossEntropyConfig(LossConfig):
    """Negative log-likelihood of the targets, in nats."""

    label_smoothing: float = 0.0
    """Share a of the target's probability that is spread evenly over all V answers (Szegedy et al. 2016,
    arXiv:1512.00567, section 7)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(0 <= self.label_smoothing < 1, "label_smoothing", self.label_smoothing, "in [0, 1)")

    @property
    def in_nats(self) -> bool:
        """Only without smoothing."""
        return self.label_smoothing == 0


class MetricConfig(Checked):
    """Base class of the configs of metrics, which are averaged over targets as the loss is.

    Register a subclass, a frozen dataclass, with a function that computes the metric at each target:

        metric(config, logits, targets) -> values

    as for `LossConfig`; `values` may also be integers or bools. No gradient flows through it.
    """

    registry: ClassVar[Registry] = Registry("metric", is_module=False)

    @property
    def label(self) -> str:
        """What its column is called; by default the registered name. A run has each label once."""
        return self.registry.part_of(type(self)).name


@dataclass(frozen=True)
class AccuracyConfig(MetricConfig):
    """Share of targets that are the most probable answer."""


@dataclass(frozen=True)
class TopKAccuracyConfig(MetricConfig):
    """Share of targets that are among the k most probable answers."""

    k: int = 5
    """How many answers count."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(1, self, "k")

    @property
    def label(self) -> str:
        """With k."""
        return f"top_{self.k}_accuracy"


register("cross_entropy", CrossEntropyConfig, "hyena_jax.training.scores:cross_entropy_loss")
register("accuracy", AccuracyConfig, "hyena_jax.training.scores:accuracy")
register("top_k_accuracy", TopKAccuracyConfig, "hyena_jax.training.scores:top_k_accuracy")
