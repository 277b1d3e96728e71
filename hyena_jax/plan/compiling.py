"""Compiles a training step in a child process, with limits of time and memory, and reads what XLA dumped."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from hyena_jax import config
from hyena_jax.config import Experiment
from hyena_jax.plan.targets import Target
from hyena_jax.system.chips import GIB
from hyena_jax.system.errors import UserError
from hyena_jax.system.files import resident_bytes

# What the child writes: facts before it compiles, and why it failed, which was the user's or the compiler's.
FACTS, FAULT = "facts.json", "fault.json"
# And if it is not ended before: the text of the program, and the bytes that it takes.
PROGRAM, MEMORY = "program.txt", "memory.txt"
USER, COMPILER = "user", "compiler"
# The vocabulary of models that take theirs from text, which is not read: GPT-2's.
VOCABULARY = 50257
POLL_EVERY = 0.2
# The training step's program, by the names that jit and pmap give it.
MODULES = ".*(train_step|_fun).*"
DUMPED, REPORT = "*.after_optimizations_after_buffer_assignment.txt", "*-memory-usage-report.txt"
# Without these, libtpu looks for the machine that it runs on.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_ACCELERATOR_TYPE": "v5e-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


class Limits(NamedTuple):
    """What one compilation may take: seconds, and bytes of this machine's memory."""

    seconds: float
    memory: int


class Compiled(NamedTuple):
    """A scheduled program."""

    facts: dict[str, Any]
    """What was known before compiling: see `step.lower`."""
    text: str
    """Optimised HLO."""
    memory: int
    """Bytes of a device."""
    buffers: tuple[tuple[int, str], ...]
    """Its temporary buffers, (bytes, arrays that take turns in it), the largest first."""
    seconds: float
    """To compile it."""


class DoesNotCompile(Exception):
    """XLA refuses the step. If it lacks memory, `needs` are the bytes that the program would take."""

    def __init__(self, reason: str, needs: float | None = None):
        super().__init__(reason)
        self.needs = needs


class Unfinished(OSError):
    """A compilation was ended at a limit, or ended without a result."""


def compile_step(experiment: Experiment, target: Target, limits: Limits) -> Compiled:
    """The scheduled program of the training step; UserError if the experiment does not fit the target."""
    with tempfile.TemporaryDirectory(prefix="hyena_jax_plan_") as scratch:
        folder, config_file = Path(scratch), Path(scratch, "config.json")
        config_file.write_text(json.dumps(config.encode(experiment)))
        dump = f"--xla_dump_to={folder} --xla_dump_hlo_as_text --xla_dump_hlo_module_re={MODULES}"
        flags = f"{os.environ.get('XLA_FLAGS', '')} {dump}".strip()
        command = [sys.executable, "-W", "ignore", "-m", "hyena_jax.plan.step"]
        command += [config_file, target.name, str(target.n_slices), folder, *config.plugins_in(experiment)]
        start = time.monotonic()
        with (folder / "log").open("wb") as log:
            child = subprocess.Popen(
                command,
                env={**os.environ, **ENVIRONMENT, "XLA_FLAGS": flags},
                stdin=subprocess.PIPE,  # never written: its end tells the child that its parent is gone
                stdout=log,
                stderr=log,
                process_group=0,
            )
        try:
            _wait(child, folder, limits, start)
        finally:
            if child.poll() is None:
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            child.stdin.close()
        return _read(folder, time.monotonic() - start)


def _wait(child: subprocess.Popen, folder: Path, limits: Limits, start: float) -> None:
    """Waits until the scheduled program is written, its files no longer grow, or the child ends."""
    sizes = None
    while child.poll() is None:
        time.sleep(POLL_EVERY)
        if time.monotonic() - start > limits.seconds:
            raise Unfinished(f"compiling took longer than --max-seconds {limits.seconds:g}; raise it")
        if resident_bytes("VmRSS", child.pid) > limits.memory:
            more = f"--max-memory {limits.memory / GIB:.1f} GiB"
            raise Unfinished(f"compiling took more than {more} of this machine's memory; raise it")
        before, sizes = sizes, [path.stat().st_size for path in (*folder.glob(DUMPED), *folder.glob(REPORT))]
        if len(sizes) == 2 and sizes == before and all(sizes):
            return


def _read(folder: Path, seconds: float) -> Compiled:
    fault = folder / FAULT
    if fault.exists():
        found = json.loads(fault.read_text())
        if found["kind"] != COMPILER:
            raise UserError(found["text"], found["argument"])
        reason = " ".join(found["text"].split())
        used = re.search(r"Used ([\d.]+)([KMGT]) of", reason)
        if used is not None:
            needs = float(used[1]) * 1024 ** ("KMGT".index(used[2]) + 1)
            raise DoesNotCompile(f"it would take {needs / GIB:.1f} GiB of a chip's memory", needs)
        raise DoesNotCompile(reason[:400])
    programs, reports = list(folder.glob(DUMPED)), list(folder.glob(REPORT))
    ended = (folder / MEMORY).exists()
    if not ended and (not programs or not reports):
        lines = (folder / "log").read_text(errors="replace").strip().splitlines()
        faults = [line for line in lines if re.match(r"[\w.]+(Error|Exception): ", line)] or lines
        reason = faults[-1][:300] if faults else "no output"
        raise Unfinished(f"the compiler ended without a result: {reason}")
    facts = json.loads((folder / FACTS).read_text())
    report = reports[0].read_text() if reports else ""
    total = re.search(r"Memory Space: default[^\n]*\nTotal bytes: (\d+)", report)
    memory = int((folder / MEMORY).read_text()) if ended else int(total[1])
    text = (folder / PROGRAM if ended else programs[0]).read_text()
    # The first table of the main memory: temporary buffers.
    row = r"^\s*[\d.]+[KMG]?i?B\(\s*\d+%\);\s*([\d.]+)([KMG]?i?B);\s*\d+;\s*\d+; (.*)$"
    units = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    rows = re.findall(row, report.partition("Memory Space: vmem")[0], re.M)
    buffers = ((int(float(n) * units[unit]), shapes) for n, unit, shapes in rows)
    return Compiled(facts, text, memory, tuple(sorted(buffers, reverse=True)), seconds)
