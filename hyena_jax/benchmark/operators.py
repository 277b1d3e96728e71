"""Mixers over lengths: ours, and the baselines beside them. Axes: B batch, L length, D channels."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hyena_jax.benchmark import flax_baseline, verify
from hyena_jax.benchmark.counts import count, count_filter
from hyena_jax.benchmark.memory import fits
from hyena_jax.benchmark.programs import Effort, Measured, Program, jit_program, measure
from hyena_jax.benchmark.roofline import Roofline
from hyena_jax.benchmark.settings import DTYPES
from hyena_jax.benchmark.work import Work
from hyena_jax.config import MIXER_CONFIGS, MixerConfig
from hyena_jax.mixers import mixer_class

FORWARD, BOTH, FILTER = "forward", "forward_backward", "filter"
# Autograd keeps about so many arrays for each that the equations name: to tell what could not fit.
KEPT_BY_AUTOGRAD = 6


class Sizes(NamedTuple):
    """Of the inputs x [B, L, D], and their dtype's name."""

    batch: int
    length: int
    d_model: int
    dtype: str


@dataclass(frozen=True)
class Row:
    """What was measured of one method at one length: numbers by pass, `filter` where there is a long one."""

    method: str
    mixer: str
    length: int
    n_params: int
    passes: dict[str, Measured]


class Method(NamedTuple):
    """One way to compute a mixer."""

    name: str
    mixer: str
    config: MixerConfig
    source: str
    """`ours`, or a baseline's name."""


def methods(configs: Mapping[str, MixerConfig], baselines: tuple[str, ...]) -> list[Method]:
    """Ours for every mixer, and each baseline where there is one of these options."""
    found = []
    for name, config in configs.items():
        found.append(Method(name, name, config, "ours"))
        for source in baselines:
            if name in _baseline(source).MIXERS and config == MIXER_CONFIGS[name]():
                found.append(Method(f"{name} ({source})", name, config, source))
    return found


def verify_method(method: Method, d_model: int, dtype: str) -> None:
    """Raises `verify.Mismatch` unless the method gives what the oracle does."""
    if method.source == "ours":
        verify.verify_mixer(method.name, method.config, d_model, dtype)
    else:
        baseline = partial(_baseline(method.source).value_and_gradient, mixer=method.mixer)
        verify.verify_baseline(method.name, method.mixer, baseline, d_model, dtype)


def bench_lengths(
    chosen: list[Method],
    lengths: tuple[int, ...],
    sizes: Sizes,
    effort: Effort,
    roofline: Roofline,
    advance: Callable[[], None],
    note: Callable[[str], None],
) -> Iterator[Row]:
    """The rows of all methods, length by length; at each length the methods take turns.

    Args:
      sizes: of the inputs; its length is not read.
      advance: called once a method and length, done or left out.
      note: called with a line for every method that goes no further.
    """
    remaining = list(chosen)
    for length in sorted(lengths):
        at_length = sizes._replace(length=length)
        programs, n_params = {}, {}
        for method in list(remaining):
            built, params = build(method, at_length)
            needed = _needed_bytes(method, built, at_length)
            if fits(needed):
                programs |= {(method.name, part): program for part, program in built.items()}
                n_params[method.name] = params
            else:
                remaining.remove(method)
                note(
                    f"{method.name}: {needed / 2**30:,.1f} GiB at length {length} are more than is available"
                )
        measured = measure(programs, effort)
        for method in [m for m in remaining if m.name in n_params]:
            passes = {part: m for (name, part), m in measured.items() if name == method.name}
            yield _row(method, at_length, n_params[method.name], passes, roofline)
            if max(m.seconds.median for m in passes.values()) > effort.max_seconds:
                remaining.remove(method)
                note(f"{method.name}: a run at length {length} took over {effort.max_seconds:g} s; no longer")
        for _ in chosen:
            advance()


