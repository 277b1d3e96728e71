"""Processes that identify themselves before they join, here as threads."""

import json
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from hyena_jax.parallel import roll_call
from hyena_jax.parallel.roll_call import GREETING, Address, call_roll
from hyena_jax.system.errors import UserError

VERSIONS = {"jax": "1.0"}
SOON = 0.3
"""Seconds to wait for what does not come."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def coordinator():
    return f"127.0.0.1:{free_port()}"


def card(number, count, versions=VERSIONS):
    return {"process_id": number, "num_processes": count, "versions": versions}


def outcomes_of(coordinator, cards, timeout=20.0):
    """What each of these processes gets, or the error that it raises."""

    def outcome(ours):
        try:
            return call_roll(coordinator, ours, timeout)
        except (UserError, OSError) as error:
            return error

    with ThreadPoolExecutor(len(cards)) as pool:
        return list(pool.map(outcome, cards))


@contextmanager
def stranger(coordinator, text=b""):
    """A connection to process 0, made as soon as it listens, that was greeted and sent this."""
    host, _, port = coordinator.rpartition(":")
    while True:
        try:
            connection = socket.create_connection((host, int(port)))
            break
        except ConnectionRefusedError:
            pass
    with connection:
        assert connection.recv(1) == GREETING
        connection.sendall(text)
        yield connection


@pytest.mark.parametrize("count", [1, 2, 5])
def test_all_come(coordinator, count):
    cards = [card(i, count) for i in reversed(range(count))]
    assert outcomes_of(coordinator, cards) == [None] * (count - 1) + [coordinator]


@pytest.mark.parametrize("host", ["localhost", "[::1]"])
def test_names_and_addresses_of_ipv6(host):
    place = f"{host}:{free_port()}"
    bound = outcomes_of(place, [card(0, 2), card(1, 2)], 1.0)[0]
    if host == "[::1]" and isinstance(bound, UserError):
        pytest.skip("no IPv6")
    assert bound in [place.replace("localhost", address) for address in ("127.0.0.1", "[::1]")]


@pytest.mark.parametrize(
    ("cards", "message"),
    [
        ([card(0, 2), card(2, 3)], "num_processes must be the same .* got 2 in process 0 and 3 in 2"),
        ([card(0, 3), card(1, 3), card(1, 3)], "process_id must differ .* got 1 in two of 3"),
        ([card(0, 2), card(1, 2, {"jax": "2"})], "jax must be the same .* '1.0' in process 0 and '2' in 1"),
    ],
)
def test_what_does_not_fit_is_refused_in_all(coordinator, cards, message):
    for error in outcomes_of(coordinator, cards):
        with pytest.raises(UserError, match=message):
            raise error


def test_a_process_that_does_not_come(coordinator):
    message = f"process 2 of 3 did not connect to {coordinator} in 0.3 s"
    for error in outcomes_of(coordinator, [card(0, 3), card(1, 3)], SOON):
        with pytest.raises(OSError, match=message):
            raise error
    with pytest.raises(OSError, match=r"process 1, 2, 3, 4, 5, 6, 7, 8, \.\.\. of 1000000000 did not"):
        call_roll(coordinator, card(0, 10**9), 0.01)


def test_nobody_is_at_the_coordinator(coordinator):
    with pytest.raises(OSError, match=f"process 0 did not connect to {coordinator} in 0.3 s"):
        call_roll(coordinator, card(1, 2), SOON)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\x00\xff\xfe\n",
        b"[" * 60_000 + b"\n",
        b"a" * 1_000_000,
        json.dumps(card(-1, 2)).encode() + b"\n",
        json.dumps(card(True, 2)).encode() + b"\n",
        b'{"process_id": 1, "num_processes": 2}\n',
    ],
)
def test_strangers_do_no_harm(coordinator, text):
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(call_roll, coordinator, card(0, 2), 20)
        try:
            with stranger(coordinator, text):
                assert call_roll(coordinator, card(1, 2), 20) is None
        except (ConnectionResetError, BrokenPipeError):  # it was closed while still sending
            assert call_roll(coordinator, card(1, 2), 20) is None
        assert first.result() == coordinator


def test_one_that_ended_may_come_again(coordinator):
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(call_roll, coordinator, card(0, 3), 20)
        line = json.dumps(card(1, 3)).encode() + b"\n"
        with stranger(coordinator, line) as connection:
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(1) == b""  # taken off the roll again
        both = outcomes_of(coordinator, [card(1, 3), card(2, 3)])
        assert [*both, first.result()] == [None, None, coordinator]


@pytest.mark.parametrize(
    ("said", "message"),
    [(b"220 smtp", "another program, or another training, listens on"), (GREETING, "ended before all")],
)
def test_something_else_listens(coordinator, said, message):
    with socket.create_server(("127.0.0.1", int(coordinator.rpartition(":")[2]))) as other:
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(call_roll, coordinator, card(1, 2), 20)
            connection = other.accept()[0]
            connection.sendall(said)
            connection.close()
            with pytest.raises(OSError, match=message):
                asking.result()
        in_use = f"cannot listen on coordinator {coordinator}: Address already in use"
        with pytest.raises(OSError, match=in_use):
            call_roll(coordinator, card(0, 2), SOON)


@pytest.mark.parametrize("number", [0, 1])
def test_an_unknown_host(number, monkeypatch):
    monkeypatch.setattr(roll_call, "RESOLVE_WITHIN", 0.0)
    with pytest.raises(UserError, match="coordinator must be HOST:PORT of a host that is known here"):
        call_roll("nowhere.invalid:1234", card(number, 2), SOON)


def test_process_0_runs_where_the_coordinator_is():
    message = "coordinator must be an address of the machine that process 0 runs on"
    with pytest.raises(UserError, match=message):
        call_roll("203.0.113.1:1234", card(0, 2), SOON)


def test_where_to_listen_may_be_told_apart_from_where_to_connect(coordinator, monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", coordinator)
    assert call_roll("203.0.113.1:1234", card(0, 1), SOON) == coordinator


def test_a_wrong_place_to_listen_on_is_named(coordinator, monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", "127.0.0.1")
    with pytest.raises(UserError, match="JAX_COORDINATOR_BIND_ADDRESS must be HOST:PORT"):
        call_roll(coordinator, card(0, 1), SOON)


def test_a_name_that_means_loopback_to_itself_is_listened_for_everywhere(coordinator, monkeypatch):
    port = int(coordinator.rpartition(":")[2])
    found = [Address(socket.AF_INET, "127.0.1.1", port)]
    monkeypatch.setattr(roll_call, "_resolve", lambda place: found)
    assert call_roll(f"host0:{port}", card(0, 1), SOON) == f"0.0.0.0:{port}"


def test_a_listener_that_says_nothing_is_given_up_with_its_connection():
    """A connection that is not closed would end as a warning, an error here."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        coordinator = f"127.0.0.1:{silent.getsockname()[1]}"
        (error,) = outcomes_of(coordinator, [card(1, 2)], SOON)
    assert str(error) == f"process 0 did not connect to {coordinator} in 0.3 s"
