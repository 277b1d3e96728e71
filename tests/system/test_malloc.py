import subprocess
import sys

import pytest

PROGRAM = """
import os, pathlib, sys
from hyena_jax.system.malloc import restart_with_large_pages
restart_with_large_pages(pathlib.Path(sys.argv[1]))
print(os.getpid(), os.environ.get("GLIBC_TUNABLES"), *sys.argv[2:])
"""


@pytest.mark.parametrize(
    ("setting", "variable", "expected"),
    [
        ("always [madvise] never", None, ["glibc.malloc.hugetlb=1", "a b"]),
        ("[always] madvise never", None, ["None", "a b"]),
        (None, None, ["None", "a b"]),
        ("always [madvise] never", "glibc.malloc.arena_max=2", ["glibc.malloc.arena_max=2", "a b"]),
    ],
)
def test_a_process_is_started_again_where_that_changes_its_pages(tmp_path, setting, variable, expected):
    program, pages = tmp_path / "program.py", tmp_path / "enabled"
    program.write_text(PROGRAM)
    if setting is not None:
        pages.write_text(setting)
    environment = {} if variable is None else {"GLIBC_TUNABLES": variable}
    started = subprocess.Popen(
        [sys.executable, program, pages, "a b"], env=environment, stdout=subprocess.PIPE, text=True
    )
    out, _ = started.communicate(timeout=60)
    assert out.strip() == " ".join([str(started.pid), *expected])
