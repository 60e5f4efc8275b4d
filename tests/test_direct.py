"""The streaming client against a server that speaks vLLM's recorded wire format, well or badly."""

import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest

from specbench.config import Load, Sampling
from specbench.load.direct import DirectClient
from specbench.records import Prompt, RequestRecord

FAKE = Path(__file__).with_name("fake_vllm.py")
Serve = Callable[[str], str]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    running: list[subprocess.Popen[bytes]] = []

    def start(mode: str) -> str:
        with closing(socket.create_server(("127.0.0.1", 0))) as probe:
            port = probe.getsockname()[1]
        log = (tmp_path / "log").open("wb")
        command = [sys.executable, str(FAKE), "--port", str(port), "--served-model-name", "m"]
        command += ["--speculative-config", "{}"]  # what the fake answers like is up to it
        running.append(
            subprocess.Popen(command, env={**os.environ, "FAKE_MODE": mode}, stdout=log, stderr=log)
        )
        log.close()
        for _ in range(500):
            try:
                httpx.get(f"http://127.0.0.1:{port}/health")
                break
            except httpx.HTTPError:
                time.sleep(0.02)
        return f"http://127.0.0.1:{port}"

    yield start
    for process in running:
        process.kill()
        process.wait()


def send(
    url: str,
    *prompts: Prompt,
    concurrency: int = 1,
    sampling: Sampling | None = None,
    **load: float,
) -> list[RequestRecord]:
    client = DirectClient(
        url=url,
        served_model="m",
        api_key="k",
        sampling=sampling or Sampling(),
        load=Load.model_validate(load),
        start=4,
    )
    records: list[RequestRecord] = []
    with closing(client):
        client.send(prompts, max_tokens=24, concurrency=concurrency, on_record=records.append)
    return records


HELLO = Prompt(id="a", turns=("hello",), category="greetings")


def test_a_good_answer_becomes_a_complete_record(serve: Serve) -> None:
    (record,) = send(serve("ok"), HELLO)
    assert record.error is None
    assert (record.prompt_id, record.category, record.start) == ("a", "greetings", 4)
    assert (record.prompt_tokens, record.output_tokens, record.token_source) == (38, 24, "usage")
    assert len(record.chunk_ns) == 18
    assert record.sent_ns < record.chunk_ns[0] < record.chunk_ns[-1] <= record.end_ns
    assert record.spec is not None
    assert record.spec.accepted == 6


@pytest.mark.parametrize(
    ("mode", "problem"),
    [
        ("cut", "the stream was cut"),
        ("dies", "the stream was cut"),
        ("empty", "sent no token"),
        ("error", "EngineCore died"),
        ("refuses", "HTTP 400: This model's maximum context length is 2048."),
    ],
)
def test_a_bad_answer_is_a_record_that_says_why(serve: Serve, mode: str, problem: str) -> None:
    (record,) = send(serve(mode), HELLO)
    assert problem in (record.error or "")
    assert not record.ok


def test_a_stall_ends_after_its_limit_and_keeps_what_came(serve: Serve) -> None:
    started = time.monotonic()
    (record,) = send(serve("stalls"), HELLO, stall_s=0.5)
    assert record.error == "no data for 0.5 s (load.stall_s)"
    assert len(record.chunk_ns) == 4
    assert time.monotonic() - started < 5


def test_a_server_that_is_not_there_is_a_failed_request() -> None:
    (record,) = send("http://127.0.0.1:9", HELLO)
    assert record.error is not None
    assert "the request failed: ConnectError" in record.error


