"""Mixers over lengths: ours, and the baselines beside them. Axes: B batch, L length, D channels."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hyena_jax.benchmark import flax_baseline, verify
from hyena_jax.benchmark.counts import Work, count
from hyena_jax.benchmark.memory import fits
from hyena_jax.benchmark.programs import Effort, Measured, Program, jit_program, measure
from hyena_jax.benchmark.roofline import Roofline
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


def verify_method(method: Method, d_model: int, dtype: str) -> bool:
    """Raises `verify.Mismatch` unless the method gives what the oracle does; False without an oracle."""
    if method.source == "ours":
        return verify.verify_mixer(method.name, method.config, d_model, dtype)
    baseline = partial(_baseline(method.source).value_and_gradient, mixer=method.mixer)
    verify.verify_baseline(method.name, method.mixer, baseline, d_model, dtype)
    return True


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
        programs, built = {}, {}
        for method in list(remaining):
            candidate = build(method, at_length)
            if fits(candidate.needed_bytes):
                programs |= {(method.name, part): program for part, program in candidate.programs.items()}
                built[method.name] = candidate
            else:
                remaining.remove(method)
                needed = f"{candidate.needed_bytes / 2**30:,.1f} GiB at length {length}"
                note(f"{method.name}: {needed} are more than is available")
        measured = measure(programs, effort)
        for method in [m for m in remaining if m.name in built]:
            passes = {part: m for (name, part), m in measured.items() if name == method.name}
            yield _row(method, length, built[method.name], passes, roofline)
            open_loops = built[method.name].works[BOTH].open_loops
            if open_loops and length == min(lengths):
                note(f"{method.name}: {open_loops} loops of unknown length are counted as one round each")
            if max(m.seconds.median for m in passes.values()) > effort.max_seconds:
                remaining.remove(method)
                note(f"{method.name}: a run at length {length} took over {effort.max_seconds:g} s; no longer")
        for _ in chosen:
            advance()


class Built(NamedTuple):
    """The programs of a method, and the work that our mixer is for the same results."""

    programs: dict[str, Program]
    """By pass."""
    works: dict[str, Work]
    """By pass."""
    n_params: int

    @property
    def needed_bytes(self) -> int:
        """What the largest program takes: as its compiler planned it, or without one by its work."""
        planned = [program.memory.total for program in self.programs.values() if program.memory is not None]
        return max(planned, default=int(KEPT_BY_AUTOGRAD * self.works[FORWARD].bytes))


def build(method: Method, sizes: Sizes) -> Built:
    """Compiles a method's passes."""
    config, dtype = method.config, jnp.dtype(sizes.dtype)
    module = mixer_class(config)(sizes.d_model, sizes.length, config, 1, dtype)
    shape = (sizes.batch, sizes.length, sizes.d_model)
    x, cotangent = (jax.random.normal(jax.random.key(i), shape).astype(dtype) for i in range(2))
    params = verify.initial_params(module, x[:1, :1], 2)
    n_params = sum(leaf.size for leaf in jax.tree.leaves(params))

    def ours(params: dict, x: jax.Array) -> jax.Array:
        return module.apply({"params": params}, x, None, True)

    def long_filter(params: dict) -> jax.Array:
        return module.apply({"params": params}, method=lambda mixer: mixer.filter(sizes.length))

    passes = _passes(ours, params, x, cotangent)
    if callable(getattr(module.bind({"params": params}), "filter", None)):
        passes[FILTER] = long_filter, (params,)
    works = {part: count(function, *args) for part, (function, args) in passes.items()}
    if method.source == "torch":
        runs = _baseline("torch").programs(method.mixer, config, sizes.length, params, x, cotangent)
        return Built({part: Program(run) for part, run in runs.items()}, works, n_params)
    if method.source == "flax":
        naive = flax_baseline.build(method.mixer, config, sizes.length, dtype)
        params = flax_baseline.convert_params(params)
        passes = _passes(lambda params, x: naive.apply({"params": params}, x), params, x, cotangent)
    programs = {part: jit_program(function, *args) for part, (function, args) in passes.items()}
    return Built(programs, works, n_params)


def _passes(
    forward: Callable[[dict, jax.Array], jax.Array], params: dict, x: jax.Array, cotangent: jax.Array
) -> dict[str, tuple[Callable, tuple]]:
    """Functions and their arguments: y; and y with the gradients of all parameters and x."""

    def forward_backward(params: dict, x: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, Any]:
        y, pullback = jax.vjp(forward, params, x)
        return y, pullback(cotangent)

    return {FORWARD: (forward, (params, x)), BOTH: (forward_backward, (params, x, cotangent))}


def _baseline(source: str) -> Any:
    if source == "flax":
        return flax_baseline
    from hyena_jax.benchmark import torch_baseline

    return torch_baseline


def _row(
    method: Method, length: int, built: Built, passes: Mapping[str, Measured], roofline: Roofline
) -> Row:
    with_counts = {}
    for part in (FORWARD, BOTH, FILTER):
        if part in passes:
            work = built.works[part]
            share = roofline.least_seconds(work.flops, work.bytes) / passes[part].seconds.median
            with_counts[part] = replace(
                passes[part], flops=work.flops, least_bytes=work.bytes, roofline_share=share
            )
    return Row(method.name, method.mixer, length, built.n_params, with_counts)
