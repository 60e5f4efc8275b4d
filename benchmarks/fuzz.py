"""Does any input end in a traceback? Configs, prompts, metrics, streams, imports and run folders.

    python benchmarks/fuzz.py [--inputs 100000] [--seconds 900] [--seed 0] [--only yaml,sse] [--save DIR]
    python benchmarks/fuzz.py --atheris sse --seconds 60      (coverage-guided; needs atheris)

Each target takes its share of --inputs, at most its share of --seconds, in a process of its own:
first what people really had wrong (fuzz_inputs.nasty), then good files that were damaged. An input
passes that is read, or refused in the words of the target's own error: one line that names the file,
exit code 2. A traceback, over 1 s (twice in a row: others may be at work here too) or over 500 MB
is a failure; --save keeps its input. Prints the seed, a markdown table and what failed; exit 1 then.

`names a place` is the share of refusals that name a line, an item, a row or a key.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import fuzz_inputs

ROOT = Path(__file__).parents[1]
SLOW_S, HANG_S, MOST_MB = 1.0, 20, 500
MODEL = '{"model": "m", "method": "eagle"}'
PLACE = re.compile(r"\b(line|item|row) \d+|: [A-Za-z_][\w.-]*: |`[^`]+`|\bkey\b|'[^']+'")

Refusal = str | None  # what was said; None where the input was read
Judge = Callable[[bytes, Path, random.Random], Refusal]


class Hang(BaseException):
    """An input that took HANG_S; no `except Exception` can hide it."""


class Poor(Exception):
    """A refusal that leaves its reader alone; the message says how."""


# --- targets: each makes its judge and its good inputs -------------------------------------------


def _refused(error: Exception, path: Path) -> str:
    said, code = str(error), getattr(error, "exit_code", 2)
    if code != 2:
        raise Poor(f"exit code {code}: {said[:200]}")
    if "\n" in said.strip() or len(said) > 5000:
        raise Poor(f"{len(said)} characters in {said.count(chr(10)) + 1} lines: {said[:200]!r}")
    if path.name not in said:
        raise Poor(f"does not name its file: {said[:200]!r}")
    return said


def yaml() -> tuple[Judge, list[bytes]]:
    """Configs."""
    from specbench import config
    from specbench.errors import SpecbenchError

    def judge(data: bytes, folder: Path, _: random.Random) -> Refusal:
        path = folder / "c.yaml"
        path.write_bytes(data)
        try:
            config.load(path)
        except SpecbenchError as error:
            return _refused(error, path)
        return None

    shipped = [path.read_bytes() for path in sorted((ROOT / "configs").glob("*.yaml"))]
    flow = b'{"model": "m", "prompts": ["p"], "speculation": [{"method": "ngram", "k": [1, 2]}]}\n'
    return judge, [*shipped, flow]


def prompts() -> tuple[Judge, list[bytes]]:
    """Prompt files under every suffix, in the layout that they seem to have or that the user names."""
    from specbench.errors import PromptError
    from specbench.prompts import sets
    from specbench.prompts.formats import read_prompts
    from specbench.prompts.layouts import LAYOUTS

    suffixes = (".jsonl", ".jsonl", ".jsonl", ".json", ".csv", ".txt", ".parquet", ".jsonl.gz")
    layouts: list[str | None] = [None, None, None, None, *LAYOUTS]

    def judge(data: bytes, folder: Path, rng: random.Random) -> Refusal:
        path = folder / f"p{rng.choice(suffixes)}"
        path.write_bytes(data)
        try:
            for located in read_prompts(path, layout=rng.choice(layouts)):
                located.prompt.model_dump_json()
            if rng.random() < 0.2:
                sets.load_prompt_set(str(path), search=())
        except PromptError as error:
            return _refused(error, path)
        finally:
            path.unlink()
        return None

    return judge, _prompt_files()


def sidecars() -> tuple[Judge, list[bytes]]:
    """NAME.meta.json beside a converted set."""
    from specbench.errors import PromptError
    from specbench.prompts.sets import load_prompt_set

    def judge(data: bytes, folder: Path, _: random.Random) -> Refusal:
        (folder / "smoke.jsonl").write_bytes(text)
        path = folder / "smoke.meta.json"
        path.write_bytes(data)
        try:
            load_prompt_set("smoke", search=(folder,))
        except PromptError as error:
            return _refused(error, folder / "smoke")
        return None

    text = (ROOT / "datasets" / "smoke.jsonl").read_bytes()
    return judge, [(ROOT / "datasets" / "smoke.meta.json").read_bytes()]


def metrics() -> tuple[Judge, list[bytes]]:
    """/metrics pages."""
    from specbench.engines import counters

    def judge(data: bytes, _: Path, __: random.Random) -> Refusal:
        page = data.decode("utf-8", "replace")
        counters.kv_cache_tokens(page)
        try:
            found = counters.parse(page)
            (found - found).model_dump_json()
        except counters.CountersUnreadable as error:
            return str(error)
        return None

    return judge, [(fuzz_inputs.DATA / "vllm_0.32_metrics_eagle_k3.txt").read_bytes()]


def sse() -> tuple[Judge, list[bytes]]:
    """Streams of an OpenAI-compatible server, to the record that would be stored."""
    from specbench.load.sse import Reader

    names = ("vllm_0.32_chat_eagle_k3.sse", "vllm_0.32_completion_eagle_k3.sse")
    seeds = [(fuzz_inputs.DATA / name).read_bytes() for name in names]
    return _stream_judge(Reader), [*seeds, *_short_streams(seeds)]


def triton() -> tuple[Judge, list[bytes]]:
    """Streams of Triton's vLLM backend, to the record that would be stored."""
    from specbench.load.dialects import Triton

    dialect = Triton("m", lambda _: "p", ("return_finish_reason", "return_num_output_tokens"))
    chunk = {"text_output": " a", "num_output_tokens": 2, "finish_reason": "None"}
    last = {"text_output": "", "finish_reason": "length", "num_input_tokens": 3}
    events = [chunk, chunk, last, {"error": "no"}]
    stream = b"".join(b"data: " + json.dumps(one).encode() + b"\n\n" for one in events)
    return _stream_judge(lambda: dialect.reader({"text_input": "p"})), [stream, stream[:-24]]


