"""Several processes on this machine, as `hyena-jax launch` starts them; two devices each."""

import hashlib
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from test_roll_call import free_port
from whole_runs import losses, rows

from hyena_jax import cli
from hyena_jax.config import MIXER_CONFIGS, Cluster, Experiment, LanguageModelConfig, load_plugin
from hyena_jax.parallel import processes as distributed
from hyena_jax.parallel.processes import join, lost_another, require_equal, require_equal_devices
from hyena_jax.system.errors import UserError
from hyena_jax.training import setup
from hyena_jax.training.checkpoint import saved_steps
from hyena_jax.training.checkpoint_files import damage_in

SMALL = """
    --model.n-layers 1 --model.d-model 16 --model.d-ff 8 --model.max-len 16
    --data.seq-len 16 --data.batch-size 8 --optimizer.schedule.decay-steps 100 --logging.sample-tokens 0
    --training.log-every 1 --training.eval-every 4 --training.checkpoint-every 2 --no-logging.tensorboard
""".split()
HYENA = ("--model.pattern.0.filter.width", 4)
ATTENTION = ("--model.pattern", "attention", "--model.pattern.0.n-heads", 2)  # which compiles fastest


def arguments(text, workdir, steps, *more, model=ATTENTION):
    place = ["train", "quickstart", "--workdir", workdir, "--data.path", text]
    return [str(word) for word in (*place, *model, *SMALL, "--training.steps", steps, *more)]


def started(command, **environment):
    """A process of the program, with its standard error joined to its standard output."""
    return subprocess.Popen(
        [sys.executable, "-u", "-m", "hyena_jax", *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, **environment},
    )


@contextmanager
def launched(n_processes, command, grace=60):
    flags = re.sub(r"(device_count)=\d+", r"\1=2", os.environ["XLA_FLAGS"])
    launch = ["launch", "--num-processes", n_processes, "--grace", grace, "--", *command]
    with started(launch, XLA_FLAGS=flags) as launcher:
        try:
            yield launcher
        finally:
            launcher.terminate()
            launcher.communicate()


def ended(n_processes, command, code=0, **options):
    """The output of a launcher that ends with this exit code."""
    with launched(n_processes, command, **options) as launcher:
        output = launcher.stdout.read()
        assert launcher.wait() == code, output
    return output


def until(launcher, text):
    """Reads until a line contains `text`; returns all lines read."""
    lines = []
    for line in launcher.stdout:
        lines.append(line)
        if text in line:
            return lines
    raise AssertionError("".join(lines))


def pid_of(launcher, process_id):
    command = ["ps", "-ww", "--ppid", str(launcher.pid), "-o", "pid=,args="]
    children = subprocess.run(command, capture_output=True, text=True, check=True)
    ending = f"--process-id {process_id}"
    line = next(line for line in children.stdout.splitlines() if line.endswith(ending))
    return int(line.split()[0])


def assert_like_one_process(text, tmp_path, workdir, steps, model=ATTENTION):
    assert cli.main(arguments(text, tmp_path / "one", steps, model=model)) == 0
    for part in ("train", "validation"):
        found = {row["step"]: row[f"{part}/loss"] for row in rows(workdir) if f"{part}/loss" in row}
        found = [loss for step, loss in found.items() if step <= steps]
        assert found == pytest.approx(losses(tmp_path / "one", part), abs=1e-5)


@pytest.mark.scale
def test_two_processes_train_as_one_and_a_killed_one_ends_both(text, tmp_path):
    workdir = tmp_path / "two"
    with launched(2, arguments(text, workdir, 100_000), grace=1) as launcher:
        until(launcher, "step      4   validation loss")
        os.kill(pid_of(launcher, 1), signal.SIGKILL)
        rest = launcher.stdout.readlines()
        assert launcher.wait() == 128 + signal.SIGKILL
    assert rest[-1] == "hyena-jax: process 1 of 2 was ended by SIGKILL; the others were ended too\n"
    assert_like_one_process(text, tmp_path, workdir, 4)


@pytest.mark.scale
@pytest.mark.parametrize(
    ("layout", "model"),
    [
        ("--parallel.fsdp 2", ATTENTION),
        pytest.param("--parallel.sequence 4", HYENA, marks=pytest.mark.grid),
    ],
)
def test_four_processes_train_as_one_and_save_together(text, tmp_path, layout, model):
    workdir = tmp_path / "four"
    flags = f"--parallel.strategy sharded {layout} --parallel.check-replicas-every 4".split()
    output = ended(4, arguments(text, workdir, 8, *flags, model=model))
    assert "8 x cpu in 4 processes" in output
    assert output.count("run folder") == 1
    assert not damage_in(workdir / "checkpoints" / "8")
    assert (workdir / "checkpoints" / "8" / "manifest.json").exists()
    assert_like_one_process(text, tmp_path, workdir, 8, model=model)
    assert cli.main(arguments(text, workdir, 9, model=model)) == 0


