"""The kernel's stamps: what a reader who is late still knows of when bytes came."""

import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from specbench.load import wire as wire_module
from specbench.load.arrivals import (
    ANCILLARY_BYTES,
    SO_TIMESTAMPNS,
    Stamps,
    are_stamped,
    ask_for_stamps,
)
from specbench.load.wire import Exchange, Wire

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
LATE_S = 0.1


def event(text: bytes) -> bytes:
    data = b"data: " + text + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with closing(socket.create_server(("127.0.0.1", 0))) as sock:
        yield sock


@pytest.fixture
def wire(listener: socket.socket) -> Iterator[Wire]:
    made = Wire(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_s=10, stall_s=10)
    with closing(made):
        made.warm(1)
        yield made


def accepted(listener: socket.socket) -> socket.socket:
    sock, _ = listener.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.settimeout(5)
    return sock


def test_bytes_that_lay_there_for_long_are_as_old_as_they_are(
    listener: socket.socket, wire: Wire
) -> None:
    """A client that is busy elsewhere, or one of 64 streams that are read one after the other."""
    exchange = Exchange(b"GET / HTTP/1.1\r\n\r\n")
    wire.start(exchange)
    with closing(accepted(listener)) as server:
        server.recv(100)
        server.sendall(HEAD)
        wire.turn(5)
        sent_ns = time.perf_counter_ns()
        server.sendall(event(b"first"))
        time.sleep(LATE_S)
        wire.turn(5)
    (_, _), (arrived_ns, piece) = exchange.pieces
    assert piece == event(b"first")
    assert 0 <= arrived_ns - sent_ns < LATE_S * 1e9 / 2


