"""Compares what the mixers and the variants of `shakespeare_cpu` compute and compile to with what is kept.

python tests/programs/program_counts.py [--tpu] [--write] [NAME ...]

For each mixer y and its gradients (B=2, L=64, D=32), and for each variant the training step with one repeat
of its pattern: counted in the jaxpr (`hyena_jax.ops.counts`), products, elementwise operations, transforms
and bytes; counted in the compiled program, instructions that run (fusions, and all) and relayouts, which are
copies and transposes, also those within fusions. Compiled for CPUs as by default, with AVX2 and two threads,
so that the processor does not matter; with --tpu for one chip of v5e, ahead of time (the extra `tpu`).

Counts are kept in program_counts.json by the versions of JAX and the compiler. --write keeps the present
ones; without it the exit code is 1 if a count differs. With other versions there is a line and no verdict.
"""

import importlib.metadata
import json
import os
import runpy
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("program_counts.json")
BATCH, LENGTH, WIDTH = 2, 64, 32
THREADS = 2
RELAYOUTS = ("copy", "transpose")
Counts = dict[str, dict[str, float]]
"""By the name of a program: counts by their names."""


def versions(is_tpu: bool) -> str:
    """The key of the counts."""
    chip, packages = ("v5e", ("jax", "jaxlib", "libtpu")) if is_tpu else ("cpu", ("jax", "jaxlib"))
    return ", ".join([chip, *(f"{name} {importlib.metadata.version(name)}" for name in packages)])


def start(is_tpu: bool) -> None:
    """Before JAX is imported: one device, two threads, and a compiler that does not look at the processor."""
    from hyena_jax.plan.compiling import ENVIRONMENT

    os.environ.update(ENVIRONMENT if is_tpu else {"JAX_PLATFORMS": "cpu"})
    os.environ["XLA_FLAGS"] = "--xla_cpu_max_isa=AVX2"
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])


def names() -> list[str]:
    """All programs: `mixer NAME` and `step VARIANT`."""
    from hyena_jax.config import MIXER_CONFIGS, config_files

    variants = runpy.run_path(str(config_files()["shakespeare_cpu"]))["VARIANTS"]
    return [*(f"mixer {name}" for name in MIXER_CONFIGS), *(f"step {name}" for name in variants)]


def counts_of(name: str, is_tpu: bool) -> dict[str, float]:
    """The counts of one program."""
    import jax

    from hyena_jax.plan.targets import compile_only_devices, parse_target

    device = compile_only_devices(parse_target("v5e:1x1"))[0] if is_tpu else jax.devices()[0]
    kind, _, name = name.partition(" ")
    jaxpr, lowered = (_mixer if kind == "mixer" else _step)(name, device)
    return {**in_jaxpr(jaxpr), **in_program(lowered.compile().as_text())}


def _mixer(name: str, device: Any) -> tuple:
    """y of a mixer with its default options, with the gradients of its parameters and of x."""
    import jax
    import jax.numpy as jnp

    from hyena_jax.config import MIXER_CONFIGS
    from hyena_jax.mixers import mixer_class
    from hyena_jax.ops.forms import forms_for

    config = MIXER_CONFIGS[name]()
    module = mixer_class(config)(WIDTH, LENGTH, config, 1, jnp.float32)
    if hasattr(module, "forms"):
        module = module.clone(forms=forms_for(device.platform, kernels=device.platform == "tpu"))
    x = jax.ShapeDtypeStruct((BATCH, LENGTH, WIDTH), jnp.float32)
    params = jax.eval_shape(module.init, jax.random.key(0), x).get("params", {})

    def both(params: Any, x: Any, cotangent: Any) -> tuple:
        y, pullback = jax.vjp(lambda params, x: module.apply({"params": params}, x, None, True), params, x)
        return y, pullback(cotangent)

    sharding = jax.sharding.SingleDeviceSharding(device)
    traced = jax.jit(both, in_shardings=sharding, out_shardings=sharding).trace(params, x, x)
    return traced.jaxpr, traced.lower()


