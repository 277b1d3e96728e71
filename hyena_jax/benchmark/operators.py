"""`hyena-jax bench operators`: mixers and baselines over lengths. Axes: B batch, L length, D channels."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hyena_jax.benchmark import flax_baseline, verify
from hyena_jax.benchmark.results import Cells, Picture, Results, curves, describe_device, milliseconds, panels
from hyena_jax.benchmark.runner import Benchmark, Case, Measurement, Size, cost_cells, work_cells
from hyena_jax.benchmark.scaling import crossover, fitted_exponent
from hyena_jax.benchmark.settings import Operators
from hyena_jax.benchmark.timing import Program, jit_program
from hyena_jax.config import MIXER_CONFIGS, MixerConfig
from hyena_jax.mixers import mixer_class
from hyena_jax.ops.counts import count

FORWARD, BOTH, FILTER = "forward", "forward_backward", "filter"
# Autograd keeps about this many arrays for each one in the equations; estimates which programs cannot fit.
KEPT_BY_AUTOGRAD = 6


class Method(NamedTuple):
    """One way to compute a mixer."""

    name: str
    mixer: str
    config: MixerConfig
    source: str
    """`ours`, or a baseline's name."""


def make(settings: Operators) -> Benchmark:
    """Every method over the lengths, with exponents and crossovers."""
    configs = {name: MIXER_CONFIGS[name]() for name in settings.chosen}
    chosen = {method.name: method for method in methods(configs, settings.baseline)}
    return Benchmark(
        methods=list(chosen),
        sizes=[{"length": length} for length in sorted(settings.lengths)],
        check=lambda name: verify_method(chosen[name], settings.d_model, settings.dtype),
        build=lambda name, size: build(chosen[name], size, settings),
        cells=cells,
        picture=picture,
        summary=scaling,
        lines=describe_scaling,
        roofline_dtype=settings.dtype,
    )


def methods(configs: Mapping[str, MixerConfig], baselines: tuple[str, ...]) -> list[Method]:
    """Ours for every mixer, and each baseline that has the mixer, if its options are the defaults."""
    found = []
    for name, config in configs.items():
        found.append(Method(name, name, config, "ours"))
        for source in baselines:
            if name in _baseline(source).MIXERS and config == MIXER_CONFIGS[name]():
                found.append(Method(f"{name} ({source})", name, config, source))
    return found


def verify_method(method: Method, d_model: int, dtype: str) -> bool:
    """Raises `verify.Mismatch` unless the method equals its oracle; returns whether there is one."""
    if method.source == "ours":
        return verify.verify_mixer(method.name, method.config, d_model, dtype)
    baseline = partial(_baseline(method.source).value_and_gradient, mixer=method.mixer)
    verify.verify_baseline(method.name, method.mixer, baseline, d_model, dtype)
    return True


def build(method: Method, size: Size, settings: Operators) -> Case:
    """Compiles a method's passes; counted is the work that our mixer does for the same results."""
    config, dtype, length = method.config, jnp.dtype(settings.dtype), size["length"]
    module = mixer_class(config)(settings.d_model, length, config, 1, dtype)
    shape = (settings.batch_size, length, settings.d_model)
    x, cotangent = (jax.random.normal(jax.random.key(i), shape).astype(dtype) for i in range(2))
    params = verify.initial_params(module, x[:1, :1], 2)
    n_params = sum(leaf.size for leaf in jax.tree.leaves(params))
    facts = {"mixer": method.mixer, "n_params": n_params}

    def ours(params: dict, x: jax.Array) -> jax.Array:
        return module.apply({"params": params}, x, None, True)

    def long_filter(params: dict) -> jax.Array:
        return module.apply({"params": params}, method=lambda mixer: mixer.filter(length))

    passes = _passes(ours, params, x, cotangent)
    if callable(getattr(module.bind({"params": params}), "filter", None)):
        passes[FILTER] = long_filter, (params,)
    works = {part: count(function, *args) for part, (function, args) in passes.items()}
    if method.source == "torch":
        runs = _baseline("torch").programs(method.mixer, config, length, params, x, cotangent)
        programs = {part: Program(run) for part, run in runs.items()}
        return Case(programs, facts, works, int(KEPT_BY_AUTOGRAD * works[FORWARD].bytes))
    if method.source == "flax":
        naive = flax_baseline.build(method.mixer, config, length, dtype)
        params = flax_baseline.convert_params(params)
        passes = _passes(lambda params, x: naive.apply({"params": params}, x), params, x, cotangent)
    programs = {part: jit_program(function, *args) for part, (function, args) in passes.items()}
    return Case(programs, facts, works)


