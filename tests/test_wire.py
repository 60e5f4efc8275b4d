"""The client's own wire: stamps where they belong, and an answer for whatever a server does."""

import contextlib
import gc
import itertools
import shutil
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbench.errors import LoadError
from specbench.load import http1
from specbench.load.http1 import AnswerError, Ending, Site, body
from specbench.load.wire import Exchange, Wire, undisturbed, until

OK = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"
EVENTS = [b"data: one\n\n", b"data: two\n\n", b"data: 0\n\n"]
END = b"0\r\n\r\n"
TOO_LONG = "no complete answer within 0.1 s (load.timeout_s)"


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)


STREAM = CHUNKED + chunked(*EVENTS) + END
COUNTED = OK + b"content-length: %d\r\n\r\n" % len(b"".join(EVENTS)) + b"".join(EVENTS)


def pieces_of(stream: bytes, cuts: Sequence[int]) -> list[tuple[int, bytes]]:
    edges = [0, *cuts, len(stream)]
    return [(i, stream[a:b]) for i, (a, b) in enumerate(itertools.pairwise(edges)) if a < b]


def said(stream: bytes, *, whole: bool = True) -> bytes:
    return b"".join(data for _, data in body([(0, stream)], whole=whole))


# --- the end of an answer, and its body ----------------------------------------------------------


@pytest.mark.parametrize("stream", [STREAM, COUNTED], ids=["chunked", "counted"])
@given(data=st.data())
def test_an_answer_ends_with_its_last_byte_however_it_is_cut(
    stream: bytes, data: st.DataObject
) -> None:
    cuts = data.draw(st.lists(st.integers(1, len(stream) - 1), max_size=12).map(sorted))
    pieces, ending = pieces_of(stream, cuts), Ending()
    assert [ending.take(piece) for _, piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert ending.reusable
    assert b"".join(data for _, data in body(pieces, whole=True)) == b"".join(EVENTS)


@given(cuts=st.lists(st.integers(1, len(STREAM) - 1), max_size=12).map(sorted))
def test_each_byte_of_a_body_has_the_time_of_its_piece(cuts: list[int]) -> None:
    pieces = pieces_of(STREAM, cuts)
    alone = dict.fromkeys(dict(pieces), b"")
    for arrived_ns, data in body(pieces, whole=True):
        assert data in dict(pieces)[arrived_ns]
        alone[arrived_ns] += data
    assert b"".join(alone.values()) == b"".join(EVENTS)


@pytest.mark.parametrize(
    ("stream", "reusable"),
    [
        (CHUNKED + END, True),
        (CHUNKED + chunked(b"a") + b"0\r\nserver-timing: x\r\n\r\n", True),
        (b"HTTP/1.1 103 Early Hints\r\nlink: a\r\n\r\n" + STREAM, True),
        (STREAM.replace(b"200 OK\r\n", b"200 OK\r\nConnection: Close\r\n"), False),
        (COUNTED.replace(b"HTTP/1.1", b"HTTP/1.0"), False),
        (b"HTTP/1.1 204 No Content\r\n\r\n", True),
        (OK + b"content-length: 0\r\n\r\n", True),
        (COUNTED + b"beyond", False),
    ],
)
def test_whether_a_connection_is_of_use_afterwards(stream: bytes, reusable: bool) -> None:
    ending = Ending()
    assert ending.take(stream)
    assert ending.reusable is reusable


def test_events_that_end_in_crlf_are_not_taken_for_the_end() -> None:
    ending = Ending()
    event = chunked(b"data: 0\r\n\r\n")
    assert [ending.take(piece) for piece in (CHUNKED, event, event, END)] == [False] * 3 + [True]


def test_an_answer_without_a_length_ends_with_the_connection() -> None:
    assert not Ending().take(OK + b"\r\ndata: a\n\n")
    assert said(OK + b"\r\ndata: a\n\n") == b"data: a\n\n"


@pytest.mark.parametrize(
    ("stream", "problem"),
    [
        (b"", "the request failed: RemoteProtocolError: the server closed the connection before"),
        (OK, "the request failed: RemoteProtocolError: the server closed the connection before"),
        (b"SSH-2.0-x\r\n\r\n", "the request failed: RemoteProtocolError: illegal status line"),
        (STREAM[:-5], "the stream was cut: RemoteProtocolError: peer closed"),
        (COUNTED[:-1], "the stream was cut: RemoteProtocolError: peer closed"),
        (STREAM.replace(b"b\r\ndata", b"x\r\ndata"), "RemoteProtocolError: illegal chunk header"),
        (b"HTTP/1.1 302 Found\r\nlocation: /b\r\ncontent-length: 0\r\n\r\n", "HTTP 302"),
        (b"HTTP/1.1 500 Oops\r\n\r\nout of  memory ", "HTTP 500: out of  memory"),
        (b"HTTP/1.1 503 No\r\ncontent-length: 9\r\n\r\nnot", "HTTP 503: not"),
        (
            b'HTTP/1.1 400 Bad\r\ncontent-length: 32\r\n\r\n{"error":{"message":"too long"}}',
            "HTTP 400: too long",
        ),
        (
            STREAM.replace(b"200 OK\r\n", b"200 OK\r\ncontent-encoding: gzip\r\n"),
            "the server compressed its answer (gzip)",
        ),
    ],
)
def test_an_answer_that_is_none_is_named(stream: bytes, problem: str) -> None:
    with pytest.raises(AnswerError) as caught:
        said(stream)
    assert str(caught.value).startswith(problem) or problem in str(caught.value)


def test_an_answer_that_was_given_up_keeps_what_came() -> None:
    assert said(STREAM[:-20], whole=False).startswith(EVENTS[0])


def test_answers_without_end_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http1, "MAX_ANSWER_BYTES", 1 << 20)
    ending = Ending()
    assert not ending.take(CHUNKED)
    assert [ending.take(bytes(1 << 19)) for _ in range(3)] == [False, False, True]
    assert ending.problem == "the answer is over 1 MB"
    head = Ending()
    assert any(head.take(b"x-a: b\r\n" * 1000) for _ in range(10))
    assert head.problem == "the answer's head is over 64 kB"


