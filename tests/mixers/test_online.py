import jax
import jax.numpy as jnp
import pytest

from hyena_jax.mixers.online import Online


@pytest.mark.parametrize("is_step", [True, False])
def test_a_step_has_full_precision(is_step):
    """A TPU would multiply a float32 memory in bfloat16."""
    found = []

    def run(memory):
        found.append(jax.config.jax_default_matmul_precision)
        return None, memory

    begun = Online.start(1, 4)
    begun.carry("sum", lambda: jnp.zeros((1, 2)), run)
    Online(begun.initial(), 1, is_step=is_step).carry("sum", lambda: None, run)
    assert found == ["highest", "highest" if is_step else None]


def test_taps_are_summed_in_float32():
    """In bfloat16 256 + 1 is 256, whether the ones come before or after."""
    x = jnp.asarray([1, 1, 1, 1, 256, 1, 1, 1, 1], jnp.bfloat16)[None, :, None]
    y = jax.jit(lambda: Online.start(1, 9).fir(x, jnp.ones((1, 9))))()
    assert y.dtype == jnp.bfloat16
    assert y[0, -1, 0] == 264