def _passes(
    forward: Callable[[Any, Any], Any], params: Any, x: Any, cotangent: Any
) -> dict[str, tuple[Callable, tuple]]:
    """Functions and their arguments: y, and y with the gradients of all parameters and x."""

    def forward_backward(params: Any, x: Any, cotangent: Any) -> tuple[Any, Any]:
        y, pullback = jax.vjp(forward, params, x)
        return y, pullback(cotangent)

    return {FORWARD: (forward, (params, x)), BOTH: (forward_backward, (params, x, cotangent))}


def _baseline(source: str) -> Any:
    if source == "flax":
        return flax_baseline
    from hyena_jax.benchmark import torch_baseline

    return torch_baseline


def scaling(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Exponents of both passes by method, and the length from which each method is faster than attention."""
    times = {part: _times(rows, part) for part in (FORWARD, BOTH)}
    exponents = {
        part: {method: fitted_exponent(points) for method, points in by_method.items()}
        for part, by_method in times.items()
    }
    both = times[BOTH]
    others = dict.fromkeys(row["method"] for row in rows if row["mixer"] != "attention")
    crossovers = {
        reference: {method: crossover(both[method], both[reference]) for method in others}
        for reference in ("attention", "attention (torch)")
        if reference in both
    }
    return {"exponents": exponents, "crossovers": crossovers}


def describe_scaling(results: Results) -> list[str]:
    """Lines about the exponents and crossovers of `scaling`, and the machine's limits."""
    lines, longest = [], max(results["settings"]["lengths"])
    for part, exponents in results["exponents"].items():
        fitted = [f"{method} {value:.2f}" for method, value in exponents.items() if value is not None]
        if fitted:
            lines.append(f"time of {part} grows as length to the power, from 4,096 on: {', '.join(fitted)}")
    for reference, lengths in results["crossovers"].items():
        starts = [
            f"{method} {f'none up to {longest:,}' if at is None else f'{round(at):,}'}"
            for method, at in lengths.items()
        ]
        if starts:
            lines.append(f"faster than {reference}, forward and backward, from length: {', '.join(starts)}")
    roofline = results["roofline"]
    flops, n_bytes = roofline["flops_per_second"] / 1e9, roofline["bytes_per_second"] / 1e9
    lines.append(f"this machine: {flops:,.1f} GFLOP/s in a matrix product, {n_bytes:,.1f} GB/s in a copy")
    return lines


def cells(row: Measurement) -> Iterator[Cells]:
    """The line of a method and length."""
    both = row.passes[BOTH]
    yield {
        "method": row.method,
        "length": f"{row.size['length']:,}",
        "forward ms": milliseconds(row.passes[FORWARD].seconds),
        "forward + backward ms": milliseconds(both.seconds),
        "filter ms": milliseconds(row.passes[FILTER].seconds) if FILTER in row.passes else "",
        **cost_cells(both),
        **work_cells(both),
    }


def picture(results: Results) -> Picture:
    """Time and memory of forward + backward by length, with attention in every row of panels."""
    settings = results["settings"]
    sizes = f"batch {settings['batch_size']}, {settings['d_model']} channels, {settings['dtype']}"
    points = [(row["method"], row["length"], row["passes"][BOTH]) for row in results["rows"]]
    title = f"Mixers: {sizes}; {describe_device(results)}"
    return Picture(title, "length, tokens", panels(points, ", forward + backward"), reference="attention")


def _times(rows: Sequence[Mapping[str, Any]], part: str) -> dict[str, dict[int, float]]:
    """Median seconds of a pass by method and length."""
    return curves((row["method"], row["length"], row["passes"][part]["seconds"]["median"]) for row in rows)
