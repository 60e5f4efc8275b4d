"""NVIDIA's GenAI-Perf as a load generator: `genai-perf profile` against the arm's chat endpoint.

Files, in the case's folder (peers.md and docs/load.md have the formats):

    genai-perf.N/prompts.jsonl          what it was given: one file, and one run, for each turn
    genai-perf.N/MODEL-openai-chat/     inputs.json, profile_export.json (every request),
                                        profile_export_genai_perf.json (its summary)

What 0.0.16 cannot do, and what is done instead (each was tried):
- It strips white space around a prompt of its input file. Its payload input takes `messages` as
  they are, so that is used, and nothing is stripped.
- Its sessions die of a streamed answer (perf_analyzer reads it as JSON), so each turn is a run of
  its own, with the engine's own answers in its messages.
- It dies of the usage chunk (IndexError), so tokens are counted by `return_token_ids`, which are
  the server's as well.
- Triton's prompts it strips all the same: the new line at the end of a chat template is lost there.
- At a rate perf_analyzer starts again with the first prompt until the last answer is there; such
  requests are left out here, and the engine's counters around them are not used.
"""

import json
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from specbench.errors import LoadError
from specbench.load import perf_analyzer
from specbench.load.tool_client import Exchange, Job, ToolClient, means
from specbench.records import Prompt

# GenAI-Perf's name and what it is here; all are means over requests, times in ms.
FIGURES = {
    "request_latency": "latency_ms",
    "time_to_first_token": "ttft_ms",
    "inter_token_latency": "tpot_ms",  # (latency - TTFT) / (tokens - 1), as it counts tokens
    "output_sequence_length": "output_tokens",
    "output_token_throughput": "tokens_per_s",
    "request_count": "requests",
}


class GenAIPerfClient(ToolClient):
    """One `genai-perf profile` for each turn of a set; see the module."""

    turn_by_turn = True
    stamps_by_day = True

    def command(self, job: Job) -> tuple[list[str], dict[str, str]]:
        """Its payload input, which keeps every byte.

        Raises:
            LoadError: it cannot send such prompts at that rate.
        """
        argv = [str(self.tool.command), "profile", "-m", self.target.served_model, "--streaming"]
        argv += self._kserve(job) if self._in_triton else self._openai(job)
        argv += ["--tokenizer", self.target.tokenizer, "--artifact-dir", str(job.folder)]
        if self.target.api_key:  # perf_analyzer takes headers on its command line only
            argv += ["--header", f"Authorization:Bearer {self.target.api_key}"]
        path = job.folder / "prompts.jsonl"
        argv += ["--input-file", f"payload:{path}"]
        # GenAI-Perf has no request count for a payload; perf_analyzer takes it from behind the --
        more = ["--request-count", str(job.requests), "--stability-percentage", "999"]
        if job.rate is None:
            argv += ["--concurrency", str(min(job.concurrency, job.requests))]
        else:
            _refuse_rate(job, job.rate)
            argv += ["--request-rate", f"{job.rate:g}"]
            more += ["--request-distribution", "poisson"]
        argv += ["--", *more]
        lines = (self._line(prompt, job) for prompt in job.prompts)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        return argv, self._environment()

    @property
    def _in_triton(self) -> bool:
        return self.target.triton_inputs is not None

    def _openai(self, job: Job) -> list[str]:
        address = urlsplit(self.target.url)
        style = {prompt.style for prompt in job.prompts}
        body = {"max_tokens": job.max_tokens, **self.sampling, "return_token_ids": True}
        endpoint = "chat" if style == {"chat"} else "completions"
        url = f"{address.scheme}://{address.netloc}"
        return ["--endpoint-type", endpoint, "--url", url, "--extra-inputs", json.dumps(body)]

    def _kserve(self, job: Job) -> list[str]:
        """Over gRPC, Triton's own way; sampling is one JSON text among the inputs."""
        if self.target.grpc_url is None:
            raise LoadError(
                "GenAI-Perf speaks gRPC to Triton, and its address is not known.",
                hint="Write engine.grpc_url, HOST:8001 unless Triton was told otherwise.",
            )
        body = self.dialect.body(
            job.prompts[0],
            [{"role": "user", "content": ""}],
            {"max_tokens": job.max_tokens, **self.sampling},
        )
        own = ("text_input", "stream", "exclude_input_in_output")  # GenAI-Perf's to set
        more = {name: value for name, value in body.items() if name not in own}
        kserve = ["--endpoint-type", "kserve", "--backend", "vllm", "--url", self.target.grpc_url]
        return [*kserve, "--extra-inputs", json.dumps(more)]

    def _line(self, prompt: Prompt, job: Job) -> dict[str, Any]:
        """A line of its payload input. What is not `text` goes into the body as it is, and wins."""
        text = prompt.turns[job.turn or 0]
        messages = [*job.said.get(prompt.id, ()), {"role": "user", "content": text}]
        if self._in_triton:
            return {"text": self.dialect.body(prompt, messages, {})["text_input"]}
        if prompt.style == "completion":
            return {"text": text, "prompt": text}
        return {"text": text, "messages": messages}

    def _environment(self) -> dict[str, str]:
        """Its own programs first on PATH: it calls `perf_analyzer` by that name."""
        places = [self.tool.command.parent, Path("/usr/bin"), Path("/bin")]
        if self.tool.folder is not None:
            places.insert(0, perf_analyzer.require())
        return {
            "PATH": ":".join(map(str, places)),
            "NO_COLOR": "1",
            "COLUMNS": "200",
            "PYTHONUNBUFFERED": "1",
        }

    def exchanges(self, job: Job) -> Iterator[Exchange]:
        """The requests of profile_export.json, matched to the prompts by session, else by text."""
        export = _read(_find(job.folder, "profile_export.json"))
        try:
            found = sent_requests(export)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise LoadError(
                f"{job.folder}: profile_export.json is not as GenAI-Perf 0.0.16 writes it "
                f"({type(error).__name__}: {error})."
            ) from None
        waiting: dict[str, deque[Prompt]] = defaultdict(deque)
        for prompt in job.prompts:
            line = self._line(prompt, job)
            waiting[_key({"text_input": line["text"]} if self._in_triton else line)].append(prompt)
        for sent_ns, body, pieces in sorted(found, key=lambda one: one[0]):
            if same := waiting.get(_key(body)):
                yield Exchange(same.popleft(), job.turn or 0, body, sent_ns, pieces)
            elif job.rate is None:  # at a rate perf_analyzer starts again until the last answer
                raise LoadError(
                    f"GenAI-Perf sent a prompt twice, or one of its own: {_key(body)[:80]}"
                )

    def figures(self, job: Job) -> dict[str, float]:
        """Its summary's means."""
        return means(_read(_find(job.folder, "profile_export_genai_perf.json")), FIGURES)


