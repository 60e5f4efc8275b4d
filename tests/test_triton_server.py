"""Triton as a server of arms: what it says when it will not, and its stream as records.

The fake below answers as Triton 2.51 did (recorded with the backend of tests/triton);
tests/engine/test_tools.py runs the real one.
"""

import json
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from specbench import config, prepare
from specbench.config import Load, Sampling
from specbench.engines.counters import CountersUnreadable
from specbench.engines.triton import TritonServer, write_model
from specbench.errors import EngineError
from specbench.load.dialects import OPTIONAL_INPUTS, OpenAI, Triton
from specbench.load.direct import DirectClient
from specbench.records import Prompt, RequestRecord
from specbench.run import execute
from specbench.store import RunStore
from specbench.sweep import Case

STEPS = [("1", 1), (". 1\n", 4), ("2", 1), ("", 1), (" and more", 2)]
ALL_INPUTS = ("text_input", "stream", "sampling_parameters", *OPTIONAL_INPUTS)


class FakeTriton:
    """One model, `eagle_model`; *how* changes what goes wrong."""

    def __init__(self) -> None:
        self.how: dict[str, Any] = {}
        self.state = "UNAVAILABLE"
        self.unloading = 2  # how many looks at the index it takes to be gone
        self.asked: list[dict[str, Any]] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None:
                pass

            def answer(self, status: int, body: Any, kind: str = "application/json") -> None:  # noqa: ANN401
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self) -> None:
                self.answer(*fake.get(self.path))

            def do_POST(self) -> None:
                size = int(self.headers.get("Content-Length", 0))
                body = json.loads(self.rfile.read(size) or b"{}")
                self.answer(*fake.post(self.path, body))

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def get(self, path: str) -> tuple[int, Any]:
        if path == "/v2/health/ready":
            return 200, b""
        if path.endswith("/config"):
            return 200, {"input": [{"name": name} for name in self.how.get("inputs", ALL_INPUTS)]}
        return 200, {"name": "triton", "version": "2.51.0"}

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any] | tuple[int, Any, str]:
        if path.endswith("/load"):
            if "eagle_model" not in path:
                return 500, {"error": "failed to load 'nope', failed to poll from model repository"}
            self.state = "READY"
            return 200, b""
        if path.endswith("/unload"):
            self.state = "UNLOADING"
            return 200, b""
        if path.endswith("/index"):
            if self.state == "UNLOADING":
                self.unloading -= 1
                self.state = "UNAVAILABLE" if self.unloading <= 0 else "UNLOADING"
            return 200, [{"name": "base_model"}, {"name": "eagle_model", "state": self.state}]
        if path.endswith("/generate"):
            answer: tuple[int, Any] = self.how.get("generate", (200, {"text_output": "4"}))
            return answer
        self.asked.append(body)
        events = self.how.get("events") or self.events(body)
        stream = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in events)
        return 200, stream, "text/event-stream"

    def events(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        echo = self.how.get("echo", "")
        for number, (text, tokens) in enumerate(STEPS):
            last = number == len(STEPS) - 1
            known = {
                "return_num_output_tokens": ("num_output_tokens", tokens),
                "return_num_input_tokens": ("num_input_tokens", 13),
                "return_finish_reason": ("finish_reason", "length" if last else "None"),
            }
            yield {
                "model_name": "eagle_model",
                "text_output": (body["text_input"] if echo and not number else "") + text,
                **dict(known[name] for name in known if body.get(name)),
            }


@pytest.fixture
def fake() -> Iterator[FakeTriton]:
    server = FakeTriton()
    yield server
    server.http.shutdown()
    server.http.server_close()


Ask = Callable[..., RequestRecord]


@pytest.fixture
def ask(fake: FakeTriton) -> Ask:
    def send(prompt: str = "Count", inputs: tuple[str, ...] = ALL_INPUTS) -> RequestRecord:
        dialect = Triton("eagle_model", lambda messages: f"<{messages[-1]['content']}>", inputs)
        client = DirectClient(
            url=fake.url,
            served_model="eagle_model",
            api_key=None,
            sampling=Sampling(),
            load=Load(),
            dialect=dialect,
        )
        records: list[RequestRecord] = []
        prompts = [Prompt(id="a", turns=(prompt,))]
        client.send(prompts, max_tokens=9, concurrency=1, on_record=records.append)
        client.close()
        return records[0]

    return send


def test_a_stream_of_the_backend_becomes_a_record(fake: FakeTriton, ask: Ask) -> None:
    record = ask()
    assert record.ok, record.error
    assert record.text == "1. 1\n2 and more"
    assert record.chunk_tokens == (1, 4, 1, 1, 2)
    assert (record.output_tokens, record.token_source, record.prompt_tokens) == (9, "usage", 13)
    assert record.finish_reason == "length"
    (body,) = fake.asked
    assert body["text_input"] == "<Count>"  # the chat template is ours to apply
    assert body["exclude_input_in_output"] is True
    sampling = json.loads(body["sampling_parameters"])
    assert sampling["max_tokens"] == 9  # the backend's own default is 16
    assert sampling["temperature"] == 0
    assert "stop" not in sampling  # null is no list of texts


def test_an_older_backend_is_not_asked_for_what_it_does_not_know(
    fake: FakeTriton, ask: Ask
) -> None:
    record = ask(inputs=("text_input", "stream", "sampling_parameters"))
    assert not set(OPTIONAL_INPUTS) & fake.asked[0].keys()
    assert record.ok
    assert record.chunk_tokens is None  # so acceptance is null, with the reason
    assert record.token_source == "chunks"


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (
            {"events": [{"error": "Unexpected keyword argument 'bogus'"}]},
            "inside the stream.*bogus",
        ),
        ({"echo": True}, "begins with its prompt"),
        ({"events": [{"text_output": "x", "num_output_tokens": 1}]}, "no finish reason"),
        ({"events": [{"model_name": "m"}]}, "without text_output"),
    ],
)
def test_what_a_200_can_hide(fake: FakeTriton, ask: Ask, how: dict[str, Any], said: str) -> None:
    fake.how = how
    record = ask()
    assert record.error is not None
    assert re.search(said, record.error)


