import jax
import pytest


@pytest.fixture(autouse=True)
def _strict_promotion():
    """No dtype may be mixed by accident."""
    with jax.numpy_dtype_promotion("strict"):
        yield