def _step(variant: str, device: Any) -> tuple:
    """The training step of a variant of `shakespeare_cpu`, with as many blocks as its pattern has mixers."""
    from dataclasses import replace

    from hyena_jax import config
    from hyena_jax.plan.step import lower

    experiment = config.load(f"shakespeare_cpu:{variant}")
    model = replace(experiment.model, n_layers=len(experiment.model.pattern), vocab_size=65)
    found = lower(replace(experiment, model=model), [device])
    return found.jaxpr, found.lowered


def in_jaxpr(jaxpr: Any) -> dict[str, float]:
    """FLOPs by kind, and bytes."""
    from hyena_jax.ops.counts import count_jaxpr

    work = count_jaxpr(jaxpr.jaxpr)
    counts = {"products": work.products, "transforms": round(work.transforms)}
    return {**counts, "elementwise": work.other, "bytes": work.bytes}


def in_program(text: str) -> dict[str, float]:
    """Instructions of a compiled program, each once, however often a loop runs it."""
    from hyena_jax.plan.hlo import Program

    program = Program(text)
    running = {instruction.name: instruction for instruction, _ in program.running()}.values()
    free = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast")
    return {
        "instructions": sum(one.opcode not in free for one in running),
        "fusions": sum(one.opcode == "fusion" for one in running),
        "relayouts": sum(
            inner.opcode in RELAYOUTS
            for one in running
            for inner in (program.within(one) if one.opcode == "fusion" else (one,))
        ),
    }


def differences(kept: Counts, found: Counts) -> Iterator[str]:
    """A line for each program that is new or lost, and each count that changed."""
    for name in [*found, *(name for name in kept if name not in found)]:
        if name not in kept or name not in found:
            yield f"{name}: {'not kept yet' if name in found else 'no such program any more'}"
            continue
        for what, value in found[name].items():
            before = kept[name].get(what)
            if before != value:
                change = "is new" if before is None else f"{before:,g} -> {value:,g}"
                yield f"{name}: {what} {change}"


def main(arguments: list[str]) -> int:
    """Counts, and compares or writes."""
    is_tpu, is_writing = "--tpu" in arguments, "--write" in arguments
    asked = [argument for argument in arguments if not argument.startswith("--")]
    kept = json.loads(FILE.read_text()) if FILE.exists() else {}
    key = versions(is_tpu)
    if not is_writing and key not in kept:
        print(f"program counts: none are kept for {key}, so nothing is compared; kept are {'; '.join(kept)}")
        return 0
    start(is_tpu)
    known = names()
    for name in asked:
        if name not in known:
            print(f"{name!r} is not a program; they are: {'; '.join(known)}")
            return 2
    wanted, found = asked or known, {}
    with ProcessPoolExecutor(THREADS, get_context("spawn"), start, (is_tpu,)) as pool:
        for name, counts in zip(wanted, pool.map(counts_of, wanted, [is_tpu] * len(wanted)), strict=True):
            found[name] = counts
            if sys.stderr.isatty():
                print(f"{len(found)} of {len(wanted)}", end="\r", file=sys.stderr)
    if is_writing:
        kept[key] = {**(kept.get(key, {}) if asked else {}), **found}
        lines = (
            f' "{key}": {{\n'
            + ",\n".join(f'  "{name}": {json.dumps(row)}' for name, row in rows.items())
            + "\n }"
            for key, rows in sorted(kept.items())
        )
        FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        return 0
    lines = list(differences({n: kept[key][n] for n in kept[key] if not asked or n in asked}, found))
    print("\n".join(lines) or f"program counts: all {len(found)} programs are as kept for {key}")
    if lines:
        print("if this is meant: python tests/programs/program_counts.py --write" + " --tpu" * is_tpu)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
