"""How glibc treats the memory of XLA's programs on CPUs: they allocate and free temporaries at each run.

Memory that goes back to the kernel in between costs a page fault for every 4 kB at the next run: half of the
time of some training steps.
"""

import ctypes
import os
import sys
from contextlib import suppress
from pathlib import Path

TUNABLES = "GLIBC_TUNABLES"
PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def restart_with_large_pages(pages: Path = PAGES) -> None:
    """Starts this process again, with its number and arguments, so that glibc asks for pages of 2 MB.

    Temporaries of more than 64 MB are mapped anew at each run, whatever is set; large pages make that cheap.
    glibc reads the variable only when a process starts. Signals that are blocked stay so. Returns where the
    variable is set, or `pages`, the kernel's setting, leaves no choice.
    """
    with suppress(OSError, ValueError):  # then this process goes on as it is
        if TUNABLES not in os.environ and "[madvise]" in pages.read_text():
            os.environ[TUNABLES] = "glibc.malloc.hugetlb=1"
            os.execv(sys.executable, sys.orig_argv)


def keep_freed_memory() -> None:
    """Tells glibc to keep the memory that is freed, as far as it can."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            trim_threshold, top_pad, mmap_max = -1, -2, -4
            libc.mallopt(trim_threshold, -1)  # never
            libc.mallopt(mmap_max, 0)
            # The heaps of threads have 64 MB each; one that is free is kept if less than this were left.
            libc.mallopt(top_pad, 2**27)
