import jax
import pytest
from jax.experimental import topologies

# Without these libtpu looks for a TPU, and for other processes that use one.
LIBTPU = {
    "TPU_ACCELERATOR_TYPE": "v5e-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


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
        for name, value in LIBTPU.items():
            patch.setenv(name, value)
        return topologies.get_topology_desc("v5e:2x2", platform="tpu").devices
