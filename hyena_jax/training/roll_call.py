"""Before several processes join, process 0 hears from each of them, and all learn what is wrong.

JAX ends a process that cannot join its coordination service (SIGABRT, after a minute), so what can be known
is found out first, over the coordinator's port and before JAX listens there: process 0 greets every
connection, the others say in a line of JSON who they are, and all get one answer, once the last has come or
one does not fit. A connection that says anything else is closed and does no harm.
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

from hyena_jax.config import UserError, require
from hyena_jax.config.cluster import require_address

BIND_VARIABLE = "JAX_COORDINATOR_BIND_ADDRESS"
"""JAX's variable for where process 0 listens, if the others know it by another address."""
GREETING = b"\x06"
"""One byte, unlike the first of HTTP/2, which JAX's coordinator sends."""
RETRY_EVERY, RESOLVE_WITHIN, LINE_WITHIN = 0.1, 5.0, 5.0
"""Seconds: between two tries, for a name to become known, and for a line of a connection."""
ANYWHERE = {socket.AF_INET: "0.0.0.0", socket.AF_INET6: "::"}

Card = dict[str, Any]
"""What a process says of itself: `process_id`, `num_processes`, and `versions` by the names of packages."""
Fault = tuple[bool, str]
"""Whether it is wrong input (the machine failed otherwise), and what to say."""


class Address(NamedTuple):
    """An address that a name was resolved to."""

    family: socket.AddressFamily
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def call_roll(coordinator: str, card: Card, timeout: float) -> str | None:
    """Returns once all processes are there and fit together. Every process must call this.

    Args:
      coordinator: HOST:PORT, where process 0 listens and the others find it.
      timeout: seconds to wait for the others.

    Returns:
      On process 0, the address for JAX's coordinator to listen on; None on the others.

    Raises:
      UserError: if the host is unknown or, on process 0, another machine; on all, if two processes have one
        number, or were told of different numbers of processes, or run different versions.
      OSError: if the port is in use, or a process did not come within `timeout`.
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
        is_user_error, text = fault
        raise (UserError if is_user_error else OSError)(text)
    return None if address is None else str(address)


def _listen(place: str) -> tuple[Address, socket.socket]:
    """Listens on the address of one interface, not on all.

    Where a machine's name means loopback to itself (in /etc/hosts, as Debian writes it), the others know that
    name by another address: there, all interfaces are listened on.
    """
    name, error = _split(place)[0], None
    for address in _resolve(place):
        is_alias = ipaddress.ip_address(address.host).is_loopback and name not in ("localhost", address.host)
        address = address._replace(host=ANYWHERE[address.family]) if is_alias else address
        try:
            return address, socket.create_server(address[1:], family=address.family)
        except OSError as raised:
            error = raised
            if error.errno == errno.EADDRINUSE:  # also where another of the name's addresses is free
                break
    is_elsewhere = error.errno == errno.EADDRNOTAVAIL
    require(not is_elsewhere, "coordinator", place, "an address of the machine that process 0 runs on")
    raise OSError(f"process 0 cannot listen on coordinator {place}: {os.strerror(error.errno)}") from error


def _resolve(place: str) -> list[Address]:
    """The addresses of HOST:PORT; a name that is unknown may become known while machines start."""
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
    """Process 0: hears from the others until all are present or something is wrong, and answers them."""
    count, present, handlers = ours["num_processes"], {0}, set()
    answer: asyncio.Future[Fault | None] = asyncio.get_running_loop().create_future()

    async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, ValueError, RecursionError), closing(writer):  # strangers, and who died
            writer.write(GREETING)
            async with asyncio.timeout(LINE_WITHIN):
                card = json.loads(await reader.readline())
            if not _is_card(card):
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
            else:  # it ended; one that is started in its place may come
                present.discard(number)

    server = await asyncio.start_server(hear, sock=listener)
    if count == 1:
        answer.set_result(None)
    await asyncio.wait({answer}, timeout=timeout)
    if not answer.done():
        missing = (str(i) for i in range(count) if i not in present)
        first = ", ".join(itertools.islice(missing, 8)) + (", ..." if count - len(present) > 8 else "")
        answer.set_result(
            (False, f"process {first} of {count} did not come to {coordinator} in {timeout:g} s")
        )
    server.close()
    if handlers:
        await asyncio.wait(handlers, timeout=LINE_WITHIN)
    return answer.result()


def _is_card(card: Any) -> bool:
    numbers = ("process_id", "num_processes")
    return (
        isinstance(card, dict)
        and all(type(card.get(name)) is int for name in numbers)
        and 0 < card["process_id"] < card["num_processes"]
        and isinstance(card.get("versions"), dict)
    )


def _misfit(card: Card, ours: Card, present: set[int]) -> Fault | None:
    """What does not fit of a process that is not process 0."""
    number, told, count = card["process_id"], card["num_processes"], ours["num_processes"]
    same = {"num_processes": (count, told)}
    same |= {name: (version, card["versions"].get(name)) for name, version in ours["versions"].items()}
    for name, (here, there) in same.items():
        if here != there:
            return True, must_be_same(name, here, number, there)
    if number in present:
        return True, f"process_id must differ between processes, got {number} in two of {count}"
    return None


def must_be_same(name: str, first: object, number: int, other: object) -> str:
    """How a value is refused that is `first` in process 0 and `other` in process `number`."""
    return f"{name} must be the same in all processes, got {first!r} in process 0 and {other!r} in {number}"


async def _report(coordinator: str, card: Card, timeout: float) -> Fault | None:
    """Any other process: the answer of process 0."""
    _resolve(coordinator)
    host, port = _split(coordinator)
    try:
        async with asyncio.timeout(timeout):
            reader, writer, greeting = await _greeted(host, port)
    except TimeoutError:
        return False, f"process 0 did not come to {coordinator} in {timeout:g} s"
    with closing(writer):
        if greeting != GREETING:
            return False, f"another program, or another training, listens on coordinator {coordinator}"
        with suppress(OSError, ValueError):
            writer.write(json.dumps(card).encode() + b"\n")
            async with asyncio.timeout(timeout + LINE_WITHIN):  # process 0 gives up before
                return json.loads(await reader.readline())
    return False, f"process 0 at {coordinator} ended before all processes had come"


async def _greeted(host: str, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, bytes]:
    """A connection, and the first byte that came over it, as soon as there is one."""
    while True:
        with suppress(OSError):  # nobody listens there yet
            reader, writer = await asyncio.open_connection(host, port)
            if greeting := await reader.read(1):
                return reader, writer, greeting
            writer.close()
        await asyncio.sleep(RETRY_EVERY)
