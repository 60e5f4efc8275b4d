"""What the kill campaign holds against a run's folder: after each kill, and at its end.

Each check gives the faults that it found, a line of text each; none is good.
"""

import fcntl
import json
import re
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from specbench.records import RequestRecord
from specbench.store import RunStore

STORED_WITHIN_S = 0.25  # what a loaded machine may take from an answer's last byte to our disk

# Columns that no clock is in: the same in every run of a config on one engine.
SAME = re.compile(
    r"^(arm|label|method|k|prompt_set|part|max_tokens|concurrency|repeats|cycles|requests|prompts"
    r"|output_tokens|acceptance_\w+|p_\d+|outputs_\w+|rate|problem)$"
)
TRACEBACK = re.compile(
    r"Traceback \(most recent|^Exception ignored|^Fatal Python error", re.MULTILINE
)
LINES = ("requests.jsonl", "counters.jsonl", "tools.jsonl")


class Answered(NamedTuple):
    """An answer that an engine sent to its end, and when (CLOCK_MONOTONIC)."""

    served: str
    first_prompt: str
    turn: int
    end_ns: int


def requests_of(run: Path) -> dict[str, bytes]:
    """The bytes of every requests.jsonl, by the name of its case."""
    return {p.parent.name: p.read_bytes() for p in run.glob("cases/*/requests.jsonl")}


def tracebacks(said: str) -> tuple[list[str], int]:
    """Tracebacks in what specbench said, and how many more are of Python's own start.

    Before the first line of specbench runs, Python answers Ctrl-C with a traceback itself.
    """
    ours, pythons = [], 0
    for found in TRACEBACK.finditer(said):
        text = said[found.start() : found.start() + 6000]
        text = text[
            : end.end()
            if (end := re.search(r"^\w*(Error|Interrupt).*$", text, re.MULTILINE))
            else None
        ]
        if re.search(r'File "[^"]*specbench', text):
            ours.append(text)
        else:
            pythons += 1
    return ours, pythons


