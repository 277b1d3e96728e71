"""A roll call before several processes join, so that every process learns what is wrong.

JAX aborts a process that cannot join its coordination service (SIGABRT, after a minute). The roll call checks
beforehand, on the coordinator's port before JAX listens there: process 0 greets every connection, each other
process identifies itself with a line of JSON, and all get the same answer as soon as the last one has
connected or one does not fit. Connections that send anything else are closed and do no harm.
"""

import asyncio
import errno
import ipaddress
import itertools
import json
import os
import socket
import time
from contextlib import closing, suppress
from typing import Any, NamedTuple

from hyena_jax.config.training import require_address
from hyena_jax.system.errors import UserError, require

BIND_VARIABLE = "JAX_COORDINATOR_BIND_ADDRESS"
"""JAX's variable for the address that process 0 listens on, if it differs from the coordinator's."""
GREETING = b"\x06"
"""One byte that differs from the first byte of HTTP/2, which JAX's coordinator sends."""
RETRY_EVERY, RESOLVE_WITHIN, LINE_WITHIN = 0.1, 5.0, 5.0
"""Seconds between two tries; for a host name to resolve; for a connection to send its line."""
ANYWHERE = {socket.AF_INET: "0.0.0.0", socket.AF_INET6: "::"}

Card = dict[str, Any]
"""How a process identifies itself: `process_id`, `num_processes`, and `versions` of packages."""
Fault = tuple[str, str | None]
"""(The message, the argument that it is about: wrong input; or None: a failed machine)."""


class Address(NamedTuple):
    """An address that a host name resolved to."""

    family: socket.AddressFamily
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def call_roll(coordinator: str, card: Card, timeout: float) -> str | None:
    """Returns once all processes have connected and fit together. Every process must call it.

    Args:
      coordinator: HOST:PORT where process 0 listens.
      timeout: seconds to wait for the other processes.

    Returns:
      On process 0, the address for JAX's coordinator to listen on; None on the others.

    Raises:
      UserError: if the host is unknown or, on process 0, is another machine; on all processes, if two have
        the same process_id, or num_processes or versions differ.
      OSError: if the port is in use, or a process did not connect within `timeout`.
    """
    if card["process_id"] > 0:
        fault = asyncio.run(_report(coordinator, card, timeout))
        address = None
    else:
        place = os.environ.get(BIND_VARIABLE, coordinator)
        require_address(BIND_VARIABLE, place)
        address, listener = _listen(place)
        with closing(listener):
            fault = asyncio.run(_hear(listener, coordinator, card, timeout))
    if fault is not None:
        text, argument = fault
        raise OSError(text) if argument is None else UserError(text, argument)
    return None if address is None else str(address)


def _listen(place: str) -> tuple[Address, socket.socket]:
    """Listens on the address of one interface, with one exception.

    If the host resolves its own name to loopback (Debian's /etc/hosts does), the other hosts resolve the name
    to another address: then it listens on all interfaces.
    """
    name, error = _split(place)[0], None
    for address in _resolve(place):
        is_alias = ipaddress.ip_address(address.host).is_loopback and name not in ("localhost", address.host)
        address = address._replace(host=ANYWHERE[address.family]) if is_alias else address
        try:
            return address, socket.create_server(address[1:], family=address.family)
        except OSError as raised:
            error = raised
            if error.errno == errno.EADDRINUSE:  # even if another address of this name is free
                break
    is_elsewhere = error.errno == errno.EADDRNOTAVAIL
    require(not is_elsewhere, "coordinator", place, "an address of the machine that process 0 runs on")
    raise OSError(f"process 0 cannot listen on coordinator {place}: {os.strerror(error.errno)}") from error


def _resolve(place: str) -> list[Address]:
    """The addresses of HOST:PORT; retries, since names may become known only while machines start."""
    host, port = _split(place)
    deadline = time.monotonic() + RESOLVE_WITHIN
    while True:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            return [Address(family, where[0], where[1]) for family, _, _, _, where in found]
        except socket.gaierror as error:
            if time.monotonic() > deadline:
                known = f"HOST:PORT of a host that is known here ({error.strerror})"
                require(False, "coordinator", place, known)
        time.sleep(RETRY_EVERY)


