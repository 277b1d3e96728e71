"""Training steps on one and on all devices beside the CPU's, and a checkpoint.

Axes: B batch, L length.
"""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from hyena_jax import models, parallel
from hyena_jax.benchmark.verify import relative_error
from hyena_jax.check.facts import Check, Fact, Tree, have_equal_bits, largest
from hyena_jax.config import (
    AttentionConfig,
    ConstantConfig,
    HawkConfig,
    HyenaConfig,
    LanguageModelConfig,
    LocalAttentionConfig,
    ParallelConfig,
    SGDConfig,
)
from hyena_jax.training.checkpoint import Checkpoints, Meta
from hyena_jax.training.optimizer import make_optimizer
from hyena_jax.training.step import init_params, init_state, make_train_step

MODEL = LanguageModelConfig(
    pattern=(HyenaConfig(), HawkConfig(), AttentionConfig(2), LocalAttentionConfig(2, window=13)),
    n_layers=4,
    d_model=32,
    d_ff=64,
    max_len=64,
    vocab_size=61,
)
ROWS, STEPS = 8, 2


class Trained(NamedTuple):
    """What some steps gave."""

    losses: np.ndarray
    moved: Tree
    """By how much each parameter moved."""
    state: Tree
    """At the end, as NumPy arrays."""


def training_cases() -> Iterator[tuple[str, Check]]:
    """Every way in which a step may be distributed over the devices of this process."""
    most = 2 ** (len(jax.local_devices()).bit_length() - 1)
    layouts = {"one device": ParallelConfig(devices=1)}
    if most > 1:
        layouts[f"pmap over {most} devices"] = ParallelConfig(devices=most)
        for sizes in ({"fsdp": most}, {"data": most // 2, "sequence": 2}):
            name = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
            layouts[name] = ParallelConfig(strategy="sharded", devices=most, **sizes)
        yield "training: dropout on two devices", _check_dropout
    on_cpu: list[Trained] = []

    def check(config: ParallelConfig) -> Iterator[Fact]:
        if not on_cpu:
            on_cpu.append(_train(ParallelConfig(devices=1), jax.local_devices(backend="cpu")))
        found, expected = _train(config), on_cpu[0]
        yield Fact("value", relative_error(found.losses, expected.losses))
        # Relative to the largest value of each leaf; one that hardly moves is only rounding.
        pairs = list(zip(jax.tree.leaves(found.moved), jax.tree.leaves(expected.moved), strict=True))
        least = 1e-2 * max(np.abs(b).max() for _, b in pairs)
        yield Fact("update", largest(np.abs(a - b).max() / max(np.abs(b).max(), least) for a, b in pairs))
        if config is layouts["one device"]:
            again = _train(config).state
            if not have_equal_bits(found.state, again):
                note = "two trainings differ in bits: an operation is not deterministic"
                yield Fact("same bits", 0.0, note)
            yield from _check_checkpoint(found.state)

    for name, config in layouts.items():
        yield f"training: {name}", partial(check, config)


def _train(
    config: ParallelConfig,
    devices: Sequence[jax.Device] | None = None,
    model_config: LanguageModelConfig = MODEL,
    equal_rows: int = 0,
) -> Trained:
    """Some steps of gradient descent, which moves parameters by their gradients; with so many equal rows."""
    strategy = parallel.make_strategy(config, devices)
    model = models.build(model_config, strategy.sequence_axis, strategy.layout)
    shapes = jax.eval_shape(lambda: init_params(model, 0))
    optimizer = make_optimizer(SGDConfig(schedule=ConstantConfig(warmup_steps=0)), shapes, STEPS)
    with jax.default_device(strategy.devices[0]):
        start = jax.device_get(init_params(model, 0))
        state = strategy.place(jax.device_get(init_state(start, optimizer)))
    step = make_train_step(model, optimizer, 0, strategy.axis_name)
    step, losses = strategy.map_train_step(step, jax.eval_shape(lambda: init_state(start, optimizer))), []
    tokens = np.random.default_rng(0).integers(0, 61, (STEPS, ROWS, MODEL.max_len + 1), np.int32)
    for windows in np.repeat(tokens[:, :1], equal_rows, axis=1) if equal_rows else tokens:
        batch = {"inputs": windows[:, :-1], "targets": windows[:, 1:]}
        state, metrics = step(state, strategy.place_batch(batch))
        losses.append(float(metrics["loss"]))
    state = strategy.host_copy(state)
    return Trained(np.array(losses), jax.tree.map(np.subtract, state.params, start), state)


def _check_dropout() -> Iterator[Fact]:
    """One row on one device, and the same row on two: with one mask on both, the losses would be equal."""
    model = replace(MODEL, pattern=(AttentionConfig(2),), n_layers=1, dropout=0.5)
    alone, both = (_train(ParallelConfig(devices=n), None, model, n).losses[0] for n in (1, 2))
    if not abs(both - alone) > 1e-6 * alone:  # NaN does not show it either
        yield Fact("value", float("inf"), "both devices drop the same activations")
    else:
        yield Fact("value", 0.0)


def _check_checkpoint(state: Tree) -> Iterator[Fact]:
    """Saved and restored: the same bits."""
    with tempfile.TemporaryDirectory(prefix="hyena_jax_check_") as folder:
        with Checkpoints(Path(folder) / "checkpoints", 1, print) as checkpoints:
            checkpoints.save(Meta(STEPS), state.to_items())
        with Checkpoints(Path(folder) / "checkpoints", 1, print) as checkpoints:
            restored = checkpoints.restore(jax.eval_shape(lambda: state.to_items()))
    if restored is not None and have_equal_bits(restored.items, state.to_items()):
        yield Fact("same bits", 0.0)
    else:
        yield Fact("same bits", float("inf"), "a checkpoint is restored to other bits")