def test_a_refusal_is_read_for_four_kilobytes_only() -> None:
    ending = Ending()
    assert not ending.take(b"HTTP/1.1 500 Oops\r\n\r\n")
    assert [ending.take(b"x" * 1000) for _ in range(5)] == [False] * 4 + [True]
    assert ending.problem is None  # the status says enough


@given(st.lists(st.binary(max_size=80), max_size=5), st.sampled_from([b"", OK, CHUNKED]))
def test_no_bytes_make_it_raise_anything_else(parts: list[bytes], start: bytes) -> None:
    ending = Ending()
    stream = [start, *parts]
    for part in stream:
        ending.take(part)
    with contextlib.suppress(AnswerError):
        list(body([(0, part) for part in stream if part], whole=True))


def test_a_request_goes_out_whole() -> None:
    sent = Site("http://[::1]:8000/base/", "secret").post("/v1/x", b"{}")
    head, _, payload = sent.partition(b"\r\n\r\n")
    assert payload == b"{}"
    assert head.split(b"\r\n")[0] == b"POST /base/v1/x HTTP/1.1"
    assert {b"host: [::1]:8000", b"content-length: 2", b"authorization: Bearer secret"} <= set(
        head.split(b"\r\n")
    )


@pytest.mark.parametrize("key", ["two\r\nlines", "schlüssel\u2028"])
def test_an_api_key_that_fits_in_no_header_is_refused(key: str) -> None:
    with pytest.raises(LoadError, match="API key"):
        Site("http://a", key).post("/", b"")


# --- sockets -------------------------------------------------------------------------------------

Step = bytes | Callable[[socket.socket], None]


