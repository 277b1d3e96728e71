"""Signals at moments swept over the start of a command."""

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz.test_fuzz import TRAIN
from grid import grid_but

pytestmark = [pytest.mark.fuzz, pytest.mark.xdist_group("start_up")]

SECONDS = 180
"""Longest that a command may take."""
PARTS = 2
"""Signals to each command."""


def start(*arguments):
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-m", "hyena_jax", *map(str, arguments)]
    return subprocess.Popen(command, env={**ours, "JAX_PLATFORMS": "cpu"}, **pipes)


def cpu_seconds(pid):
    """What a process and its threads have used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    root = tmp_path_factory.mktemp("start_up")
    (root / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    flags = ["--workdir", root / "run", "--data.path", root / "text.txt"]
    with start(*TRAIN, "--training.steps", 2, *flags) as process:
        process.communicate(timeout=SECONDS)
    assert process.returncode == 0
    return root


LONG = [*TRAIN, "--training.steps", "5000", "--data.path", "{root}/text.txt"]
COMMANDS = {
    "train": [*LONG, "--workdir", "{root}/new"],
    "continue": [*LONG, "--workdir", "{root}/run"],
    "eval": ["eval", "{root}/run"],
    "generate": ["generate", "{root}/run", "--prompt", "the", "--max-new-tokens", "100000"],
    "export": ["export", "{root}/run", "--output", "{root}/out.safetensors"],
    "bench": ["bench", "operators", "--mixers", "hyena", "--lengths", "4096"],
}


@pytest.mark.parametrize("part", grid_but(range(PARTS), 0))
@pytest.mark.parametrize("name", COMMANDS)
def test_signals_swept_over_the_start(places, tmp_path, name, part):
    """From 0.15 s of the command's CPU time, after Python's own start, to 20 s, mostly early."""
    generator = random.Random(f"{name} {part}")
    moment = 0.15 * 130 ** ((part + generator.random()) / PARTS)
    number = generator.choice([signal.SIGINT, signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    if signal.getsignal(number) == signal.SIG_IGN:  # these tests run under nohup
        number = signal.SIGTERM
    subprocess.run(["cp", "-r", f"{places}/.", tmp_path], check=True)
    with start(*(str(word).format(root=tmp_path) for word in COMMANDS[name])) as process:
        try:
            output = error = None
            while output is None:
                try:
                    output, error = process.communicate(timeout=0.02)
                except subprocess.TimeoutExpired:
                    if cpu_seconds(process.pid) >= moment:  # a loaded machine only takes longer
                        process.send_signal(number)
                        output, error = process.communicate(timeout=SECONDS)
        finally:
            process.kill()
    code, lines = process.returncode, error.splitlines()
    if code == 0:  # the command ended before the signal
        assert name in ("eval", "export")
    elif name in ("train", "continue"):
        assert len(lines) == 1, error
        assert lines[0].startswith(("hyena-jax: interrupted", f"hyena-jax: stopped by {number.name};"))
        assert code == (130 if "interrupted" in lines[0] else 75)
        assert ("interrupted" in lines[0] or "saved at" in lines[0]) or number != signal.SIGINT
    elif number == signal.SIGINT:
        assert code == 130, error
        assert lines[-1].startswith("hyena-jax: interrupted")
    else:
        assert code == -number
    assert "Traceback" not in output + error
    assert "ignored in" not in error
    rows = tmp_path / "run" / "metrics.jsonl"
    assert all(json.loads(line) for line in rows.read_text().splitlines())
