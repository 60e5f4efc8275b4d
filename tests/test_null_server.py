"""The server that knows its own times: vLLM's format, the pace it was told, one clock for all."""

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specbench.config import Load, Sampling
from specbench.load import http1, null_format, sse
from specbench.load.direct import DirectClient
from specbench.load.null_server import NullServer, running
from specbench.records import Prompt, RequestRecord

DATA = Path(__file__).with_name("data")
ORDER = null_format.Order(
    is_chat=True,
    model="m",
    tokens=24,
    prompt_tokens=5,
    streams=True,
    with_usage=True,
    with_ids=True,
)


@pytest.fixture(scope="module")
def server() -> Iterator[NullServer]:
    with running() as one:
        yield one


@pytest.fixture
def paced(server: NullServer) -> NullServer:
    server.pace(ttft_ms=5, gap_ms=2, tokens=(1,))
    server.forget()
    return server


def ask(server: NullServer, *prompts: str, tokens: int = 8, **more: int) -> list[RequestRecord]:
    records: list[RequestRecord] = []
    client = DirectClient(
        url=server.url, served_model="m", api_key=None, sampling=Sampling(), load=Load()
    )
    with closing(client):
        client.send(
            [Prompt(id=text, turns=(text,)) for text in prompts],
            max_tokens=tokens,
            concurrency=more.get("concurrency", 1),
            on_record=records.append,
        )
    return records


# --- what it says --------------------------------------------------------------------------------


def shape(value: object) -> object:
    """The keys and kinds of a JSON value, without what it says."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return type(value).__name__


def events(stream: bytes) -> list[dict[str, object]]:
    lines = stream.strip().split(b"\n\n")
    assert lines[-1] == b"data: [DONE]"
    return [json.loads(line.removeprefix(b"data: ")) for line in lines[:-1]]


def stream_of(order: null_format.Order, *pattern: int) -> bytes:
    chunks = null_format.sends(order, null_format.counts(order.tokens, pattern or (1,)), 7)
    whole = null_format.HEAD + b"".join(chunks)
    return b"".join(data for _, data in http1.body([(0, whole)], whole=True))


@pytest.mark.parametrize(
    ("recorded", "is_chat"),
    [("vllm_0.32_chat_eagle_k3.sse", True), ("vllm_0.32_completion_eagle_k3.sse", False)],
)
def test_its_streams_are_built_as_vllms(recorded: str, is_chat: bool) -> None:
    theirs = events((DATA / recorded).read_bytes())
    ours = events(stream_of(ORDER._replace(is_chat=is_chat), 2))
    theirs[-1].pop("metrics")  # vLLM says these on demand
    for which in (0, 1, 2, -2, -1):
        assert shape(ours[which]) == shape(theirs[which])
        assert list(ours[which]) == list(theirs[which])


@given(
    tokens=st.integers(1, 40),
    pattern=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    is_chat=st.booleans(),
)
def test_a_stream_carries_what_was_ordered(tokens: int, pattern: list[int], is_chat: bool) -> None:
    order = ORDER._replace(tokens=tokens, is_chat=is_chat)
    answer = sse.read([(1, stream_of(order, *pattern))])
    assert answer.problem is None
    assert answer.tokens == (tokens, "usage")
    assert answer.chunk_tokens == null_format.counts(tokens, pattern)
    assert len(answer.token_ids) == tokens
    assert answer.prompt_head == (0, 1, 2, 3, 4)
    assert answer.done


def test_nothing_is_said_that_was_not_asked_for() -> None:
    plain = ORDER._replace(with_usage=False, with_ids=False)
    answer = sse.read([(1, stream_of(plain))])
    assert answer.usage is None
    assert answer.token_ids == []
    assert answer.finish_reason == "length"


def test_other_clients_find_what_they_look_for(paced: NullServer) -> None:
    with httpx.Client(base_url=paced.url, trust_env=False) as client:
        assert client.get("/v1/models").json()["data"][0]["id"] == NullServer.model
        for path in ("/health", "/version", "/metrics", "/"):
            assert client.get(path).status_code == 200
        assert client.head("/v1/models").status_code == 200
        assert client.get("/nowhere").status_code == 404
        refused = client.post("/v1/completions", content=b"{torn")
        assert refused.json()["error"]["message"] == "the body is not JSON"
        body = {"model": "m", "messages": [], "max_tokens": 3}
        answer = client.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == " the sea and"
    assert answer["usage"]["completion_tokens"] == 3


def test_a_body_that_waits_to_be_asked_for_is_asked_for(paced: NullServer) -> None:
    payload = b'{"prompt": "a", "max_tokens": 1}'
    head = b"POST /v1/completions HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: %d\r\n\r\n"
    with closing(socket.create_connection(("127.0.0.1", paced.port), timeout=5)) as sock:
        sock.sendall(head % len(payload))
        assert sock.recv(100).startswith(b"HTTP/1.1 100")
        sock.sendall(payload)
        assert sock.recv(1000).startswith(b"HTTP/1.1 200")


def test_requests_that_come_at_once_are_answered_in_turn(paced: NullServer) -> None:
    request = b"GET /version HTTP/1.1\r\n\r\n"
    with closing(socket.create_connection(("127.0.0.1", paced.port), timeout=5)) as sock:
        sock.sendall(request * 3)
        said = b""
        while said.count(b"0.32.0") < 3:
            said += sock.recv(1000)


def test_a_client_that_goes_away_leaves_the_others_alone(paced: NullServer) -> None:
    payload = b'{"prompt": "a", "max_tokens": 9, "stream": true}'
    head = b"POST /v1/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(payload)
    with closing(socket.create_connection(("127.0.0.1", paced.port), timeout=5)) as sock:
        sock.sendall(head + payload)
        sock.recv(1)
    assert ask(paced, "still there?")[0].ok


# --- when it says it -----------------------------------------------------------------------------


def test_all_processes_read_one_clock(paced: NullServer) -> None:
    """Else its times and the client's could not be compared: sent, received, sent back, read."""
    assert time.get_clock_info("perf_counter").implementation == "clock_gettime(CLOCK_MONOTONIC)"
    (record,) = ask(paced, "what time is it?")
    (served,) = paced.log()
    assert record.sent_ns < served.received_ns < served.sent_ns[0] < record.chunk_ns[0]
    assert all(a < b for a, b in zip(served.sent_ns, record.chunk_ns, strict=True))


