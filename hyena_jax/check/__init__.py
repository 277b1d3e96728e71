"""`hyena-jax check`: whether everything computes the right values on the devices that JAX finds."""

import time
from collections.abc import Iterator, Mapping
from functools import partial
from typing import NamedTuple

import jax

from hyena_jax.check.facts import Check, Fact
from hyena_jax.check.mixers import check_mixer, check_model, small_models
from hyena_jax.check.operators import operator_cases
from hyena_jax.check.training import training_cases
from hyena_jax.config import MIXER_CONFIGS
from hyena_jax.ops.forms import forms_for


class Outcome(NamedTuple):
    """What was found of one case."""

    name: str
    facts: list[Fact]
    fault: str | None
    """Why it did not run to its end."""
    seconds: float

    @property
    def is_wrong(self) -> bool:
        return self.fault is not None or not all(fact.holds for fact in self.facts)


def cases() -> dict[str, Check]:
    """All cases for the devices, in the order in which they are checked."""
    platform = jax.default_backend()
    found = dict(operator_cases(platform))
    found |= dict(training_cases())
    for name, make in MIXER_CONFIGS.items():
        found[name] = partial(check_mixer, make(), None)
        if platform != "cpu":
            found[f"{name} with kernels"] = partial(check_mixer, make(), forms_for(platform, kernels=True))
    return found | {f"model: {name}": partial(check_model, small) for name, small in small_models().items()}


def run(chosen: Mapping[str, Check], seconds: float) -> Iterator[Outcome]:
    """Checks one case after the other, in float32 at the highest precision, until the time has passed."""
    start = time.monotonic()
    for name, check in chosen.items():
        began, facts, fault = time.monotonic(), [], None
        if began - start > seconds:
            return
        try:
            with jax.default_matmul_precision("highest"):
                facts.extend(check())
        except Exception as error:  # Mosaic's, Triton's and XLA's own kinds: the rest is checked all the same
            fault = (str(error).splitlines() or [type(error).__name__])[0]
        yield Outcome(name, facts, fault, time.monotonic() - began)