@pytest.mark.scale
def test_slurm_tells_the_processes_where_they_meet(text, tmp_path):
    workdir = tmp_path / "slurm"
    command = arguments(text, workdir, 4, "--parallel.devices", 1, "--distributed")
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
    processes = [started(command, **job, SLURM_PROCID=str(i), SLURM_LOCALID=str(i)) for i in range(2)]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert "2 x cpu in 2 processes" in outputs[0]
    assert "validation loss" not in outputs[1]
    assert_like_one_process(text, tmp_path, workdir, 4)


@pytest.mark.scale
def test_a_run_of_one_process_goes_on_in_two_and_back(text, tmp_path):
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    assert cli.main(arguments(text, whole, 6)) == 0
    assert cli.main(arguments(text, moved, 2)) == 0
    sharded = ["--parallel.strategy", "sharded", "--parallel.fsdp", 4]
    assert "continuing after step 2" in ended(2, arguments(text, moved, 4, *sharded))
    assert cli.main(arguments(text, moved, 6)) == 0
    assert losses(moved) == pytest.approx(losses(whole), abs=1e-5)


@pytest.mark.scale
@pytest.mark.parametrize(
    ("name", "stop_every", "multiple"),
    [
        ("SIGHUP", 10, 10),
        # At the next step: after SIGTERM there is little time.
        pytest.param("SIGTERM", 10**9, 1, marks=pytest.mark.grid),
    ],
)
def test_a_signal_to_one_stops_and_saves_all_at_one_step(text, tmp_path, name, stop_every, multiple):
    layout = ["--parallel.strategy", "sharded", "--parallel.fsdp", 4, "--parallel.stop-every", stop_every]
    with launched(2, arguments(text, tmp_path / "two", 100_000, *layout)) as launcher:
        until(launcher, "step      4   validation loss")
        os.kill(pid_of(launcher, 1), signal.Signals[name])
        output = launcher.stdout.read()
        assert launcher.wait() == 75, output
    checkpoints = tmp_path / "two" / "checkpoints"
    step = saved_steps(checkpoints)[0]
    assert step % multiple == 0
    assert output.count(f"stopped by {name}; saved at step {step}") == 1
    assert not damage_in(checkpoints / str(step))


@pytest.mark.scale
def test_a_process_that_does_not_answer_is_given_up(text, tmp_path):
    command = arguments(text, tmp_path / "two", 100_000, "--parallel.heartbeat-timeout", 5)
    with launched(2, command, grace=1) as launcher:
        until(launcher, "step      4   validation loss")
        os.kill(pid_of(launcher, 1), signal.SIGSTOP)
        rest = launcher.stdout.readlines()
        assert launcher.wait() != 0
    assert "process 0 of 2" in rest[-1]


@pytest.mark.scale
@pytest.mark.parametrize(
    ("workdir", "devices", "message"),
    [
        ("other", 2, "--workdir must be the same in all processes"),
        ("run", 3, "every process must have the same number of devices, got {0: 2, 1: 3}"),
    ],
)
def test_processes_that_do_not_fit_together_are_refused(text, tmp_path, workdir, devices, message):
    meeting = ["--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", 2, "--process-id"]
    processes = [
        started(
            arguments(text, tmp_path / name, 4, *meeting, i),
            XLA_FLAGS=f"--xla_force_host_platform_device_count={count}",
        )
        for i, (name, count) in enumerate([("run", 2), (workdir, devices)])
    ]
    for process in processes:
        output = process.communicate(timeout=120)[0]
        assert process.returncode == 2, output
        assert len(re.findall(f"^hyena-jax: error: {message}", output, re.MULTILINE)) == 1, output
        assert "Traceback" not in output
    assert list(tmp_path.iterdir()) == []


@pytest.mark.scale
def test_processes_stop_and_save_when_their_launcher_is_killed(text, tmp_path):
    workdir = tmp_path / "two"
    with launched(2, arguments(text, workdir, 100_000)) as launcher:
        until(launcher, "step      4   validation loss")
        launcher.kill()
        rest = launcher.stdout.read()  # to the end of the last process that writes to it
    step = saved_steps(workdir / "checkpoints")[0]
    assert f"stopped by SIGTERM; saved at step {step}" in rest


