"""Operators against a lower bound of their cost, their dense products, or against the form that they replace.

python experiments/benchmarks/targets.py [--output experiments/benchmarks]

Writes targets.json and prints the table. Every ratio compares medians of runs that took turns in this
process; leave the machine idle meanwhile.
"""

import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import flax_baseline
import jax
import jax.numpy as jnp
import torch_baseline
from rich.console import Console
from rich.table import Table

from hyena_jax import config as configs
from hyena_jax import models
from hyena_jax.benchmark.settings import Effort
from hyena_jax.benchmark.timing import Runnable, forward_backward, jit_program, measure
from hyena_jax.cli.base import script_flags
from hyena_jax.config import (
    ExplicitFilterConfig,
    GatedDelta2Config,
    GatedDeltaConfig,
    HawkConfig,
    HyenaConfig,
    KDAConfig,
    Mamba2Config,
    Mamba3Config,
    MixerConfig,
    RWKV7Config,
)
from hyena_jax.mixers import mixer_class
from hyena_jax.ops import fastmax
from hyena_jax.parallel import Pmap, all_devices
from hyena_jax.system.machine import describe_machine, describe_versions
from hyena_jax.system.malloc import keep_freed_memory, restart_with_large_pages
from hyena_jax.system.trees import named_leaves
from hyena_jax.training.optimizer import make_optimizer
from hyena_jax.training.step import init_params, init_state, make_train_step

# Free taps: computing the filter is not part of the operator here.
HYENA = HyenaConfig(filter=ExplicitFilterConfig())
HAWK = HawkConfig(gate_blocks=8)
MATRIX_MEMORIES = {
    "gated_delta": GatedDeltaConfig(n_heads=4),
    "mamba2": Mamba2Config(n_heads=4),
    "kda": KDAConfig(n_heads=4),
    "gated_delta2": GatedDelta2Config(n_heads=4),
    "rwkv7": RWKV7Config(n_heads=4),
    "mamba3": Mamba3Config(n_heads=4),
}
VOCABULARY = 65
STEPS = 10


@dataclass(frozen=True)
class Flags:
    """Measures everything, one group after the other."""

    output: Path = Path(__file__).parent
    """Folder of targets.json."""
    seconds: float = 6.0
    """Measuring time of each program."""
    keep_memory: bool = True
    """Have glibc keep freed memory, as `hyena-jax` does, for PyTorch and JAX alike."""
    only: str = ""
    """Measure only the groups whose name starts with this, and write no file."""


def main(flags: Flags) -> None:
    if flags.keep_memory:
        restart_with_large_pages()
        keep_freed_memory()
    effort = Effort(flags.seconds, 9, 60.0)
    groups = {
        "hyena B=4 L=1024 D=256": partial(hyena, 4, 1024, 256),
        "hyena B=1 L=8192 D=256": partial(hyena, 1, 8192, 256),
        "hawk B=4 L=2048 D=512, 8 gate blocks": partial(hawk, 4, 2048, 512),
        **{
            f"{name} B=1 L=8192 D=256, 4 heads": partial(matrix_memory, config, 8192, 256)
            for name, config in MATRIX_MEMORIES.items()
        },
        "fastmax p=2 head_dim=32 L=8192": partial(fastmax_forms, 8192),
        "train step of shakespeare_cpu": partial(train_steps, ("attention", "hyena", "hawk")),
    }
    table, results = Table("group", "program", "pass", "ms", "quartiles", "ratio", box=None), {}
    for group, make in groups.items():
        if not group.startswith(flags.only):
            continue
        programs = make()
        measured = measure(programs, effort)
        first = {part: measured[name, part].seconds.median for name, part in reversed(programs)}
        for (name, part), found in measured.items():
            per = STEPS if part.endswith("steps") else 1
            timing = found.seconds
            median, lower, upper = (1e3 * t / per for t in (timing.median, timing.lower, timing.upper))
            ratio = found.seconds.median / first[part]
            table.add_row(group, name, part, f"{median:.1f}", f"{lower:.1f}-{upper:.1f}", f"{ratio:.2f}")
            results.setdefault(group, {}).setdefault(name, {})[part] = {
                "ms": median,
                "lower": lower,
                "upper": upper,
                "ratio": ratio,
                "runs": found.seconds.runs,
            }
    memory = {length: fastmax_memory(length) for length in (4096, 8192, 16384, 32768) if not flags.only}
    for length, megabytes in memory.items():
        table.add_row(
            "fastmax, temporary memory", f"L={length}", "forward + backward", f"{megabytes:.1f} MB", "", ""
        )
    Console(width=130).print(table)
    if flags.only:
        return
    report = (
        describe_machine() | describe_versions("torch") | {"results": results, "fastmax_megabytes": memory}
    )
    (flags.output / "targets.json").write_text(json.dumps(report, indent=2) + "\n")


