"""Plants silent faults in copies of the checkout, one at a time, and says which test catches each.

python tests/programs/faults_planted.py [NAME ...] [--list] [--jobs N] [--whole] [--limit S] [--output FILE]

A fault, of which faults.jsonl has one a line, is a line of the package as a careful person might have got it
wrong: the program still runs, and gives wrong results or breaks a promise. What the tests miss here, they
would miss in a change as well.

For each fault the tracked files are copied into a temporary folder and the line is changed there. The tests
of the file's part of the package run first, those named after the file before the others, until one fails;
with --whole the whole suite follows where none did. Both take the marks that pytest takes by default. A run
of pytest that takes longer than --limit seconds is ended, and the fault counts as caught by the time limit:
raise it on a busy machine. --jobs faults are tried at the same time. --list only checks the faults: each must
be found exactly once in its file, and the changed file must compile.

With --output each result is appended to FILE as a line of JSON; faults that are in it already are not tried
again, but with --whole those are that only their own tests have missed. A table in Markdown is printed at the
end. The exit code is 1 if a fault is not found in its file, or if its tests could not be run.
The fault `unharmed` changes nothing: a test of the whole suite that catches it fails in every copy.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
PYTEST = "-m pytest -x -q -p no:cacheprovider --no-header -rfE".split()
HUNG = "the time limit"
NO_TESTS = 5
"""Pytest's exit code if the marks leave none."""
ELSEWHERE = {
    "cli": ("tests/test_cli.py", "tests/test_command_line.py", "tests/test_launch.py"),
    "config": ("tests/test_config.py", "tests/test_command_line.py", "tests/test_parameters.py"),
    "parallel": ("tests/training",),
    "api.py": ("tests/test_api.py",),
}
"""Tests of the parts of the package that have no folder of their own in tests."""
Row = dict[str, Any]


class Fault(NamedTuple):
    name: str
    file: str
    old: str
    """What stands there, exactly once in the file."""
    new: str
    says: str
    """What is wrong, in some words."""
    tests: Sequence[str] = ()
    """Tests that run with those of the file's part."""


UNHARMED = Fault("unharmed", "", "", "", "nothing is changed")
LINES = Path(__file__).with_name("faults.jsonl").read_text(encoding="utf-8").splitlines()
FAULTS = [Fault(**json.loads(line)) for line in LINES]


class NotFound(Exception):
    pass


def harmed(fault: Fault) -> str:
    """The text of the fault's file with the fault in it, which compiles."""
    text = (ROOT / fault.file).read_text()
    if text.count(fault.old) != 1:
        raise NotFound(f"{fault.name}: {text.count(fault.old)} times in {fault.file}: {fault.old!r}")
    text = text.replace(fault.old, fault.new)
    try:
        compile(text, fault.file, "exec")
    except SyntaxError as error:
        raise NotFound(f"{fault.name}: {fault.file} no longer compiles: {error}") from error
    return text


def own_tests(fault: Fault) -> Iterable[list[str]]:
    """Arguments of pytest: for the files named after the fault's file, then for the others of its part."""
    part, *rest = Path(fault.file).relative_to("hyena_jax").parts
    others = ELSEWHERE.get(part)
    if others is None:
        folder = ROOT / "tests" / Path(part, *rest).parent
        folder = next(path for path in (folder, *folder.parents) if path.is_dir())
        others = (str(folder.relative_to(ROOT)),)
    named = [
        str(path.relative_to(ROOT))
        for other in others
        for path in sorted((ROOT / other).rglob(f"test_*{Path(fault.file).stem}*.py"))
    ]
    first = list(dict.fromkeys([*named, *(path for path in fault.tests if path.endswith(".py"))]))
    rest = [path for path in (*fault.tests, *others) if path not in first]
    return filter(None, (first, [*rest, *(f"--ignore={path}" for path in first)]))


def copied(folder: Path, fault: Fault) -> Path:
    """A copy of the tracked files in `folder`, with the fault."""
    text = None if fault == UNHARMED else harmed(fault)
    checkout = folder / "checkout"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        if not os.path.lexists(ROOT / name):  # deleted, which is not committed yet
            continue
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, checkout / name, follow_symlinks=False)
    if (ROOT.parent / "shared").exists():  # corpora that some tests look for beside the checkout
        (folder / "shared").symlink_to((ROOT.parent / "shared").resolve())
    if text is not None:
        (checkout / fault.file).write_text(text)
    return checkout