def http1() -> tuple[Judge, list[bytes]]:
    """Answers as they come over the wire, cut at random into pieces."""
    from specbench.load import http1 as wire

    def judge(data: bytes, _: Path, rng: random.Random) -> Refusal:
        cuts = sorted(rng.randint(0, len(data)) for _ in range(rng.randint(0, 4)))
        ends = zip([0, *cuts], [*cuts, len(data)], strict=True)
        ending, pieces = wire.Ending(), []
        for n, (start, end) in enumerate(ends):
            pieces.append((n, data[start:end]))
            if ending.take(data[start:end]):
                break
        try:
            list(wire.body(pieces, whole=ending.problem is None))
        except wire.AnswerError as error:
            return str(error)
        return None

    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
    return judge, [
        head + b"transfer-encoding: chunked\r\n\r\n5\r\ndata:\r\n2;x=y\r\n\n\n\r\n0\r\n\r\n",
        head + b"content-length: 12\r\n\r\ndata: {}\n\n\r\n",
        head + b"connection: close\r\n\r\ndata: {}\n\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" + head + b"\r\n",
        b'HTTP/1.1 400 Bad Request\r\ncontent-length: 29\r\n\r\n{"error": {"message": "no"}}\n',
        b"HTTP/1.1 302 Found\r\nlocation: /\r\ncontent-length: 0\r\n\r\n",
    ]


def imports() -> tuple[Judge, list[bytes]]:
    """Other tools' results, to a run folder and its table."""
    from specbench.errors import SpecbenchError
    from specbench.interchange.found import Told
    from specbench.interchange.importing import KINDS, import_file

    kinds = [None, None, None, None, *KINDS]

    def judge(data: bytes, folder: Path, rng: random.Random) -> Refusal:
        path = folder / rng.choice(("a.json", "a.jsonl"))
        path.write_bytes(data)
        told = Told(rng.choice((None, 0, 3, 5)), rng.choice((None, "eagle")), None)
        try:
            made = import_file(
                path, results=folder, told=told, kind=rng.choice(kinds), name=f"x{time.time_ns()}"
            )
        except SpecbenchError as error:
            return _refused(error, path)
        _reported(made.path, rng)  # what was taken is a run like any other
        return None

    data = fuzz_inputs.DATA
    files = [*(data / "imports").iterdir(), *data.glob("*_0.*/*.json*")]
    return judge, [path.read_bytes() for path in sorted(files)]


