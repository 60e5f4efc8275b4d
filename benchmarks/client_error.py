"""How far are load clients from the truth? Each against the null server, side by side in one run.

    python benchmarks/client_error.py [--rounds 3] [--requests 12] [--concurrency 1]
        [--loads 5x1,20x4] [--chunks 48] [--tokenizer DIR]
        [--only direct,genai-perf] [--vllm PYTHON] [--guidellm PATH]

A load GAPxTOKENS is a chunk of TOKENS tokens each GAP milliseconds. In each round every client has
its turn, in another order. An error is the mean that the client itself reports less the server's
own mean over the same requests (analysis/calibration.py has the definitions). Client and server
share the machine, so run it alone. Prints a markdown table; a client that is not there is left
out with a line that says so.

`CPU us/chunk` is the CPU time of all of a client's processes from its first request to its last
chunk, over the chunks (read four times a second, so give it some seconds of load); for our own
client, which runs inside this process, it holds what comes before and after too. `CPU s` is the
whole, `around s` the wall time before the first request and after the last chunk.
"""

import argparse
import json
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import psutil

from specbench import config, demo
from specbench.analysis.metrics import latency_ms, tpot_ms, ttft_ms
from specbench.config import Engine, Load, Sampling
from specbench.engines.installation import metadata_environment, require_installation
from specbench.errors import SpecbenchError
from specbench.load.clients import Clients
from specbench.load.direct import DirectClient
from specbench.load.null_server import NullServer, Served, running
from specbench.load.tool_client import Target
from specbench.load.tools import TOOLS, require
from specbench.records import Prompt, RequestRecord

TTFT_MS = 50.0
Figures = Mapping[str, float]  # ttft_ms, tpot_ms, latency_ms: means over requests


@dataclass(frozen=True)
class Work:
    """What a client has to do."""

    server: NullServer
    prompts: Sequence[Prompt]
    tokens: int
    concurrency: int
    tokenizer: str
    folder: Path


@dataclass(frozen=True)
class Measured:
    """One turn of one client: its error, and what it cost."""

    errors: Figures
    cpu_us_per_chunk: float
    cpu_s: float
    around_s: float
    more: int  # requests beyond those asked for: tests of the connection, warm-up


# --- clients -------------------------------------------------------------------------------------


def direct(work: Work) -> Figures:
    """Our own."""
    client = DirectClient(
        url=work.server.url,
        served_model=work.server.model,
        api_key=None,
        sampling=Sampling(),
        load=Load(),
    )
    records: list[RequestRecord] = []
    with closing(client):
        client.send(
            work.prompts,
            max_tokens=work.tokens,
            concurrency=work.concurrency,
            on_record=records.append,
        )
    return means(records)


def means(records: Sequence[RequestRecord]) -> Figures:
    """As specbench's tables have them."""
    return {
        "ttft_ms": statistics.mean(map(ttft_ms, records)),
        "tpot_ms": statistics.mean(t for r in records if (t := tpot_ms(r)) is not None),
        "latency_ms": statistics.mean(map(latency_ms, records)),
    }


def tool(name: str) -> Callable[[Work], Figures]:
    """GenAI-Perf or AIPerf as specbench runs them; the figures are those of the tool's summary."""
    clients = Clients(Sampling(), Load(), require(TOOLS[name], say=print))

    def run(work: Work) -> Figures:
        target = Target(work.server.url, work.server.model, work.tokenizer)
        client = clients.measuring(target, 0, None, lambda _: None)
        reports = client.send(
            work.prompts,
            max_tokens=work.tokens,
            concurrency=work.concurrency,
            on_record=lambda _: None,
            folder=work.folder,
        )
        assert reports, f"{name} said nothing of itself"
        return reports[0].figures

    return run


def vllm_bench(python: Path | None) -> Callable[[Work], Figures]:
    """`vllm bench serve`, by the vLLM of *python* (this interpreter when None)."""
    installation = require_installation(Engine(python=python) if python else Engine())
    env = {**os.environ, **metadata_environment(installation)}

    def run(work: Work) -> Figures:
        path = work.folder / "prompts.jsonl"
        lines = (json.dumps({"prompt": prompt.turns[0]}) + "\n" for prompt in work.prompts)
        path.write_text("".join(lines), encoding="utf-8")
        argv = [str(installation.python), "-m", "vllm.entrypoints.cli.main", "bench", "serve"]
        argv += ["--backend", "openai-chat", "--endpoint", "/v1/chat/completions"]
        argv += ["--base-url", work.server.url, "--model", work.server.model]
        argv += ["--tokenizer", work.tokenizer, "--temperature", "0"]
        argv += ["--dataset-name", "custom", "--dataset-path", str(path), "--skip-chat-template"]
        argv += ["--custom-output-len", str(work.tokens), "--num-prompts", str(len(work.prompts))]
        argv += ["--max-concurrency", str(work.concurrency), "--disable-shuffle"]
        argv += ["--percentile-metrics", "ttft,tpot,itl,e2el", "--save-result"]
        argv += ["--result-dir", str(work.folder), "--result-filename", "out.json"]
        carry_out(argv, work.folder, env)
        out = json.loads((work.folder / "out.json").read_bytes())
        names = {"ttft_ms": "mean_ttft_ms", "tpot_ms": "mean_tpot_ms", "latency_ms": "mean_e2el_ms"}
        return {ours: out[theirs] for ours, theirs in names.items()}

    return run


