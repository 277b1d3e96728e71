import jax
import pytest
from jax.experimental import topologies

from hyena_jax.plan.compiling import ENVIRONMENT


@pytest.fixture(autouse=True)
def _strict_promotion():
    """Makes accidental mixing of dtypes an error."""
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture(scope="session")
def v5e():
    """Four TPUs to compile for, without having them; libtpu is in the extra `tpu`."""
    pytest.importorskip("libtpu")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        return topologies.get_topology_desc("v5e:2x2", platform="tpu").devices