def both_passes(name: str, function: Any, params: Any, x: jax.Array, y_bar: jax.Array) -> dict:
    """Programs for y = function(params, x), and for y with the gradients of params and x."""
    return {
        (name, "forward"): jit_program(function, params, x),
        (name, "forward + backward"): jit_program(forward_backward(function), (params, x), y_bar),
    }


def inputs(*shape: int) -> tuple[jax.Array, jax.Array]:
    return tuple(jax.random.normal(jax.random.key(i), shape) for i in range(2))


class Projections(nn.Module):
    """Hyena's two dense layers; a sum makes the second one's input."""

    width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        z = nn.Dense(3 * self.width)(x).reshape(*x.shape[:2], 3, self.width)
        return nn.Dense(self.width)(z.sum(axis=2))


def hyena(batch: int, length: int, width: int) -> dict:
    x, y_bar = inputs(batch, length, width)
    dense = Projections(width)
    programs = both_passes(
        "dense projections", dense.apply, jax.jit(dense.init)(jax.random.key(0), x), x, y_bar
    )
    module = mixer_class(HYENA)(width, length, HYENA)
    params = jax.jit(module.init)(jax.random.key(0), x)
    programs |= both_passes("hyena", module.apply, params, x, y_bar)
    naive = flax_baseline.build("hyena", HYENA, length, jnp.float32)
    converted = {"params": flax_baseline.convert_params(params["params"])}
    programs |= both_passes("naive Flax", naive.apply, converted, x, y_bar)
    torch = torch_baseline.programs("hyena", HYENA, length, params["params"], x, y_bar)
    for part, run in torch.items():
        programs["PyTorch", part.replace("_", " + ")] = Runnable(run)
    implicit = mixer_class(HyenaConfig())(width, length, HyenaConfig())
    implicit_params = jax.jit(implicit.init)(jax.random.key(0), x)

    def filters(params: Any, _: jax.Array) -> jax.Array:
        return implicit.apply(params, method=lambda mixer: mixer.filter(length))

    h_bar = jax.random.normal(jax.random.key(3), (1, width, length))
    return programs | both_passes("implicit filter alone", filters, implicit_params, x, h_bar)


def hawk(batch: int, length: int, width: int) -> dict:
    x, y_bar = inputs(batch, length, width)
    module = mixer_class(HAWK)(width, length, HAWK)
    params = jax.jit(module.init)(jax.random.key(0), x)

    def products(params: dict, x: jax.Array) -> jax.Array:
        """The block's matrix products, with the axes in their best order."""
        params = params["params"]
        kernel, n_blocks = params["in_proj"]["kernel"], HAWK.gate_blocks
        gate, u = x @ kernel[:, :width], x @ kernel[:, width:]
        u = u.reshape(batch * length, n_blocks, -1).transpose(1, 0, 2)
        gates = (
            jnp.einsum("hni,hij->hnj", u, params[f"{name}_gate"]["kernel"])
            for name in ("recurrence", "input")
        )
        v = sum(gates).transpose(1, 0, 2).reshape(x.shape)
        return (gate + v) @ params["out_proj"]["kernel"]

    programs = both_passes("matrix products", products, params, x, y_bar)
    return programs | both_passes("hawk", module.apply, params, x, y_bar)


