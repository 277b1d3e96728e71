"""The sharded strategy: how arrays are sharded, and that no layout changes the values."""

import dataclasses
import os
import subprocess
import sys

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grid import in_grid
from jax.sharding import PartitionSpec
from whole_runs import losses as losses_of
from whole_runs import with_training

from hyena_jax import models, parallel
from hyena_jax.config import (
    FILTER_CONFIGS,
    NO_DECAY,
    OPTIMIZER_CONFIGS,
    AdamWConfig,
    AttentionConfig,
    ConstantConfig,
    CosineConfig,
    HyenaConfig,
    LanguageModelConfig,
    OptimizerConfig,
    ParallelConfig,
    ParameterGroup,
)
from hyena_jax.parallel.processes import check_replicas
from hyena_jax.parallel.sharded import batch_spec, leaf_spec
from hyena_jax.system.errors import UserError
from hyena_jax.training.checkpoint import Checkpoints, Meta
from hyena_jax.training.optimizer import make_optimizer
from hyena_jax.training.run import train
from hyena_jax.training.step import init_params, init_state, make_train_step

CONFIG = LanguageModelConfig(
    pattern=(HyenaConfig(), AttentionConfig(2)), n_layers=2, d_model=32, d_ff=64, max_len=16, vocab_size=64
)
ATTENTION = dataclasses.replace(CONFIG, pattern=(AttentionConfig(2),), n_layers=1)
ADAMW = AdamWConfig(schedule=CosineConfig(warmup_steps=0))


def sharded(data: int, fsdp: int, sequence: int) -> ParallelConfig:
    return ParallelConfig(
        strategy="sharded", devices=data * fsdp * sequence, data=data, fsdp=fsdp, sequence=sequence
    )


LAYOUTS = {
    "pmap 4": ParallelConfig(devices=4),
    "pmap 1": ParallelConfig(devices=1),
    "fsdp 4": sharded(1, 4, 1),
    "data 2, fsdp 2": sharded(2, 2, 1),
    "fsdp 2": sharded(1, 2, 1),
}


def batch(t: int) -> dict[str, np.ndarray]:
    windows = np.random.default_rng(t).integers(0, 64, (8, 17), dtype=np.int32)
    return {"inputs": windows[:, :-1], "targets": windows[:, 1:]}


def losses(
    config: ParallelConfig,
    model_config=CONFIG,
    accumulation_steps: int = 1,
    optimizer_config: OptimizerConfig = ADAMW,
    steps: int = 5,
) -> list[float]:
    """Losses of some steps from the same start; the state stays sharded by its leaves' shapes."""
    strategy = parallel.make_strategy(config)
    model = models.build(model_config, strategy.sequence_axis, strategy.layout)
    params = jax.eval_shape(lambda: init_params(model, 0))
    optimizer = make_optimizer(optimizer_config, params, 20)

    def make():
        return init_state(init_params(model, 0), optimizer)

    step = make_train_step(model, optimizer, 0, strategy.axis_name, accumulation_steps)
    step, state, found = strategy.map_train_step(step, jax.eval_shape(make)), strategy.make_state(make), []
    for t in range(steps):
        state, metrics = step(state, strategy.place_batch(strategy.row_shard.of(batch(t))))
        found.append(float(metrics["loss"]))
    if config.strategy == "sharded":
        for leaf in jax.tree.leaves(state):
            assert leaf.sharding.spec == leaf_spec(leaf.shape, config.fsdp)
    return found


@pytest.mark.parametrize(
    ("shape", "fsdp", "spec"),
    [
        ((64, 256), 4, (None, "fsdp")),
        ((256, 64), 4, ("fsdp",)),
        ((64, 64), 4, ("fsdp",)),
        ((66, 64), 4, (None, "fsdp")),
        ((65, 67), 4, ()),
        ((256, 64), 1, ()),
        ((8, 8), 4, ()),
        ((2, 3, 1000), 8, (None, None, "fsdp")),
        ((), 4, ()),
    ],
)
def test_the_longest_axis_that_can_be_is_divided(shape, fsdp, spec):
    assert leaf_spec(shape, fsdp) == PartitionSpec(*spec)


def test_rows_and_length_of_a_batch_are_divided():
    assert batch_spec(1) == PartitionSpec(("data", "fsdp"))
    assert batch_spec(4) == PartitionSpec(("data", "fsdp"), "sequence")


