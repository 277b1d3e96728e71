"""Configs of losses and metrics."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from hyena_jax.config.checks import AtLeast, Between, Checked
from hyena_jax.config.registry import Registry, register


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


register("cross_entropy", CrossEntropyConfig, "hyena_jax.training.loss:cross_entropy_loss")
register("accuracy", AccuracyConfig, "hyena_jax.training.loss:accuracy")
register("top_k_accuracy", TopKAccuracyConfig, "hyena_jax.training.loss:top_k_accuracy")
