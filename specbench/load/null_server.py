"""A server with no model behind it: it answers at a set pace and keeps the times it sent at.

    python -m specbench.load.null_server [--ttft-ms 20] [--gap-ms 5] [--tokens 1] [--port 0]

What a client measures against it, less what it measured itself, is the client's error. Its times
are `time.perf_counter_ns`, which on Linux is CLOCK_MONOTONIC: one clock for all processes of a
boot. A request counts as received when its last byte arrived, by the kernel's stamp (`arrivals`), a
chunk as sent just before the call that sends it. Deadlines are absolute, so that lateness of one chunk does not move the next.

GET /log is what was served, a JSON object a line; DELETE /log forgets it; POST /pace with
{"ttft_ms", "gap_ms", "tokens"} sets another pace for the requests to come. One thread, one loop;
the standard library only, because it must start in no time.
"""

import argparse
import ctypes
import gc
import hashlib
import heapq
import itertools
import json
import select
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from specbench.load import null_format
from specbench.load.arrivals import ANCILLARY_BYTES, Stamps, ask_for_stamps

SPIN_NS = 60_000  # before a deadline: sleeping until then would often end late
PR_SET_TIMERSLACK = 29
READABLE, WRITABLE = select.EPOLLIN, select.EPOLLOUT
START_S = 20.0


@dataclass
class Pace:
    """When the first chunk is due after the request, and the later ones after each other.

    `tokens` is how many each chunk but the first carries, over and over.
    """

    ttft_ns: int
    gap_ns: int
    tokens: tuple[int, ...] = (1,)

    @classmethod
    def of(cls, ttft_ms: float, gap_ms: float, tokens: Sequence[int]) -> "Pace":
        """A pace in milliseconds."""
        return cls(round(ttft_ms * 1e6), round(gap_ms * 1e6), tuple(tokens))


@dataclass
class Served:
    """One request as the server knows it; `sent_ns` and `tokens` have an entry for each chunk.

    `prompt_sha256` is that of RequestRecord: by it a client's records find their requests.
    """

    prompt_sha256: str
    path: str
    ttft_ns: int
    gap_ns: int
    received_ns: int
    sent_ns: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


@dataclass(eq=False)
class _Peer:
    """A connection: what it sent that is not handled yet, and the answer under way."""

    sock: socket.socket
    unread: bytes = b""
    unsent: bytes = b""
    told_to_go_on: bool = False
    is_last: bool = False  # it asked for the connection to be closed then
    read_ns: int = 0
    served: Served | None = None
    chunk: bytes = b""  # the one that is due next
    later: Iterator[bytes] = field(default_factory=lambda: iter(()))
    due_ns: int = 0