def runs() -> tuple[Judge, list[bytes]]:
    """Run folders of which one file is damaged: the report in every format, the list, the details."""
    from specbench import runs as keeping
    from specbench.errors import SpecbenchError

    with tempfile.TemporaryDirectory() as made:
        files = {name: path.read_bytes() for name, path in _run_files(Path(made) / "one")}
    names = list(files)

    def judge(data: bytes, folder: Path, rng: random.Random) -> Refusal:
        head, _, data = fuzz_inputs.split(data)
        name = head.decode() or rng.choice(names)
        run = folder / "run"
        for other, content in files.items():
            path = run / other
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data if other == name else content)
        keeping.list_runs(folder)
        try:
            keeping.details(run)
        except SpecbenchError as error:
            _refused(error, run)
        try:
            _reported(run, rng)
        except SpecbenchError as error:
            return _refused(error, run)
        return None

    seeds = [name.encode() + fuzz_inputs.MARK + content for name, content in files.items()]
    return judge, [*seeds, *[one for one in seeds if one.startswith(b"run.json")] * 4]


TARGETS: dict[str, tuple[Callable[[], tuple[Judge, list[bytes]]], float]] = {
    "yaml": (yaml, 0.14),
    "prompts": (prompts, 0.22),
    "sidecars": (sidecars, 0.04),
    "metrics": (metrics, 0.1),
    "sse": (sse, 0.16),
    "triton": (triton, 0.08),
    "http1": (http1, 0.16),
    "imports": (imports, 0.07),
    "runs": (runs, 0.03),
}


# --- what targets share --------------------------------------------------------------------------


def _stream_judge(reader: Callable[[], Any]) -> Judge:
    from specbench.load.answers import record_of
    from specbench.records import Prompt, RequestRecord

    prompt = Prompt(id="a", turns=("p",))

    def judge(data: bytes, _: Path, rng: random.Random) -> Refusal:
        reading, at = reader(), rng.randint(0, len(data))
        for arrived_ns, piece in ((1, data[:at]), (2, data[at:])):
            reading.feed(arrived_ns, piece)
        answer = reading.close()
        facts: dict[str, Any] = {"prompt": prompt, "turn": 0, "start": 0, "due_ns": None}
        facts |= {"sent_ns": 0, "end_ns": 2, "sampling": {}, "prompt_sha256": "", "problem": None}
        record = record_of(answer, **facts)
        kept = record.model_dump_json(exclude_none=True)
        assert RequestRecord.model_validate_json(kept) == record
        assert record.impossible is None  # or the whole case could not be read again
        return record.error

    return judge


def _short_streams(seeds: Sequence[bytes]) -> Iterator[bytes]:
    """First and last events only, so that damage hits what is looked at."""
    for seed in seeds:
        events = seed.strip().split(b"\n\n")
        yield b"\n\n".join([*events[:2], *events[-3:]]) + b"\n\n"


def _prompt_files() -> list[bytes]:
    records: list[Any] = [
        {"text": "a"},
        {"text_input": "a", "session_id": "s", "delay": 0},
        {"question_id": 81, "category": "c", "turns": ["a", "b"], "reference": ["r"]},
        {"task_id": "HumanEval/0", "prompt": "def f():", "test": "t", "entry_point": "f"},
        {"prompt": ["a", "b"], "prompt_id": 1, "category": "c"},
        {
            "id": "x",
            "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": ""}],
        },
        {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]},
        {"type": "multi_turn", "session_id": "s", "turns": [{"text": "a", "output_length": 3}]},
        {"type": "single_turn", "session_id": "s", "text": "a", "output_length": 3},
        {"type": "mooncake_trace", "text_input": "a", "output_length": 3, "timestamp": 0},
        {"prompt": "a", "output_tokens": 3},
    ]
    found = []
    for record in records:
        line = json.dumps(record).encode() + b"\n"
        found += [line * 2, b"[" + line.strip() + b",\n" + line + b"]\n"]
    return [*found, b'id,prompt,category\n1,"a\nb",c\n2,d,\n', b"one\ntwo\n", *_parquets()]


