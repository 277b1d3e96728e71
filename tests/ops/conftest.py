import jax
import pytest


@pytest.fixture(autouse=True)
def _strict_promotion():
    """Makes accidental mixing of dtypes an error."""
    with jax.numpy_dtype_promotion("strict"):
        yield