def build(method: Method, sizes: Sizes) -> tuple[dict[str, Program], int]:
    """The programs of a method by pass, and how many parameters it has.

    The cotangent of y is given, and the second program returns y and the gradients of all parameters and x.
    """
    config, dtype = method.config, jnp.dtype(sizes.dtype)
    module = mixer_class(config)(sizes.d_model, sizes.length, config, dtype=dtype)
    shape = (sizes.batch, sizes.length, sizes.d_model)
    x, cotangent = (jax.random.normal(jax.random.key(i), shape).astype(dtype) for i in range(2))
    params = jax.jit(module.init)(jax.random.key(2), x[:1, :1])["params"]
    n_params = sum(leaf.size for leaf in jax.tree.leaves(params))
    if method.source == "torch":
        runs = _baseline("torch").programs(method.mixer, config, sizes.length, params, x, cotangent)
        return {part: Program(run) for part, run in runs.items()}, n_params
    programs = {}
    if method.source == "ours" and hasattr(config, "filter"):
        programs[FILTER] = _filter_program(module, params, sizes.length)
    if method.source == "flax":
        module = flax_baseline.build(method.mixer, config, sizes.length, dtype)
        params = flax_baseline.convert_params(params)

    def forward(params: dict, x: jax.Array) -> jax.Array:
        return module.apply({"params": params}, x)

    def forward_backward(params: dict, x: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, Any]:
        y, pullback = jax.vjp(forward, params, x)
        return y, pullback(cotangent)

    programs[FORWARD] = jit_program(forward, params, x)
    programs[BOTH] = jit_program(forward_backward, params, x, cotangent)
    return programs, n_params


def _filter_program(module: Any, params: dict, length: int) -> Program:
    """The long filter of a mixer by itself, h [N, D, L]."""
    return jit_program(
        lambda params: module.apply({"params": params}, method=lambda mixer: mixer.filter(length)), params
    )


def _baseline(source: str) -> Any:
    if source == "flax":
        return flax_baseline
    from hyena_jax.benchmark import torch_baseline

    return torch_baseline


def _needed_bytes(method: Method, programs: Mapping[str, Program], sizes: Sizes) -> int:
    """What the largest program takes: as its compiler planned it, or without one by the analytic count."""
    planned = [program.memory.total for program in programs.values() if program.memory is not None]
    if planned:
        return max(planned)
    work = count(method.config, sizes.batch, sizes.length, sizes.d_model)
    return int(KEPT_BY_AUTOGRAD * DTYPES["float32"] * work.activations)


def _row(
    method: Method, sizes: Sizes, n_params: int, passes: Mapping[str, Measured], roofline: Roofline
) -> Row:
    work = count(method.config, sizes.batch, sizes.length, sizes.d_model)
    n_bytes = work.forward_bytes(n_params, DTYPES[sizes.dtype])
    analytic = {FORWARD: (work.forward, n_bytes), BOTH: (work.forward_backward, 3 * n_bytes)}
    if FILTER in passes:
        made = filter_work(method.config, sizes)
        analytic[FILTER] = (made.forward, made.forward_bytes(0, DTYPES["float32"]))
    with_counts = {}
    for part in (FORWARD, BOTH, FILTER):
        if part in passes:
            flops, least_bytes = analytic[part]
            share = roofline.least_seconds(flops, least_bytes) / passes[part].seconds.median
            with_counts[part] = replace(
                passes[part], flops=flops, least_bytes=least_bytes, roofline_share=share
            )
    return Row(method.name, method.mixer, sizes.length, n_params, with_counts)


def filter_work(config: MixerConfig, sizes: Sizes) -> Work:
    """The work of the long filter in a mixer's config: as much as the parameters' shapes ask for."""
    h = jax.eval_shape(
        lambda: mixer_class(config)(sizes.d_model, sizes.length, config).init_with_output(
            jax.random.key(0), method=lambda mixer: mixer.filter(sizes.length)
        )[0]
    )
    return count_filter(config.filter, h.shape[0], h.shape[1], sizes.length)