def read_request(sock: socket.socket) -> bytes:
    """The payload of the next request; empty when the client has gone."""
    data = b""
    while b"\r\n\r\n" not in data:
        if not (piece := sock.recv(65536)):
            return b""
        data += piece
    head, _, payload = data.partition(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    parts = bytearray(payload)
    while len(parts) < length:
        parts += sock.recv(1 << 20)
    return bytes(parts)


class Scripted:
    """Plays one script on each connection, in the order in which they come; counts them.

    A script is a list of answers, one a request; an answer is what is sent and done, step by step.
    The connection is closed after the last.
    """

    def __init__(
        self, scripts: Sequence[Sequence[Sequence[Step]]], tls: ssl.SSLContext | None
    ) -> None:
        self.requests: list[bytes] = []
        self.connections = 0
        self._scripts, self._tls = list(scripts), tls
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http{'s' if tls else ''}://localhost:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def stop(self) -> None:
        with contextlib.suppress(OSError):  # stopped already
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(5)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                script = self._scripts[min(self.connections, len(self._scripts) - 1)]
                self.connections += 1
                thread = threading.Thread(target=self._play, args=(sock, script))
                self._threads.append(thread)
                thread.start()

    def _play(self, sock: socket.socket, script: Sequence[Sequence[Step]]) -> None:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            if self._tls:
                sock = self._tls.wrap_socket(sock, server_side=True)
            stack.callback(sock.close)
            sock.settimeout(10)
            for answer in script:
                if not (payload := read_request(sock)):
                    return
                self.requests.append(payload)
                for step in answer:
                    sock.sendall(step) if isinstance(step, bytes) else step(sock)


@pytest.fixture
def serve() -> Iterator[Callable[..., Scripted]]:
    running: list[Scripted] = []

    def start(*scripts: Sequence[Sequence[Step]], tls: ssl.SSLContext | None = None) -> Scripted:
        running.append(Scripted(scripts, tls))
        return running[-1]

    yield start
    for server in running:
        server.stop()


def pause(_: socket.socket) -> None:
    time.sleep(0.02)


def wait_for_the_client(sock: socket.socket) -> None:
    """Until it closes the connection."""
    sock.recv(1)


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def fetch(wire: Wire, *payloads: bytes) -> list[Exchange]:
    """All at once, in the order in which they end."""
    site = Site("http://localhost", None)
    for payload in payloads:
        wire.start(Exchange(site.post("/", payload)))
    ended: list[Exchange] = []
    while len(ended) < len(payloads):
        ended += wire.turn(10)
    return ended


def wire_to(server: Scripted | str, **more: object) -> "closing[Wire]":
    url = server if isinstance(server, str) else server.url
    return closing(Wire(url, **{"timeout_s": 10, "stall_s": 10, **more}))  # type: ignore[arg-type]


def test_pieces_are_stamped_as_they_arrive(serve: Callable[..., Scripted]) -> None:
    first, second = chunked(EVENTS[0]), chunked(EVENTS[1]) + END
    with wire_to(serve([[CHUNKED, pause, first, pause, second]])) as wire:
        before_ns = time.perf_counter_ns()
        (exchange,) = fetch(wire, b"{}")
    assert exchange.problem is None
    stamps = [ns for ns, _ in exchange.pieces]
    assert before_ns < exchange.sent_ns < stamps[0]
    assert exchange.end_ns == stamps[-1]
    gaps_ms = [(b - a) / 1e6 for a, b in itertools.pairwise(stamps)]
    assert len(gaps_ms) == 2
    assert all(19 < gap_ms < 2000 for gap_ms in gaps_ms)


def test_one_connection_carries_requests_one_after_the_other(
    serve: Callable[..., Scripted],
) -> None:
    server = serve([[STREAM]] * 3)
    with wire_to(server) as wire:
        for _ in range(3):
            assert fetch(wire, b"{}")[0].problem is None
    assert server.connections == 1


def test_connections_are_open_before_they_are_needed(serve: Callable[..., Scripted]) -> None:
    server = serve([[STREAM]])
    with wire_to(server) as wire:
        wire.warm(3)
        wire.warm(2)
        assert len(fetch(wire, b"1", b"2", b"3")) == 3
    assert server.connections == 3


def test_a_connection_that_the_server_closed_is_opened_again(
    serve: Callable[..., Scripted],
) -> None:
    server = serve([[STREAM]])  # it closes after each answer, without saying so
    with wire_to(server) as wire:
        for _ in range(3):
            (exchange,) = fetch(wire, b"{}")
            assert exchange.problem is None
            time.sleep(0.005)  # it closes the connection meanwhile
    assert server.connections == len(server.requests) == 3


def test_a_request_that_met_a_closing_connection_is_sent_once_more(
    serve: Callable[..., Scripted],
) -> None:
    server = serve([[STREAM], [reset]], [[STREAM]])
    with wire_to(server) as wire:
        fetch(wire, b"first")
        (exchange,) = fetch(wire, b"second")
    assert exchange.problem is None
    assert server.requests == [b"first", b"second", b"second"]


def test_two_connections_may_be_lost_at_once(serve: Callable[..., Scripted]) -> None:
    """The second try of one request finds the other connection closed, before its event is seen."""
    server = serve([[pause, STREAM], [reset]], [[STREAM, pause, pause]], [[STREAM]])
    with wire_to(server) as wire:
        fetch(wire, b"slow", b"fast")
        exchange = Exchange(Site(server.url, None).post("/", b"again"))
        wire.start(exchange)
        time.sleep(0.06)
        while not wire.turn(10):
            pass
    assert exchange.problem is None
    assert server.connections == 3


def test_a_request_on_a_fresh_connection_is_sent_once(serve: Callable[..., Scripted]) -> None:
    server = serve([[reset]])
    with wire_to(server) as wire:
        (exchange,) = fetch(wire, b"{}")
    assert (exchange.problem or "").startswith("the request failed: ReadError: [Errno 104]")
    assert server.connections == 1


def test_a_lost_connection_keeps_what_came(serve: Callable[..., Scripted]) -> None:
    with wire_to(serve([[CHUNKED + chunked(EVENTS[0]), pause, reset]])) as wire:
        (exchange,) = fetch(wire, b"{}")
    assert (exchange.problem or "").startswith("the stream was cut: ReadError")
    assert exchange.pieces


@pytest.mark.parametrize(
    ("steps", "problem"),
    [
        ([wait_for_the_client], "no data for 0.05 s (load.stall_s)"),
        ([CHUNKED, wait_for_the_client], "no data for 0.05 s (load.stall_s)"),
        ([CHUNKED, *[chunked(b"x"), pause] * 10], TOO_LONG),
        ([b"HTTP/1.1 200 OK\r\n", *[b"a: b\r\n", pause] * 10], TOO_LONG),
    ],
)
def test_a_slow_server_is_given_up(
    serve: Callable[..., Scripted], steps: list[Step], problem: str
) -> None:
    limits = (0.1, 10) if "timeout_s" in problem else (10, 0.05)
    with wire_to(serve([steps]), timeout_s=limits[0], stall_s=limits[1]) as wire:
        (exchange,) = fetch(wire, b"{}")
    assert exchange.problem == problem
    assert exchange.end_ns - exchange.sent_ns < 5e9


def test_a_steady_answer_may_take_longer_than_a_stall(serve: Callable[..., Scripted]) -> None:
    """By a clock that goes on 10 ms whenever it is read: some 30 ms a piece, 360 for all."""

    def moment(_: socket.socket) -> None:
        time.sleep(0.004)

    steps = [CHUNKED, *[chunked(b"x"), moment] * 12, END]
    clock = itertools.count(0, 10_000_000).__next__
    with wire_to(serve([steps]), stall_s=0.1, clock=clock) as wire:
        (exchange,) = fetch(wire, b"{}")
    assert exchange.problem is None


def test_a_slow_answer_holds_up_no_other(serve: Callable[..., Scripted]) -> None:
    server = serve([[CHUNKED, wait_for_the_client]], [[STREAM]])
    with wire_to(server, stall_s=0.1) as wire:
        problems = [exchange.problem for exchange in fetch(wire, b"slow", b"fast")]
    assert problems == [None, "no data for 0.1 s (load.stall_s)"]


def test_a_large_request_goes_out_in_parts(serve: Callable[..., Scripted]) -> None:
    payload = b"x" * (8 << 20)
    server = serve([[STREAM]])
    with wire_to(server) as wire:
        (exchange,) = fetch(wire, payload)
    assert exchange.problem is None
    assert server.requests == [payload]


def test_nobody_there_is_a_failed_request() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as probe:
        port = probe.getsockname()[1]
    with wire_to(f"http://127.0.0.1:{port}") as wire:
        wire.warm(2)
        (exchange,) = fetch(wire, b"{}")
    assert exchange.problem == "the request failed: ConnectError: [Errno 111] Connection refused"
    assert exchange.sent_ns <= exchange.end_ns


def test_a_server_that_goes_away_is_a_failed_request(serve: Callable[..., Scripted]) -> None:
    server = serve([[STREAM]])
    with wire_to(server) as wire:
        fetch(wire, b"{}")
        server.stop()
        (exchange,) = fetch(wire, b"{}")
    assert (exchange.problem or "").startswith("the request failed: ")


def test_what_was_in_flight_can_be_forgotten(serve: Callable[..., Scripted]) -> None:
    server = serve([[wait_for_the_client]], [[STREAM]])
    with wire_to(server) as wire:
        wire.start(Exchange(Site(server.url, None).post("/", b"{}")))
        wire.forget()
        (exchange,) = fetch(wire, b"again")
    assert exchange.problem is None


# --- TLS -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A key and a certificate of its own for localhost, in one file."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate with")
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    made = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -batch"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    files = ["-keyout", str(path), "-out", f"{path}.crt"]
    subprocess.run(["openssl", *made.split(), *names, *files], check=True, capture_output=True)
    path.write_bytes(path.read_bytes() + Path(f"{path}.crt").read_bytes())
    return path


def test_an_answer_over_tls_is_taken_to_its_end(
    serve: Callable[..., Scripted], certificate: Path
) -> None:
    ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ours.load_cert_chain(certificate)
    theirs = ssl.create_default_context(cafile=certificate)
    long = [b"data: " + b"x" * 1000 + b"\n\n"] * 100
    server = serve([[CHUNKED + chunked(*long) + END], [STREAM]], tls=ours)
    with wire_to(server, tls=theirs) as wire:
        wire.warm(1)
        (first,) = fetch(wire, b"x" * (4 << 20))
        (second,) = fetch(wire, b"{}")
    assert b"".join(data for _, data in body(first.pieces, whole=True)) == b"".join(long)
    assert second.problem is None
    assert server.connections == 1


def test_a_certificate_that_nobody_signed_is_a_failed_request(
    serve: Callable[..., Scripted], certificate: Path
) -> None:
    ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ours.load_cert_chain(certificate)
    with wire_to(serve([[STREAM]], tls=ours)) as wire:
        (exchange,) = fetch(wire, b"{}")
    assert "the request failed: ConnectError" in (exchange.problem or "")
    assert "CERTIFICATE_VERIFY_FAILED" in (exchange.problem or "")


# --- the interpreter -----------------------------------------------------------------------------


def test_garbage_collection_and_threads_are_as_before_afterwards() -> None:
    before = gc.isenabled(), sys.getswitchinterval(), gc.get_freeze_count()

    def breaks_off() -> None:
        with undisturbed():
            assert not gc.isenabled()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        breaks_off()
    assert (gc.isenabled(), sys.getswitchinterval(), gc.get_freeze_count()) == before


@given(st.integers(0, 10**12), st.integers(0, 10**12))
def test_a_wait_never_goes_beyond_what_is_due(now_ns: int, due_ns: int) -> None:
    wait_s = until(due_ns, now_ns)
    assert wait_s >= 0
    assert wait_s * 1e9 <= max(0, due_ns - now_ns) + 1
