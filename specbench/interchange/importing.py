"""What was found in another tool's file to a run folder: facts only, whole or not at all."""

import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from specbench import __version__
from specbench.errors import ExchangeError, StoreError
from specbench.interchange import aiperf, answers, genai_perf, sglang, vllm_bench
from specbench.interchange.found import UNKNOWN, VANILLA, FoundCase, Told
from specbench.interchange.reading import Source, read_source
from specbench.prompts.sets import prompt_set_sha256
from specbench.records import Fact, Prompt
from specbench.store import RunStore, new_run_id, write_document, write_text

NAME = re.compile(r"[^A-Za-z0-9_.-]+")
LONGEST_NAME = 60


class Kind(NamedTuple):
    """How a tool's file is known, and read."""

    tool: str
    claims: Callable[[Any], bool]
    read: Callable[[Source, Told], list[FoundCase]]


# In the order in which a file is tried.
KINDS: dict[str, Kind] = {
    "vllm-bench": Kind(vllm_bench.TOOL, vllm_bench.claims, vllm_bench.read),
    "genai-perf": Kind(genai_perf.TOOL, genai_perf.claims, genai_perf.read),
    "aiperf-raw": Kind("AIPerf raw records", aiperf.claims_raw, aiperf.read_raw),
    "aiperf": Kind("AIPerf records", aiperf.claims_records, aiperf.read_records),
    "spec-bench": Kind("Spec-Bench", answers.claims_spec_bench, answers.read_spec_bench),
    "eagle": Kind("EAGLE", answers.claims_eagle, answers.read_eagle),
    "sglang": Kind(sglang.TOOL, sglang.claims, sglang.read),
    "aiperf-summary": Kind("AIPerf summary", aiperf.claims_summary, aiperf.read_summary),
    "genai-perf-summary": Kind(
        "GenAI-Perf summary", genai_perf.claims_summary, genai_perf.read_summary
    ),
}


@dataclass(frozen=True)
class ImportedRun:
    """A run folder that was made of a file."""

    path: Path
    kind: str
    arms: list[str]
    requests: int


def import_file(
    path: Path,
    *,
    results: Path,
    told: Told,
    kind: str | None = None,
    name: str | None = None,
    baseline: Path | None = None,
    command: Sequence[str] = (),
) -> ImportedRun:
    """Make a run folder of *path*; of *baseline* too, as the vanilla arm beside it.

    Raises:
        ExchangeError: a file is not what *kind* says or none that is known, or lacks what no one says.
        StoreError: the run folder can't be made.
    """
    source = read_source(path)
    kind = kind or kind_of(source)
    cases = _read(source, kind, told)
    sources = [source]
    if baseline is not None:
        sources.append(read_source(baseline))
        vanilla = _read(sources[1], kind_of(sources[1]), replace(told, k=0, method=None))
        cases = [*vanilla, *cases]
    called = slug(name or source.path.stem)
    document, folders = _document(cases, called, sources, kind, command, told)
    run_id = new_run_id(called)
    _write(results, run_id, document, folders, _prompts(cases), called)
    return ImportedRun(
        path=results / run_id,
        kind=kind,
        arms=document["arms"],
        requests=sum(len(case.records) for case in cases),
    )


def kind_of(source: Source) -> str:
    """Which tool wrote the file, by its first value.

    Raises:
        ExchangeError: none that is known.
    """
    for kind, reader in KINDS.items():
        if reader.claims(source.first):
            return kind
    raise ExchangeError(
        source.path,
        source.documents[0][0],
        "is none of the files that are known here.",
        hint=f"Known: {', '.join(one.tool for one in KINDS.values())}; name one with --from.",
    )


def _read(source: Source, kind: str, told: Told) -> list[FoundCase]:
    if kind not in KINDS:
        raise ExchangeError(
            source.path, None, f"no kind {kind!r}.", hint=f"--from takes {', '.join(KINDS)}."
        )
    if not KINDS[kind].claims(source.first):
        raise ExchangeError(source.path, source.documents[0][0], f"is not of {KINDS[kind].tool}.")
    return KINDS[kind].read(source, told)


def slug(name: str) -> str:
    """*name* as part of a folder's name."""
    return NAME.sub("-", name).strip("-._")[:LONGEST_NAME] or "imported"


# --- the run's document ---------------------------------------------------------------------------


