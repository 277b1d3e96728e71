"""One run, distilled to one state size after the other."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import optax

from hyena_jax import models
from hyena_jax.config import Experiment
from hyena_jax.data.text import Corpus
from hyena_jax.distillation import measure, modal_fit
from hyena_jax.distillation.measure import FilterError, Spectra
from hyena_jax.distillation.model import LongFilters, distilled_experiment, distilled_params, long_filters
from hyena_jax.training.metrics import Values


class Source(NamedTuple):
    """The run that is distilled; `about_data` is what its folder keeps of the data."""

    experiment: Experiment
    step: int
    params: optax.Params
    data: Corpus
    about_data: dict[str, Any]
    filters: list[LongFilters]

    @property
    def max_len(self) -> int:
        """L."""
        return self.experiment.model.max_len


class Tried(NamedTuple):
    """The model of one state size, its filters and their errors, and its metrics with `kl`."""

    size: int
    experiment: Experiment
    params: optax.Params
    filters: list[LongFilters]
    errors: list[FilterError]
    values: Values


def evaluate_source(source: Source, batch_size: int) -> Values:
    """The metrics of the run itself, by the same steps as those of what it is distilled to; its kl is 0."""
    model = models.build(source.experiment.model)
    return measure.compare((model, model), (source.params, source.params), source.data, batch_size)


def all_spectra(source: Source, largest: int, seed: int, advance: Callable[[], None]) -> list[Spectra]:
    """The Hankel spectra of every layer, beyond the largest state size."""
    found = []
    for filters in source.filters:
        found.append(measure.spectra(filters, 2 * largest, seed))
        advance()
    return found


def distill(
    source: Source,
    spectra: Sequence[Spectra],
    size: int,
    batch_size: int,
    seed: int,
    advance: Callable[[], None],
) -> Tried:
    """The model whose filters have `size` real numbers of state a channel; what it loses."""
    fitted = []
    for filters in source.filters:
        fitted.append(modal_fit.fit(filters.later, size // 2, seed))
        advance()
    experiment = distilled_experiment(source.experiment, size // 2)
    params = distilled_params(source.params, source.filters, fitted)
    # What the model computes in float32, not what the fit promised in float64.
    after = long_filters(experiment.model, params)
    errors = [
        error
        for layer in zip(source.filters, after, spectra, strict=True)
        for error in measure.filter_errors(*layer, size)
    ]
    both = [models.build(one.model) for one in (source.experiment, experiment)]
    values = measure.compare(both, (source.params, params), source.data, batch_size)
    advance()
    return Tried(size, experiment, params, after, errors, values)
