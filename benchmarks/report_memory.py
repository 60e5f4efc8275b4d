"""What a report costs: memory and seconds of each format, by the number of requests and their length.

    python benchmarks/report_memory.py [--requests 8000] [--tokens 256] [--formats table json html]

Makes a run of two arms (vanilla, eagle at k = 3) in a temporary folder: every request with its chunk
times, token ids, text and steps, half of the outputs with a difference. Each report is a process of its
own; memory is the peak of its resident set, `over` that beyond the report of a run of 20 requests.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FORMATS = ("table", "markdown", "csv", "json", "html")
ARMS = {"vanilla": 0, "eagle-k3": 3}
STEP_NS, VARIANTS = 10_000_000, 50  # ns of a target step; answers that are made up, then used again


def main() -> None:
    """Print a line for each format."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=8000)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        least, run = Path(folder) / "least", Path(folder) / "run"
        make(least, 20, given.tokens)
        file_mb = make(run, given.requests, given.tokens)
        print(f"{given.requests} requests of {given.tokens} tokens, {file_mb:,.0f} MB")
        for form in given.formats:
            peak, seconds = cost(run, form)
            over = peak - cost(least, form)[0]
            print(
                f"{form:9} peak {peak:6,.0f} MB, over {over:6,.0f} MB ({over / file_mb:.1%} of the "
                f"file, {1e6 * over / given.requests:,.0f} bytes a request), {seconds:.1f} s",
                flush=True,
            )


def cost(run: Path, form: str) -> tuple[float, float]:
    """Peak MB and seconds of one report."""
    page = run / f"report.{form}"
    command = [sys.executable, "-m", "specbench", "report", str(run), "-f", form, "-o", str(page)]
    began = time.monotonic()
    process = subprocess.Popen(command)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"specbench report ended with {process.returncode}")
    return used.ru_maxrss * 1024 / 1e6, time.monotonic() - began


def make(folder: Path, requests: int, tokens: int) -> float:
    """A run folder; MB of its requests."""
    prompts = requests // len(ARMS)
    condition = {"prompt_set": "s", "max_tokens": tokens, "concurrency": 1, "repeat": 0, "group": 0}
    sampling = {"temperature": 0.0, "ignore_eos": True, "top_p": 1.0}
    document = {
        "format": 1,
        "id": folder.name,
        "command": ["specbench", "run"],
        "config_path": "made.yaml",
        "config": {
            "model": "m",
            "prompts": [{"set": "s"}],
            "schedule": "interleaved",
            "sampling": sampling,
            "engine": {"kind": "vllm"},
        },
        "schedule": "interleaved",
        "arms": list(ARMS),
        "methods": {arm: {"method": arm.partition("-")[0], "k": k} for arm, k in ARMS.items()},
        "cases": [{"id": arm, "arm": arm, **condition} for arm in ARMS],
        "room": None,
        "prompt_sets": {"s": {"sha256": "0" * 64, "prompts": prompts, "source": "made up"}},
        "machine": {"gpus": [], "cpu": "made up", "cores": 1, "packages": {}},
        "vllm": None,
    }
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps(document), encoding="utf-8")
    (folder / "done.json").write_text('{"status": "ok"}', encoding="utf-8")
    (folder / "prompts").mkdir()
    asked = (json.dumps({"id": f"p{n}", "turns": [f"prompt {n}"]}) + "\n" for n in range(prompts))
    with (folder / "prompts" / "s.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(asked)
    size = 0
    for arm, k in ARMS.items():
        case = folder / "cases" / arm
        case.mkdir(parents=True)
        (case / "done.json").write_text('{"status": "ok"}', encoding="utf-8")
        with (case / "requests.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(lines(prompts, tokens, k))
        size += (case / "requests.jsonl").stat().st_size
    return size / 1e6


def lines(prompts: int, tokens: int, k: int) -> Iterator[str]:
    """The requests of a case; what differs from prompt to prompt is its id, and one of VARIANTS."""
    rng = random.Random(k)
    variants = [json.dumps(answer(rng, variant, tokens, k)) for variant in range(VARIANTS)]
    for n in range(prompts):
        yield variants[n % VARIANTS].replace('"@"', f'"p{n}"', 1) + "\n"


def answer(rng: random.Random, variant: int, tokens: int, k: int) -> dict[str, Any]:
    """A request as a run with per-request metrics keeps it."""
    said = [random.Random(variant).randrange(100_000) + place for place in range(tokens)]
    if k and variant % 2:
        said[tokens // 2 :] = [rng.randrange(100_000) for _ in said[tokens // 2 :]]
    counts, accepted = [1], []
    while (left := tokens - sum(counts)) > 0:
        accepted.append(min(k, int(rng.expovariate(0.5))))
        counts.append(min(1 + accepted[-1], left))
    sent = 10**12 + variant * 10**10
    pace = STEP_NS * (1 + 0.1 * k) * rng.uniform(0.95, 1.05)
    times = [round(sent + 5e7 + place * pace) for place in range(len(counts))]
    words = [f" {token % 7919}" for token in said]
    ends = [sum(counts[: place + 1]) for place in range(len(counts))]
    texts = ["".join(words[e - c : e]) for e, c in zip(ends, counts, strict=True)]
    found = {
        "prompt_id": "@",
        "sent_ns": sent,
        "end_ns": times[-1],
        "chunk_ns": times,
        "chunk_tokens": counts,
        "chunk_chars": list(map(len, texts)),
        "prompt_tokens": 9,
        "output_tokens": tokens,
        "token_source": "usage",
        "finish_reason": "length",
        "token_ids": said,
        "text": "".join(texts),
        "prompt_sha256": f"{variant:064}",
    }
    if not k:
        return found
    spec = {
        "drafts": len(accepted),
        "draft_tokens": k * len(accepted),
        "accepted": sum(accepted),
        "accepted_histogram": [accepted.count(n) for n in range(k + 1)],
        "per_step_accepted": accepted,
        "per_step_drafted": [k] * len(accepted),
    }
    return {**found, "spec": spec}


if __name__ == "__main__":
    main()
