"""NVIDIA's AIPerf, GenAI-Perf's successor, as a load generator: `aiperf profile --config`.

Files, in the case's folder:

    aiperf.N/prompts.jsonl   what it was given: a conversation a line (its multi_turn format)
    aiperf.N/aiperf.yaml     how to send them; the key is named there, not written
    aiperf.N/out/            raw_records: every request with its stream; profile_export_aiperf.json

It asks for the usage chunk, so vLLM's per-request metrics are in its streams as in ours.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from specbench.errors import LoadError
from specbench.load.tool_client import Exchange, Job, ToolClient, means
from specbench.records import Prompt

KEY_VARIABLE = "SPECBENCH_SERVER_KEY"
# AIPerf's name and what it is here; means over requests, times in ms.
FIGURES = {
    "request_latency": "latency_ms",
    "time_to_first_token": "ttft_ms",
    "inter_token_latency": "tpot_ms",
    "output_sequence_length": "output_tokens",
    "output_token_throughput": "tokens_per_s",
    "request_count": "requests",
    "spec_decode_token_weighted_acceptance_length": "acceptance_length",
}


class AIPerfClient(ToolClient):
    """One `aiperf profile` a set; see the module."""

    def command(self, job: Job) -> tuple[list[str], dict[str, str]]:
        """Everything in its YAML, so that no key stands on a command line."""
        lines = (
            json.dumps({"session_id": str(n), "turns": [{"text": t} for t in prompt.turns]}) + "\n"
            for n, prompt in enumerate(job.prompts)
        )
        (job.folder / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
        config = job.folder / "aiperf.yaml"
        config.write_text(yaml.safe_dump(self._config(job), sort_keys=False), encoding="utf-8")
        env = {"NO_COLOR": "1", "COLUMNS": "200", "TERM": "dumb"}
        if self.target.api_key:
            env[KEY_VARIABLE] = self.target.api_key
        return [str(self.tool.command), "profile", "--config", str(config)], env

    def _config(self, job: Job) -> dict[str, Any]:
        style = {prompt.style for prompt in job.prompts}
        phase: dict[str, Any] = {"type": "concurrency", "concurrency": job.concurrency}
        if job.rate is not None:
            phase = {"type": "poisson", "rate": job.rate}
        else:
            phase["concurrency"] = min(job.concurrency, len(job.prompts))
        endpoint = {
            "url": self.target.url,
            "type": "chat" if style == {"chat"} else "completions",
            "streaming": True,
            "timeout": self.load.timeout_s,
            "useServerTokenCount": True,
            "extra": {"max_tokens": job.max_tokens, **self.sampling, "return_token_ids": True},
        }
        if self.target.api_key:
            endpoint["apiKey"] = f"${{{KEY_VARIABLE}}}"
        return {
            "schemaVersion": "2.0",
            "randomSeed": 0,
            "benchmark": {
                "model": self.target.served_model,
                "endpoint": endpoint,
                "tokenizer": {"name": self.target.tokenizer},
                "dataset": {
                    "type": "file",
                    "path": str(job.folder / "prompts.jsonl"),
                    "format": "multi_turn",
                    "sampling": "sequential",
                },
                "profiling": {**phase, "sessions": len(job.prompts)},
                "artifacts": {
                    "dir": str(job.folder / "out"),
                    "summary": ["json"],
                    "records": ["jsonl"],
                    "raw": True,
                },
                "runtime": {"ui": "none"},
                "gpuTelemetry": {"enabled": False},
                "serverMetrics": {"enabled": False},
            },
        }

    def exchanges(self, job: Job) -> Iterator[Exchange]:
        """Its raw records, by conversation and turn."""
        for path in sorted((job.folder / "out").rglob("*raw*.jsonl")):
            with path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    try:
                        raw = json.loads(line)
                        prompt = job.prompts[int(raw["metadata"]["conversation_id"])]
                        yield exchange_of(raw, prompt, timed=job.rate is not None)
                    except (KeyError, TypeError, ValueError, IndexError) as error:
                        raise LoadError(
                            f"{path}, line {number}: not as AIPerf {self.tool.tool.version} writes "
                            f"it ({type(error).__name__}: {error})."
                        ) from None

    def figures(self, job: Job) -> dict[str, float]:
        """The means in its summary."""
        found = list((job.folder / "out").rglob("profile_export_aiperf.json"))
        if len(found) != 1:
            raise LoadError(f"AIPerf left no profile_export_aiperf.json in {job.folder}/out.")
        return means(json.loads(found[0].read_bytes()), FIGURES)


def exchange_of(raw: Mapping[str, Any], prompt: Prompt, *, timed: bool) -> Exchange:
    """One of its raw records; *timed* where requests were due at a time (a rate).

    Raises:
        KeyError, TypeError, ValueError: it is not as AIPerf writes it.
    """
    about = raw["metadata"]
    error = raw.get("error")
    said = None
    if error:
        said = f"{error.get('type')}: {error.get('message')}" if isinstance(error, dict) else error
    sent_ns = int(raw["start_perf_ns"])
    late_ns = int(about["request_start_ns"]) - int(about["credit_issued_ns"] or 0) if timed else 0
    return Exchange(
        prompt=prompt,
        turn=int(about.get("turn_index") or 0),
        body=raw.get("payload") or {},
        sent_ns=sent_ns,
        due_ns=sent_ns - late_ns if timed else None,
        pieces=list(_events(raw.get("responses") or [])),
        error=str(said)[:300] if said else None,
    )


def _events(responses: list[Mapping[str, Any]]) -> Iterator[tuple[int, bytes]]:
    """Its messages (each with its `packets`, the fields of one event) as a stream again."""
    for response in responses:
        data = [
            str(packet["value"])
            for packet in response.get("packets", ())
            if packet.get("name") == "data"
        ]
        if data:
            lines = "".join(f"data: {value}\n" for value in data)
            yield int(response["perf_ns"]), f"{lines}\n".encode()
