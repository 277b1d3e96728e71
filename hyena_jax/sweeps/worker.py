"""A process that trains runs of a sweep one after the other: it starts JAX once and reads the data once.

`python -m hyena_jax.sweeps.worker CONNECTION CORES` receives requests and sends events through a connection
of `multiprocessing`. Its parent kills it when there is no more work. Once its standard input ends, the parent
is gone: it stops and saves.
"""

import os
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from hyena_jax.sweeps.pool import FAILED, READY
from hyena_jax.system.errors import UserError
from hyena_jax.system.malloc import keep_freed_memory
from hyena_jax.system.signals import STOPPED_CODE, end_with, take_signals
from hyena_jax.system.startup import quiet_libraries, refuse_wrong_jaxlib, start_jax


def main(number: str, cores: str) -> int:
    """Serves requests until it is asked to stop.

    `number` is the connection's file descriptor, `cores` the CPUs to use, such as `0,1`; empty for all.
    """
    take_signals()
    if cores:  # before anything starts threads
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    end_with(sys.stdin.fileno())
    os.set_inheritable(int(number), False)  # a process that outlives this one must not hold it open
    connection = Connection(int(number))

    def send(kind: str, **values: Any) -> None:
        with suppress(ConnectionError):  # nobody waits for events any more: the run is saved all the same
            connection.send((kind, values))

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
    with suppress(EOFError, ConnectionError):  # the parent is gone
        while server.serve(connection.recv()):
            pass
    return STOPPED_CODE


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