@pytest.mark.scale
def test_what_is_wrong_in_one_process_ends_all(text, tmp_path):
    output = ended(2, arguments(tmp_path / "nothing", tmp_path / "run", 4), code=2, grace=20)
    assert "--data.path must be an existing" in output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (OSError("no space"), True),
        (ValueError("UNKNOWN: Gloo AllGather failed: Connection closed by peer"), True),
        (jax.errors.JaxRuntimeError("INTERNAL: Gloo all-reduce failed"), True),
        (ValueError("sequence length must be at least 1"), False),
        (None, False),
    ],
)
def test_a_broken_connection_is_told_from_wrong_input(error, is_lost, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert lost_another(error) == is_lost
    monkeypatch.undo()
    assert not lost_another(error)


TWO = {"coordinator": "a:1", "num_processes": 2, "process_id": 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_processes": 2}, "num_processes must be given with coordinator, and only then, got 2"),
        ({"coordinator": "a:1"}, "num_processes must be given with coordinator"),
        ({**TWO, "process_id": 2}, r"process_id must be in 0..1, got 2"),
        ({**TWO, "coordinator": "a"}, "coordinator must be HOST:PORT"),
        ({**TWO, "coordinator": "a:0"}, "a port in 1..65535, got 'a:0'"),
        ({**TWO, "coordinator": "::1:80"}, "coordinator must be HOST:PORT"),
        ({**TWO, "distributed": True}, "distributed must be False when coordinator is given"),
        ({"join_timeout": 0.0}, "join_timeout must be above 0"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        Cluster(**options)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"a": 1, "b": None}, None),
        ({"a": 2, "b": None}, "a must be the same in all processes, got 1 in process 0 and 2 in 1"),
        ({"a": 1}, "b must be the same"),
        ({"a": 1, "b": None, "c": None}, "c must be the same"),
    ],
)
def test_what_differs_between_processes_is_named(other, message, monkeypatch):
    monkeypatch.setattr(distributed, "gather", lambda value: [value, other])
    if message is None:
        require_equal({"a": 1, "b": None})
        return
    with pytest.raises(UserError, match=message) as raised:
        require_equal({"a": 1, "b": None})
    assert raised.value.argument == message[0]  # which commands replace by its flag


def test_processes_must_agree_on_every_setting_and_on_their_plugins(monkeypatch, own_parts):
    plugin, said = Path(__file__).parents[1] / "extensions" / "ema.py", {}
    load_plugin(str(plugin))
    experiment = Experiment(model=LanguageModelConfig(pattern=(MIXER_CONFIGS["ema"](),)), seed=3)
    monkeypatch.setattr(setup, "require_equal", said.update)
    setup.agree(experiment, workdir="runs/a")
    assert said["the plugins' SHA-256"] == [hashlib.sha256(plugin.read_bytes()).hexdigest()]
    assert said.items() >= {"workdir": "runs/a", "seed": 3, "training.steps": 2000}.items()


JOB = {f"SLURM_{name}": "0" for name in ("PROCID", "LOCALID")}
JOB |= {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "1"}


class Joined(Exception):
    """All checks passed, and JAX would connect now."""


@pytest.fixture
def joined(monkeypatch):
    """The arguments that JAX would join with, in a job of Slurm."""
    found = {}
    for name, value in JOB.items():
        monkeypatch.setenv(name, value)

    def initialize(*place, **options):
        found.update(options, place=place)
        raise Joined

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    monkeypatch.setattr(jax.config, "update", lambda name, value: None)
    monkeypatch.setenv("no_grpc_proxy", "")
    return found


def test_a_coordinator_listens_on_its_own_address(joined):
    with pytest.raises(Joined):
        join(Cluster(distributed=True), 10)
    assert joined["place"] == ("localhost:61447", 1, 0)
    assert joined["coordinator_bind_address"] in ("127.0.0.1:61447", "[::1]:61447")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"SLURM_NTASKS": "two"}, "this environment does not name the processes .invalid literal for int"),
        ({"SLURM_PROCID": "3"}, r"process_id must be in 0..0, got 3"),
        ({"SLURM_STEP_NODELIST": ""}, "coordinator must be HOST:PORT, got ':61447'"),
        ({"SLURM_JOB_ID": ""}, "invalid literal"),
        ({"SLURM_NTASKS": "0"}, "num_processes must be at least 1, got 0"),
        ({"SLURM_PROCID": None}, "nothing like Slurm, Open MPI, Kubernetes or a Cloud TPU was found"),
    ],
)
def test_an_environment_that_names_no_processes(changes, message, joined, monkeypatch):
    for name, value in changes.items():
        monkeypatch.delenv(name) if value is None else monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"distributed: .*{message}"):
        join(Cluster(distributed=True), 10)


def test_other_numbers_of_devices_are_refused(monkeypatch):
    require_equal_devices()
    devices = [SimpleNamespace(process_index=i) for i in (0, 0, 1)]
    monkeypatch.setattr(jax, "devices", lambda: devices)
    with pytest.raises(UserError, match="the same number of devices, got {0: 2, 1: 1}"):
        require_equal_devices()


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("launch --num-processes 0 -- train quickstart", "--num-processes must be at least 1, got 0"),
        ("launch --num-processes 99999 -- train quickstart", "--num-processes must be at most 256"),
        ("launch --num-processes 2 -- generate x", "after -- must be train ..., got 'generate x'"),
        ("launch --num-processes 2 -- train images --workdir x --process-id 1", "process-id is given twice"),
        ("train quickstart --workdir x --process-id 1", "--process-id must be given with coordinator"),
    ],
)
def test_wrong_flags_are_one_line(command, message, capsys):
    assert cli.main(command.split()) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
