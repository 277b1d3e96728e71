"""Where a model's arrays lie on a mesh, and which platform its operators are compiled for."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from grid import grid_but

from hyena_jax import models, parallel
from hyena_jax.config import MIXER_CONFIGS, HawkConfig, HyenaConfig, LanguageModelConfig, ParallelConfig
from hyena_jax.ops.forms import Layout
from hyena_jax.plan.collectives import collectives
from hyena_jax.plan.hlo import Program
from hyena_jax.training.loss import MAX_LOGITS, chunk_tokens
from hyena_jax.training.step import init_params, init_state, make_train_step

FSDP = 4


def config(mixer, **options) -> LanguageModelConfig:
    sizes = {"n_layers": 2, "d_model": 128, "d_ff": 512, "max_len": 64, "vocab_size": 256}
    return LanguageModelConfig(pattern=(mixer,), **(sizes | options))


def compiled_step(model_config, rows: int):
    """The training step over fsdp = 4, as text, and the bytes of all parameters."""
    strategy = parallel.make_strategy(ParallelConfig(strategy="sharded", fsdp=FSDP))
    model = models.build(model_config, strategy.sequence_axis, strategy.layout)
    params = jax.eval_shape(lambda: init_params(model, 0))
    optimizer = optax.adamw(1e-3)
    state = jax.eval_shape(lambda params: init_state(params, optimizer), params)
    tokens = jax.ShapeDtypeStruct((rows, model_config.max_len), jnp.int32)
    step = make_train_step(model, optimizer, 0)
    _, lowered = strategy.lower_train_step(step, state, {"inputs": tokens, "targets": tokens})
    text = lowered.compile().as_text()
    return text, sum(leaf.size * 4 for leaf in jax.tree.leaves(params))


@pytest.mark.grid
@pytest.mark.parametrize(
    ("mixer", "remat"),
    [
        ("attention", "none"),
        pytest.param("hyena", "block", marks=pytest.mark.scale),
        *(
            pytest.param(name, "none", marks=pytest.mark.scale)
            for name in ("hyena", "hawk", "local_attention", "fastmax", "aft_simple", "h3", "rwkv7")
        ),
    ],
)
def test_weights_are_gathered_and_activations_stay(mixer, remat):
    """At most 1.5 times what sharded parameters have to move: twice the weights, once the gradients."""
    rows = 64  # activations are larger than any weight
    text, size = compiled_step(config(MIXER_CONFIGS[mixer](), remat=remat), rows)
    found = collectives(Program(text))
    assert 0 < sum(one.bytes * one.rounds for one in found) <= 1.5 * 3 * size
    for one in found:
        for shape in one.shapes:  # [B, L, D], or [B / 4, L, D]
            assert not re.search(rf"\[({rows}|{rows // FSDP}),\d+,\d+\]", shape), one


@pytest.mark.parametrize("name", grid_but(MIXER_CONFIGS, "hawk", "attention"))
def test_no_backend_is_asked_while_a_model_is_traced(name, monkeypatch):
    """So that a program for a TPU can be made on a machine without one."""
    monkeypatch.setattr(jax, "default_backend", lambda: pytest.fail("the backend was asked"))
    model = models.build(config(MIXER_CONFIGS[name](), n_layers=1), layout=Layout("tpu"))
    tokens = np.zeros((2, 64), np.int32)
    params = jax.eval_shape(model.init, jax.random.key(0), tokens)
    assert jax.eval_shape(model.apply, params, tokens).shape == (2, 64, 256)

    def decode(params):
        bound = model.bind(params)
        state, _ = bound.prefill(bound.init_state(2, 64), tokens[:, :5])
        return bound.step(state, tokens[:, 5])[1]

    assert jax.eval_shape(decode, params).shape == (2, 256)


@pytest.mark.grid
def test_a_program_for_a_tpu_holds_its_forms():
    def program(mixer, platform, kernels=False):
        layout = Layout(platform, kernels=kernels)
        model = models.build(config(mixer, max_len=256, n_layers=1), layout=layout)
        params = jax.eval_shape(model.init, jax.random.key(0), np.zeros((2, 256), np.int32))
        return str(jax.make_jaxpr(model.apply)(params, np.zeros((2, 256), np.int32)))

    assert "fft[" in program(HyenaConfig(), "cpu")
    assert "fft[" not in program(HyenaConfig(), "tpu")
    for mixer in (HawkConfig(), HyenaConfig()):
        assert "pallas_call" in program(mixer, "tpu", kernels=True)
        assert "pallas_call" not in program(mixer, "tpu") + program(mixer, "cpu", kernels=True)


@pytest.mark.grid
def test_a_step_for_a_tpu_takes_the_chip_s_own_random_bits():
    """Threefry for dropout takes 13 to 14 of the 133 to 209 ms of the 125M Hyena's step (estimated, v5e)."""

    def step_of(platform):
        model = models.build(config(HyenaConfig(), dropout=0.5), layout=Layout(platform))
        optimizer = optax.sgd(1e-3)
        state = jax.eval_shape(lambda: init_state(init_params(model, 0), optimizer))
        tokens = jax.ShapeDtypeStruct((2, 8), jnp.int32)
        step = make_train_step(model, optimizer, 0)
        return str(jax.make_jaxpr(step)(state, {"inputs": tokens, "targets": tokens}))

    assert "impl=rbg" in step_of("tpu")
    assert "impl=rbg" not in step_of("cpu") + step_of("gpu")


def test_a_chunk_of_the_loss_counts_the_rows_of_one_device():
    model_config = config(HyenaConfig(), vocab_size=2**15)
    tokens = {
        shards: chunk_tokens(models.build(model_config, layout=Layout("cpu", shards)), (2**10, 64))
        for shards in (1, 16)
    }
    assert tokens == {1: MAX_LOGITS // 2**25, 16: MAX_LOGITS // 2**21}