def _parquets() -> list[bytes]:
    import pyarrow
    from pyarrow.parquet import write_table

    tables = [{"prompt": ["a", "b"], "id": ["1", None]}, {"turns": [["a", "b"], None]}]
    made = []
    for table in tables:
        sink = pyarrow.BufferOutputStream()
        write_table(pyarrow.table(table), sink)
        made.append(sink.getvalue().to_pybytes())
    return made


def _reported(folder: Path, rng: random.Random) -> None:
    """All that `specbench report` does with a run, but for printing it."""
    from specbench.analysis.curves import curves
    from specbench.analysis.rows import rows
    from specbench.analysis.slices import WAYS
    from specbench.render import report
    from specbench.render.read import measured_cases
    from specbench.store import RunStore

    store = RunStore.open(folder)
    cases = list(measured_cases(store))
    by = rng.choice((None, None, None, *WAYS))
    findings = report.Findings(
        rows(cases, baseline="vanilla", by=by, greedy=True),
        [] if by else curves(cases, baseline="vanilla"),
        by,
    )
    texts = [report.as_table(store.document, findings, width=100, colour=False)]
    texts += [render(store.document, findings) for render in report.FORMATS.values()]
    if by is None and rng.random() < 0.1:
        from specbench.render.html import page

        texts.append(page(store, cases, findings))
    for text in texts:
        text.encode()
    assert "\x1b" not in "".join(texts)
    store.status()


def _run_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """A small run of two arms as specbench writes it: its files by their names in it."""
    from specbench.records import (
        CounterSpan,
        EngineCounters,
        EngineFacts,
        Prompt,
        RequestRecord,
        SpecRequest,
    )
    from specbench.store import RunStore

    config: dict[str, Any] = {
        "name": "made",
        "model": "m",
        "prompts": [{"set": "s"}],
        "schedule": "interleaved",
    }
    config["sampling"] = {"temperature": 0.0, "ignore_eos": False, "top_p": 1.0}
    config |= {"engine": {"kind": "vllm"}, "goodput": {"ttft_ms": 90.0}, "precision": None}
    arms = {"vanilla": 0, "eagle-k2": 2}
    about = {"sha256": "0" * 64, "prompts": 3, "available": 9, "source": "made"}
    methods = {a: {"method": a.partition("-")[0], "k": k, "label": a} for a, k in arms.items()}
    condition = {"prompt_set": "s", "max_tokens": 8, "concurrency": 1, "repeat": 0, "group": 0}
    document = {
        "command": ["specbench", "run"],
        "config_path": "c.yaml",
        "config": config,
        "schedule": "interleaved",
        "arms": list(arms),
        "methods": methods,
        "cases": [{"id": f"{arm}.s", "arm": arm, **condition} for arm in arms],
        "order": [["vanilla", "eagle-k2"]],
        "room": None,
        "prompt_sets": {"s": about},
        "machine": {"gpus": [{"name": "g"}], "cpu": "c", "cores": 2, "packages": {}},
        "vllm": "0.32.0",
    }
    store = RunStore.create(folder.parent, folder.name, document)
    said = [Prompt(id=f"p{n}", turns=(f"prompt {n}",), category="ab"[n % 2]) for n in range(3)]
    store.save_prompts("s", said)
    for arm, k in arms.items():
        facts: dict[str, Any] = {
            "arm": arm,
            "start": 0,
            "kind": "vllm",
            "version": "0.32.0",
            "url": "http://h:1",
        }
        facts |= {"served_model": "m", "argv": ["vllm", "serve"], "started_at": "2026-01-01"}
        store.save_engine(EngineFacts.model_validate({**facts, "startup_s": 9.5}))
        for prompt in said:
            spec = SpecRequest(drafts=3, draft_tokens=6, accepted=4, accepted_histogram=(0, 2, 1))
            made: dict[str, Any] = {
                "prompt_id": prompt.id,
                "category": prompt.category,
                "sent_ns": 10,
            }
            made |= {"end_ns": 90_000_000, "chunk_ns": [30_000_000, 60_000_000, 90_000_000]}
            made |= {"chunk_tokens": [1, 3, 4], "chunk_chars": [1, 3, 4], "text": "abcdefgh"}
            made |= {"prompt_tokens": 4, "prompt_head": [1, 2], "output_tokens": 8}
            made |= {"token_source": "usage", "finish_reason": "length", "token_ids": [*range(8)]}
            made |= {"sampling": {"temperature": 0.0, "max_tokens": 8}}
            made |= {"prompt_sha256": hashlib.sha256(prompt.turns[0].encode()).hexdigest()}
            made |= {"spec": spec if k else None}
            store.append_request(f"{arm}.s", RequestRecord.model_validate(made))
        spent = EngineCounters(generation_tokens=24, requests=3, drafts=9, accepted=12)
        spent = spent.model_copy(update={"draft_tokens": 18, "accepted_per_pos": (8, 4)})
        keys = tuple(f"{p.id}#0@0" for p in said)
        span = CounterSpan(requests=3, keys=keys, spent=spent if k else None)
        store.append_counters(f"{arm}.s", span)
        store.finish_case(f"{arm}.s", "ok")
    store.finish("ok")
    for path in sorted(folder.rglob("*.json*")):
        yield str(path.relative_to(folder)), path


