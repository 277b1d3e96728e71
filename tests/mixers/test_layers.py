import jax
import jax.numpy as jnp
import numpy as np

from hyena_jax.mixers.layers import Embed


def test_the_gradient_of_a_frequent_token_is_not_summed_in_bfloat16():
    """In bfloat16 a sum of 4,096 numbers near 1 stays at 256."""
    embedding, tokens = Embed(2, 3, dtype=jnp.bfloat16), np.zeros(4096, int)
    params = embedding.init(jax.random.key(0), tokens)
    gradient = jax.grad(lambda params: embedding.apply(params, tokens).astype(jnp.float32).sum())
    np.testing.assert_array_equal(gradient(params)["params"]["embedding"], [[4096] * 3, [0] * 3])