class Recorder(BaseHTTPRequestHandler):
    """Keeps what it is sent and answers each request with one token: its own number."""

    protocol_version = "HTTP/1.1"
    bodies: ClassVar[list[tuple[str, dict[str, Any], str | None]]] = []
    in_flight = 0
    most_in_flight = 0
    answers_at = 1  # so many must be in flight before one is answered, for 5 s at most
    turnstile: ClassVar[threading.Condition]

    def do_POST(self) -> None:
        length = int(self.headers["content-length"])
        body = json.loads(self.rfile.read(length))
        with self.turnstile:
            type(self).in_flight += 1
            type(self).most_in_flight = max(self.most_in_flight, self.in_flight)
            self.bodies.append((self.path, body, self.headers["authorization"]))
            self.turnstile.notify_all()
            self.turnstile.wait_for(lambda: self.most_in_flight >= self.answers_at, 5)
        time.sleep(0.05)  # another one too many would be seen
        choice = {
            "index": 0,
            "delta": {"content": f"answer {len(self.bodies)}"},
            "text": f"answer {len(self.bodies)}",
            "finish_reason": "stop",
        }
        data = b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        with self.turnstile:
            type(self).in_flight -= 1
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def recorder() -> Iterator[tuple[str, type[Recorder]]]:
    fresh = {"bodies": [], "in_flight": 0, "most_in_flight": 0}
    handler = type("Fresh", (Recorder,), {**fresh, "turnstile": threading.Condition()})

    class Server(ThreadingHTTPServer):
        request_queue_size = 64  # more at once wait a second to be let in

    server = Server(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", handler
    server.shutdown()
    thread.join()
    server.server_close()


def test_sampling_is_sent_whole_with_every_request(
    recorder: tuple[str, type[Recorder]],
) -> None:
    url, handler = recorder
    (record,) = send(url, HELLO)
    path, body, authorization = handler.bodies[0]
    assert path == "/v1/chat/completions"
    assert authorization == "Bearer k"
    assert body == {
        "model": "m",
        "messages": [{"role": "user", "content": "hello"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "max_tokens": 24,
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 0,
        "seed": 0,
        "ignore_eos": False,
        "stop": None,
    }
    about_sampling = ("max_tokens", "temperature", "top_p", "top_k", "seed", "ignore_eos", "stop")
    assert record.sampling == {name: body[name] for name in about_sampling}


def test_a_record_holds_the_seed_that_was_sent(recorder: tuple[str, type[Recorder]]) -> None:
    url, handler = recorder
    client = DirectClient(
        url=url,
        served_model="m",
        api_key=None,
        sampling=Sampling(seed=3),
        load=Load(),
        seed_of=lambda prompt: len(prompt.id),
    )
    records: list[RequestRecord] = []
    with closing(client):
        client.send([HELLO], max_tokens=24, concurrency=1, on_record=records.append)
    assert records[0].sampling is not None
    assert records[0].sampling["seed"] == handler.bodies[0][1]["seed"] == 1


def test_a_second_turn_holds_the_engines_own_first_answer(
    recorder: tuple[str, type[Recorder]],
) -> None:
    url, handler = recorder
    records = send(url, Prompt(id="81", turns=("one", "two")))
    assert [r.turn for r in records] == [0, 1]
    assert handler.bodies[1][1]["messages"] == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "answer 1"},
        {"role": "user", "content": "two"},
    ]


def test_a_failed_turn_ends_its_conversation_only(serve: Serve) -> None:
    records = send(serve("empty"), Prompt(id="81", turns=("one", "two")), HELLO)
    assert [(r.prompt_id, r.turn) for r in records] == [("81", 0), ("a", 0)]


def test_a_completion_is_sent_as_bare_text(recorder: tuple[str, type[Recorder]]) -> None:
    url, handler = recorder
    (record,) = send(url, Prompt(id="a", turns=("def f():",), style="completion"))
    path, body, _ = handler.bodies[0]
    assert path == "/v1/completions"
    assert body["prompt"] == "def f():"
    assert record.text == "answer 1"


def test_concurrency_is_how_many_are_in_flight(recorder: tuple[str, type[Recorder]]) -> None:
    url, handler = recorder
    handler.answers_at = 4  # however late the server's threads get going
    prompts = [Prompt(id=str(i), turns=("x",)) for i in range(8)]
    assert len(send(url, *prompts, concurrency=4)) == 8
    assert handler.most_in_flight == 4


def test_one_connection_serves_a_sequence_of_requests(serve: Serve) -> None:
    url = serve("ok")
    records = send(url, *[Prompt(id=str(i), turns=("x",)) for i in range(5)])
    assert all(r.ok for r in records)


def test_each_chunk_says_how_much_text_it_brought(serve: Serve) -> None:
    (record,) = send(serve("ok"), HELLO)
    assert record.chunk_chars is not None
    assert len(record.chunk_chars) == len(record.chunk_ns)
    assert sum(record.chunk_chars) == len(record.text)


def test_conversations_side_by_side_keep_to_themselves(
    recorder: tuple[str, type[Recorder]],
) -> None:
    url, handler = recorder
    prompts = [Prompt(id=str(i), turns=(f"one {i}", f"two {i}")) for i in range(4)]
    records = send(url, *prompts, concurrency=2)
    assert sorted((r.prompt_id, r.turn) for r in records) == [
        (str(i), turn) for i in range(4) for turn in (0, 1)
    ]
    for i in range(4):
        first = next(r for r in records if (r.prompt_id, r.turn) == (str(i), 0))
        asked = [body["messages"] for _, body, _ in handler.bodies]
        question, answer = {"role": "user"}, {"role": "assistant"}
        assert [
            question | {"content": f"one {i}"},
            answer | {"content": first.text},
            question | {"content": f"two {i}"},
        ] in asked
    assert handler.most_in_flight == 2


# --- open loop -----------------------------------------------------------------------------------


def client_of(url: str) -> DirectClient:
    return DirectClient(
        url=url, served_model="m", api_key=None, sampling=Sampling(), load=Load(), arrival_seed=7
    )


def at_rate(url: str, rate: float, count: int) -> list[RequestRecord]:
    records: list[RequestRecord] = []
    prompts = [Prompt(id=str(i), turns=("x", "y") if i == 0 else ("x",)) for i in range(count)]
    with closing(client_of(url)) as client:
        client.send(prompts, max_tokens=8, concurrency=1, on_record=records.append, rate=rate)
    return records


def test_at_a_rate_requests_go_out_when_they_are_due_however_many_are_in_flight(
    recorder: tuple[str, type[Recorder]],
) -> None:
    url, handler = recorder
    records = at_rate(url, 400, 8)
    assert len(records) == 9
    for record in records:
        assert (record.due_ns is None) == (record.turn == 1)
        if record.due_ns is not None:
            assert 0 <= record.sent_ns - record.due_ns < 1e9
    assert handler.most_in_flight > 2


def test_arrivals_are_poisson_and_the_same_for_the_same_seed(
    recorder: tuple[str, type[Recorder]],
) -> None:
    """A thousand gaps average 1 / rate, as do their deviations: the mark of an exponential."""
    client = client_of("http://localhost:1")
    talks = [client._talk(Prompt(id="a", turns=("x",)), 8) for _ in range(1001)]
    with closing(client):
        client._set_due(talks, 50.0)
        once = gaps_ms(talks)
        client._set_due(talks, 50.0)
    mean = sum(once) / len(once)
    deviation = (sum((gap - mean) ** 2 for gap in once) / len(once)) ** 0.5
    assert 18 < mean < 22
    assert 18 < deviation < 22
    assert gaps_ms(talks) == pytest.approx(once)


def gaps_ms(talks: list[Any]) -> list[float]:
    return [(b.due_ns - a.due_ns) / 1e6 for a, b in itertools.pairwise(talks)]


# --- who listens ---------------------------------------------------------------------------------


def test_a_slow_listener_holds_up_no_request(recorder: tuple[str, type[Recorder]]) -> None:
    """It takes in the first record only when all requests have been sent."""
    url, handler = recorder
    heard: list[RequestRecord] = []

    def listen(record: RequestRecord) -> None:
        deadline = time.monotonic() + 5
        while len(handler.bodies) < 6:
            assert time.monotonic() < deadline, "the requests wait for us"
            time.sleep(0.001)
        heard.append(record)

    prompts = [Prompt(id=str(i), turns=("x",)) for i in range(6)]
    with closing(client_of(url)) as client:
        client.send(prompts, max_tokens=8, concurrency=2, on_record=listen)
    assert len(heard) == 6


@pytest.mark.parametrize("concurrency", [1, 3])
def test_a_listener_that_fails_ends_the_sending_and_the_client_goes_on(
    recorder: tuple[str, type[Recorder]], concurrency: int
) -> None:
    url, _ = recorder
    prompts = [Prompt(id=str(i), turns=("x",)) for i in range(6)]

    def fail(_: RequestRecord) -> None:
        raise OSError("the disk is full")

    heard: list[RequestRecord] = []
    with closing(client_of(url)) as client:
        with pytest.raises(OSError, match="the disk is full"):
            client.send(prompts, max_tokens=8, concurrency=concurrency, on_record=fail)
        client.send(prompts[:2], max_tokens=8, concurrency=concurrency, on_record=heard.append)
    assert [record.ok for record in heard] == [True, True]


def test_nothing_to_send_is_nothing_sent() -> None:
    with closing(client_of("http://localhost:1")) as client:
        client.send([], max_tokens=8, concurrency=4, on_record=lambda _: None)
