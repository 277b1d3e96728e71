"""Language models with sequences sharded over four fake devices equal one device, gradient by gradient."""

import contextlib
import dataclasses
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grid import grid_but, in_grid
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from oracles import random_params
from tolerances import assert_close

from hyena_jax import models
from hyena_jax.config import (
    MIXER_CONFIGS,
    AFTSimpleConfig,
    AttentionConfig,
    FastmaxConfig,
    HawkConfig,
    HyenaConfig,
    ImageClassifierConfig,
    ImplicitFilterConfig,
    LanguageModelConfig,
    LocalAttentionConfig,
    RealModalFilterConfig,
    ShortFilterConfig,
    load_plugin,
)
from hyena_jax.training.step import init_params, init_state, make_eval_step, make_train_step

EXTENSIONS = Path(__file__).parents[1] / "extensions"
AXES = ("data", "fsdp", "sequence")
FILTER = ImplicitFilterConfig(emb_dim=3, width=4)
CONFIG = LanguageModelConfig(
    pattern=(
        HyenaConfig(filter=FILTER), HawkConfig(gate_blocks=2), LocalAttentionConfig(n_heads=2, window=5),
        FastmaxConfig(n_heads=2), AFTSimpleConfig(),
    ),
    n_layers=5, d_model=8, d_ff=8, max_len=16, vocab_size=11, learned_positions=True,
)  # fmt: skip
OTHERS = {
    "hyena": HyenaConfig(order=3, gating="conv_first", n_heads=2, n_blocks=2, filter=FILTER),
    "hyena_short": HyenaConfig(filter=ShortFilterConfig(5), filter_groups=2, short_bias=False),
    "hyena_in_groups": HyenaConfig(
        filter=RealModalFilterConfig(2), filter_groups=4, in_bias=False, skip=False
    ),
    "hyena_lfm2": HyenaConfig(filter=ShortFilterConfig(3), short_filter_len=0, skip=False, out_bias=False),
    **{name: MIXER_CONFIGS[name]() for name in ("gated_hyena", "s4d", "fir", "annotated_hyena")},
    "h3": MIXER_CONFIGS["h3"](head_dim=2, n_taps=5),
    "attention": AttentionConfig(2, rotary_fraction=0.5),
    "gated_delta": MIXER_CONFIGS["gated_delta"](2, factors=2, chunk=3),
    "kda": MIXER_CONFIGS["kda"](2, chunk=3),
    "gated_delta2": MIXER_CONFIGS["gated_delta2"](2, chunk=3),
    "rwkv7": MIXER_CONFIGS["rwkv7"](2, 2, 2, 2, 2, chunk=3),
    "mamba2": MIXER_CONFIGS["mamba2"](2, d_state=5, chunk=3),
    "mamba3": MIXER_CONFIGS["mamba3"](2, d_state=6, n_inputs=2, chunk=3),
    "aft_full": MIXER_CONFIGS["aft_full"](rank=3),
    "aft_local": MIXER_CONFIGS["aft_local"](rank=3, window=5),
    "aft_conv": MIXER_CONFIGS["aft_conv"](n_heads=2, n_taps=5),
}


def mesh_of(*shape: int) -> Mesh:
    return Mesh(np.array(jax.devices()[: np.prod(shape)]).reshape(shape), AXES)


def batch(rows: int, length: int = 16) -> dict[str, np.ndarray]:
    windows = np.random.default_rng(rows).integers(0, 11, (rows, length + 1), dtype=np.int32)
    return {"inputs": windows[:, :-1], "targets": windows[:, 1:]}


def logits_and_gradients(model, params, tokens):
    def loss(params):
        logits = model.apply({"params": params}, tokens)
        weights = np.random.default_rng(1).standard_normal(logits.shape).astype(np.float32)
        return (logits * weights).sum(), logits

    (_, logits), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    return logits, gradients


def assert_layouts_agree(config: LanguageModelConfig, mesh: Mesh, rows: int) -> None:
    tokens = batch(rows)["inputs"]
    params = random_params(config, tokens)
    expected = logits_and_gradients(models.build(config), params, tokens)
    with jax.set_mesh(mesh):
        tokens = jax.device_put(tokens, NamedSharding(mesh, PartitionSpec(None, "sequence")))
        actual = logits_and_gradients(models.build(config, "sequence"), params, tokens)
    jax.tree.map(assert_close, actual, expected)


@pytest.mark.sequence
@pytest.mark.parametrize("layout", [*in_grid(((1, 1, 4), 3), ((1, 1, 4), 1), ((2, 1, 2), 2)), ((1, 2, 2), 3)])
def test_meshes_and_rows(layout):
    shape, rows = layout
    assert_layouts_agree(CONFIG, mesh_of(*shape), rows)


@pytest.mark.sequence
@pytest.mark.filterwarnings("ignore:the operator .* has no sharded form:UserWarning")  # of AFT
@pytest.mark.parametrize("name", grid_but(OTHERS, "hyena", "gated_delta", "aft_conv"))
def test_the_other_mixers(name):
    config = dataclasses.replace(CONFIG, pattern=(OTHERS[name],), n_layers=1)
    assert_layouts_agree(config, mesh_of(1, 1, 4), rows=3)


@pytest.mark.sequence
@pytest.mark.parametrize("remat", [*in_grid("none"), "block"])
def test_values_that_layers_hand_on_and_token_shift_in_the_feed_forward_layers(remat):
    config = dataclasses.replace(CONFIG, pattern=(OTHERS["rwkv7"],), n_layers=2, ffn_shift=True, remat=remat)
    assert_layouts_agree(config, mesh_of(2, 1, 2), rows=2)


