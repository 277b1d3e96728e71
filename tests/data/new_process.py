"""Python in a process of its own."""

import subprocess
import sys


def output_of(code: str, *arguments: str) -> str:
    """What this code prints; with its warnings errors, nothing else may be said."""
    command = [sys.executable, "-W", "error", "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert done.stderr == ""
    return done.stdout