def test_a_model_is_loaded_asked_and_unloaded_until_it_is_gone(fake: FakeTriton) -> None:
    with TritonServer(url=fake.url, grpc_url="h:8001") as server:
        model, facts = server.load("eagle_model", arm="eagle-k2", start=4)
        assert (facts.kind, facts.served_model, facts.start) == ("triton", "eagle_model", 4)
        assert model.inputs == set(ALL_INPUTS)
        assert model.grpc_url == "h:8001"
        with pytest.raises(CountersUnreadable, match="no speculative counters"):
            model.counters()
        server.unload("eagle_model")
        assert server.state("eagle_model") == "UNAVAILABLE"
        assert fake.unloading == 0  # it was waited for


@pytest.mark.parametrize(
    ("generate", "said"),
    [
        ((200, {"error": "Stub process is not healthy."}), "does not answer: Stub process"),
        ((500, {"error": "numpy"}), "does not answer: numpy"),
        ((200, {"model_name": "m"}), "does not answer"),
    ],
)
def test_ready_is_not_enough(fake: FakeTriton, generate: tuple[int, Any], said: str) -> None:
    fake.how = {"generate": generate}
    with TritonServer(url=fake.url) as server, pytest.raises(EngineError, match=said):
        server.load("eagle_model", arm="a", start=0)


def test_a_model_that_is_not_there_says_so(fake: FakeTriton) -> None:
    with TritonServer(url=fake.url) as server, pytest.raises(EngineError, match="failed to poll"):
        server.load("nope", arm="a", start=0)


def test_nothing_at_the_url_is_an_error() -> None:
    with pytest.raises(EngineError, match="did not answer"), TritonServer(url="http://127.0.0.1:9"):
        pass


