"""Every mixer beside its float64 oracle, and its forms beside each other; and the models built of them.

Axes: B batch, L length, D channels.
"""

from collections.abc import Iterator
from dataclasses import fields, replace
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from hyena_jax import models
from hyena_jax.benchmark import verify
from hyena_jax.check.facts import Fact, against_oracle, largest
from hyena_jax.config import MODEL_CONFIGS, AttentionConfig, MixerConfig, ModelConfig, config_files, load
from hyena_jax.mixers import has_state, mixer_class, mixer_oracle
from hyena_jax.mixers.consistency import check_consistency
from hyena_jax.ops.forms import Forms
from hyena_jax.system.errors import UserError

LENGTH, MAX_LEN = 67, 127
"""Primes, more than a chunk of 64 tokens; a state is made for MAX_LEN."""
LARGEST_WIDTH = 128
PREFILLED, SHORT, STEPS = 7, 4, 3
"""Tokens of a first prefill, in which a row has SHORT of them; and of the steps after a later one."""


def check_mixer(config: MixerConfig, forms: Forms | None, has_bfloat16: bool = True) -> Iterator[Fact]:
    """Values and derivatives beside the oracle, documents of one row, and decoding; the same in bfloat16.

    A mixer without an oracle: its forms beside each other.
    """
    width = verify.small_width(config, LARGEST_WIDTH)
    oracle, kind = mixer_oracle(config), mixer_class(config)
    options = {"forms": forms} if "forms" in kind.__dataclass_fields__ else {}
    module = kind(width, MAX_LEN, config, **options)
    if oracle is None:
        check_consistency(module)
        return
    x = np.random.default_rng(1).standard_normal((2, LENGTH, width), np.float32)
    params = verify.random_params(module, x[:, :1])
    yield from against_oracle(
        lambda params, x: module.apply({"params": params}, x),
        lambda params, x: oracle(params, x, MAX_LEN),
        (params, x),
        has_forward_mode=False,  # that of its operators is checked, which saves a third of the time
    )
    ids = np.repeat([[0, 1, 0], [5, 6, 7]], [11, 54, 2], axis=1)  # one begins in the second chunk
    try:
        packed = jax.jit(lambda params: module.apply({"params": params}, x, ids))(params)
    except UserError:  # it refuses documents
        pass
    else:
        yield Fact("documents", verify.relative_error(packed, oracle(params, x, MAX_LEN, ids)))
    half = kind(width, MAX_LEN, config, dtype=jnp.bfloat16, **options)
    precisions = [("decoding", module, x)]
    if has_bfloat16:
        rounded = x.astype(jnp.bfloat16)
        y = jax.jit(lambda params: half.apply({"params": params}, rounded))(params)
        yield Fact("bfloat16", verify.relative_error(y, oracle(params, rounded, MAX_LEN)))
        precisions.append(("bfloat16 decoding", half, rounded))
    if has_state(kind) and config.causal:
        for what, each, tokens in precisions:
            decoded = jax.jit(partial(_decoded, each))(params, tokens)
            rows = (oracle(params, one, MAX_LEN) for one in (tokens[:1, PREFILLED - SHORT :], tokens[1:]))
            found = decoded[:1, PREFILLED - SHORT :], decoded[1:]
            yield Fact(what, largest(map(verify.relative_error, found, rows)))


def _decoded(module: nn.Module, params: dict, x: jax.Array) -> jax.Array:
    """Outputs [2, L, D] by a prefill in which row 0 begins later, and twice by another and steps after it."""
    bound = module.bind({"params": params})

    def resumed(state: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        state, y = bound.prefill(state, x[:-STEPS].swapaxes(0, 1))
        state, stepped = jax.lax.scan(lambda state, x: bound.step(state, x), state, x[-STEPS:])
        return state, jnp.concatenate([y.swapaxes(0, 1), stepped])

    state = bound.init_state(2, MAX_LEN)
    state, y = bound.prefill(state, x[:, :PREFILLED], jnp.array([SHORT, PREFILLED]))
    rest = x[:, PREFILLED:].swapaxes(0, 1)
    later = jax.lax.scan(resumed, state, rest.reshape(2, -1, *rest.shape[1:]))[1].reshape(rest.shape)
    return jnp.concatenate([y, later.swapaxes(0, 1)], axis=1)


SOFT_CAPPED = "griffin:recurrentgemma_2b"
"""The config whose logits have a soft cap, which no default variant has."""


def small_models() -> dict[str, ModelConfig]:
    """By config, small models of the same blocks, with attention in place of its mixers; equal ones once."""
    found: dict[ModelConfig, str] = {}
    sizes = {"vocab_size": verify.LARGEST_VOCABULARY, "image_size": (8, 8), "channels": 1, "n_classes": 10}
    sizes |= {"d_model": 32, "max_len": 40, "norm_eps": 1e-3}
    sizes |= {"dtype": "float32", "dropout": 0.0, "remat": "none"}
    for called in (*config_files(), SOFT_CAPPED):
        model = load(called).model
        places = len(getattr(model, "norm_places", (None,)))
        pattern = (AttentionConfig(2, causal=model.pattern[0].causal),) * places
        d_ff = None if model.ffn == "none" else 48
        changes = {"d_ff": d_ff, "pattern": pattern, "n_layers": max(2, places)}
        names = {field.name for field in fields(model)}
        known = {name: value for name, value in sizes.items() if name in names}
        found.setdefault(replace(model, **changes, **known), called)
    return {called: model for model, called in found.items()}


def check_model(config: ModelConfig) -> Iterator[Fact]:
    """Logits and gradients beside the oracle, and decoding."""
    attention = config.pattern[0]
    oracle, of_mixer = MODEL_CONFIGS.oracle(type(config)), mixer_oracle(attention)
    model = models.build(config)
    inputs = verify.random_inputs(config, 2, 33)
    params = verify.random_params(model, inputs)
    mixers = [lambda params, x: of_mixer(params, x, LENGTH)] * len(config.pattern)
    yield from against_oracle(
        lambda params: model.apply({"params": params}, inputs),
        lambda params: oracle(params, np.asarray(inputs), config, mixers),
        (params,),
        has_forward_mode=False,
    )
    if hasattr(model, "prefill"):
        yield Fact("decoding", verify.decoding_error(config))