@pytest.mark.scale
@pytest.mark.parametrize("name", OPTIMIZER_CONFIGS)
def test_every_optimizer_trains_on_a_mesh_as_on_one_device(name):
    """The losses after the first update show it; Adafactor's state is not shaped like the parameters."""
    options = {"min_dim_size_to_factor": 16} if name == "adafactor" else {}
    groups = (ParameterGroup("mlp", learning_rate=1e-3), NO_DECAY)
    optimizer = OPTIMIZER_CONFIGS[name](schedule=ConstantConfig(warmup_steps=0), groups=groups, **options)
    found = losses(sharded(1, 2, 1), ATTENTION, 2, optimizer, steps=3)
    expected = losses(LAYOUTS["pmap 1"], ATTENTION, 1, optimizer, steps=3)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.scale
@pytest.mark.parametrize(
    "name",
    ["implicit", *in_grid("windowed", "explicit", "fno", "transfer_function", "modal", "lookup", "stu")],
)
def test_filters_train_on_a_mesh_as_on_one_device(name):
    """One of each kind; all filters equal their oracles in tests of their own."""
    options = {"transfer_function": {"n_state": 8}, "stu": {"n_vectors": 4}}.get(name, {})
    pattern = (HyenaConfig(filter=FILTER_CONFIGS[name](**options)),)
    model_config = dataclasses.replace(CONFIG, pattern=pattern, n_layers=1)
    found = losses(sharded(1, 2, 2), model_config)
    np.testing.assert_allclose(found, losses(LAYOUTS["pmap 1"], model_config), atol=1e-5)


def test_parameters_and_optimizer_state_fall_as_one_over_fsdp():
    def make():
        params = init_params(models.build(CONFIG), 0)
        return init_state(params, make_optimizer(AdamWConfig(), params, 20))

    shapes, held = jax.eval_shape(make), {}
    for fsdp in (1, 2, 4):
        strategy = parallel.make_strategy(sharded(4 // fsdp, fsdp, 1))
        placed = strategy.place(jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes))
        held[fsdp] = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(placed))
    whole = [leaf for leaf in jax.tree.leaves(shapes) if leaf_spec(leaf.shape, 4) == PartitionSpec()]
    small = sum(leaf.size * leaf.dtype.itemsize for leaf in whole)
    assert held[1] > 8 * small
    for fsdp in (2, 4):
        assert held[fsdp] - small == (held[1] - small) / fsdp


@pytest.mark.parametrize("saved", ["fsdp 4", *in_grid("pmap 4", "pmap 1")])
def test_a_checkpoint_is_restored_in_every_layout(tmp_path, saved):
    values = {"w": np.random.default_rng(0).standard_normal((64, 48)).astype(np.float32), "n": np.int32(3)}
    strategy = parallel.make_strategy(LAYOUTS[saved])
    with Checkpoints(tmp_path, 1, print) as checkpoints:
        placed = strategy.to_global(strategy.place(values))
        checkpoints.save(Meta(3), {"params": placed})
    for layout in LAYOUTS.values():
        strategy = parallel.make_strategy(layout)
        target = strategy.restore_target(jax.eval_shape(lambda: values))
        with Checkpoints(tmp_path, 1, print) as checkpoints:
            found = strategy.from_global(checkpoints.restore({"params": target}).items["params"])
        assert found["w"].sharding == strategy.place(values)["w"].sharding
        chex.assert_trees_all_equal(strategy.host_copy(found), values)


@pytest.mark.parametrize("layout", ["data 2, fsdp 2", *in_grid("pmap 4")])
def test_a_save_under_way_is_not_changed_by_later_steps(tmp_path, layout):
    strategy = parallel.make_strategy(LAYOUTS[layout])
    values = {"w": np.zeros((256, 256), np.float32)}
    step = strategy.map_train_step(
        lambda state, batch: (jax.tree.map(lambda x: x + 1, state), {}), jax.eval_shape(lambda: values)
    )
    state = strategy.place(values)
    ones = strategy.place_batch({"x": np.ones((4, 1), np.float32)})
    with Checkpoints(tmp_path, 1, print) as checkpoints:
        state, _ = step(state, ones)
        checkpoints.save(Meta(1), {"params": strategy.to_global(state)})
        for _ in range(20):
            state, _ = step(state, ones)
        jax.block_until_ready(state)
    with Checkpoints(tmp_path, 1, print) as checkpoints:
        restored = checkpoints.restore({"params": values})
    np.testing.assert_array_equal(restored.items["params"]["w"], 1)


