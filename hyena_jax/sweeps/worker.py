"""A process that trains runs of a sweep one after the other: it starts JAX once and reads the data once.

`python -m hyena_jax.sweeps.worker CORES` reads requests from its standard input, a JSON object a line, and
writes events to its standard output; what is printed goes to the standard error. Its parent kills it when
there is no more work. Once its standard input ends, the parent is gone: it stops and saves.
"""

import json
import os
import queue
import sys
import threading
from contextlib import suppress
from typing import Any

from hyena_jax.config import UserError
from hyena_jax.signals import stop_and_end, take_signals
from hyena_jax.startup import keep_freed_memory, quiet_libraries, refuse_wrong_jaxlib, start_jax

# Kinds of requests, and of events.
PLAN, TRAIN = "plan", "train"
READY, STEP, PLANNED, DONE = "ready", "step", "planned", "done"
DIVERGED, FAILED, STOPPED = "diverged", "failed", "stopped"


def main(cores: str) -> int:
    """Serves requests until it is asked to stop.

    Args:
      cores: the CPUs to use, such as `0,1`; empty for all.
    """
    take_signals()
    if cores:  # before anything starts threads
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def send(kind: str, **values: Any) -> None:
        with suppress(BrokenPipeError):  # nobody waits for events any more: the run is saved all the same
            events.write(json.dumps({"kind": kind, **values}) + "\n")

    requests: queue.Queue = queue.Queue()
    threading.Thread(target=_read_requests, args=(requests,), daemon=True).start()
    try:
        quiet_libraries()
        refuse_wrong_jaxlib()
        keep_freed_memory()
        start_jax(lambda text: print(text, file=sys.stderr))

        import jax

        from hyena_jax.sweeps.serve import Server

        platform = jax.devices()[0].platform
        if cores and platform != "cpu":
            raise UserError(f"must be 1 on a {platform}: only CPUs are divided among the runs", "jobs")
    except UserError as error:
        send(FAILED, error=error.message, argument=error.argument)
        return 2
    server = Server(send)
    send(READY)
    while server.serve(requests.get()):
        pass
    return 0


def _read_requests(requests: queue.Queue) -> None:
    """Puts requests into the queue; stops this process if the one that sends them has ended."""
    for line in sys.stdin:
        requests.put(json.loads(line))
    stop_and_end()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