@pytest.mark.sequence
@pytest.mark.parametrize("name", ["ema", "gru_cell", "token_shift", "running_maximum"])
def test_mixers_of_ones_own(name, own_parts):
    """On a mesh of two by two devices; an operator of one's own is computed on the whole sequence."""
    load_plugin(str(EXTENSIONS / f"{name}.py"))
    config = dataclasses.replace(CONFIG, pattern=(MIXER_CONFIGS[name](),), n_layers=1)
    gathers = pytest.warns(UserWarning, match="has no sharded form: every device gathers")
    with gathers if name in ("running_maximum", "gru_cell") else contextlib.nullcontext():
        assert_layouts_agree(config, mesh_of(2, 1, 2), rows=2)


@pytest.mark.sequence
@pytest.mark.parametrize("n_mixers", [*in_grid(2), 5])
def test_a_training_step_with_recomputed_blocks_and_a_loss_in_parts_is_the_same(n_mixers):
    """On (data, fsdp, sequence) = (1, 1, 4), under jit, at an odd number of rows."""
    config = dataclasses.replace(CONFIG, pattern=CONFIG.pattern[:n_mixers], n_layers=n_mixers)
    params, optimizer, data = init_params(models.build(config), 0), optax.sgd(0.5), batch(3)
    step = partial(make_train_step, optimizer=optimizer, seed=0)
    expected, metrics = jax.jit(step(models.build(config)))(init_state(params, optimizer), data)
    mesh = mesh_of(1, 1, 4)
    with jax.set_mesh(mesh):
        model = models.build(dataclasses.replace(config, remat="block", loss_chunk=6), "sequence")
        data = jax.device_put(data, NamedSharding(mesh, PartitionSpec(("data", "fsdp"), "sequence")))
        actual, ours = jax.jit(step(model))(init_state(params, optimizer), data)
        sums = jax.jit(make_eval_step(model))(params, {**data, "weights": jnp.ones((3, 16))})
    assert float(ours["loss"]) == pytest.approx(float(metrics["loss"]), rel=1e-6)
    assert float(sums["nats"].sum() / 48) == pytest.approx(float(metrics["loss"]), rel=1e-6)
    jax.tree.map(assert_close, actual.params, expected.params)


@pytest.mark.sequence
def test_parameters_and_decoding_do_not_need_a_mesh():
    config = dataclasses.replace(CONFIG, n_layers=2)
    whole, shared = models.build(config), models.build(config, "sequence")
    tokens = batch(2)["inputs"]
    params = jax.jit(shared.init)(jax.random.key(0), tokens)["params"]
    state = shared.bind({"params": params}).init_state(2, 16)
    logits = shared.apply({"params": params}, state, tokens, method="prefill")[1]
    assert_close(logits, whole.apply({"params": params}, tokens))


def test_mixers_that_cannot_shard_a_sequence_are_refused_by_name(own_parts):
    """A module that is not a `Mixer`, without the field."""
    load_plugin(str(EXTENSIONS / "ema_by_hand.py"))
    config = dataclasses.replace(CONFIG, pattern=(MIXER_CONFIGS["ema_by_hand"](),))
    with pytest.raises(ValueError, match=r"pattern must be of mixers.*'ema_by_hand'"):
        models.build(config, "sequence")


@pytest.mark.grid
def test_what_else_cannot_be_shared_out_is_refused():
    images = ImageClassifierConfig(pattern=(AttentionConfig(),), image_size=(8, 8), channels=1, n_classes=2)
    with pytest.raises(ValueError, match="sequence_axis must be None for a model of ImageClassifierConfig"):
        models.build(images, "sequence")
    quadratic = dataclasses.replace(CONFIG, pattern=(FastmaxConfig(n_heads=2, factorized=False),))
    tokens = batch(1)["inputs"]
    params = random_params(quadratic, tokens)
    with jax.set_mesh(mesh_of(1, 1, 4)), pytest.raises(ValueError, match="factorized must be True"):
        models.build(quadratic, "sequence").apply({"params": params}, tokens)
    with pytest.raises(ValueError, match="sequence_axis must be an axis of the ambient mesh"):
        models.build(CONFIG, "sequence").apply({"params": random_params(CONFIG, tokens)}, tokens)


EIGHT_DEVICES = """
import dataclasses, jax, test_sequence_layouts as ours
assert len(jax.devices()) == 8
config = dataclasses.replace(ours.CONFIG, max_len=65536, learned_positions=False, n_layers=1)
config = dataclasses.replace(config, pattern=(ours.CONFIG.pattern[{i}],))
ours.batch.__defaults__ = (65536,)
ours.assert_layouts_agree(config, ours.mesh_of(1, 1, 8), rows={rows})
"""


@pytest.mark.sequence
@pytest.mark.parametrize("case", [(0, 3), *in_grid((1, 3), (2, 1), (3, 3), (4, 1))])
def test_65536_tokens_on_eight_devices(case):
    mixer, rows = case
    flags = re.sub(r"--xla_\S+", "", os.environ["XLA_FLAGS"]) + " --xla_force_host_platform_device_count=8"
    path = os.pathsep.join([os.path.dirname(__file__), *filter(None, sys.path)])
    environment = {**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": path}
    code = EIGHT_DEVICES.format(i=mixer, rows=rows)
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