def guidellm(command: Path | None) -> Callable[[Work], Figures]:
    """GuideLLM 0.8, where its command is on PATH or named."""
    found = shutil.which(command or "guidellm")
    if found is None:
        raise SpecbenchError("guidellm is no program that can be run here (--guidellm PATH).")

    def run(work: Work) -> Figures:
        path = work.folder / "prompts.jsonl"
        lines = (
            json.dumps({"prompt": p.turns[0], "output_tokens_count": work.tokens}) + "\n"
            for p in work.prompts
        )
        path.write_text("".join(lines), encoding="utf-8")
        target = f"target={work.server.url},model={work.server.model}"
        argv = [found, "run", "--backend", f"kind=openai_http,{target}"]
        argv += ["--profile", f"kind=concurrent,streams={work.concurrency}"]
        argv += ["--constraint", f"kind=max_requests,count={len(work.prompts)}"]
        argv += ["--tokenizer", f"kind=hf_auto,model={work.tokenizer}"]
        argv += ["--data", f"kind=json_file,path={path}", "--disable-console"]
        argv += ["--output", f"kind=json,path={work.folder / 'out.json'}"]
        carry_out(argv, work.folder, dict(os.environ))
        out = json.loads((work.folder / "out.json").read_bytes())["benchmarks"][0]["metrics"]
        names = {
            "ttft_ms": ("time_to_first_token_ms", 1),
            "tpot_ms": ("inter_token_latency_ms", 1),  # what it calls TPOT has the first in it
            "latency_ms": ("request_latency", 1e3),
        }
        return {
            ours: out[theirs]["successful"]["mean"] * scale
            for ours, (theirs, scale) in names.items()
        }

    return run


def carry_out(argv: Sequence[str], folder: Path, env: Mapping[str, str]) -> None:
    """Run a client to its end.

    Raises:
        SpecbenchError: it failed; with the last line that it said.
    """
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or ["nothing"]
        raise SpecbenchError(f"{Path(argv[0]).name} ended with {done.returncode}: {said[-1]}")


# --- measuring -----------------------------------------------------------------------------------


def measure(client: Callable[[Work], Figures], work: Work) -> Measured:
    """One turn of one client.

    Raises:
        SpecbenchError: it failed, or did not send what it was asked to.
    """
    work.server.forget()
    began_ns, cpu_s = time.perf_counter_ns(), cpu_time_s()
    with nullcontext() if client is direct else Meter() as meter:
        said = client(work)
    ended_ns, cpu_s = time.perf_counter_ns(), cpu_time_s() - cpu_s
    log = [one for one in work.server.log() if one.path.endswith("/completions")]
    asked = [one for one in log if sum(one.tokens) == work.tokens][-len(work.prompts) :]
    if len(asked) < len(work.prompts):
        raise SpecbenchError(f"sent {len(asked)} of {len(work.prompts)} requests as asked for")
    own = own_means(asked)
    chunks = sum(len(one.sent_ns) for one in log)
    first_ns, last_ns = log[0].received_ns, max(one.sent_ns[-1] for one in asked)
    streaming_s = meter.between(first_ns, last_ns) if meter else cpu_s
    return Measured(
        errors={name: said[name] - own[name] for name in own},
        cpu_us_per_chunk=streaming_s * 1e6 / chunks,
        cpu_s=cpu_s,
        around_s=(first_ns - began_ns + ended_ns - last_ns) / 1e9,
        more=len(log) - len(asked),
    )


def own_means(served: Sequence[Served]) -> Figures:
    """What a client without error would have reported."""
    first_ns = [one.sent_ns[0] - one.received_ns for one in served]
    spans_ns = [one.sent_ns[-1] - one.sent_ns[0] for one in served]
    pairs = zip(spans_ns, served, strict=True)
    return {
        "ttft_ms": statistics.mean(first_ns) / 1e6,
        "tpot_ms": statistics.mean(ns / max(1, sum(one.tokens[1:])) for ns, one in pairs) / 1e6,
        "latency_ms": (statistics.mean(first_ns) + statistics.mean(spans_ns)) / 1e6,
    }