def matrix_memory(config: MixerConfig, length: int, width: int) -> dict:
    x, y_bar = inputs(1, length, width)
    module = mixer_class(config)(width, length, config)
    params = jax.jit(module.init)(jax.random.key(0), x)
    heads, has_states = config.n_heads, isinstance(config, Mamba2Config | Mamba3Config)
    # The heads of Mamba-2 share q and k; those of Mamba-3 have biases of their own.
    key_heads = 1 if isinstance(config, Mamba2Config) else heads

    def products(params: dict, x: jax.Array) -> jax.Array:
        """The layers' matrix products, and those of all chunks at once; the rest is left out."""
        kernels = {path: x for path, x in named_leaves(params["params"]).items() if path.endswith("kernel")}
        out, inner = kernels.pop("out_proj/kernel"), {}
        for path in sorted(kernels):  # "down" before the "up" of a low-rank layer
            inner[path] = inner.get(path.replace("up/", "down/"), x) @ kernels[path]
        values, keys = out.shape[0], config.d_state if has_states else width
        if isinstance(config, RWKV7Config):
            q, k, v = (inner[f"{name}_proj/kernel"][0] for name in "rkv")
        else:
            joint = inner["in_proj/kernel" if has_states else "qkv_proj/kernel"]
            q, k, v = jnp.split(joint[0, :, : 2 * keys + values], [keys, 2 * keys], axis=-1)
        if has_states:
            q, k = (jnp.tile(part, key_heads) for part in (q, k))
        # [chunks, heads, tokens, channels].
        q, k, v = (
            part.reshape(-1, config.chunk, n, part.shape[-1] // n).swapaxes(1, 2)
            for part, n in ((q, key_heads), (k, key_heads), (v, heads))
        )
        memory = k.mT @ v
        if has_states:
            o = q @ memory + (q @ k.mT) @ v
        elif isinstance(config, RWKV7Config):  # what is erased has vectors of its own: here v's, of that size
            erased = (k @ v.mT) @ (k @ memory + (k @ k.mT) @ v)
            o = q @ memory + (q @ k.mT) @ v - (q @ v.mT) @ erased + k @ (v.mT @ erased)
        else:
            o = q @ memory + (q @ k.mT) @ ((k @ k.mT) @ (v - k @ memory))
        o = o.swapaxes(1, 2).reshape(1, length, values)
        rest = sum(part.mean() for part in inner.values())  # so that no product is dropped
        return (o + rest) @ out

    programs = both_passes("matrix products", products, params, x, y_bar)
    return programs | both_passes("mixer", module.apply, params, x, y_bar)


def fastmax_forms(length: int) -> dict:
    qk = inputs(1, length, 1, 32)
    v, y_bar = inputs(1, length, 1, 32)

    def quadratic(qk: tuple, v: jax.Array) -> jax.Array:
        return fastmax.fastmax_quadratic(*scaled(qk), v, 2, jnp.tri(length, dtype=bool))

    return both_passes("quadratic", quadratic, qk, v, y_bar) | both_passes(
        "factorized", factorized, qk, v, y_bar
    )


def factorized(qk: tuple, v: jax.Array) -> jax.Array:
    q, k = scaled(qk)
    return fastmax.fastmax_causal(q, k, v, 2, fastmax.no_sums(k, 2))[0]


def scaled(qk: tuple) -> tuple[jax.Array, jax.Array]:
    return tuple(fastmax.standardize(x) / x.shape[-1] ** 0.25 for x in qk)


def fastmax_memory(length: int) -> float:
    """Megabytes of temporary memory of the factorized form, forward and backward."""
    v, y_bar = inputs(1, length, 1, 32)
    program = both_passes("", factorized, (v, v), v, y_bar)["", "forward + backward"]
    return program.memory.temporary / 1e6


def train_steps(mixers: tuple[str, ...]) -> dict:
    return {(name, f"{STEPS} steps"): steps(f"shakespeare_cpu:{name}") for name in mixers}


def steps(spec: str) -> Runnable:
    """Ten training steps as the training loop runs them, on random characters."""
    experiment = configs.load(spec)
    model = models.build(replace(experiment.model, vocab_size=VOCABULARY))
    params = init_params(model, 0)
    optimizer = make_optimizer(experiment.optimizer, params, experiment.training.steps)
    strategy = Pmap(all_devices(1))
    state = strategy.place(init_state(params, optimizer))
    step = strategy.map_train_step(make_train_step(model, optimizer, 0, strategy.axis_name), state)
    shape = (1, experiment.data.batch_size, experiment.model.max_len)
    keys = (jax.random.key(i) for i in range(2))
    batch = {
        name: jax.random.randint(key, shape, 0, VOCABULARY)
        for name, key in zip(("inputs", "targets"), keys, strict=True)
    }
    kept = [state]

    def run() -> Any:
        for _ in range(STEPS):
            kept[0], metrics = step(kept[0], batch)
        return metrics

    run()
    return Runnable(run)


if __name__ == "__main__":
    main(script_flags(Flags))
