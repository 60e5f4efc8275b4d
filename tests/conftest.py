"""What several test files build: a request as it was measured, and a run folder."""

import functools
import hashlib
import itertools
import os
import random
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from specbench.interrupts import ENDING
from specbench.records import EngineFacts, Prompt, RequestRecord, SpecRequest
from specbench.store import RunStore

# Tests run beside each other: what the sampler saw of that would flag their rows.
os.environ.setdefault("SPECBENCH_TELEMETRY", "off")
os.environ.setdefault("SPECBENCH_CALIBRATION", "off")  # a second for each run
# Thousands of small folders, many of them synced: in memory they take a tenth of what they do on a disk.
MEMORY = Path("/dev/shm")
ROOM_BYTES = 4 << 30
with suppress(OSError):
    has_room = os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > ROOM_BYTES
    if (
        has_room and not os.statvfs(MEMORY).f_flag & os.ST_NOEXEC
    ):  # docker's are, and we run scripts
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))
# Workers on all cores: of more threads, those of OpenBLAS and OpenMP spin while they wait for each other.
# Read when numpy and torch are imported, which nothing above does.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

# In the background of a script, or under nohup, INT and HUP are ignored, and would be by all that tests start.
for _number, _default in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGTERM, signal.SIG_DFL),
):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, _default)

SLOW = {Path(__file__).with_name("engine"), Path(__file__).with_name("browser")}


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """How many workers, if nobody says: engines are started one at a time, because they are measured.

    The fast part has more than there are cores, since tests wait for processes half of their time.
    """
    return 4 if config.option.markexpr.startswith("not engine") else 0


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The fast part need not import what is all marked `engine`: torch, and a browser's driver."""
    return True if config.option.markexpr == "not engine" and collection_path in SLOW else None


@pytest.fixture
def record() -> Callable[..., RequestRecord]:
    """A request in round numbers: sent at 0, times in ms, one token a chunk unless said."""

    def build(
        prompt: str = "a",
        *,
        sent: float = 0,
        chunks: Sequence[float] = (100, 200),
        tokens: int | None = None,
        **more: Any,  # noqa: ANN401  (any field of the record)
    ) -> RequestRecord:
        facts: dict[str, Any] = {
            "prompt_id": prompt,
            "sent_ns": round(sent * 1e6),
            "end_ns": round((chunks[-1] if chunks else sent + 1) * 1e6),
            "chunk_ns": tuple(round(ms * 1e6) for ms in chunks),
            "output_tokens": len(chunks) if tokens is None else tokens,
            "token_source": "usage",
            "finish_reason": "stop",
            "prompt_sha256": hashlib.sha256(prompt.encode()).hexdigest(),
        }
        return RequestRecord.model_validate(facts | more)

    return build


@pytest.fixture(autouse=True)
def _signals_are_put_back() -> Iterator[None]:
    """Commands that run in this process end as a process would: deaf to INT, TERM and HUP."""
    handlers = {n: signal.getsignal(n) for n in (*ENDING, signal.SIGALRM, signal.SIGCONT)}
    hook = sys.unraisablehook
    yield
    sys.unraisablehook = hook
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def fake_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter whose vLLM, said to be 0.32, is tests/fake_vllm.py: for `engine.python`."""
    folder = tmp_path_factory.mktemp("engine")
    package = folder / "site" / "vllm"
    (package / "engine").mkdir(parents=True)
    (package / "config").mkdir()
    (package / "__init__.py").touch()
    (package / "_version.py").write_text("__version__ = '0.32.0'\n", encoding="utf-8")
    (package / "engine" / "arg_utils.py").write_text(
        "class EngineArgs:\n    model: str\n    dtype: str\n    enable_prefix_caching: bool\n",
        encoding="utf-8",
    )
    (package / "config" / "speculative.py").write_text(
        "SpeculativeMethod = Literal['eagle', 'ngram']\n"
        "class SpeculativeConfig:\n    method: str\n    prompt_lookup_max: int\n"
        "    rejection_sample_method: str\n    synthetic_acceptance_length: float\n",
        encoding="utf-8",
    )
    python = folder / "python"
    python.write_text(
        "#!/bin/sh\n"
        f'[ "$1" = -I ] && {{ shift; PYTHONPATH={folder}/site exec {sys.executable} -S "$@"; }}\n'
        f'exec {sys.executable} {Path(__file__).with_name("fake_vllm.py")} "$@"\n',
        encoding="utf-8",
    )
    python.chmod(0o755)
    return python


MADE_CONFIG: dict[str, Any] = {
    "model": "m",
    "speculation": [{"method": "eagle", "model": "head", "k": [1, 3]}],
    "prompts": [{"set": "he"}],
    "max_tokens": [24],
    "schedule": "interleaved",
    "sampling": {"temperature": 0.0, "ignore_eos": False},
}


@pytest.fixture
def made_run(run_in: Callable[..., RunStore], tmp_path: Path) -> Callable[..., RunStore]:
    """`run_in`, with its results in the test's own folder."""
    return functools.partial(run_in, tmp_path)


@pytest.fixture(scope="session")
def run_in() -> Callable[..., RunStore]:
    """`make_run`, for test files: they cannot import this one."""
    return make_run


