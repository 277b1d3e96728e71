"""`hyena-jax bench operators`: mixers and baselines over lengths. Axes: B batch, L length, D channels."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hyena_jax.benchmark import flax_baseline, verify
from hyena_jax.benchmark.counts import Work, count
from hyena_jax.benchmark.machine import Roofline, measure_roofline
from hyena_jax.benchmark.memory import fits
from hyena_jax.benchmark.results import (
    MIB,
    Cells,
    Panel,
    Picture,
    Report,
    Results,
    curves,
    describe_device,
    memory_of,
    milliseconds,
    number,
)
from hyena_jax.benchmark.scaling import crossover, fitted_exponent
from hyena_jax.benchmark.settings import Operators
from hyena_jax.benchmark.timing import Measured, Program, jit_program, measure
from hyena_jax.config import MIXER_CONFIGS, MixerConfig
from hyena_jax.mixers import mixer_class
from hyena_jax.output import bar

FORWARD, BOTH, FILTER = "forward", "forward_backward", "filter"
# Autograd keeps about this many arrays for each one in the equations; estimates which programs cannot fit.
KEPT_BY_AUTOGRAD = 6


@dataclass(frozen=True)
class OperatorRow:
    """The measurements of one method at one length."""

    method: str
    mixer: str
    length: int
    n_params: int
    passes: dict[str, Measured]
    """By pass: `forward`, `forward_backward`, and `filter` for mixers with a long filter."""


class Method(NamedTuple):
    """One way to compute a mixer."""

    name: str
    mixer: str
    config: MixerConfig
    source: str
    """`ours`, or a baseline's name."""


def run(settings: Operators, report: Report) -> None:
    """Checks every method, measures it over the lengths, and reports exponents and crossovers."""
    configs = {name: MIXER_CONFIGS[name]() for name in settings.chosen}
    chosen = methods(configs, settings.baseline)
    with bar("measuring", len(chosen) * (1 + len(settings.lengths)), report.console) as advance:
        for method in chosen:
            if not verify_method(method, settings.d_model, settings.dtype):
                report.notes.append(f"values not checked: {method.name} has no oracle")
            advance()
        roofline = measure_roofline(settings.dtype)
        for row in bench_lengths(chosen, settings, roofline, advance, report.notes.append):
            report.add(row, cells(row))
            report.write(roofline=roofline._asdict(), **scaling(report.rows))
    found = scaling(report.rows)
    flops, n_bytes = roofline.flops_per_second / 1e9, roofline.bytes_per_second / 1e9
    limits = f"this machine: {flops:,.1f} GFLOP/s in a matrix product, {n_bytes:,.1f} GB/s in a copy"
    lines = [*describe_scaling(found, max(settings.lengths)), limits]
    report.finish(lines, picture, roofline=roofline._asdict(), **found)


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


def bench_lengths(
    chosen: list[Method],
    settings: Operators,
    roofline: Roofline,
    advance: Callable[[], None],
    note: Callable[[str], None],
) -> Iterator[OperatorRow]:
    """The rows of all methods, length by length; at each length the methods take turns.

    Args:
      advance: called once for each method and length, measured or left out.
      note: called with a line for every method that is not measured at greater lengths.
    """
    remaining = list(chosen)
    for length in sorted(settings.lengths):
        programs, built = {}, {}
        for method in list(remaining):
            candidate = build(method, length, settings)
            if fits(candidate.needed_bytes):
                programs |= {(method.name, part): program for part, program in candidate.programs.items()}
                built[method.name] = candidate
            else:
                remaining.remove(method)
                needed = f"{candidate.needed_bytes / 2**30:,.1f} GiB at length {length}"
                note(f"{method.name}: {needed} are more than is available")
        measured = measure(programs, settings)
        for method in list(remaining):
            n_params, works = built[method.name].n_params, built[method.name].works
            passes = {}
            for part, work in works.items():
                if (method.name, part) in measured:
                    found = measured[method.name, part]
                    share = roofline.least_seconds(work.flops, work.bytes) / found.seconds.median
                    passes[part] = replace(
                        found, flops=work.flops, least_bytes=work.bytes, roofline_share=share
                    )
            yield OperatorRow(method.name, method.mixer, length, n_params, passes)
            open_loops = works[BOTH].open_loops
            if open_loops and length == min(settings.lengths):
                note(f"{method.name}: {open_loops} loops of unknown length are counted as one round each")
            if max(m.seconds.median for m in passes.values()) > settings.max_seconds:
                remaining.remove(method)
                limit = f"took over {settings.max_seconds:g} s; no longer"
                note(f"{method.name}: a run at length {length} {limit}")
        for _ in chosen:
            advance()


