"""What a model takes from its data."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from hyena_jax.config import Experiment, require

COUNTS = frozenset({"vocab_size", "n_classes"})
"""Of these a model may have more than its data."""


def fill_in(experiment: Experiment, facts: Mapping[str, Any]) -> Experiment:
    """The experiment with the model's fields that are None filled in from `facts`, by their names.

    Facts that the model has no field for are left out.

    Raises:
      UserError: where the model contradicts a fact: has fewer symbols or classes, or another size.
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