def test_what_came_while_the_reader_was_at_others_does_not_make_the_first_event_late(
    listener: socket.socket, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel stamps bytes that it joined with the time of the last of them."""
    exchange = Exchange(b"GET / HTTP/1.1\r\n\r\n")
    wire.start(exchange)
    with closing(accepted(listener)) as server:
        server.recv(100)
        server.sendall(HEAD)
        wire.turn(5)
        server.sendall(event(b"first"))

        def compare_clocks(_: Stamps) -> None:  # called once between the waking and the reading
            time.sleep(LATE_S)
            server.sendall(event(b"second"))
            time.sleep(LATE_S / 10)

        monkeypatch.setattr(Stamps, "compare_clocks", compare_clocks)
        wire.turn(5)
    (_, _), (first_ns, first), (second_ns, second) = exchange.pieces
    assert first + second == event(b"first") + event(b"second")
    assert first.endswith(b"first\n\n")
    assert second_ns - first_ns >= LATE_S * 1e9


def stamped(ns: int) -> list[tuple[int, int, bytes]]:
    data = struct.pack("qq", *divmod(ns, 1_000_000_000))
    return [(socket.SOL_SOCKET, SO_TIMESTAMPNS, data)]


def test_a_stamp_is_turned_into_the_clock_that_intervals_are_measured_by() -> None:
    stamps, day_ns, now_ns = Stamps(), time.time_ns(), time.perf_counter_ns()
    found = stamps.arrival_ns(stamped(day_ns), not_before_ns=now_ns - 10**9, seen_ns=0)
    assert abs(found - now_ns) < 1e7


@pytest.mark.parametrize("step_s", [-3600, -0.5, 0.5, 3600])
def test_a_stamp_of_a_day_that_was_set_meanwhile_is_not_believed(step_s: float) -> None:
    stamps, sent_ns = Stamps(), time.perf_counter_ns()
    wrong = stamped(time.time_ns() + round(step_s * 1e9))
    assert stamps.arrival_ns(wrong, not_before_ns=sent_ns, seen_ns=7) == 7


@pytest.mark.parametrize(
    "ancillary",
    [
        [],
        [(socket.SOL_SOCKET, SO_TIMESTAMPNS + 1, b"x" * 16)],
        [(socket.SOL_SOCKET, SO_TIMESTAMPNS, b"x" * 8)],
    ],
    ids=["none", "another", "torn"],
)
def test_without_a_stamp_the_waking_counts(ancillary: list[tuple[int, int, bytes]]) -> None:
    assert Stamps().arrival_ns(ancillary, not_before_ns=0, seen_ns=7) == 7


def test_the_clock_may_be_set_between_two_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read after a new comparison is on the new time of day."""
    real_ns, step_ns = time.time_ns, 3600 * 10**9
    stamps, floor_ns = Stamps(), time.perf_counter_ns()
    monkeypatch.setattr(time, "time_ns", lambda: real_ns() + step_ns)
    stamps.compare_clocks()
    found = stamps.arrival_ns(stamped(real_ns() + step_ns), not_before_ns=floor_ns, seen_ns=0)
    assert floor_ns <= found <= time.perf_counter_ns()


def test_a_comparison_that_was_torn_apart_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process ran for 50 ms between the readings of the two clocks."""
    real_ns, slow = time.time_ns, iter([True, False])

    def day_ns() -> int:
        now_ns = real_ns()
        if next(slow, False):
            time.sleep(0.05)
        return now_ns

    monkeypatch.setattr(time, "time_ns", day_ns)
    stamps, now_ns = Stamps(), time.perf_counter_ns()
    found = stamps.arrival_ns(stamped(real_ns()), not_before_ns=0, seen_ns=0)
    assert abs(found - now_ns) < 1e7


def test_a_socket_that_takes_no_stamps_is_read_all_the_same() -> None:
    class Refusing:
        def setsockopt(self, *_: object) -> None:
            raise OSError(92, "Protocol not available")

    ask_for_stamps(Refusing())  # type: ignore[arg-type]


def test_a_real_socket_hands_stamps_on(listener: socket.socket) -> None:
    with closing(socket.create_connection(listener.getsockname())) as client:
        ask_for_stamps(client)
        assert are_stamped()
        with closing(accepted(listener)) as server:
            server.sendall(b"x")
        client.settimeout(5)
        _, ancillary, _, _ = client.recvmsg(10, ANCILLARY_BYTES)
    assert [(level, kind) for level, kind, _ in ancillary] == [(socket.SOL_SOCKET, SO_TIMESTAMPNS)]


def test_this_kernel_is_asked_whether_it_stamps() -> None:
    assert are_stamped()


class Forgetful(socket.socket):
    """A socket of a kernel that does not stamp yet, or never does."""

    late = 0

    def recvmsg(self, *sizes: int) -> tuple[bytes, list[tuple[int, int, bytes]], int, object]:
        data, ancillary, flags, address = super().recvmsg(*sizes)
        type(self).late -= 1
        return data, [] if type(self).late >= 0 else ancillary, flags, address


@pytest.mark.parametrize(("late", "stamped"), [(3, True), (10**9, False)])
def test_stamping_may_begin_late_or_never(
    monkeypatch: pytest.MonkeyPatch, late: int, stamped: bool
) -> None:
    """Linux switches it on a few ms after the first socket asks: a first look would say no."""
    real = socket.create_connection

    def connect(address: tuple[str, int]) -> Forgetful:
        with closing(real(address)) as sock:
            return Forgetful(fileno=os.dup(sock.fileno()))

    monkeypatch.setattr(Forgetful, "late", late)
    monkeypatch.setattr(socket, "create_connection", connect)
    assert are_stamped() == stamped


def test_a_wire_is_warm_when_its_packets_are_stamped(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the first answers of a run without warm-up have no stamps."""
    asked = []
    monkeypatch.setattr(wire_module, "are_stamped", lambda: asked.append(1))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with closing(Wire(url, timeout_s=1, stall_s=1)) as made:
        made.warm(1)
        made.warm(2)
    assert asked == [1]
