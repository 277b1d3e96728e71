"""Mixers from outside the package: HYENA_JAX_PLUGINS=my_mixer.py pytest tests/mixers/test_contract.py

Each mixer that a plugin registers goes through the whole contract with its default options; tests that need
an oracle are skipped where it has none.
"""

import os
from functools import cache

import jax
import jax.numpy as jnp

from cases.case import Case, D, make_case
from hyena_jax import config
from hyena_jax.config import MIXER_CONFIGS, MixerConfig
from hyena_jax.mixers import mixer_class
from hyena_jax.mixers.consistency import check_float64
from hyena_jax.system.errors import UserError

for _name in filter(None, os.environ.get("HYENA_JAX_PLUGINS", "").split(os.pathsep)):
    config.load_plugin(_name)


def _case(config: MixerConfig) -> Case:
    """With the oracle of documents where the mixer does not refuse them."""
    case = make_case(config, {})
    x, ids = jnp.zeros((1, 2, D)), jnp.zeros((1, 2), jnp.int32)
    try:
        jax.eval_shape(mixer_class(config)(D, case.max_len, config).init, jax.random.key(0), x, ids)
    except UserError:
        return case._replace(resets=None)
    return case


@cache
def float64_fault(name: str) -> str | None:
    """Why a plugin's mixer cannot be tested in float64, in one line; None if it can, or is of the package."""
    if name not in CASES:
        return None
    config = CASES[name].config
    try:
        check_float64(mixer_class(config)(D, CASES[name].max_len, config))
    except UserError as error:
        return str(error)
    return None


CASES = {
    name: _case(part.config_class()) for name, part in MIXER_CONFIGS.parts.items() if part.plugin is not None
}
