"""Distils a run to a state size and measures the result."""

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
    """The run to distil; `about_data` is the content of its data.json."""

    experiment: Experiment
    step: int
    params: optax.Params
    data: Corpus
    about_data: dict[str, Any]
    filters: list[LongFilters]

    @property
    def max_len(self) -> int:
        """Lmax of the model, the length of its filters."""
        return self.experiment.model.max_len


class Tried(NamedTuple):
    """The model at one state size, its filters and their errors, and its metrics including `kl`."""

    size: int
    experiment: Experiment
    params: optax.Params
    filters: list[LongFilters]
    errors: list[FilterError]
    values: Values


def evaluate_source(source: Source, batch_size: int) -> Values:
    """The metrics of the run itself, computed like the distilled models' metrics; its kl is 0."""
    model = models.build(source.experiment.model)
    return measure.compare((model, model), (source.params, source.params), source.data, batch_size)


def all_spectra(source: Source, largest: int, seed: int, advance: Callable[[], None]) -> list[Spectra]:
    """The Hankel spectra of every layer, to twice the largest state size."""
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
    """The model whose filters have `size` real numbers of state per channel, with its errors."""
    fitted = []
    for filters in source.filters:
        fitted.append(modal_fit.fit(filters.later, size // 2, seed))
        advance()
    experiment = distilled_experiment(source.experiment, size // 2)
    params = distilled_params(source.params, source.filters, fitted)
    # Errors of the filters that the model computes in float32, not of the float64 fit.
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
