"""`hyena-jax bench operators` beside our plain versions of the same mixers, in PyTorch and in naive Flax.

python experiments/benchmarks/baselines.py --baseline torch flax [any flag of `bench operators`]

Each baseline first has to compute what our mixer does. Those of PyTorch need it: pip install torch.
"""

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from hyena_jax.benchmark.operators import OperatorsBenchmark
from hyena_jax.benchmark.results import Row
from hyena_jax.benchmark.runner import BOTH, FORWARD, Case, Size
from hyena_jax.benchmark.timing import Runnable, forward_backward, jit_program
from hyena_jax.benchmark.verify import BATCH, LENGTH, MAX_LEN, random_params, require_close, small_width
from hyena_jax.cli.bench import BenchOperators
from hyena_jax.config import MIXER_CONFIGS
from hyena_jax.config.flags import read_flags
from hyena_jax.mixers import mixer_class
from hyena_jax.ops.counts import count
from hyena_jax.system.errors import UserError
from hyena_jax.system.machine import describe_versions
from hyena_jax.system.malloc import restart_with_large_pages
from hyena_jax.system.trees import n_entries

# Autograd keeps about this many arrays for each one in the equations; estimates which programs cannot fit.
KEPT_BY_AUTOGRAD = 6


@dataclass(frozen=True)
class BenchBaselines(BenchOperators):
    """Time mixers, and our plain versions of them, forward and with their gradients, over lengths."""

    baseline: tuple[Literal["torch", "flax"], ...] = ("torch", "flax")
    """Whose versions to time."""

    def prepare(self) -> "BaselinesBenchmark":
        return BaselinesBenchmark(self)


class BaselinesBenchmark(OperatorsBenchmark):
    """The mixers, each followed by the baselines that have it."""

    references = ("attention", "attention (torch)")

    def __init__(self, settings: BenchBaselines):
        super().__init__(settings)
        self.baselines: dict[str, tuple[str, ModuleType]] = {}
        """By method, its mixer and who computes it."""
        try:
            modules = {source: importlib.import_module(f"{source}_baseline") for source in settings.baseline}
        except ModuleNotFoundError as error:
            raise UserError(f"{error.name} is not installed: pip install {error.name}") from error
        self.methods = []
        for mixer in settings.chosen:
            having = [source for source in modules if mixer in modules[source].MIXERS]
            self.baselines |= {f"{mixer} ({source})": (mixer, modules[source]) for source in having}
            self.methods += [mixer, *(f"{mixer} ({source})" for source in having)]

    def check(self, method: str) -> bool:
        if method not in self.baselines:
            return super().check(method)
        verify_baseline(method, *self.baselines[method], self.settings.d_model, self.settings.dtype)
        return True

    def build(self, method: str, size: Size) -> Case:
        """Counted is the work that our mixer does for the same results."""
        if method not in self.baselines:
            return super().build(method, size)
        mixer, module = self.baselines[method]
        passes, config = self.passes(mixer, size), self.configs[mixer]
        (params, x), cotangent = passes[BOTH][1]
        works = {part: count(function, *args) for part, (function, args) in passes.items()}
        facts = {"mixer": mixer, "n_params": n_entries(params)}
        if module.__name__ == "torch_baseline":
            runs = module.programs(mixer, config, size["length"], params, x, cotangent)
            programs = {part: Runnable(run, work=works[part]) for part, run in runs.items()}
            return Case(programs, facts, int(KEPT_BY_AUTOGRAD * works[FORWARD].bytes))
        naive = module.build(mixer, config, size["length"], x.dtype)

        def forward(params: dict, x: jax.Array) -> jax.Array:
            return naive.apply({"params": params}, x)

        given = module.convert_params(params), x
        programs = {
            FORWARD: jit_program(forward, *given)._replace(work=works[FORWARD]),
            BOTH: jit_program(forward_backward(forward), given, cotangent)._replace(work=works[BOTH]),
        }
        return Case(programs, facts)

    def summary(self, rows: Sequence[Row]) -> dict[str, Any]:
        others = ("torch",) if "torch" in self.settings.baseline else ()
        own = {"command": " ".join(["python", *sys.argv]), "versions": describe_versions(*others)}
        return super().summary(rows) | own


def verify_baseline(what: str, mixer: str, module: ModuleType, d_model: int, dtype: str) -> None:
    """Compares a baseline's y and gradient of x with our default mixer's, which match the oracle.

    Args:
      what: the baseline's name, for the message.
      module: has value_and_gradient(config, params, x [B, L, D], cotangent, max_len, mixer).

    Raises:
      Mismatch: where they differ.
    """
    config = MIXER_CONFIGS[mixer]()
    width = small_width(config, d_model)
    ours = mixer_class(config)(width, MAX_LEN, config, 1, jnp.dtype(dtype))
    shape = (BATCH, LENGTH, width)
    x, cotangent = (jax.random.normal(jax.random.key(i), shape).astype(dtype) for i in range(2))
    params = random_params(ours, x)

    def value_and_gradient(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y, pullback = jax.vjp(lambda x: ours.apply({"params": params}, x), x)
        return y, pullback(cotangent)[0]

    expected = jax.jit(value_and_gradient)(x)
    actual = module.value_and_gradient(config, params, x, cotangent, MAX_LEN, mixer)
    for part, a, e in zip(("", ", gradient of the input,"), actual, expected, strict=True):
        require_close(what + part, a, np.asarray(e).astype(np.float64), dtype)


if __name__ == "__main__":
    restart_with_large_pages()
    try:
        sys.exit(read_flags(BenchBaselines, "baselines.py", sys.argv[1:]).run(sys.argv))
    except UserError as error:
        sys.exit(f"error: {error}")