def cpu_time_s() -> float:
    """Of this process and of all children that have ended."""
    both = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


class Meter(threading.Thread):
    """Reads the CPU time of all processes that start while it runs, four times a second."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._before = {child.pid for child in psutil.Process().children(recursive=True)}
        self._samples: list[tuple[int, float]] = []
        self._over = threading.Event()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.join()

    def run(self) -> None:
        """Until left."""
        while not self._over.wait(0.25):
            self._samples.append((time.perf_counter_ns(), self._now_s()))

    def _now_s(self) -> float:
        """Children that have ended are in their parents' times."""
        total = 0.0
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                if child.pid not in self._before:
                    total += sum(child.cpu_times()[:4])
        return total

    def between(self, first_ns: int, last_ns: int) -> float:
        """CPU seconds from one time to the other, straight lines between readings."""
        at_ns, cpu_s = zip(*self._samples, strict=True)
        return float(np.interp(last_ns, at_ns, cpu_s) - np.interp(first_ns, at_ns, cpu_s))


def main() -> None:
    """Rounds of all clients under each load, and a table of means (least to greatest) over rounds."""
    args = arguments()
    makers: dict[str, Callable[[], Callable[[Work], Figures]]] = {
        "direct": lambda: direct,
        "genai-perf": lambda: tool("genai-perf"),
        "aiperf": lambda: tool("aiperf"),
        "vllm bench serve": lambda: vllm_bench(args.vllm),
        "guidellm": lambda: guidellm(args.guidellm),
    }
    wanted = args.only.split(",") if args.only else list(makers)
    clients = {}
    for name in wanted:
        try:
            clients[name] = makers[name]()
        except SpecbenchError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
    tokenizer = args.tokenizer or str(
        demo.resolve(config.load(config.find("demo")).model, say=print)
    )
    prompts = [
        Prompt(id=str(n), turns=(f"Tell me about the number {n} and what comes after it.",))
        for n in range(args.requests)
    ]
    found: dict[tuple[str, str], list[Measured]] = defaultdict(list)
    with running() as server, tempfile.TemporaryDirectory() as place:
        for turn in range(args.rounds):
            for load in args.loads.split(","):
                gap_ms, per_chunk = load.split("x")
                server.pace(ttft_ms=TTFT_MS, gap_ms=float(gap_ms), tokens=[int(per_chunk)])
                for name in random.Random(f"{turn}{load}").sample(list(clients), len(clients)):
                    folder = Path(place, f"{turn}-{load}-{name.replace(' ', '-')}")
                    folder.mkdir()
                    tokens = 1 + args.chunks * int(per_chunk)
                    work = Work(server, prompts, tokens, args.concurrency, tokenizer, folder)
                    try:
                        found[load, name].append(measure(clients[name], work))
                    except (SpecbenchError, KeyError, ValueError) as error:
                        print(f"{load} {name}: {error!s:.300}", file=sys.stderr)
    print(table(found, args))


def arguments() -> argparse.Namespace:
    """The command line above."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--loads", default="5x1,20x4")
    parser.add_argument("--chunks", type=int, default=48, help="of each answer, after its first")
    parser.add_argument("--tokenizer", help="default: the demo target's")
    parser.add_argument("--only", help="some of the clients, with commas between")
    parser.add_argument("--vllm", type=Path, help="an interpreter that has vLLM")
    parser.add_argument("--guidellm", type=Path, help="its command")
    return parser.parse_args()


def table(found: Mapping[tuple[str, str], Sequence[Measured]], args: argparse.Namespace) -> str:
    """A row for each load and client: mean over rounds, and the least and greatest."""
    lines = [
        f"{args.rounds} rounds of {args.requests} requests at concurrency {args.concurrency}:",
        "",
        "| ms x tokens | client | TTFT ms | TPOT ms | latency ms | CPU us/chunk | CPU s | around s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (load, name), turns in sorted(found.items(), key=lambda item: item[0][0]):
        cells = [spread([one.errors[key] for one in turns], signed) for key, signed in ERRORS]
        cells.append(f"{statistics.mean(one.cpu_us_per_chunk for one in turns):.0f}")
        cells.append(f"{statistics.mean(one.cpu_s for one in turns):.1f}")
        cells.append(f"{statistics.mean(one.around_s for one in turns):.1f}")
        lines.append(f"| {load.replace('x', ' x ')} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


ERRORS = (("ttft_ms", "+.2f"), ("tpot_ms", "+.4f"), ("latency_ms", "+.2f"))


def spread(values: Sequence[float], form: str) -> str:
    """The mean, and the range where there are several."""
    mean = f"{statistics.mean(values):{form}}"
    return f"{mean} ({min(values):{form}} to {max(values):{form}})" if len(values) > 1 else mean


if __name__ == "__main__":
    main()