def test_a_server_that_dies_says_why(tmp_path: Any) -> None:  # noqa: ANN401
    dying = ["/bin/sh", "-c", "echo no such backend; exit 3"]
    server = TritonServer(command=dying, repository=tmp_path, folder=tmp_path / "log")
    with pytest.raises(EngineError, match="ended with status 3") as caught, server:
        pass
    assert "no such backend" in caught.value.tail


def test_a_model_repository_is_what_the_backend_reads(tmp_path: Any) -> None:  # noqa: ANN401
    made = write_model(tmp_path, "eagle_model", {"model": "m", "speculative_config": {"k": 1}})
    assert 'backend: "vllm"' in (made / "config.pbtxt").read_text(encoding="utf-8")
    written = json.loads((made / "1" / "model.json").read_text(encoding="utf-8"))
    assert written == {"model": "m", "speculative_config": {"k": 1}}


def test_the_demo_through_triton_is_planned_model_by_model() -> None:
    path = config.find("triton_demo")
    made = prepare.prepare(
        config.load(path, ["prompts=[smoke]"]),
        config_path=path,
        prompt_folders=(Path(__file__).parents[1] / "datasets",),
        dry=True,
    )
    assert [[arm.id for arm in stage.arms] for stage in made.plan.stages] in (
        [["vanilla"], ["eagle-k3"]],
        [["eagle-k3"], ["vanilla"]],
    )
    fields = made.launches["eagle-k3"].model_json
    assert fields["speculative_config"]["num_speculative_tokens"] == 3
    assert not {"enable_per_request_metrics", "per_request_spec_decode_metrics"} & fields.keys()
    assert "speculative_config" not in made.launches["vanilla"].model_json


def test_the_openai_dialect_says_what_it_always_said() -> None:
    prompt = Prompt(id="a", turns=("x",), style="completion")
    body = OpenAI("m").body(prompt, [{"role": "user", "content": "x"}], {"max_tokens": 3})
    assert body["prompt"] == "x"
    assert "messages" not in body
    assert OpenAI("m").path(prompt) == "/v1/completions"


class Quiet:
    """Progress that keeps what it is told."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def waiting(self, text: str) -> None:
        pass

    def advance(self, case: Case, record: RequestRecord) -> None:
        pass


@pytest.mark.parametrize("how", ["is not there", "goes away"])
def test_a_triton_that_is_gone_fails_its_arms_and_not_the_run(
    fake: FakeTriton, tmp_path: Path, how: str
) -> None:
    """Every case gets its reason; a server that died cannot be told to unload either."""
    source, url = config.find("triton_demo"), fake.url
    if how == "is not there":
        url = "http://127.0.0.1:9"
    else:
        fake.how = {"generate": (200, {"text_output": "4"})}
        post = fake.post

        def die(path: str, body: dict[str, Any]) -> tuple[int, Any] | tuple[int, Any, str]:
            if path.endswith("/unload"):
                raise ConnectionAbortedError
            return (200, b"") if path.endswith("/load") else post(path, body)

        fake.post = die  # type: ignore[method-assign]
    engine = f"engine={{kind: triton, url: '{url}'}}"
    sets = ["prompts=[{set: smoke, limit: 1, style: completion}]", "load.warmup=0", engine]
    prepared = prepare.prepare(
        config.load(source, ["model=m", *sets]),
        config_path=source,
        prompt_folders=(Path(__file__).parents[1] / "datasets",),
    )
    about = prepare.document(prepared, config_path=source, command=[])
    progress = Quiet()
    with RunStore.create(tmp_path, "t", about) as store:
        status = execute(prepared, store, progress)
        ends = {case.id: store.case_status(case.id) for case in prepared.plan.cases}
    assert all(ends.values())  # no case without a verdict
    if how == "is not there":
        assert status == "partial"
        assert all("did not answer" in str(end and end["problem"]) for end in ends.values())
    else:
        assert any("did not unload" in line for line in progress.said)
