"""A report takes no more memory where requests are longer, and little where there are more of them."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from specbench.records import Prompt, RequestRecord, SpecRequest
from specbench.store import RunStore

pytestmark = pytest.mark.engine  # they measure: nothing runs beside them

Made = Callable[..., RunStore]
Build = Callable[..., RequestRecord]
MB = 1e6


def filled(store: RunStore, record: Build, prompts: int, tokens: int) -> float:
    """Put an answer of so many tokens to each prompt into each case; MB of requests."""
    size = 0
    for case in store.document["cases"]:
        k = store.document["methods"][case["arm"]]["k"]
        counts = (1, *[1 + k] * ((tokens - 1) // (1 + k)))
        ids = tuple(range(1000, 1000 + sum(counts)))
        steps = len(counts) - 1
        histogram = (*[0] * k, steps)
        spec = SpecRequest(
            drafts=steps,
            draft_tokens=steps * k,
            accepted=steps * k,
            accepted_histogram=histogram,
            per_step_accepted=(k,) * steps,
            per_step_drafted=(k,) * steps,
        )
        line = record(
            "@",
            chunks=[100 + 10 * (1 + 0.1 * k) * n for n in range(len(counts))],
            tokens=sum(counts),
            chunk_tokens=counts,
            chunk_chars=tuple(5 * count for count in counts),
            token_ids=ids,
            text="word " * sum(counts),
            spec=spec if k else None,
        ).model_dump_json(exclude_none=True)
        path = store.path / "cases" / case["id"] / "requests.jsonl"
        with path.open("w", encoding="utf-8") as file:
            file.writelines(line.replace("@", f"p{n}", 1) + "\n" for n in range(prompts))
        size += path.stat().st_size
    return size / MB


def peak_mb(*arguments: str) -> float:
    """The largest resident set of a specbench of its own that ends well."""
    command = [sys.executable, "-m", "specbench", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    _, status, used = os.wait4(process.pid, 0)
    assert process.stderr is not None
    said = process.stderr.read().decode()
    process.stderr.close()
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, said
    return used.ru_maxrss / 1024


@pytest.fixture
def grows(made_run: Made, record: Build) -> Callable[..., float]:
    """By what share of the requests' own size memory grows from the smaller of two runs to the larger."""

    def measured(smaller: tuple[int, int], larger: tuple[int, int], *command: str) -> float:
        asked = [Prompt(id=f"p{n}", turns=(f"prompt {n}",)) for n in range(larger[0])]
        store = made_run(asked, say=lambda *_: "", arms={"eagle": (3,)})
        arguments = [str(store.path) if word == "RUN" else word for word in command]
        sizes, peaks = [], []
        for prompts, tokens in (smaller, larger):
            sizes.append(filled(store, record, prompts, tokens))
            peaks.append(peak_mb(*arguments))
        assert sizes[1] > 25
        assert sizes[1] > 9 * sizes[0]
        return (peaks[1] - peaks[0]) / (sizes[1] - sizes[0])

    return measured


def test_longer_answers_take_no_more_memory(grows: Callable[..., float]) -> None:
    """Kept whole, requests take six times what their file does."""
    assert grows((300, 250), (300, 2500), "report", "RUN") < 0.05


@pytest.mark.parametrize(
    "command",
    [
        ("report", "RUN"),
        ("baseline", "save", "RUN", "--replace", "-o", "@"),
    ],
    ids=["table", "baseline"],
)
def test_more_requests_take_little_more_memory(
    grows: Callable[..., float], tmp_path: Path, command: tuple[str, ...]
) -> None:
    """Some 600 bytes for each of 4,600 requests of 6 kB."""
    words = [str(tmp_path / "kept.json") if word == "@" else word for word in command]
    g = grows((200, 300), (2300, 300), *words)
    assert g < 0.3
