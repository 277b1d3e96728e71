"""`hyena-jax bench operators`: mixers over lengths. Axes: B batch, L length, D channels."""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from hyena_jax.benchmark import verify
from hyena_jax.benchmark.results import (
    Cells,
    Picture,
    Results,
    Row,
    cost_cells,
    curves,
    milliseconds,
    panels,
    work_cells,
)
from hyena_jax.benchmark.runner import BOTH, FORWARD, Benchmark, Case, Size
from hyena_jax.benchmark.settings import Operators
from hyena_jax.benchmark.timing import counted_program, forward_backward
from hyena_jax.config import MIXER_CONFIGS
from hyena_jax.mixers import mixer_class
from hyena_jax.system.trees import n_entries

LONG_FILTER = "filter"
# At shorter lengths fixed costs dominate, and an exponent would describe them.
LEAST_LENGTH, LEAST_POINTS = 4096, 3


class OperatorsBenchmark(Benchmark):
    """Mixers over lengths, with exponents, and the lengths from which each is faster than attention."""

    references = ("attention",)
    """The methods that all others are compared with."""

    def __init__(self, settings: Operators):
        self.settings = settings
        self.configs = {name: MIXER_CONFIGS[name]() for name in settings.chosen}
        self.methods = list(self.configs)
        self.sizes = [{"length": length} for length in sorted(settings.lengths)]
        self.roofline_dtype = settings.dtype

    def check(self, method: str) -> bool:
        return verify.verify_mixer(method, self.configs[method], self.settings.d_model, self.settings.dtype)

    def passes(self, mixer: str, size: Size) -> dict[str, tuple[Callable, tuple]]:
        """What is timed of a mixer: functions and their arguments, the parameters first."""
        config, length, d_model = self.configs[mixer], size["length"], self.settings.d_model
        dtype = jnp.dtype(self.settings.dtype)
        module = mixer_class(config)(d_model, length, config, 1, dtype)
        shape = (self.settings.batch_size, length, d_model)
        x, cotangent = (jax.random.normal(jax.random.key(i), shape).astype(dtype) for i in range(2))
        params = verify.initial_params(module, x[:1, :1], 2)

        def forward(params: dict, x: jax.Array) -> jax.Array:
            return module.apply({"params": params}, x, None, True)

        def long_filter(params: dict) -> jax.Array:
            return module.apply({"params": params}, method=lambda mixer: mixer.filter(length))

        found = {FORWARD: (forward, (params, x)), BOTH: (forward_backward(forward), ((params, x), cotangent))}
        if callable(getattr(module.bind({"params": params}), "filter", None)):
            found[LONG_FILTER] = long_filter, (params,)
        return found

    def build(self, method: str, size: Size) -> Case:
        passes = self.passes(method, size)
        params, _ = passes[FORWARD][1]
        programs = {part: counted_program(function, *args) for part, (function, args) in passes.items()}
        return Case(programs, {"mixer": method, "n_params": n_entries(params)})

    def cells(self, row: Row) -> Iterator[Cells]:
        passes = row["passes"]
        yield {
            "method": row["method"],
            "length": f"{row['length']:,}",
            "forward ms": milliseconds(passes[FORWARD]),
            "forward + backward ms": milliseconds(passes[BOTH]),
            "filter ms": milliseconds(passes[LONG_FILTER]) if LONG_FILTER in passes else "",
            **cost_cells(passes[BOTH]),
            **work_cells(passes[BOTH]),
        }

    @staticmethod
    def picture(results: Results) -> Picture:
        settings = results["settings"]
        sizes = f"batch {settings['batch_size']}, {settings['d_model']} channels, {settings['dtype']}"
        points = [(row["method"], row["length"], row["passes"][BOTH]) for row in results["rows"]]
        shown = panels(points, ", forward + backward")
        return Picture(f"Mixers: {sizes}", "length, tokens", shown, reference="attention")

    def summary(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Exponents of both passes by method, and the lengths from which methods beat the references."""
        times = {
            part: curves((r["method"], r["length"], r["passes"][part]["seconds"]["median"]) for r in rows)
            for part in (FORWARD, BOTH)
        }
        exponents = {
            part: {method: fitted_exponent(points) for method, points in by_method.items()}
            for part, by_method in times.items()
        }
        both = times[BOTH]
        others = dict.fromkeys(row["method"] for row in rows if row["mixer"] != "attention")
        crossovers = {
            reference: {method: crossover(both[method], both[reference]) for method in others}
            for reference in self.references
            if reference in both
        }
        return {"exponents": exponents, "crossovers": crossovers}

    def lines(self, results: Results) -> list[str]:
        lines, longest = [], max(results["settings"]["lengths"])
        for part, exponents in results["exponents"].items():
            fitted = [f"{method} {value:.2f}" for method, value in exponents.items() if value is not None]
            if fitted:
                listed = ", ".join(fitted)
                lines.append(f"time of {part} grows as length to the power, from 4,096 on: {listed}")
        for reference, lengths in results["crossovers"].items():
            starts = [
                f"{method} {f'none up to {longest:,}' if at is None else f'{round(at):,}'}"
                for method, at in lengths.items()
            ]
            if starts:
                lines.append(
                    f"faster than {reference}, forward and backward, from length: {', '.join(starts)}"
                )
        roofline = results["roofline"]
        flops, n_bytes = roofline["flops_per_second"] / 1e9, roofline["bytes_per_second"] / 1e9
        lines.append(f"this machine: {flops:,.1f} GFLOP/s in a matrix product, {n_bytes:,.1f} GB/s in a copy")
        return lines


def fitted_exponent(times: Mapping[int, float], least_length: int = LEAST_LENGTH) -> float | None:
    """The exponent e of the least-squares fit time = c length^e in logarithms, of times by length.

    Lengths below `least_length` are left out; None with fewer than LEAST_POINTS others.
    """
    points = [(math.log(length), math.log(time)) for length, time in times.items() if length >= least_length]
    if len(points) < LEAST_POINTS:
        return None
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def crossover(times: Mapping[int, float], other: Mapping[int, float]) -> float | None:
    """The length from which `times` stays below `other`, of the lengths that both have; None if it does not.

    Between two measured lengths, the logarithm of their ratio is interpolated linearly in the logarithm of
    the length; below at all lengths, it is the shortest.
    """
    lengths = sorted(times.keys() & other.keys())
    ratios = {length: math.log(times[length] / other[length]) for length in lengths}
    if not lengths or ratios[lengths[-1]] >= 0:
        return None
    slower = [length for length in lengths if ratios[length] >= 0]
    if not slower:
        return float(lengths[0])
    before = slower[-1]
    after = lengths[lengths.index(before) + 1]
    part = ratios[before] / (ratios[before] - ratios[after])
    return math.exp(math.log(before) + part * math.log(after / before))
