"""Filling in the sizes that a model takes from its data."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from hyena_jax.config import Experiment, require

COUNTS = frozenset({"vocab_size", "n_classes"})
"""A model may have more of these than its data."""


def fill_in(experiment: Experiment, facts: Mapping[str, Any]) -> Experiment:
    """The experiment with each model field that is None filled in from the fact of the same name.

    Facts without a field in the model are ignored.

    Raises:
      UserError: if the model contradicts a fact: it has fewer symbols or classes, or another size.
    """
    model, found = experiment.model, {}
    names = {field.name for field in dataclasses.fields(model)}
    for name, value in facts.items():
        if name not in names:
            continue
        ours = getattr(model, name)
        if ours is None:
            found[name] = value
        elif name in COUNTS:
            require(ours >= value, f"model.{name}", ours, f"at least the data's {value}")
        else:
            require(ours == value, f"model.{name}", ours, f"the data's {value}")
    return dataclasses.replace(experiment, model=dataclasses.replace(model, **found)) if found else experiment
