"""Connections to one server in one loop, whose pieces are stamped by the kernel as they arrive.

Where the kernel has no stamp (TLS, see `arrivals`) it is the time of waking: reading the clock is the
first act then, and nothing is parsed and nothing but the piece itself is made between that and the
next read. Epoll itself, not `selectors`: what that does before it returns runs cold after each
wait, and took 16 us of 84. Linux only, as is all that starts engines here. Connections are kept, so
that no request pays for a handshake; one that the server has closed is opened again before the
request is stamped as sent.
"""

import errno
import gc
import math
import os
import select
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from specbench.load.arrivals import ANCILLARY_BYTES, Stamps, are_stamped, ask_for_stamps
from specbench.load.clocks import FREEZES
from specbench.load.http1 import Ending

READ_BYTES = 65536
CONNECT_S = 10.0
SWITCH_S = 20e-6  # how long another thread may hold the interpreter once bytes have arrived
READ, WRITE = select.EPOLLIN, select.EPOLLOUT
NEVER = 1 << 62  # ns
LOOK_S = 0.25  # the longest wait in one go: a process that wakes much later was frozen
EVENT_END = b"\n\n"


@contextmanager
def undisturbed() -> Iterator[None]:
    """No garbage collection, and threads that yield soon, while arrivals are being stamped."""
    was_on, interval = gc.isenabled(), sys.getswitchinterval()
    gc.disable()
    gc.freeze()
    sys.setswitchinterval(SWITCH_S)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        gc.unfreeze()
        if was_on:
            gc.enable()


@dataclass(eq=False, slots=True)
class Exchange:
    """One request and what came back: `pieces` are (arrival in ns, bytes as they came).

    `sent_ns` is taken just before the first byte goes out. `problem` is set where the exchange
    was given up; without one, the answer may still be no good (http1.body).
    """

    request: bytes
    sent_ns: int = 0
    end_ns: int = 0
    pieces: list[tuple[int, bytes]] = field(default_factory=list)
    problem: str | None = None


class _Connection:
    """A socket on its way through: connecting, idle, or busy with an exchange."""

    __slots__ = (
        "deadline_ns",
        "ending",
        "exchange",
        "fd",
        "quiet_ns",
        "ready",
        "sock",
        "unsent",
        "used",
    )

    def __init__(self, sock: socket.socket, deadline_ns: int, exchange: Exchange | None) -> None:
        self.sock, self.fd, self.exchange = sock, sock.fileno(), exchange
        self.deadline_ns = self.quiet_ns = deadline_ns
        self.ready = self.used = False
        self.unsent = memoryview(b"")
        self.ending = Ending()