class Built(NamedTuple):
    """The programs of a method, and the work that our mixer does for the same results."""

    programs: dict[str, Program]
    """By pass."""
    works: dict[str, Work]
    """By pass."""
    n_params: int

    @property
    def needed_bytes(self) -> int:
        """Bytes of the largest program: as its compiler planned, or estimated from its work."""
        planned = [program.memory.total for program in self.programs.values() if program.memory is not None]
        return max(planned, default=int(KEPT_BY_AUTOGRAD * self.works[FORWARD].bytes))


def build(method: Method, length: int, settings: Operators) -> Built:
    """Compiles a method's passes."""
    config, dtype = method.config, jnp.dtype(settings.dtype)
    module = mixer_class(config)(settings.d_model, length, config, 1, dtype)
    shape = (settings.batch_size, length, settings.d_model)
    x, cotangent = (jax.random.normal(jax.random.key(i), shape).astype(dtype) for i in range(2))
    params = verify.initial_params(module, x[:1, :1], 2)
    n_params = sum(leaf.size for leaf in jax.tree.leaves(params))

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
        return Built({part: Program(run) for part, run in runs.items()}, works, n_params)
    if method.source == "flax":
        naive = flax_baseline.build(method.mixer, config, length, dtype)
        params = flax_baseline.convert_params(params)
        passes = _passes(lambda params, x: naive.apply({"params": params}, x), params, x, cotangent)
    programs = {part: jit_program(function, *args) for part, (function, args) in passes.items()}
    return Built(programs, works, n_params)


def _passes(
    forward: Callable[[dict, jax.Array], jax.Array], params: dict, x: jax.Array, cotangent: jax.Array
) -> dict[str, tuple[Callable, tuple]]:
    """Functions and their arguments: y, and y with the gradients of all parameters and x."""

    def forward_backward(params: dict, x: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, Any]:
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
    times = {part: _times(rows, part, 1.0) for part in (FORWARD, BOTH)}
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


def describe_scaling(found: Mapping[str, Any], longest: int) -> list[str]:
    """Lines about the exponents and crossovers of `scaling`."""
    lines = []
    for part, exponents in found["exponents"].items():
        fitted = [f"{method} {value:.2f}" for method, value in exponents.items() if value is not None]
        if fitted:
            lines.append(f"time of {part} grows as length to the power, from 4,096 on: {', '.join(fitted)}")
    for reference, lengths in found["crossovers"].items():
        starts = [
            f"{method} {f'none up to {longest:,}' if at is None else f'{round(at):,}'}"
            for method, at in lengths.items()
        ]
        if starts:
            lines.append(f"faster than {reference}, forward and backward, from length: {', '.join(starts)}")
    return lines


def cells(row: OperatorRow) -> Iterator[Cells]:
    """The line of a method and length."""
    both = row.passes[BOTH]
    yield {
        "method": row.method,
        "length": f"{row.length:,}",
        "forward ms": milliseconds(row.passes[FORWARD].seconds),
        "forward + backward ms": milliseconds(both.seconds),
        "filter ms": milliseconds(row.passes[FILTER].seconds) if FILTER in row.passes else "",
        "compile s": number(both.compile_seconds, ".1f"),
        "MiB planned": number(both.compiled_bytes, ",.1f", MIB),
        "MiB live": number(both.live_bytes, ",.1f", MIB),
        "GFLOP": number(both.flops, ",.3g", 1e9),
        "by XLA": number(both.xla_flops, ",.3g", 1e9),
        "roofline": number(both.roofline_share, ".1%"),
    }


def picture(results: Results) -> Picture:
    """Time and memory of forward + backward by length, with attention in every row of panels."""
    settings, rows = results["settings"], results["rows"]
    sizes = f"batch {settings['batch_size']}, {settings['d_model']} channels, {settings['dtype']}"
    memory = ((row["method"], row["length"], memory_of(row["passes"][BOTH])) for row in rows)
    panels = (
        Panel("time, forward + backward", "ms", _times(rows, BOTH, 1e-3)),
        Panel("memory, forward + backward", "MiB", curves(memory, MIB)),
    )
    title = f"Mixers: {sizes}; {describe_device(results)}"
    return Picture(title, "length, tokens", panels, reference="attention")


def _times(rows: Sequence[Mapping[str, Any]], part: str, unit: float) -> dict[str, dict[int, float]]:
    """Medians of a pass by method and length, in units of `unit` seconds."""
    points = ((row["method"], row["length"], row["passes"][part]["seconds"]["median"]) for row in rows)
    return curves(points, unit)