def _split(place: str) -> tuple[str, int]:
    host, _, port = place.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


async def _hear(listener: socket.socket, coordinator: str, ours: Card, timeout: float) -> Fault | None:
    """Process 0: listens until all processes are present or something is wrong, then answers them."""
    count, present, handlers = ours["num_processes"], {0}, set()
    answer: asyncio.Future[Fault | None] = asyncio.get_running_loop().create_future()

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, ValueError, RecursionError), closing(writer):  # strangers and dead processes
            writer.write(GREETING)
            async with asyncio.timeout(LINE_WITHIN):
                card = json.loads(await reader.readline())
            numbers = ("process_id", "num_processes")
            is_card = isinstance(card, dict) and all(type(card.get(name)) is int for name in numbers)
            is_card = is_card and 0 < card["process_id"] < card["num_processes"]
            if not (is_card and isinstance(card.get("versions"), dict)):
                return
            handlers.add(asyncio.current_task())
            number, fault = card["process_id"], _misfit(card, ours, present)
            present.add(number)
            if not answer.done() and (fault or len(present) == count):
                answer.set_result(fault)
            gone = asyncio.ensure_future(reader.read(1))
            await asyncio.wait({gone, answer}, return_when=asyncio.FIRST_COMPLETED)
            gone.cancel()
            if answer.done():
                writer.write(json.dumps(answer.result()).encode() + b"\n")
            else:  # that process ended, but may be restarted
                present.discard(number)

    server = await asyncio.start_server(hear, sock=listener)
    if count == 1:
        answer.set_result(None)
    await asyncio.wait({answer}, timeout=timeout)
    if not answer.done():
        missing = (str(i) for i in range(count) if i not in present)
        first = ", ".join(itertools.islice(missing, 8)) + (", ..." if count - len(present) > 8 else "")
        answer.set_result(
            (f"process {first} of {count} did not connect to {coordinator} in {timeout:g} s", None)
        )
    server.close()
    if handlers:
        await asyncio.wait(handlers, timeout=LINE_WITHIN)
    return answer.result()


def _misfit(card: Card, ours: Card, present: set[int]) -> Fault | None:
    """Why another process does not fit process 0; None if it does."""
    number, told, count = card["process_id"], card["num_processes"], ours["num_processes"]
    same = {"num_processes": (count, told)}
    same |= {name: (version, card["versions"].get(name)) for name, version in ours["versions"].items()}
    for name, (here, there) in same.items():
        if here != there:
            return must_be_same(here, number, there), name
    if number in present:
        return f"must differ between processes, got {number} in two of {count}", "process_id"
    return None


def must_be_same(first: object, number: int, other: object) -> str:
    """The message about a value that is `first` in process 0 and `other` in process `number`."""
    return f"must be the same in all processes, got {first!r} in process 0 and {other!r} in {number}"


async def _report(coordinator: str, card: Card, timeout: float) -> Fault | None:
    """Any other process: identifies itself and returns the answer of process 0."""
    _resolve(coordinator)
    host, port = _split(coordinator)
    try:
        async with asyncio.timeout(timeout):
            reader, writer, greeting = await _greeted(host, port)
    except TimeoutError:
        return f"process 0 did not connect to {coordinator} in {timeout:g} s", None
    with closing(writer):
        if greeting != GREETING:
            return f"another program, or another training, listens on coordinator {coordinator}", None
        with suppress(OSError, ValueError):
            writer.write(json.dumps(card).encode() + b"\n")
            async with asyncio.timeout(timeout + LINE_WITHIN):  # process 0 gives up earlier
                return json.loads(await reader.readline())
    return f"process 0 at {coordinator} ended before all processes had connected", None


async def _greeted(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, bytes]:
    """The first connection that sends a byte, and that byte."""
    while True:
        with suppress(OSError):  # nobody listens yet
            reader, writer = await asyncio.open_connection(host, port)
            greeting = b""
            try:
                greeting = await reader.read(1)
            finally:
                if not greeting:  # also where the caller's time is over
                    writer.close()
            if greeting:
                return reader, writer, greeting
        await asyncio.sleep(RETRY_EVERY)