def after_a_kill(run: Path, before: dict[str, bytes]) -> Iterator[str]:
    """Lines that were there are there, documents are whole, the lock is free."""
    now = requests_of(run)
    for case, kept in before.items():
        whole = kept[: kept.rfind(b"\n") + 1]
        if not now.get(case, b"").startswith(whole):
            yield f"lost: {case} had {whole.count(10)} requests before the kill"
    for path in run.glob("cases/*/*.jsonl"):
        if path.name in LINES:
            for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
                with suppress(ValueError):
                    json.loads(line)
                    continue
                yield f"torn: line {number} of {path}"
    for path in [*run.glob("*.json"), *run.glob("*/*/*.json")]:
        try:
            json.loads(path.read_bytes())
        except ValueError:
            yield f"torn: {path}"
    if (run / "lock").exists():
        with (run / "lock").open("rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                yield f"locked: {run}"


# --- witnesses -----------------------------------------------------------------------------------


def answered(witness: Path) -> list[Answered]:
    """What stand-in engines noted of the answers that they sent."""
    found = []
    with suppress(FileNotFoundError):
        for line in witness.read_bytes().split(b"\n")[:-1]:
            said = json.loads(line)
            user = [m["content"] for m in said["messages"] if m["role"] == "user"]
            found.append(Answered(said["served"], user[0], len(user) - 1, said["end_ns"]))
    return found


def unstored(
    run: Path, sent: list[Answered], began_ns: int, killed_ns: int
) -> tuple[list[str], float]:
    """Answers of one attempt that are not in the store, and the age in s of the oldest of them.

    Those within STORED_WITHIN_S of the kill are no loss: nobody had them yet.
    """
    store = RunStore.open(run)
    starts = {facts.served_model: (facts.arm, facts.start) for facts in store.engines()}
    ids = {
        prompt.turns[0]: (name, prompt.id)
        for name in store.document["prompt_sets"]
        for prompt in store.prompts(name)
    }
    kept = {
        (case["arm"], record.start, case["prompt_set"], record.prompt_id, record.turn)
        for case in store.document["cases"]
        for record in store.requests(case["id"])
    }
    losses, oldest_s = [], 0.0
    for one in sent:
        if one.served in starts and one.first_prompt in ids and began_ns < one.end_ns < killed_ns:
            key = (*starts[one.served], *ids[one.first_prompt], one.turn)
            age_s = (killed_ns - one.end_ns) / 1e9
            if key not in kept:
                oldest_s = max(oldest_s, age_s)
                if age_s > STORED_WITHIN_S:
                    losses.append(f"lost: {key} was answered {age_s:.3f} s before the kill")
    return losses, oldest_s


def counted(run: Path) -> dict[tuple[str, int], int]:
    """How many requests each living engine of *run* says it has finished, by arm and start."""
    found = {}
    newest = {facts.arm: facts for facts in RunStore.open(run).engines()}
    for facts in newest.values():
        with suppress(OSError, ValueError):
            with urllib.request.urlopen(f"{facts.url}/metrics", timeout=2) as page:
                text = page.read().decode()
            name = r"^vllm:request_success_total(?:\{.*\})? ([0-9.e+]+)$"
            done = sum(float(n) for n in re.findall(name, text, re.MULTILINE))
            found[(facts.arm, facts.start)] = int(done)
    return found


def uncounted(run: Path, finished: dict[tuple[str, int], int], warm_up: int) -> list[str]:
    """Engines that had finished more requests (but for the warm-up) than the store has of them."""
    store = RunStore.open(run)
    kept = Counter(
        (case["arm"], record.start)
        for case in store.document["cases"]
        for record in store.requests(case["id"])
    )
    return [
        f"lost: {start} had finished {count} requests with {warm_up} of warm-up, {kept[start]} kept"
        for start, count in finished.items()
        if count - warm_up > kept[start]
    ]


# --- a run that is done --------------------------------------------------------------------------


def finished(
    run: Path, reference: list[dict[str, Any]], sent: list[Answered] | None, *, whole: bool
) -> list[str]:
    """Everything measured, once, each by an engine of its own arm, with *reference*'s `table`."""
    store = RunStore.open(run)
    found = []
    if (store.status() or {}).get("status") != "ok":
        found.append(f"unfinished: {store.status()}")
    for case in store.document["cases"]:
        records = list(store.requests(case["id"]))
        found += _measured_again(case["id"], records, store.prompts(case["prompt_set"]))
        found += _mixed(store, case["arm"], records, sent)
    if drafts := [str(path) for path in run.rglob("*.draft")]:
        found.append(f"litter: {drafts}")
    for ours, theirs in zip(table(run, whole=whole), reference, strict=True):
        # What fits together hangs on the memory that is free; the baseline is in every group.
        apart = ours["groups"] != theirs["groups"]
        leave_out = {"requests", "output_tokens"} if apart else set()
        found += [
            f"table: {ours['arm']} {name} is {ours[name]!r}, undisturbed {theirs[name]!r}"
            for name in ours
            if ours[name] != theirs[name]
            and name != "groups"
            and not (ours["k"] == 0 and name in leave_out)
        ]
    return found


def _measured_again(case: str, records: list[RequestRecord], prompts: list[Any]) -> Iterator[str]:
    """Requests that were measured although they had been; a cut conversation has to begin anew."""
    turns = {prompt.id: len(prompt.turns) for prompt in prompts}
    at: dict[tuple[str, int], int] = {}  # the next turn of each prompt, by pass
    for record in records:
        key = (record.prompt_id, record.cycle)
        if at.get(key, 0) >= turns[record.prompt_id]:
            yield f"twice: {case} {record.key}"
        elif record.turn not in (0, at.get(key, 0)):
            yield f"order: {case} {record.key} after {at.get(key, 0)} turns"
        at[key] = record.turn + 1 if record.ok else 0
    for name, count in turns.items():
        if at.get((name, 0), 0) != count:
            yield f"unmeasured: {case} {name}"


def _mixed(
    store: RunStore, arm: str, records: list[RequestRecord], sent: list[Answered] | None
) -> Iterator[str]:
    """Records of a start that there was not, or that this engine says it did not answer."""
    served = {(facts.arm, facts.start): facts.served_model for facts in store.engines()}
    told = Counter(one.served for one in sent) if sent is not None else None
    of_start = Counter(record.start for record in records if record.ok)
    for start, count in of_start.items():
        if not store.engine_folder(arm, start).is_dir():
            yield f"mixed: {arm} has records of start {start}, which never was"
        if told is not None and told[served.get((arm, start)) or ""] < count:
            yield f"mixed: start {start} of {arm} did not answer all of its {count} records"


def table(run: Path, *, whole: bool = False) -> list[dict[str, Any]]:
    """The run's report but for columns with times in them; with *whole*, with them."""
    from specbench.analysis.rows import rows
    from specbench.render import report
    from specbench.render.read import measured_cases

    store = RunStore.open(run)
    cases = list(measured_cases(store))
    findings = report.Findings(rows(cases, baseline="vanilla", greedy=True), [], None)
    made = json.loads(report.FORMATS["json"](store.document, findings))["rows"]
    groups = len({case.group for case in cases})
    kept = ({k: v for k, v in row.items() if whole or SAME.match(k)} for row in made)
    return [{**row, "groups": groups} for row in kept]
