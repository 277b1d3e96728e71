"""Fine-tuning small models: all parameters, low-rank factors (LoRA), or all but those of the first blocks.

python experiments/fine_tuning/run.py --path input.txt [--workdir runs/fine_tuning]

Trains a small RecurrentGemma and a small Hyena on Python's standard library, then fine-tunes each on the text
at --path in several ways, and writes results.json. Runs that are finished in WORKDIR are read, not repeated.
"""

import json
import math
import re
import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import numpy as np

import hyena_jax
from hyena_jax import models
from hyena_jax.cli.base import script_flags
from hyena_jax.config import (
    HYENA_GROUPS,
    AdamWConfig,
    CosineConfig,
    Experiment,
    HawkConfig,
    HyenaConfig,
    LanguageModelConfig,
    LocalAttentionConfig,
    LoggingConfig,
    LoRAConfig,
    ParallelConfig,
    ParameterGroup,
    TextConfig,
    TrainingConfig,
)
from hyena_jax.data.dataset import load
from hyena_jax.system.machine import describe_machine, describe_versions
from hyena_jax.system.trees import named_leaves
from hyena_jax.training import lora
from hyena_jax.training.optimizer import make_optimizer
from hyena_jax.training.step import init_params, init_state, make_train_step

HERE = Path(__file__).parent
BASE_STEPS, STEPS = 400, 150
TIMED = 20
EVALUATED = 32_768
"""Bytes at the start of what is held out of each text, on which every run is evaluated."""
SIZES = {"n_layers": 3, "d_model": 64, "max_len": 128}
HAWK = HawkConfig(gate_blocks=4, projection_bias=True, gate_bias=True, reset_at_start=True, gelu="tanh")
MODELS = {
    "recurrentgemma": LanguageModelConfig(
        pattern=(HAWK, HAWK, LocalAttentionConfig(n_heads=4, window=32)),
        ffn="geglu",
        d_ff=192,
        norm="rms",
        final_norm="rms",
        init="griffin",
        scale_embedding=True,
        soft_cap=30.0,
        **SIZES,
    ),
    "hyena": LanguageModelConfig(pattern=(HyenaConfig(),), d_ff=256, **SIZES),
}
# Everything but the last block and the final norm.
FROZEN = ParameterGroup(r"^(embedding|blocks_[01])/", learning_rate=0.0)
METHODS = {
    "all": {},
    "lora_2": {"lora": LoRAConfig(rank=2)},
    "lora_8": {"lora": LoRAConfig(rank=8)},
    "frozen": {"groups": (FROZEN,)},
}
RATES = {"all": 5e-4, "frozen": 2e-3}
"""Peak learning rates; 5e-3 with LoRA."""


def base(model: str) -> Experiment:
    """The training of the base."""
    return Experiment(
        model=MODELS[model],
        data=TextConfig(seq_len=128, batch_size=8),
        optimizer=AdamWConfig(2e-3, CosineConfig(warmup_steps=20), groups=HYENA_GROUPS),
        training=training(BASE_STEPS),
        parallel=ParallelConfig(devices=1),
        logging=LoggingConfig(tensorboard=False, sample_tokens=0),
    )


def training(steps: int) -> TrainingConfig:
    return TrainingConfig(steps, eval_every=steps, eval_windows=1, checkpoint_every=steps, keep_checkpoints=1)


def fine_tuning(source: Experiment, method: str, path: str) -> Experiment:
    """The base's experiment, continued on the text at `path`."""
    options = METHODS[method]
    groups = (*options.get("groups", ()), *HYENA_GROUPS)
    return replace(
        source,
        model=replace(source.model, lora=options.get("lora", LoRAConfig())),
        data=replace(source.data, path=path),
        optimizer=replace(source.optimizer, learning_rate=RATES.get(method, 5e-3), groups=groups),
        training=training(STEPS),
    )


def finished(folder: Path, experiment: Experiment, init_from: Path | None = None) -> hyena_jax.LoadedRun:
    start = None if (folder / "config.json").exists() else init_from
    return hyena_jax.train(experiment, folder, init_from=start, quiet=True)