def _document(
    cases: Sequence[FoundCase],
    called: str,
    sources: Sequence[Source],
    kind: str,
    command: Sequence[str],
    told: Told,
) -> tuple[dict[str, Any], dict[str, FoundCase]]:
    """What run.json says, and each case by its id."""
    planned: dict[str, dict[str, Any]] = {}
    folders: dict[str, FoundCase] = {}
    repeats: dict[tuple[Any, ...], int] = {}
    for case in cases:
        arm = slug(case.arm)
        condition = (arm, case.max_tokens, case.concurrency, case.rate)
        repeat = repeats[condition] = repeats.get(condition, -1) + 1
        if repeat and not case.records:
            raise ExchangeError(
                sources[0].path,
                None,
                f"holds {arm} at concurrency {case.concurrency} twice, and figures can't be added.",
                hint="Import each in a file of its own.",
            )
        load = f"c{case.concurrency}" if case.rate is None else f"q{case.rate:g}"
        length = "" if case.max_tokens is None else f".t{case.max_tokens}"
        id = f"{arm}.{called}{length}.{load}.r{repeat}"
        planned[id] = {
            "id": id,
            "arm": arm,
            "prompt_set": called,
            "max_tokens": case.max_tokens,
            "concurrency": case.concurrency,
            "repeat": repeat,
            "group": 0,
            "rate": case.rate,
        }
        folders[id] = case
    first = {slug(case.arm): case for case in reversed(cases)}
    arms = sorted(first, key=lambda arm: arm != VANILLA)
    prompts = _prompts(cases)
    return {
        "command": list(command),
        "config_path": str(sources[0].path),
        "config": _config(cases, called, told),
        "schedule": "blocks",
        "arms": arms,
        "methods": {
            arm: {
                "method": first[arm].method,
                "k": first[arm].k,
                "label": VANILLA
                if not first[arm].k
                else slug(first[arm].label or first[arm].method),
            }
            for arm in arms
        },
        "order": [[arm] for arm in arms],
        "cases": list(planned.values()),
        "room": None,
        "prompt_sets": {
            called: {
                "sha256": prompt_set_sha256(prompts),
                "prompts": len(prompts),
                "available": None,
                "source": f"imported from {sources[0].path.name}",
            }
        },
        "machine": {"gpus": [], "cpu": None, "cores": None, "specbench": __version__},
        "vllm": None,
        "load": {"client": KINDS[kind].tool, "version": None},
        "imported": {
            "from": KINDS[kind].tool,
            "kind": kind,
            "files": [one.path.name.encode("utf-8", "replace").decode() for one in sources],
            "sha256": [one.sha256 for one in sources],
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
        },
    }, folders


def _config(cases: Sequence[FoundCase], called: str, told: Told) -> dict[str, Any]:
    """As much of a config as is known; null where it is not."""
    models = [told.model, *(case.model for case in cases)]
    sampling = {"temperature": None, "ignore_eos": None, **_shared(cases)}
    sampling.pop("max_tokens", None)
    return {
        "name": called,
        "model": next(filter(None, models), UNKNOWN),
        "speculation": [],
        "prompts": [{"set": called}],
        "max_tokens": sorted({case.max_tokens for case in cases if case.max_tokens}) or None,
        "concurrency": sorted({case.concurrency for case in cases}),
        "repeats": 1,
        "schedule": "blocks",
        "sampling": sampling,
        "engine": {},
        "load": {},
    }


def _shared(cases: Sequence[FoundCase]) -> Mapping[str, Any]:
    """The sampling that all cases have in common."""
    first = cases[0].sampling
    return {
        name: value
        for name, value in first.items()
        if all(name in case.sampling and case.sampling[name] == value for case in cases)
    }


def _prompts(cases: Sequence[FoundCase]) -> list[Prompt]:
    """Every prompt once; of two with one id the one that says more."""
    found: dict[str, Prompt] = {}
    for case in cases:
        for prompt in case.prompts:
            known = found.get(prompt.id)
            if known is None or _says(prompt) > _says(known):
                found[prompt.id] = prompt
    return list(found.values())


def _says(prompt: Prompt) -> tuple[int, int]:
    return len(prompt.turns), sum(map(len, prompt.turns))


# --- the folder -----------------------------------------------------------------------------------


def _write(
    results: Path,
    run_id: str,
    document: Mapping[str, Any],
    cases: Mapping[str, FoundCase],
    prompts: Sequence[Prompt],
    called: str,
) -> None:
    """Make the whole folder beside its place, then put it there by one rename."""
    try:
        results.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".import-", dir=results) as draft:
            store = RunStore.create(Path(draft), run_id, dict(document))
            store.save_prompts(called, prompts)
            for id, case in cases.items():
                _write_case(store, id, case)
            store.finish("ok")
            if (results / run_id).exists():
                raise StoreError(f"{results / run_id} is taken.", hint="Choose another --name.")
            store.path.rename(results / run_id)
    except OSError as error:
        raise StoreError(f"{results / run_id} can't be made: {error.strerror}.") from None


def _write_case(store: RunStore, id: str, case: FoundCase) -> None:
    folder = store.case_folder(id)
    for name, facts in (
        ("requests", case.records),
        ("counters", case.spans),
        ("tools", [case.report] if case.report else []),
    ):
        if facts:
            write_text(folder / f"{name}.jsonl", _lines(facts))
    write_document(folder / "imported.json", case.imported.model_dump(mode="json"))
    failed = sum(not record.ok for record in case.records)
    if failed:
        store.finish_case(id, "partial", f"{failed} of {len(case.records)} requests failed")
    else:
        store.finish_case(id, "ok")


def _lines(facts: Sequence[Fact]) -> str:
    return "".join(fact.model_dump_json(exclude_none=True) + "\n" for fact in facts)
