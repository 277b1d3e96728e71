"""A plugin: Hawk with a third gate that cannot change the sign, the control of Hawk's `sign` gate.

The factors are |tanh(W_s u + b_s)| a_t where those of the signed form are tanh(W_s u + b_s) a_t; nothing
else differs.
"""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from hyena_jax.config import HawkConfig, register
from hyena_jax.mixers.hawk import Hawk


@dataclass(frozen=True)
class ThirdGateHawkConfig(HawkConfig):
    """Hawk's options, with the gate."""

    sign: Literal["gate"] = "gate"


class ThirdGateHawk(Hawk):
    """See the top of the file."""

    config: ThirdGateHawkConfig = ThirdGateHawkConfig()

    def mix(self, x, seq, deterministic):
        seq.refuse_documents()  # as Hawk's start of a row, by default, is not that of a document
        return super().mix(x, seq, deterministic)

    def _gates(self, *args) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        r, i, a, scale = super()._gates(*args)
        return r, i, jnp.abs(a), scale


register("third_gate_hawk", ThirdGateHawkConfig, ThirdGateHawk)