def losses(run: hyena_jax.LoadedRun, files: dict[str, Path]) -> dict[str, float]:
    """Nats per byte of each file."""
    return {name: run.evaluate(file)["loss"] for name, file in files.items()}


def size(folder: Path) -> int:
    """Bytes of the newest checkpoint of a run."""
    (step,) = (path for path in (folder / "checkpoints").iterdir() if path.name.isdecimal())
    return sum(path.stat().st_size for path in step.rglob("*") if path.is_file())


def step_times(experiments: dict[str, Experiment]) -> dict[str, float]:
    """Median milliseconds of a training step by method; the methods take turns."""
    steps, states = {}, {}
    draw = np.random.default_rng(0)
    batch = {name: draw.integers(0, 256, (8, 128), dtype=np.int32) for name in ("inputs", "targets")}
    for name, experiment in experiments.items():
        model = models.build(experiment.model)
        params, kept, config = init_params(model, 0), None, experiment.optimizer
        adaptation = lora.lora_of(experiment.model)
        if adaptation is not None:
            kept, params = params, lora.init_factors(adaptation, params, 0)
            config = lora.for_factors(config)
        optimizer = make_optimizer(config, params, STEPS)
        states[name] = init_state(params, optimizer)._replace(base=kept)
        steps[name] = jax.jit(make_train_step(model, optimizer, 0), donate_argnums=0)
        states[name], _ = jax.block_until_ready(steps[name](states[name], batch))
    times = {name: [] for name in steps}
    for _ in range(TIMED):
        for name, step in steps.items():
            begun = time.perf_counter()
            states[name], _ = jax.block_until_ready(step(states[name], batch))
            times[name].append(1000 * (time.perf_counter() - begun))
    return {name: statistics.median(found) for name, found in times.items()}


@dataclass(frozen=True)
class Flags:
    """Trains what is missing, then writes results.json."""

    path: str
    """The text to fine-tune on, such as Tiny Shakespeare's input.txt."""
    workdir: Path = Path("runs/fine_tuning")
    """Folder of the runs."""


def main(flags: Flags) -> None:
    results = {"hardware": describe_machine(), "versions": describe_versions(), "models": {}}
    for model in MODELS:
        source = finished(flags.workdir / model / "base", base(model))
        experiments = {method: fine_tuning(source.experiment, method, flags.path) for method in METHODS}
        files = {"text": flags.workdir / "text.txt", "library": flags.workdir / "library.txt"}
        texts = {"text": load(replace(source.experiment.data, path=flags.path)), "library": source.data}
        for name, file in files.items():
            file.write_bytes(texts[name].held_out[:EVALUATED].astype(np.uint8).tobytes())
        rows = {"base": losses(source, files)}
        for method, experiment in experiments.items():
            run = finished(flags.workdir / model / method, experiment, source.workdir)
            changed = [
                not np.array_equal(*pair)
                for pair in zip(jax.tree.leaves(run.params), jax.tree.leaves(source.params), strict=True)
            ]
            rows[method] = {
                **losses(run, files),
                "trained": trained(experiment),
                "leaves": len(changed),
                "changed": sum(changed),
                "checkpoint": size(run.workdir),
            }
            print(model, method, rows[method], flush=True)
        for method, milliseconds in step_times(experiments).items():
            rows[method]["ms_per_step"] = milliseconds
        results["models"][model] = rows
    (HERE / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def trained(experiment: Experiment) -> int:
    """The number of parameters that are trained."""
    shapes = jax.eval_shape(lambda: init_params(models.build(experiment.model), 0))
    adaptation = lora.lora_of(experiment.model)
    if adaptation is not None:
        shapes = jax.eval_shape(lambda: lora.init_factors(adaptation, shapes, 0))
    frozen = [group.pattern for group in experiment.optimizer.groups if group.learning_rate == 0]
    return sum(
        math.prod(leaf.shape)
        for name, leaf in named_leaves(shapes).items()
        if not any(re.search(pattern, name) for pattern in frozen)
    )


if __name__ == "__main__":
    main(script_flags(Flags))
