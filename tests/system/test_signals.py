"""Signals before there is anything to save: one line, an exit code, no traceback, at any moment."""

import os
import signal
import subprocess
import sys

import pytest

from hyena_jax.system.signals import noted_signals

CONFIG = """
import os
import signal

import numpy as np

from hyena_jax import config


def get_config():
    os.kill(os.getpid(), signal.{name})
    while True:  # Python code of the main thread, which runs until a signal ends it
        np.ones(3).sum()
"""

NATIVE = """
import signal

import jax
import jax.numpy as jnp

from hyena_jax.system.signals import end_at_once, watch_signals

watch_signals()
end_at_once(signal.SIGINT, 130, "interrupted")
most = jnp.iinfo(jnp.int32).max
minutes = jax.jit(lambda x: jax.lax.fori_loop(0, most, lambda i, x: jnp.sin(x), x)).lower(1.0).compile()
print("ready", flush=True)
minutes(1.0).block_until_ready()
"""

SECONDS = 60
"""Longest that a process may take."""


def train(tmp_path, text, *prefix):
    """`hyena-jax train` with a config file of this text."""
    config = tmp_path / "config.py"
    config.write_text(text)
    command = [sys.executable, "-m", "hyena_jax", "train", str(config), "--workdir", str(tmp_path / "run")]
    return subprocess.run([*prefix, *command], capture_output=True, text=True, timeout=SECONDS)


ENDS = {
    "SIGTERM": (75, "stopped by SIGTERM; rerun the command to continue"),
    "SIGINT": (130, "interrupted"),
    "SIGHUP": (75, "stopped by SIGHUP; rerun the command to continue"),
}


@pytest.mark.wide
@pytest.mark.parametrize("name", ENDS)
def test_a_signal_at_start_up_ends_a_training(tmp_path, name):
    code, line = ENDS[name]
    done = train(tmp_path, CONFIG.format(name=name))
    assert (done.returncode, done.stdout, done.stderr) == (code, "", f"hyena-jax: {line}\n")
    assert not (tmp_path / "run").exists()


def test_nohup_stays_at_start_up(tmp_path):
    """An ignored signal stays ignored; the next one, which is not ignored, ends the process."""
    text = CONFIG.format(name="SIGHUP").replace("while True", "os.kill(os.getpid(), 15)\n    while True")
    done = train(tmp_path, text, "sh", "-c", "trap '' HUP; exec \"$@\"", "sh")
    code, line = ENDS["SIGTERM"]
    assert (done.returncode, done.stdout, done.stderr) == (code, "", f"hyena-jax: {line}\n")
    assert not (tmp_path / "run").exists()


def test_a_signal_ends_native_code():
    """An XLA loop holds the main thread, in which Python would call a handler only minutes later."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    with subprocess.Popen([sys.executable, "-c", NATIVE], env=environment, **pipes) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            process.send_signal(signal.SIGINT)
            _, error = process.communicate(timeout=SECONDS)
        finally:
            process.kill()
    assert (process.returncode, error) == (130, "hyena-jax: interrupted\n")


def test_a_signal_that_is_ignored_stays_so_in_a_run():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with noted_signals() as noted:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGTERM)
        assert noted == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGHUP, before)
