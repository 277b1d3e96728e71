"""One benchmark run by two commits: each in its own git work tree, in turns, every time in a new process."""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hyena_jax.system.errors import UserError
from hyena_jax.system.output import watched
from hyena_jax.system.signals import raising


def commit(name: str) -> str | None:
    """The hash of a commit of the repository around the working directory; None if there is none."""
    ended = _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}")
    return ended.stdout.strip() if ended.returncode == 0 else None


def measure_commits(a: str, b: str, benchmark: str, rounds: int, folder: Path) -> None:
    """Measures both commits `rounds` times each, in the order A B B A A B ...

    Args:
      a, b: hashes.
      benchmark: the command line after `hyena-jax bench`.
      folder: gets a/1, b/1, a/2, ..., each with the output of one process.

    Raises:
      UserError: if a quotation of the command line is not closed, or a commit refuses the command line, finds
        a wrong value, or has no `hyena_jax`.
      OSError: if git or a process fails otherwise.
    """
    folder = folder.resolve()  # the processes run in the work trees
    try:
        arguments = shlex.split(benchmark)
    except ValueError as error:
        raise UserError(f"must be a command line, got {benchmark!r}: {error}", "bench") from error
    order = [side for i in range(rounds) for side in ("ab" if i % 2 == 0 else "ba")]
    with (
        raising(signal.SIGINT, KeyboardInterrupt()),
        _work_tree(a, folder / "tree-a") as tree_a,
        _work_tree(b, folder / "tree-b") as tree_b,
    ):
        for i, side in enumerate(watched("measuring", order, len(order))):
            tree = tree_a if side == "a" else tree_b
            output = folder / side / str(i // 2 + 1)
            output.parent.mkdir(exist_ok=True)
            command = [sys.executable, "-m", "hyena_jax", "bench", *arguments]
            path = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")]))
            ended = subprocess.run(
                [*command, "--output", str(output)],
                cwd=tree,
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
            )
            if ended.returncode:
                reason = (ended.stderr.strip().splitlines() or ["no output"])[-1]
                line = f"commit {(a if side == 'a' else b)[:10]}: {reason}"
                raise UserError(line) if ended.returncode in (1, 2) else OSError(line)


@contextmanager
def _work_tree(commit: str, folder: Path) -> Iterator[Path]:
    """The files of a commit in a folder, which is removed in the end."""
    made = _git("worktree", "add", "--detach", "--quiet", str(folder), commit)
    if made.returncode:
        raise OSError(f"git worktree add: {made.stderr.strip()}")
    try:
        if not (folder / "hyena_jax" / "__main__.py").exists():
            raise UserError(f"commit {commit[:10]} has no hyena_jax/__main__.py: run this in its repository")
        yield folder
    finally:
        _git("worktree", "remove", "--force", str(folder))


def _git(*arguments: str) -> subprocess.CompletedProcess:
    try:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise UserError("git is not installed, which commits are compared with") from None