def _key(body: Mapping[str, Any]) -> str:
    """What a prompt and a request's body have in common, white space at the ends aside."""
    messages = body.get("messages")
    if messages is None:
        return str(body.get("prompt", body.get("text_input"))).strip()
    return json.dumps([[message["role"], message["content"].strip()] for message in messages])


def _refuse_rate(job: Job, rate: float) -> None:
    """Say what GenAI-Perf cannot do at a rate (0.0.16, tried)."""
    hint = "Use load.client=aiperf or direct."
    if any(len(prompt.turns) > 1 for prompt in job.prompts):
        raise LoadError(
            "GenAI-Perf sends conversations at a concurrency only, not at a rate.",
            hint=f"{hint} Or write `turns: first`.",
        )
    if rate < 1:
        raise LoadError(
            f"GenAI-Perf cannot send {rate:g} requests a second, only 1 and more.", hint=hint
        )


def _find(folder: Path, name: str) -> Path:
    found = list(folder.glob(f"*/{name}"))
    if len(found) != 1:
        raise LoadError(f"GenAI-Perf left no {name} in {folder}.")
    return found[0]


def _read(path: Path) -> Any:  # noqa: ANN401
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise LoadError(f"{path} cannot be read: {error}.") from None


Sent = tuple[int, dict[str, Any], list[tuple[int, bytes]]]


def sent_requests(export: Mapping[str, Any]) -> list[Sent]:
    """(sent ns, body, pieces) of every request in a profile_export.json.

    Raises:
        KeyError, TypeError, ValueError, IndexError: it is not as GenAI-Perf writes it.
    """
    return [_exchange(request) for one in export["experiments"] for request in one["requests"]]


def _exchange(request: Mapping[str, Any]) -> Sent:
    """(sent ns, body, pieces) of one request of the export.

    Over HTTP the body is one JSON text and each response an event; over gRPC both are taken apart.
    """
    inputs, outputs = request["request_inputs"], request["response_outputs"]
    times = [int(time) for time in request["response_timestamps"]]
    if len(times) != len(outputs):
        raise ValueError("as many response_timestamps as response_outputs expected")
    if "payload" in inputs:
        body = json.loads(inputs["payload"])
        texts = [str(output.get("response", "")) for output in outputs]
    else:
        body = dict(inputs)
        texts = [f"data: {json.dumps(output)}\n\n" for output in outputs]
    return int(request["timestamp"]), body, list(_events(zip(times, texts, strict=True)))


def _events(responses: Iterable[tuple[int, str]]) -> Iterator[tuple[int, bytes]]:
    """Its responses as a stream again: it drops the blank line after an event.

    A response that does not begin with "data:" goes on where the one before was cut.
    """
    for number, (arrived_ns, text) in enumerate(responses):
        starts_event = text.startswith(("data:", ":", "event:"))
        yield arrived_ns, ("\n\n" if starts_event and number else "").encode() + text.encode()