class Loop:
    """Answers on *listener* at *pace*; `serve` never returns."""

    def __init__(self, listener: socket.socket, pace: Pace) -> None:
        self._listener, self._pace = listener, pace
        listener.setblocking(False)
        self._epoll = select.epoll()
        self._epoll.register(listener.fileno(), READABLE)
        self._stamps = Stamps()
        self._peers: dict[int, _Peer] = {}
        self._due: list[tuple[int, int, _Peer]] = []
        self._arrived: deque[_Peer] = deque()
        self._log: list[tuple[Served, Any]] = []
        self._numbers = itertools.count(1)

    def serve(self) -> None:
        """Answer until killed.

        One step at a time, and a look at what has arrived in between: a request must not seem to
        come later than it did because others were being handled.
        """
        clock, due, epoll = time.perf_counter_ns, self._due, self._epoll
        listens_at, waiting = self._listener.fileno(), [epoll.fileno()]
        while True:
            if self._arrived:
                pass
            elif not due:
                select.select(waiting, [], [])
            elif (left_ns := due[0][0] - clock() - SPIN_NS) > 0:
                select.select(waiting, [], [], left_ns / 1e9)  # finer than epoll's milliseconds
            now_ns = clock()
            for fd, event in epoll.poll(0):
                if fd == listens_at:
                    self._accept()
                elif (peer := self._peers.get(fd)) is not None:
                    self._look_at(peer, event, now_ns)
            if due and due[0][0] <= clock():
                self._beat(heapq.heappop(due)[2])
            elif self._arrived:
                self._take_requests(self._arrived.popleft())

    # --- connections -----------------------------------------------------------------------------

    def _accept(self) -> None:
        with suppress(BlockingIOError):
            while True:
                sock, _ = self._listener.accept()
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                ask_for_stamps(sock)
                self._peers[sock.fileno()] = _Peer(sock)
                self._epoll.register(sock.fileno(), READABLE)

    def _look_at(self, peer: _Peer, event: int, now_ns: int) -> None:
        try:
            if event & WRITABLE:
                unsent, peer.unsent = peer.unsent, b""
                self._epoll.modify(peer.sock.fileno(), READABLE)
                self._write(peer, unsent)
            if event & ~WRITABLE:
                piece, stamp, _, _ = peer.sock.recvmsg(1 << 20, ANCILLARY_BYTES)
                if not piece:
                    self._drop(peer)
                    return
                peer.unread += piece
                self._stamps.compare_clocks()
                peer.read_ns = self._stamps.arrival_ns(
                    stamp, not_before_ns=peer.read_ns, seen_ns=now_ns
                )
                self._arrived.append(peer)
        except BlockingIOError:
            pass
        except OSError:
            self._drop(peer)

    def _drop(self, peer: _Peer) -> None:
        if self._peers.pop(peer.sock.fileno(), None):
            self._epoll.unregister(peer.sock.fileno())
            peer.sock.close()
            peer.served = None

    def _write(self, peer: _Peer, data: bytes) -> None:
        """Send what can be sent, and the rest when the client has read."""
        if not peer.unsent:
            done = 0
            with suppress(BlockingIOError):
                done = peer.sock.send(data)
            if done == len(data):
                return
            data = data[done:]
            self._epoll.modify(peer.sock.fileno(), READABLE | WRITABLE)
        peer.unsent += data

    # --- answers ---------------------------------------------------------------------------------

    def _beat(self, peer: _Peer) -> None:
        """Send the chunk that is due, and after the last one the end of the stream."""
        served = peer.served
        if served is None:  # the client has gone
            return
        try:
            served.sent_ns.append(time.perf_counter_ns())
            self._write(peer, peer.chunk)
            peer.chunk = next(peer.later)
            if len(served.sent_ns) < len(served.tokens):
                peer.due_ns += served.gap_ns
                heapq.heappush(self._due, (peer.due_ns, next(self._numbers), peer))
                return
            self._write(peer, peer.chunk)
        except OSError:
            self._drop(peer)
            return
        peer.served = None
        if peer.is_last:
            self._drop(peer)
        elif peer.unread:
            self._arrived.append(peer)

    def _take_requests(self, peer: _Peer) -> None:
        """Handle what is complete; a stream comes to its end before the next request's turn."""
        while peer.served is None and b"\r\n\r\n" in peer.unread:
            head, _, rest = peer.unread.partition(b"\r\n\r\n")
            request, *lines = head.decode("latin-1").split("\r\n")
            fields = {
                name.lower(): value.strip()
                for name, _, value in (line.partition(":") for line in lines)
            }
            length = int(fields.get("content-length", 0))
            if len(rest) < length:
                if "expect" in fields and not peer.told_to_go_on:
                    peer.told_to_go_on = True
                    self._write(peer, b"HTTP/1.1 100 Continue\r\n\r\n")
                return
            peer.unread, peer.told_to_go_on = rest[length:], False
            peer.is_last = fields.get("connection", "").lower() == "close"
            method, path, *_ = [*request.split(" "), "", ""]
            try:
                self._handle(peer, method, path.partition("?")[0], rest[:length])
            except OSError:
                self._drop(peer)
                return

    def _handle(self, peer: _Peer, method: str, path: str, body: bytes) -> None:
        try:
            asked = json.loads(body) if body else {}
        except ValueError:
            self._write(peer, _error("400 Bad Request", "the body is not JSON"))
            return
        if method == "POST" and path.endswith("/completions"):
            self._answer(peer, path, asked)
            return
        if method == "POST" and path == "/pace":
            self._pace = Pace.of(asked["ttft_ms"], asked["gap_ms"], asked["tokens"])
            answer = null_format.page("application/json", b"{}")
        elif method in ("GET", "HEAD", "DELETE"):
            answer = self._page(method, path)
        else:
            answer = _error("404 Not Found", f"there is no {path} here")
        self._write(peer, answer)
        if peer.is_last:
            self._drop(peer)

    def _answer(self, peer: _Peer, path: str, asked: dict[str, Any]) -> None:
        """Begin an answer: its head at once, its chunks when they are due."""
        pace, order = self._pace, null_format.order_of(path, asked)
        served = Served("", path, pace.ttft_ns, pace.gap_ns, peer.read_ns)
        number = next(self._numbers)
        if order.streams:
            self._write(peer, null_format.HEAD)
            served.tokens = null_format.counts(order.tokens, pace.tokens)
            peer.later = null_format.sends(order, served.tokens, number)
        else:
            served.tokens = [order.tokens]
            peer.later = iter((null_format.whole(order, number), b""))
        peer.chunk = next(peer.later)
        self._log.append((served, asked.get("messages", asked.get("prompt"))))
        peer.served = served
        peer.due_ns = peer.read_ns + pace.ttft_ns
        heapq.heappush(self._due, (peer.due_ns, number, peer))

    def _page(self, method: str, path: str) -> bytes:
        if path == "/log" and method == "DELETE":
            self._log.clear()
            return null_format.page("application/json", b"{}")
        if path == "/log":
            lines = (json.dumps(_log_line(served, said)) for served, said in self._log)
            return null_format.page("application/jsonl", "\n".join(lines).encode())
        pages = {
            "/": b"{}",
            "/health": b"",
            "/version": b'{"version": "0.32.0"}',
            "/v1/models": b'{"object": "list", "data": [{"id": "nothing", "object": "model"}]}',
            "/metrics": b'vllm:request_success_total{finished_reason="length"} %d\n'
            % len(self._log),
        }
        if path not in pages:
            return _error("404 Not Found", f"there is no {path} here")
        kind = "text/plain" if path == "/metrics" else "application/json"
        answer = null_format.page(kind, pages[path])
        return answer[: answer.index(b"\r\n\r\n") + 4] if method == "HEAD" else answer


