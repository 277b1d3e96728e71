"""Workers that end, and a sweep that ends before them; by workers without JAX."""

import contextlib
import signal
import stat
import sys

import pytest

from hyena_jax.sweeps.pool import DONE, STEP, Pool

WORKER = """#!{python}
import os, pathlib, signal, sys
from multiprocessing.connection import Connection

def save(*_):
    pathlib.Path(request["saved"]).write_text("saved")
    os._exit(75)

signal.signal(signal.SIGTERM, save)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {{signal.SIGTERM}})
connection = Connection(int(sys.argv[-2]))
connection.send(("ready", {{}}))
request = connection.recv()
connection.send(("step", {{"step": 1}}))
if os.path.exists(request["saved"]):
    connection.send(("done", {{}}))
elif request["gets"]:
    os.kill(os.getpid(), request["gets"])
signal.pause()
"""


@pytest.fixture
def workers(tmp_path, monkeypatch):
    """Makes workers save a file when they are asked to stop."""
    script = tmp_path / "worker"
    script.write_text(WORKER.format(python=sys.executable))
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(script))


def test_what_is_trained_is_saved_where_nobody_reads_the_output(workers, tmp_path):
    requests = [(name, {"saved": str(tmp_path / name), "gets": None}) for name in ("a", "b")]
    with pytest.raises(BrokenPipeError), Pool(["0", "0"], []) as pool:
        with contextlib.closing(pool.run(requests, [])) as events:
            started = {next(events).work for _ in requests}
        raise BrokenPipeError
    assert started == {"a", "b"}
    assert [(tmp_path / name).read_text() for name in started] == ["saved", "saved"]


def test_a_worker_that_dies_names_the_log_of_its_run(workers, tmp_path):
    requests = [("a", {"saved": str(tmp_path / "a"), "gets": signal.SIGKILL})]
    with Pool(["0"], []) as pool:
        *steps, end = pool.run(requests, [])
    assert [event.kind for event in steps] == [STEP]
    assert end.values["error"] == f"its process was ended by {signal.SIGKILL.name}; a.log may say why"


def test_a_worker_that_somebody_else_stops_is_replaced_and_its_run_continues(workers, tmp_path):
    requests = [("a", {"saved": str(tmp_path / "a"), "gets": signal.SIGTERM})]
    with Pool(["0"], []) as pool:
        events = list(pool.run(requests, []))
    assert [event.kind for event in events] == [STEP, STEP, DONE]
    assert events[0].seconds < events[-1].seconds