# --- the campaign --------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What became of a target's inputs."""

    inputs: int = 0
    refused: int = 0
    placed: int = 0
    worst_s: float = 0.0
    worst_mb: float = 0.0
    failures: list["Failure"] = field(default_factory=list)


class Failure(NamedTuple):
    """An input that did what none may."""

    number: int
    what: str
    data: bytes


def input_of(seed: int, target: str, number: int, seeds: Sequence[bytes]) -> bytes:
    """The input *number* of a target: first the nasty ones, then damaged ones."""
    nasty = _nasty()
    if number < len(nasty):
        return nasty[number]
    return fuzz_inputs.damaged(random.Random(f"{seed}/{target}/{number}"), seeds)


def _nasty(made: list[bytes] = []) -> list[bytes]:  # noqa: B006  (made once, some are 2 MB)
    if not made:
        made += fuzz_inputs.nasty()
    return made


def campaign(target: str, *, inputs: int, seconds: float, seed: int) -> Outcome:
    """Feed a target in this process. Syncing to disk is left out: nothing is to outlive this."""
    os.fsync = lambda _: None  # type: ignore[assignment]
    signal.signal(signal.SIGALRM, _hang)
    judge, seeds = TARGETS[target][0]()
    outcome, ends = Outcome(), time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="specbench-fuzz-", dir=_memory()) as folder:
        while outcome.inputs < inputs and time.monotonic() < ends:
            number = outcome.inputs
            outcome.inputs += 1
            data = input_of(seed, target, number, seeds)
            place = Path(folder, str(number))
            place.mkdir()
            _one(judge, data, place, f"{seed}/{target}/{number}", outcome)
            _remove(place)
    return outcome


def _one(judge: Judge, data: bytes, place: Path, name: str, outcome: Outcome) -> None:
    number, what = outcome.inputs - 1, None
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak starts anew
    for attempt in range(2):
        signal.alarm(HANG_S)
        began = time.perf_counter()
        try:
            said = judge(data, place, random.Random(name))
            took_s = time.perf_counter() - began
            if said is not None and not attempt:
                outcome.refused += 1
                outcome.placed += PLACE.search(said) is not None
        except (Exception, Hang) as error:  # noqa: BLE001  (whatever it is: that is the point)
            took_s = time.perf_counter() - began
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(last.filename).name}:{last.lineno}"
            what = f"{type(error).__name__} at {where}: {str(error)[:300]}"
        finally:
            signal.alarm(0)
        if took_s < SLOW_S or what:
            break
    outcome.worst_s = max(outcome.worst_s, took_s)
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    outcome.worst_mb = max(outcome.worst_mb, peak_mb)
    if what is None and took_s >= SLOW_S:
        what = f"took {took_s:.1f} s"
    if what is None and peak_mb > MOST_MB:
        what = f"took {peak_mb:.0f} MB"
    if what is not None:
        outcome.failures.append(Failure(number, what, data))


