"""`hyena-jax check`: whether everything computes the right values on the devices that JAX finds."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import cache, partial
from itertools import takewhile
from typing import Any, NamedTuple

import jax

from hyena_jax.check.facts import BOUNDS, Check, Fact
from hyena_jax.check.mixers import check_mixer, check_model, small_models
from hyena_jax.check.operators import operator_cases
from hyena_jax.check.training import training_cases
from hyena_jax.config import FILTER_CONFIGS, MIXER_CONFIGS, FIRConfig
from hyena_jax.ops.forms import forms_for
from hyena_jax.system.signals import processes_beside

WINDOW = 13


class Outcome(NamedTuple):
    """What was found of one case."""

    name: str
    facts: list[Fact]
    fault: str | None
    """Why it did not run to its end."""
    seconds: float

    def worst(self) -> float:
        """How many times its bound the largest error is; infinity where there is no number."""
        ratios = [fact.error / max(BOUNDS[fact.what], 1e-30) for fact in self.facts]
        found = max([math.inf if math.isnan(ratio) else ratio for ratio in ratios], default=0.0)
        return found if self.fault is None else math.inf

    def says(self) -> str:
        """What is wrong; empty if nothing is."""
        wrong = [
            fact.note or f"{fact.what} is wrong by {fact.error:.1e}, more than {BOUNDS[fact.what]:g}"
            for fact in self.facts
            if not fact.holds
        ]
        return self.fault or "; ".join(wrong)

    def to_json(self) -> dict[str, Any]:
        """Its fields; an error that is not finite, for which JSON has no number, is null."""
        errors = {fact.what: fact.error if math.isfinite(fact.error) else None for fact in self.facts}
        return {"name": self.name, "wrong": self.says(), "errors": errors, "seconds": round(self.seconds, 2)}


def cases() -> dict[str, Check]:
    """All cases for the devices, in the order in which they are checked."""
    platform = jax.default_backend()
    found = dict(operator_cases(platform)) | dict(training_cases())
    mixers = {name: make() for name, make in MIXER_CONFIGS.items()}
    mixers |= {f"filter: {name}": FIRConfig(filter=make()) for name, make in FILTER_CONFIGS.items()}
    for name, config in [*mixers.items()]:
        for field, value in (("causal", False), ("bidirectional", True)):
            if field in config.__dataclass_fields__:
                mixers[f"{name}, not causal"] = replace(config, **{field: value})
    for name, config in mixers.items():
        if hasattr(config, "window"):  # shorter than the rows
            config = replace(config, window=WINDOW)
        found[name] = partial(check_mixer, config, None, has_bfloat16=not name.startswith("filter"))
        if platform != "cpu":
            found[f"{name}, kernels"] = partial(check_mixer, config, forms_for(platform, kernels=True))
    return found | {f"model: {name}": partial(check_model, small) for name, small in small_models().items()}


def run(chosen: Mapping[str, Check], seconds: float) -> Iterator[Outcome]:
    """Checks one case after the other, in float32 at the highest precision; none begins after `seconds`."""
    end = time.monotonic() + seconds
    return takewhile(lambda found: found is not None, (_outcome(end, *case) for case in chosen.items()))


def run_beside(names: Iterable[str], seconds: float, n: int, begin: Callable[[], None]) -> Iterator[Outcome]:
    """The same of cases by name, by `n` processes, each of which calls `begin` first; OSError if one dies.

    Threads would wait for each other: of a case, Python's tracing takes longer than XLA's compilation.
    """
    end = time.monotonic() + seconds
    try:
        with ProcessPoolExecutor(n, processes_beside(), begin) as pool:
            yield from takewhile(lambda found: found is not None, pool.map(partial(_outcome, end), names))
    except BrokenProcessPool:
        raise OSError("a process of the check died: did it have too little memory?") from None


def _outcome(end: float, name: str, check: Check | None = None) -> Outcome | None:
    """What is found of a case; None if it is later than `end`."""
    began, facts, fault = time.monotonic(), [], None
    if began > end:
        return None
    try:
        with jax.default_matmul_precision("highest"):
            facts.extend((check or _cases_here()[name])())
    except Exception as error:  # Mosaic's, Triton's and XLA's own kinds: the rest is checked all the same
        fault = (str(error).splitlines() or [type(error).__name__])[0]
    return Outcome(name, facts, fault, time.monotonic() - began)


@cache
def _cases_here() -> dict[str, Check]:
    """Made once in a process of `run_beside`: what training on the CPU gave is kept with its cases."""
    return cases()