def _error(status: str, message: str) -> bytes:
    body = json.dumps({"error": {"message": message, "code": int(status[:3])}}).encode()
    return null_format.page("application/json", body, status)


def _log_line(served: Served, said: object) -> dict[str, Any]:
    digest = hashlib.sha256(json.dumps(said).encode()).hexdigest()
    return {**vars(served), "prompt_sha256": digest}


# --- for the process that measures ---------------------------------------------------------------


class NullServer:
    """A null server that runs as a process of its own, `pid`, at `url`."""

    model = "nothing"  # not "null": tools that take YAML would read that as None

    def __init__(self, port: int, pid: int) -> None:
        self.port, self.url, self.pid = port, f"http://127.0.0.1:{port}", pid

    def pace(self, *, ttft_ms: float, gap_ms: float, tokens: Sequence[int] = (1,)) -> None:
        """From the next request on: another pace."""
        body = json.dumps({"ttft_ms": ttft_ms, "gap_ms": gap_ms, "tokens": list(tokens)})
        self._ask("POST", "/pace", body)

    def log(self) -> list[Served]:
        """What was served since the last `forget`."""
        return [Served(**json.loads(line)) for line in self._ask("GET", "/log").splitlines()]

    def forget(self) -> None:
        """Start a new log."""
        self._ask("DELETE", "/log")

    def _ask(self, method: str, path: str, body: str | None = None) -> bytes:
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, body)
            return connection.getresponse().read()
        finally:
            connection.close()


@contextmanager
def running() -> Iterator[NullServer]:
    """A null server for as long as the block lasts.

    Raises:
        EngineError: it did not start.
    """
    from specbench.engines.process import Child  # the server itself has no use for it

    with tempfile.TemporaryDirectory(prefix="specbench-null-") as place:
        log = Path(place, "log")
        argv = [sys.executable, "-m", "specbench.load.null_server"]
        here = {"PYTHONPATH": str(Path(__file__).parents[2])}  # this specbench, installed or not
        with Child(argv, log=log, cwd=Path(place), env=here, patience_s=1) as child:
            began = time.monotonic()
            while not (said := log.read_bytes()).endswith(b"\n"):
                if child.poll() is not None or time.monotonic() - began > START_S:
                    raise child.failed("The null server did not start.")
                time.sleep(0.002)
            yield NullServer(int(said.split()[-1]), child.pid)


def main() -> None:
    """The command line above; says on which port it listens."""
    parser = argparse.ArgumentParser(prog="specbench.load.null_server", description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--ttft-ms", type=float, default=20)
    parser.add_argument("--gap-ms", type=float, default=5)
    parser.add_argument("--tokens", default="1", help="of each chunk, e.g. 1,3,2 over and over")
    args = parser.parse_args()
    tokens = [int(n) for n in args.tokens.split(",")]
    # The kernel wakes a thread up to 50 us late, to save wake-ups. Linux only, as is epoll.
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0)
    gc.disable()
    with socket.create_server(("127.0.0.1", args.port), backlog=1024) as listener:
        print(f"listening on port {listener.getsockname()[1]}", flush=True)
        Loop(listener, Pace.of(args.ttft_ms, args.gap_ms, tokens)).serve()


if __name__ == "__main__":
    main()