def _hang(*_: object) -> NoReturn:
    raise Hang(f"not done after {HANG_S} s")


def _memory() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def _remove(place: Path) -> None:
    for root, folders, names in os.walk(place, topdown=False):
        for name in names:
            os.unlink(os.path.join(root, name))
        for name in folders:
            os.rmdir(os.path.join(root, name))
    place.rmdir()


def _in_a_process(target: str, inputs: int, seconds: float, seed: int) -> Outcome:
    """The campaign of one target in a fresh process, so that its memory is its own."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        arguments = {"inputs": inputs, "seconds": seconds, "seed": seed}
        return pool.apply(campaign, (target,), arguments)


def main() -> int:
    """Print the table; 1 where anything failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=900)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default=",".join(TARGETS))
    parser.add_argument("--save", type=Path)
    parser.add_argument("--atheris", metavar="TARGET", choices=TARGETS)
    asked = parser.parse_args()
    if asked.atheris:
        guided(asked.atheris, asked.seconds)
    chosen = [name for name in asked.only.split(",") if name in TARGETS]
    whole = sum(TARGETS[name][1] for name in chosen)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the target's process ends with us
    heads = ("target", "inputs", "refused", "names a place", "worst s", "worst MB", "failures")
    print(f"seed {asked.seed}\n\n| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    failures: list[tuple[str, Failure]] = []
    for name in chosen:
        share = TARGETS[name][1] / whole
        inputs = max(1, round(asked.inputs * share))
        done = _in_a_process(name, inputs, asked.seconds * max(share, 1 / len(chosen)), asked.seed)
        named = f"{done.placed / done.refused:.0%}" if done.refused else "–"
        print(
            f"| {name} | {done.inputs} | {done.refused} | {named} | {done.worst_s:.2f} "
            f"| {done.worst_mb:.0f} | {len(done.failures)} |",
            flush=True,
        )
        failures += [(name, one) for one in done.failures]
    print(f"\n{len(failures)} failures")
    shown: dict[str, int] = {}
    for name, one in failures:
        kind = f"{name}: {one.what.partition(': ')[0]}"
        shown[kind] = shown.get(kind, 0) + 1
        if shown[kind] <= 2:
            print(f"- {name} {one.number}: {one.what}")
        if asked.save and shown[kind] <= 5:
            asked.save.mkdir(parents=True, exist_ok=True)
            (asked.save / f"{name}-{asked.seed}-{one.number}").write_bytes(one.data)
    return 1 if failures else 0


def guided(target: str, seconds: float) -> NoReturn:
    """Let atheris look for inputs that reach new code; it ends the process itself."""
    import atheris  # type: ignore[import-not-found, import-untyped, unused-ignore]

    os.fsync = lambda _: None  # type: ignore[assignment]
    with atheris.instrument_imports(include=["specbench"]):
        judge, seeds = TARGETS[target][0]()
    corpus = Path(tempfile.mkdtemp(prefix="specbench-atheris-"))
    for n, data in enumerate([*seeds, *(one for one in _nasty() if len(one) < 5000)]):
        (corpus / str(n)).write_bytes(data)
    place = Path(tempfile.mkdtemp(dir=_memory()))
    rng = random.Random(0)
    flags = [sys.argv[0], str(corpus), f"-max_total_time={seconds:.0f}", "-timeout=5"]
    atheris.Setup(
        [*flags, "-rss_limit_mb=2000", "-print_final_stats=1"], lambda b: judge(b, place, rng)
    )
    atheris.Fuzz()
    raise AssertionError("atheris does not return")


if __name__ == "__main__":
    sys.exit(main())