def test_it_keeps_the_pace_it_was_told(paced: NullServer) -> None:
    paced.pace(ttft_ms=10, gap_ms=4, tokens=(1, 3))
    ask(paced, "go", tokens=20)
    (served,) = paced.log()
    assert served.tokens == [1, 1, 3, 1, 3, 1, 3, 1, 3, 1, 2]
    late_ms = [
        (ns - served.received_ns) / 1e6 - (10 + 4 * i) for i, ns in enumerate(served.sent_ns)
    ]
    assert all(0 <= late < 500 for late in late_ms)


def test_a_late_chunk_does_not_push_back_the_later_ones(paced: NullServer) -> None:
    """The server stands still for 30 ms in the middle, and is on time again at the end."""
    paced.pace(ttft_ms=0, gap_ms=4)
    payload = b'{"prompt": "a", "max_tokens": 30, "stream": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    with closing(socket.create_connection(("127.0.0.1", paced.port), timeout=5)) as sock:
        sock.sendall(head % len(payload) + payload)
        sock.recv(10)
        os.kill(paced.pid, signal.SIGSTOP)
        time.sleep(0.03)
        os.kill(paced.pid, signal.SIGCONT)
        while sock.recv(65536):
            pass
    (served,) = paced.log()
    late_ms = [(ns - served.received_ns) / 1e6 - 4 * i for i, ns in enumerate(served.sent_ns)]
    assert max(late_ms) > 20
    assert min(late_ms[-10:]) < max(late_ms) / 2


def test_its_log_finds_the_clients_requests(paced: NullServer) -> None:
    records = ask(paced, "one", "two", "three")
    served = paced.log()
    assert [one.prompt_sha256 for one in served] == [r.prompt_sha256 for r in records]
    assert [one.path for one in served] == ["/v1/chat/completions"] * 3
    paced.forget()
    assert paced.log() == []


def test_streams_run_side_by_side(paced: NullServer) -> None:
    ask(paced, *map(str, range(8)), concurrency=8)
    first, last = zip(*((one.sent_ns[0], one.sent_ns[-1]) for one in paced.log()), strict=True)
    assert max(first) < min(last)


def test_a_reader_that_stands_still_gets_everything_later(paced: NullServer) -> None:
    paced.pace(ttft_ms=0, gap_ms=0)
    prompt = "x " * 200_000  # its token ids come back in the first chunk: more than a socket holds
    payload = json.dumps(
        {"prompt": prompt, "max_tokens": 3, "stream": True, "return_token_ids": True}
    ).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    with closing(socket.socket()) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.settimeout(5)
        sock.connect(("127.0.0.1", paced.port))
        sock.sendall(head % len(payload) + payload)
        while not paced.log():
            pass
        pieces = iter(lambda: sock.recv(1 << 20), b"")
        said = b"".join(pieces)
    assert said.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert len(events(body_of(said))) == 3


def body_of(said: bytes) -> bytes:
    return b"".join(data for _, data in http1.body([(0, said)], whole=True))