@pytest.mark.scale
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (sharded(1, 2, 2), ParallelConfig(devices=2)),
        (sharded(1, 4, 1), sharded(1, 1, 4)),
        (ParallelConfig(devices=4), sharded(2, 2, 1)),
    ],
)
def test_a_run_goes_on_in_another_layout(experiment, tmp_path, console, before, after):
    dry = dataclasses.replace(experiment, model=dataclasses.replace(experiment.model, dropout=0.0))

    def run(workdir, steps, layout):
        changed = dataclasses.replace(with_training(dry, steps=steps, log_every=1), parallel=layout)
        return train(changed, tmp_path / workdir, console).params

    alone = run("whole", 8, ParallelConfig(devices=1))
    run("moved", 4, dataclasses.replace(before, check_replicas_every=2))
    moved = run("moved", 8, after)
    assert "continuing after step 4" in console.file.getvalue()
    chex.assert_trees_all_close(alone, moved, atol=1e-4, rtol=1e-7)
    for part in ("train", "validation"):
        found, expected = (losses_of(tmp_path / name, part) for name in ("moved", "whole"))
        assert found == pytest.approx(expected, abs=1e-5)


def test_copies_that_differ_in_a_bit_are_found():
    strategy = parallel.make_strategy(LAYOUTS["data 2, fsdp 2"])
    tree = {"a": {"w": np.ones((64, 64), np.float32)}, "step": np.int32(1)}
    placed = strategy.place(tree)
    check_replicas(placed, 7)
    w = placed["a"]["w"]
    copies = [shard.data for shard in w.addressable_shards]
    copies[3] = copies[3].at[5, 5].set(np.nextafter(np.float32(1), np.float32(2)))
    placed["a"]["w"] = jax.make_array_from_single_device_arrays(w.shape, w.sharding, copies)
    with pytest.raises(OSError, match=r"after step 7 the copies of a/w\[32:64, :\] on device 1 and device 3"):
        check_replicas(placed, 7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fsdp": 2}, "fsdp must be 1 unless strategy is 'sharded', got 2"),
        ({"data": 2}, "data must be None unless strategy is 'sharded', got 2"),
        ({"strategy": "shraded"}, "did you mean 'sharded'"),
        ({"strategy": "sharded", "fsdp": 3}, "= 1 x 3 x 1 must be the 4 devices"),
        ({"strategy": "sharded", "fsdp": 2, "devices": 1}, "for one device give --parallel.fsdp 1$"),
        ({"strategy": "sharded", "data": 1, "fsdp": 2}, "= 1 x 2 x 1 must be the 4 devices"),
        ({"strategy": "sharded", "devices": 5}, "parallel.devices must be at most 4 on this machine, got 5"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        parallel.make_strategy(ParallelConfig(**options))


def test_a_length_that_cannot_be_divided_is_refused():
    strategy = parallel.make_strategy(sharded(1, 1, 4))
    with pytest.raises(UserError, match="parallel.sequence must be a divisor of the rows' length 6, got 4"):
        strategy.check(lambda params, batch: None, {}, {"inputs": jnp.zeros((2, 6))})


def test_channels_that_cannot_be_divided_are_refused_before_the_folder_is_made(experiment, tmp_path, console):
    narrow = dataclasses.replace(experiment.model, pattern=(HyenaConfig(),), d_model=6)
    shared = dataclasses.replace(experiment, model=narrow, parallel=sharded(1, 1, 4))
    with pytest.raises(UserError, match="parallel.sequence=4: channels of a filter must be a multiple of"):
        train(shared, tmp_path / "run", console)
    assert not (tmp_path / "run").exists()


EIGHT = """
import numpy as np
from hyena_jax.config import ParallelConfig
from test_sharded import losses, sharded
expected = losses(ParallelConfig())
for mesh in [(8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 2)]:
    np.testing.assert_allclose(losses(sharded(*mesh)), expected, atol=1e-5, err_msg=str(mesh))
"""


@pytest.mark.scale
def test_meshes_of_eight_devices_train_alike():
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    flags += " --xla_cpu_parallel_codegen_split_count=1"
    paths = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    environment = {**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", EIGHT], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
