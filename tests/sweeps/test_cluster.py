"""Sweeps on a Ray cluster of two nodes on this machine; run with -m ray where the extra is installed."""

import contextlib
import dataclasses
import signal
import subprocess
import sys
import time

import pytest
from test_sweep import SMALL, diverging, held_out

import hyena_jax
from hyena_jax import cli
from hyena_jax.data.objects import Objects
from hyena_jax.sweeps import cluster
from hyena_jax.sweeps.cluster import RayCluster
from hyena_jax.system.errors import UserError
from hyena_jax.system.storage.mirror import opened
from hyena_jax.training.checkpoint import saved_steps, steps_in

ray = pytest.importorskip("ray", reason="needs the extra ray")
pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]  # Ray's own, of files it leaves open
LONG = dataclasses.replace(
    SMALL, training=dataclasses.replace(SMALL.training, steps=40_000, eval_every=40_000, checkpoint_every=100)
)


@pytest.fixture
def two_nodes(monkeypatch):
    """A cluster whose nodes have room for one run each; the head has none."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_agent_register_timeout_ms", "300000")  # a busy machine starts nodes slowly
    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    found.workers = [found.add_node(num_cpus=1) for _ in range(2)]
    found.wait_for_nodes()
    yield found
    ray.shutdown()
    found.shutdown()


def test_a_sweep_on_a_cluster_is_that_of_this_machine(two_nodes, tmp_path):
    runs = {f"seed={i}": dataclasses.replace(SMALL, seed=i) for i in range(3)} | {"wild": diverging(SMALL)}
    root = tmp_path / "there"
    found = hyena_jax.sweep(runs, root, engine=RayCluster(two_nodes.address, jobs=2), quiet=True)
    assert [outcome.status for outcome in found.values()] == ["done", "done", "done", "diverged"]
    assert not ray.is_initialized()
    here = hyena_jax.sweep(runs, tmp_path / "here", quiet=True)
    for name, outcome in here.items():
        assert held_out(root / name) == held_out(outcome.workdir)
    assert hyena_jax.sweep(runs, root, quiet=True) == found  # also continued without a cluster


NAMES = [f"learning_rate={rate}" for rate in ("1e-3", "2e-3")]
COMMAND = """
    sweep tasks:recall --grid optimizer.learning-rate=1e-3,2e-3 --seed 3 --model.n-layers 1 --model.d-model 8
    --data.batch-size 4 --training.eval-every 200 --training.checkpoint-every 50 --no-logging.tensorboard
""".split()


@contextlib.contextmanager
def started(arguments, nodes, root):
    """The sweep, as soon as each run has a checkpoint and one of its two nodes is killed."""
    command = [sys.executable, "-m", "hyena_jax", *arguments]
    checkpoints = [steps_in(opened(f"{root}/{name}") / "checkpoints") for name in NAMES]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, **pipes) as sweep:
        wait_until(lambda: all(of_run.saved() for of_run in checkpoints), sweep)
        nodes.remove_node(nodes.workers[0], allow_graceful=False)
        yield sweep


def assert_as_on_one_machine(root, n_steps, alone):
    assert cli.main([*COMMAND, "--training.steps", n_steps, "--workdir", str(alone)]) == 0
    for name in NAMES:
        run = opened(f"{root}/{name}")
        assert saved_steps(run / "checkpoints")[0] == int(n_steps)
        assert held_out(run) == held_out(alone / name)


def test_a_run_whose_node_is_killed_continues_on_another(two_nodes, tmp_path):
    """And a sweep that was stopped continues: by the command, to the values of a run that never stopped."""
    root = tmp_path / "there"
    ours = [*COMMAND, "--training.steps", "600", "--workdir", str(root)]
    ours += ["--engine", "ray", "--address", two_nodes.address, "--jobs", "2"]
    with started(ours, two_nodes, root) as sweep:
        logs = [root / f"{name}.log" for name in NAMES]
        wait_until(lambda: any("continuing after step" in log.read_text() for log in logs), sweep)
        sweep.send_signal(signal.SIGTERM)
        output = sweep.communicate(timeout=120)[0]
    assert sweep.returncode == 75, output
    assert "Rerun the command to continue" in output
    two_nodes.add_node(num_cpus=1)
    assert cli.main(ours) == 0
    assert_as_on_one_machine(root, "600", tmp_path / "alone")


def test_in_a_bucket_a_run_whose_node_is_killed_continues_on_another(bucket, two_nodes, tmp_path):
    ours = [*COMMAND, "--training.steps", "200", "--workdir", bucket]
    ours += ["--engine", "ray", "--address", two_nodes.address, "--jobs", "2"]
    with started(ours, two_nodes, bucket) as sweep:
        output = sweep.communicate(timeout=300)[0]
    assert sweep.returncode == 0, output
    objects = Objects(bucket, "workdir")
    logs = objects.read_all(f"{name}.log" for name in NAMES)
    assert any(b"continuing after step" in log for log in logs), logs
    assert_as_on_one_machine(bucket, "200", tmp_path / "alone")


def wait_until(is_so, process):
    end = time.monotonic() + 240
    while not is_so():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < end
        time.sleep(0.2)


def test_what_a_cluster_cannot_do_is_refused(two_nodes, tmp_path, capsys, monkeypatch):
    command = f"sweep tasks:recall --grid seed=0,1 --workdir {tmp_path / 'run'}".split()
    engine = ["--engine", "ray", "--address", two_nodes.address]
    for flags, message in (
        ([*engine, "--per-run", "CPU=8"], "--per-run must be at most what one of the 3 machines has, got"),
        ([*engine, "--per-run", "GPUS=1"], "GPUS"),
        (["--address", "x:1"], "--address must be left out unless engine is 'ray'"),
    ):
        assert cli.main([*command, *flags]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(cluster, "_versions", lambda: {"jax": "0"})
    with pytest.raises(UserError, match="versions must be the same on all machines of the cluster"):
        hyena_jax.sweep({"a": SMALL}, tmp_path / "run", engine=RayCluster(two_nodes.address), quiet=True)


def test_without_a_cluster_the_address_is_named(tmp_path, capsys):
    assert cli.main(f"sweep tasks:recall --grid seed=0 --workdir {tmp_path} --engine ray".split()) == 2
    assert "--address must be the address of a running Ray cluster" in capsys.readouterr().err