def first_failure(checkout: Path, tests: Sequence[str], workers: int, limit: float) -> str | None:
    """The first test that fails, or HUNG; None if all pass."""
    log = checkout.parent / "log"
    with log.open("w") as output:
        child = subprocess.Popen(
            [sys.executable, *PYTEST, "-n", str(workers), *tests],
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": str(checkout)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            child.wait(limit)
        except subprocess.TimeoutExpired:
            return HUNG
        finally:  # what tests have started may outlive them
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    said = log.read_text(errors="replace")
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", said, re.MULTILINE)
    if found is not None:
        return re.sub(r"@\w+$", "", found[1])  # the group that pytest-xdist appends
    if child.returncode not in (0, NO_TESTS):
        raise RuntimeError(f"pytest ended with exit code {child.returncode}: {said.strip()[-300:]}")
    return None


def tried(fault: Fault, whole: bool, limit: float, before: Row | None) -> Row:
    """The row of a fault: `caught` is a test, HUNG, or None if it was missed."""
    start, caught, error = time.monotonic(), None, None
    try:
        with tempfile.TemporaryDirectory(prefix="hyena_jax_fault_", ignore_cleanup_errors=True) as scratch:
            checkout = copied(Path(scratch), fault)
            skips_own = before is not None or fault == UNHARMED
            runs = [] if skips_own else [(tests, 1) for tests in own_tests(fault)]
            if whole or fault == UNHARMED:
                runs.append(([], 2))
            found = (first_failure(checkout, tests, workers, limit) for tests, workers in runs)
            caught = next(filter(None, found), None)
    except (NotFound, RuntimeError) as reason:
        error = str(reason)
    seconds = round(time.monotonic() - start + (before["seconds"] if before else 0), 1)
    row = {"name": fault.name, "file": fault.file, "says": fault.says}
    return {**row, "caught": caught, "seconds": seconds, "whole": whole, "error": error}


def read(path: Path | None) -> dict[str, Row]:
    """The rows of an earlier start by name, without those that could not be tried."""
    lines = path.read_text().splitlines() if path is not None and path.exists() else []
    rows = (json.loads(line) for line in lines)
    return {row["name"]: row for row in rows if row["error"] is None}


def table(rows: Iterable[Row]) -> str:
    lines = ["| fault | what is wrong | caught by | s |", "|---|---|---|---:|"]
    for row in rows:
        by = row["caught"] or ("NOT TRIED" if row["error"] else "MISSED")
        cells = (row["name"], row["says"], by, f"{row['seconds']:.0f}")
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")
    return "\n".join(lines)


def listed(faults: Iterable[Fault]) -> int:
    code = 0
    for fault in faults:
        try:
            harmed(fault)
            print(f"{fault.name:45} {fault.file:45} {fault.says}")
        except NotFound as error:
            code = 1
            print(error, file=sys.stderr)
    return code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults; without any, all")
    parser.add_argument("--list", action="store_true", help="check the faults and print them")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="faults at the same time")
    parser.add_argument("--whole", action="store_true", help="the whole suite where the part's tests pass")
    parser.add_argument("--limit", type=float, default=900.0, metavar="S", help="seconds for a run of pytest")
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON lines, which are continued")
    given = parser.parse_args()
    known = {fault.name: fault for fault in (*FAULTS, UNHARMED)}
    if unknown := [name for name in given.names if name not in known]:
        parser.error(f"there is no fault {', '.join(unknown)}")
    chosen = [known[name] for name in given.names] or FAULTS
    if given.list:
        return listed(fault for fault in chosen if fault != UNHARMED)
    done = read(given.output)
    todo = [
        fault
        for fault in chosen
        if fault.name not in done
        or (given.whole and not done[fault.name]["whole"] and done[fault.name]["caught"] is None)
    ]
    with ThreadPoolExecutor(given.jobs) as pool:
        rows = [pool.submit(tried, one, given.whole, given.limit, done.get(one.name)) for one in todo]
        for row in (future.result() for future in as_completed(rows)):
            done[row["name"]] = row
            print(f"{row['name']}: {row['error'] or row['caught'] or 'MISSED'}", file=sys.stderr, flush=True)
            if given.output is not None:
                with given.output.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    found = [done[fault.name] for fault in chosen]
    print(table(found))
    return int(any(row["error"] for row in found))


if __name__ == "__main__":
    sys.exit(main())