class Wire:
    """Sends exchanges to the server at *url* and collects what comes back; single-threaded.

    *timeout_s* limits an exchange, *stall_s* the time without a byte. *clock* is in ns; with another
    than the default the kernel's stamps are of no use.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float,
        stall_s: float,
        clock: Callable[[], int] = time.perf_counter_ns,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        parts = urlsplit(url)
        self._tls = (tls or _tls_context()) if parts.scheme == "https" else None
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if self._tls else 80)
        self._timeout_s, self._stall_s, self._clock = timeout_s, stall_s, clock
        self._timeout_ns, self._stall_ns = round(timeout_s * 1e9), round(stall_s * 1e9)
        is_kernels = clock is time.perf_counter_ns and self._tls is None
        self._stamps = Stamps() if is_kernels else None
        self._has_warmed = False
        self._left_ns: int | None = None  # the end of the last turn, where something was in flight
        self._address: tuple[socket.AddressFamily, tuple[str, int]] | None = None
        self._epoll = select.epoll()
        self._by_fd: dict[int, _Connection] = {}
        self._idle: list[_Connection] = []
        self._at_work: set[_Connection] = set()  # connecting or busy
        self._ended: list[Exchange] = []
        self._check_ns = NEVER  # no limit is reached before

    def close(self) -> None:
        """Close every connection."""
        for connection in [*self._idle, *self._at_work]:
            self._drop(connection)
        self._epoll.close()

    def forget(self) -> None:
        """Give up what is in flight, where the sending broke off; nothing where it did not."""
        for connection in list(self._at_work):
            self._drop(connection)
        self._ended.clear()
        self._left_ns = None

    def warm(self, count: int) -> None:
        """Have *count* idle connections; one that fails will fail again, and say so, in `start`.

        And have the kernel stamp what comes over them. Not while exchanges are in flight.
        """
        for connection in [c for c in self._idle if not _is_alive(c)]:
            self._drop(connection)
        with suppress(OSError):
            while len(self._idle) + len(self._at_work) < count:
                self._open(None)
        while any(c.exchange is None for c in self._at_work):
            self.turn(CONNECT_S)
        if self._stamps is not None and not self._has_warmed:
            with suppress(OSError):  # no socket is left, or no address of this machine
                are_stamped()  # which waits until they are: our own sockets keep that going
        self._has_warmed = True

    def start(self, exchange: Exchange) -> None:
        """Send the request now, or as soon as a connection is open."""
        while self._idle:
            connection = self._idle.pop()
            if _is_alive(connection):
                connection.exchange = exchange
                self._at_work.add(connection)
                self._send(connection)
                return
            self._drop(connection)
        exchange.sent_ns = self._clock()
        try:
            self._open(exchange)
        except OSError as error:
            self._end_early(exchange, f"the request failed: {_connect_error(error)}")

    def turn(self, timeout_s: float | None) -> list[Exchange]:
        """Wait once, at most *timeout_s* or LOOK_S, and take what arrived; the exchanges that ended."""
        patience_s = self._patience_s(timeout_s)
        # With exchanges in flight nobody does anything long between two turns.
        began_ns = time.monotonic_ns() if self._left_ns is None else self._left_ns
        ready = self._epoll.poll(patience_s)
        now_ns = self._clock()
        FREEZES.woke(time.monotonic_ns() - began_ns - round(patience_s * 1e9))
        if ready and self._stamps is not None:
            self._stamps.compare_clocks()
        for fd, events in ready:
            connection = self._by_fd.get(fd)
            if connection is None:  # dropped in this turn
                continue
            if connection.ready and connection.exchange is not None:
                if events & ~WRITE:  # what can be read, or an error that reading tells
                    self._read(connection, connection.exchange, now_ns)
                if events & WRITE and connection.exchange is not None:
                    self._send_rest(connection)
            elif connection.ready:  # idle: the server closed it
                self._drop(connection)
            else:
                self._open_further(connection)
        if now_ns >= self._check_ns:
            self._check_limits(now_ns)
        ended, self._ended = self._ended, []
        in_flight = any(connection.exchange is not None for connection in self._at_work)
        self._left_ns = time.monotonic_ns() if in_flight else None
        return ended

    def _patience_s(self, timeout_s: float | None) -> float:
        if self._ended:
            return 0
        timeout_s = LOOK_S if timeout_s is None else min(timeout_s, LOOK_S)
        if self._check_ns != NEVER:
            left_s = max(0.0, (self._check_ns - self._clock()) / 1e9)
            timeout_s = min(timeout_s, left_s)
        return timeout_s

    # --- opening ---------------------------------------------------------------------------------

    def _open(self, exchange: Exchange | None) -> None:
        """Begin a connection. The first one finds out the address, and blocks for that."""
        deadline_ns = self._clock() + round(CONNECT_S * 1e9)
        if self._address is None:
            sock = socket.create_connection((self._host, self._port), timeout=CONNECT_S)
            self._address = (socket.AddressFamily(sock.family), sock.getpeername())
        else:
            family, address = self._address
            sock = socket.socket(family, socket.SOCK_STREAM)
            sock.setblocking(False)
            if (code := sock.connect_ex(address)) not in (0, errno.EINPROGRESS):
                sock.close()
                raise OSError(code, os.strerror(code))
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._stamps is not None:
            ask_for_stamps(sock)
        connection = _Connection(sock, deadline_ns, exchange)
        self._at_work.add(connection)
        self._check_ns = min(self._check_ns, deadline_ns)
        self._by_fd[connection.fd] = connection
        self._epoll.register(connection.fd, WRITE)

    def _open_further(self, connection: _Connection) -> None:
        """The next step to a usable connection: connected, and with TLS hands shaken."""
        sock = connection.sock
        try:
            if code := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(code, os.strerror(code))
            if self._tls and not isinstance(sock, ssl.SSLSocket):
                sock = connection.sock = self._tls.wrap_socket(
                    sock, server_hostname=self._host, do_handshake_on_connect=False
                )
            if isinstance(sock, ssl.SSLSocket):
                sock.do_handshake()
        except ssl.SSLWantReadError:
            self._epoll.modify(connection.fd, READ)
        except ssl.SSLWantWriteError:
            self._epoll.modify(connection.fd, WRITE)
        except OSError as error:
            self._give_up(connection, f"the request failed: {_connect_error(error)}")
        else:
            connection.ready = True
            self._epoll.modify(connection.fd, READ)
            if connection.exchange is None:
                self._rest(connection)
            else:
                self._send(connection)

    # --- an exchange -----------------------------------------------------------------------------

    def _send(self, connection: _Connection) -> None:
        exchange = connection.exchange
        assert exchange is not None
        connection.ending = Ending()
        request, send = exchange.request, connection.sock.send
        exchange.sent_ns = sent_ns = self._clock()
        try:
            done = send(request)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            done = 0
        except OSError as error:
            self._broken(connection, exchange, f"WriteError: {error}")
            return
        connection.deadline_ns = sent_ns + self._timeout_ns
        connection.quiet_ns = sent_ns + self._stall_ns
        self._check_ns = min(self._check_ns, connection.deadline_ns, connection.quiet_ns)
        if done < len(request):
            connection.unsent = memoryview(request)[done:]
            self._epoll.modify(connection.fd, READ | WRITE)

    def _send_rest(self, connection: _Connection) -> None:
        assert connection.exchange is not None
        try:
            done = connection.sock.send(connection.unsent)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return
        except OSError as error:
            self._broken(connection, connection.exchange, f"WriteError: {error}")
            return
        connection.unsent = connection.unsent[done:]
        if not connection.unsent:
            self._epoll.modify(connection.fd, READ)

    def _read(self, connection: _Connection, exchange: Exchange, now_ns: int) -> None:
        """Take what is there. TLS may hold more than it shows, so there all of it."""
        while True:
            try:
                piece = self._receive(connection.sock, exchange, now_ns)
            except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return
            except OSError as error:
                self._broken(connection, exchange, f"ReadError: {error}")
                return
            if not piece:
                self._broken(connection, exchange, None)
                return
            connection.quiet_ns = now_ns + self._stall_ns
            if connection.ending.take(piece):
                exchange.problem = connection.ending.problem
                self._end(connection, exchange)
                return
            if self._tls is None:
                return

    def _receive(self, sock: socket.socket, exchange: Exchange, now_ns: int) -> bytes:
        """Read once and keep it with its arrival; empty at the connection's end."""
        pieces, stamps = exchange.pieces, self._stamps
        if stamps is None:
            if piece := sock.recv(READ_BYTES):
                pieces.append((now_ns, piece))
            return piece
        piece, stamp, _, _ = sock.recvmsg(READ_BYTES, ANCILLARY_BYTES)
        if not piece:
            return piece
        latest_ns = pieces[-1][0] if pieces else exchange.sent_ns
        arrived_ns = stamps.arrival_ns(stamp, not_before_ns=latest_ns, seen_ns=now_ns)
        # Bytes that waited together have the stamp of the last packet. Where that came after the
        # waking, the first of several events did not: something could be read then.
        end = piece.find(EVENT_END) + len(EVENT_END)
        if latest_ns <= now_ns < arrived_ns and end > 1 and EVENT_END in piece[end:]:
            pieces += (now_ns, piece[:end]), (arrived_ns, piece[end:])
        else:
            pieces.append((arrived_ns, piece))
        return piece

    def _broken(self, connection: _Connection, exchange: Exchange, how: str | None) -> None:
        """The connection is at its end (*how* None) or lost, and with it the exchange.

        Unless the server gave up an idle connection just when the request went out: once more then.
        """
        connection.ending.reusable = False
        if connection.used and not exchange.pieces:
            connection.exchange = None
            self._drop(connection)
            self.start(exchange)
            return
        what = "the stream was cut" if exchange.pieces else "the request failed"
        exchange.problem = f"{what}: {how}" if how else None
        self._end(connection, exchange)

    def _end(self, connection: _Connection, exchange: Exchange) -> None:
        is_whole = exchange.problem is None and exchange.pieces
        exchange.end_ns = exchange.pieces[-1][0] if is_whole else self._clock()
        self._ended.append(exchange)
        connection.exchange = None
        if connection.ending.reusable and not connection.unsent:
            self._rest(connection)
        else:
            self._drop(connection)

    def _rest(self, connection: _Connection) -> None:
        self._at_work.discard(connection)
        connection.used = True
        self._idle.append(connection)

    def _give_up(self, connection: _Connection, problem: str) -> None:
        exchange, connection.exchange = connection.exchange, None
        self._drop(connection)
        if exchange is not None:
            self._end_early(exchange, problem)

    def _end_early(self, exchange: Exchange, problem: str) -> None:
        exchange.problem, exchange.end_ns = problem, self._clock()
        self._ended.append(exchange)

    def _drop(self, connection: _Connection) -> None:
        if connection.fd < 0:  # dropped already, in the same turn
            return
        del self._by_fd[connection.fd]
        with suppress(OSError):  # closed already, as a failed TLS wrapper does
            self._epoll.unregister(connection.fd)
        connection.fd = -1
        self._at_work.discard(connection)
        with suppress(ValueError):
            self._idle.remove(connection)
        connection.sock.close()

    def _check_limits(self, now_ns: int) -> None:
        """Give up what took too long, and note when to look again."""
        for connection in list(self._at_work):
            if now_ns >= connection.deadline_ns and not connection.ready:
                self._give_up(connection, "the request failed: ConnectTimeout")
            elif now_ns >= connection.deadline_ns:
                limit = f"{self._timeout_s:g} s (load.timeout_s)"
                self._give_up(connection, f"no complete answer within {limit}")
            elif now_ns >= connection.quiet_ns:
                self._give_up(connection, f"no data for {self._stall_s:g} s (load.stall_s)")
        limits = (min(c.deadline_ns, c.quiet_ns) for c in self._at_work)
        self._check_ns = min(limits, default=NEVER)


def _is_alive(connection: _Connection) -> bool:
    """Whether an idle connection is still open, and has nothing to say that nobody asked for."""
    try:
        connection.sock.recv(1)
    except (BlockingIOError, ssl.SSLWantReadError):
        return True
    except OSError:
        return False
    return False


def _tls_context() -> ssl.SSLContext:
    """The certificates that the rest of specbench trusts; loading them costs 50 ms."""
    import httpx

    context = httpx.create_ssl_context(trust_env=False)
    context.set_alpn_protocols(["http/1.1"])
    return context


def _connect_error(error: OSError) -> str:
    return "ConnectTimeout" if isinstance(error, TimeoutError) else f"ConnectError: {error}"


def until(due_ns: int, now_ns: int) -> float:
    """Seconds that `turn` may wait for *due_ns*: whole milliseconds, as epoll would round them up.

    0 in the last one, so that the caller looks at the clock instead of oversleeping.
    """
    return max(0, math.floor((due_ns - now_ns) / 1e6)) / 1e3