def make_run(
    results: Path,
    prompts: Sequence[Prompt],
    *,
    say: Callable[[str, Prompt, int], str],
    arms: Mapping[str, Sequence[int]] = {"eagle": (1, 3)},
    concurrency: Sequence[int] = (1,),
    max_tokens: int = 24,
    **more: Any,  # noqa: ANN401  (what run.json is to say otherwise)
) -> RunStore:
    """A finished run folder of made-up requests: vanilla, and a label at each of its k."""
    methods: dict[str, dict[str, Any]] = {
        "vanilla": {"method": "vanilla", "k": 0, "label": "vanilla"}
    }
    for label, ks in arms.items():
        methods |= {f"{label}-k{k}": {"method": label, "k": k, "label": label} for k in ks}
    cases: list[dict[str, Any]] = [
        {
            "id": f"{arm}.c{at}",
            "arm": arm,
            "prompt_set": "he",
            "max_tokens": max_tokens,
            "concurrency": at,
            "repeat": 0,
            "group": 0,
        }
        for at in concurrency
        for arm in methods
    ]
    about = {"sha256": "0" * 64, "prompts": len(prompts), "available": 164, "source": "made up"}
    document: dict[str, Any] = {
        "command": ["specbench", "run", "--config", "made.yaml"],
        "config_path": "made.yaml",
        "config": MADE_CONFIG,
        "schedule": "interleaved",
        "arms": list(methods),
        "methods": methods,
        "cases": cases,
        "room": None,
        "prompt_sets": {"he": about},
        "machine": {"gpus": [], "cpu": "Some CPU", "cores": 2, "packages": {"torch": "2"}},
        "vllm": "0.32.0",
    }
    store = RunStore.create(results, "made", document | more)
    store.save_prompts("he", prompts)
    for arm, method in methods.items():
        store.save_engine(_engine(arm))
        for case in (one for one in cases if one["arm"] == arm):
            records = [
                _spoken(prompt, turn, say(arm, prompt, turn), method["k"], case)
                for prompt in prompts
                for turn in range(len(prompt.turns))
            ]
            store.finish_case(case["id"], "ok")
            lines = "".join(f"{one.model_dump_json(exclude_none=True)}\n" for one in records)
            path = store.path / "cases" / case["id"] / "requests.jsonl"
            path.write_text(lines, encoding="utf-8")
    store.finish("ok")
    return store


def _engine(arm: str) -> EngineFacts:
    return EngineFacts(
        arm=arm,
        start=0,
        kind="vllm",
        version="0.32.0",
        url="http://127.0.0.1:1",
        served_model="m",
        argv=("vllm", "serve", "m", "--api-key", "hush"),
        env={"HF_TOKEN": "hush", "OMP_NUM_THREADS": "1"},
        startup_s=20,
        started_at="2026-01-01T00:00:00+00:00",
    )


def _spoken(prompt: Prompt, turn: int, text: str, k: int, case: Mapping[str, Any]) -> RequestRecord:
    """One answer, a word a token; drafts are accepted at random, the same in every call."""
    rng = random.Random(f"{prompt.id}{turn}{k}{case['concurrency']}")
    tokens = re.findall(r"\s?\S+|\s", text) or [""]
    counts = [1]
    accepted = []
    while sum(counts) < len(tokens):
        accepted.append(sum(itertools.takewhile(bool, (rng.random() < 0.6 for _ in range(k)))))
        counts.append(min(1 + accepted[-1], len(tokens) - sum(counts)))
    pace_ms = 10 * (1 + 0.1 * k) * case["concurrency"] ** (0.3 + 0.3 * bool(k))
    at, times = 50e6 * (1 + 0.05 * k) * rng.uniform(0.9, 1.1), []
    for _ in counts:
        times.append(round(at))
        at += pace_ms * 1e6 * rng.uniform(0.95, 1.05)
    words = itertools.accumulate(counts)
    ends = list(itertools.accumulate(map(len, tokens)))
    chars = [ends[word - 1] for word in words]
    spec = SpecRequest(
        drafts=len(accepted),
        draft_tokens=k * len(accepted),
        accepted=sum(accepted),
        accepted_histogram=tuple(accepted.count(n) for n in range(k + 1)),
        per_step_accepted=tuple(accepted),
        per_step_drafted=(k,) * len(accepted),
    )
    return RequestRecord(
        prompt_id=prompt.id,
        turn=turn,
        category=prompt.category,
        sent_ns=0,
        end_ns=times[-1],
        chunk_ns=tuple(times),
        chunk_tokens=tuple(counts),
        chunk_chars=tuple(b - a for a, b in itertools.pairwise([0, *chars])),
        prompt_tokens=10 + len(prompt.turns[turn]) // 4,
        prompt_head=(1, 2, 3),
        output_tokens=len(tokens),
        token_source="usage",
        finish_reason="length",
        token_ids=tuple(int(hashlib.sha256(one.encode()).hexdigest()[:6], 16) for one in tokens),
        text=text,
        prompt_sha256=hashlib.sha256(prompt.turns[turn].encode()).hexdigest(),
        sampling={"temperature": 0.0, "max_tokens": 24, "ignore_eos": False},
        spec=spec if k else None,
    )
