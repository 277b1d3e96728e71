"""Which JAX may compute: the one installed is tried, and the one that is wrong is refused."""

import os
import subprocess
import sys

import pytest

from hyena_jax import cli, startup
from hyena_jax.config import UserError

# jax-ml/jax#39103: the rows of a tall array times a small matrix, squared and summed. One row more than XLA's
# CPU kernel took at once was wrong. Small whole numbers, so that equality is exact.
PRODUCT_AND_SUM = """
import jax
import numpy as np

jax.config.update("jax_enable_x64", True)
for dtype, rows in ((np.float32, 32_769), (np.float64, 16_385)):
    for channels in (2, 3):
        x = np.arange(3 * rows).reshape(rows, 3) % 1000
        matrix = np.arange(3 * channels).reshape(channels, 3) % 2
        expected = ((x @ matrix.T) ** 2).sum(axis=1)
        got = jax.jit(lambda m, x: ((m @ x.T) ** 2).sum(axis=0))(matrix.astype(dtype), x.astype(dtype))
        np.testing.assert_array_equal(got, expected)
"""


def test_the_installed_jax_multiplies_and_sums_right():
    """In a process without the flags of the tests, which turn the compiler's optimizations off."""
    environment = {**os.environ, "XLA_FLAGS": "", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    command = [sys.executable, "-c", PRODUCT_AND_SUM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def wrong_jaxlib(monkeypatch):
    monkeypatch.setattr(startup, "MISCOMPILES_ON_CPUS", startup.importlib.metadata.version("jaxlib"))


@pytest.mark.parametrize("platforms", ["", "cpu", "cpu,cuda"])
def test_a_wrong_jaxlib_is_refused_on_a_cpu(wrong_jaxlib, monkeypatch, capsys, tmp_path, platforms):
    monkeypatch.setenv("JAX_PLATFORMS", platforms)
    with pytest.raises(UserError, match="jax-ml/jax#39103.*pip install jax==0.10.1"):
        startup.refuse_wrong_jaxlib()
    assert cli.main(["train", "quickstart", "--workdir", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("hyena-jax: error: jaxlib")
    assert error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_wrong_jaxlib_may_run_on_an_accelerator(wrong_jaxlib, monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda,cpu")
    startup.refuse_wrong_jaxlib()


def test_help_needs_no_right_jaxlib(wrong_jaxlib, capsys):
    with pytest.raises(SystemExit):
        cli.main(["generate", "--help"])
    assert "--prompt" in capsys.readouterr().out
