"""A run to its snapshot."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from pydantic import JsonValue

from specbench.analysis.cases import Condition, MeasuredCase
from specbench.analysis.hosts import Hosts, hosts_of
from specbench.analysis.hygiene.setup import setup_of
from specbench.analysis.metrics import (
    goodput,
    latency_ms,
    summarise,
    tokens_per_step,
    tpot_ms,
    ttft_ms,
)
from specbench.analysis.outlines import Request
from specbench.analysis.rows import Row, rows
from specbench.analysis.series import WHOLE_CASE, Cell, Series, series
from specbench.analysis.snapshot import PromptsUsed, Setup, Snapshot, SnapshotRow
from specbench.analysis.speedup import Key
from specbench.environment import SECRET
from specbench.records import EngineFacts

PER_REQUEST: Mapping[str, Callable[[Request], float | None]] = {
    "tpot_ms": tpot_ms,
    "ttft_ms": ttft_ms,
    "latency_ms": latency_ms,
    "acceptance_length": tokens_per_step,
}


def snapshot(document: Mapping[str, Any], cases: Iterable[MeasuredCase]) -> Snapshot:
    """The snapshot of a run: *document* is its run.json, *cases* are all of it."""
    everything = list(cases)
    arms: dict[tuple[str, Condition], list[MeasuredCase]] = defaultdict(list)
    for case in everything:
        arms[case.arm, case.condition].append(case)
    baseline = "vanilla" if "vanilla" in document["arms"] else None
    machine = document["machine"]
    return Snapshot(
        run=document["id"],
        model=document["config"]["model"],
        prompt_sets={
            name: PromptsUsed(
                sha256=said["sha256"], prompts=said["prompts"], source=said.get("source")
            )
            for name, said in document["prompt_sets"].items()
        },
        sampling=document["config"].get("sampling") or {},
        schedule=document.get("schedule") or "unknown",
        client=document.get("load", {}).get("client", "direct"),
        hardware={
            "cpu": machine.get("cpu"),
            "cores": machine.get("cores"),
            "memory_gib": machine.get("memory_gib"),
            "gpus": [
                {k: v for k, v in gpu.items() if k not in ("uuid", "driver_version")}
                for gpu in machine.get("gpus", [])
            ],
        },
        versions=_versions(document),
        speculation=_speculation(document["config"].get("speculation") or ()),
        setups=_setups(everything),
        rows=tuple(
            _row(row, arms[row.arm, row.condition], arms.get((baseline or "", row.condition), []))
            for row in rows(everything, baseline=baseline)
        ),
    )


def _versions(document: Mapping[str, Any]) -> dict[str, str]:
    machine = document["machine"]
    drivers = sorted(
        {gpu["driver_version"] for gpu in machine.get("gpus", []) if "driver_version" in gpu}
    )
    load = document.get("load") or {}
    own = load.get("client") in (None, "direct", "replay")
    found = {
        "vllm": document.get("vllm"),
        "driver": ", ".join(drivers),
        **machine.get("packages", {}),
        "specbench": machine.get("specbench"),
        "commit": machine.get("commit"),
        "load generator": None if own else load.get("version"),
    }
    return {name: version for name, version in found.items() if version}


def _speculation(entries: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, JsonValue]]:
    found = {}
    for entry in entries:
        said = {"method": entry["method"], "model": entry.get("model")}
        said |= {**entry.get("options", {}), **entry.get("extra", {})}
        label = entry.get("name") or entry["method"]
        found[label] = {
            name: _portable(value) if isinstance(value, str) else value
            for name, value in said.items()
            if value is not None
        }
    return found


def _setups(cases: Iterable[MeasuredCase]) -> tuple[Setup, ...]:
    """The set-up of each arm's last start; arms that share one stand together."""
    engines: dict[str, EngineFacts] = {case.arm: case.engines[-1] for case in cases if case.engines}
    alike: dict[tuple[tuple[str, str], ...], list[str]] = defaultdict(list)
    for arm, engine in engines.items():
        said = {
            name: _portable(value)
            for name, value in setup_of(engine).items()
            if not SECRET.search(name)
        }
        said.pop("version", None)
        alike[tuple(said.items())].append(arm)
    return tuple(Setup(arms=tuple(arms), values=dict(said)) for said, arms in alike.items())


def _portable(value: str) -> str:
    """An absolute path is one machine's own way of saying what is at its end."""
    return PurePath(value).name if value.startswith("/") else value


def _row(row: Row, own: Sequence[MeasuredCase], baseline: Sequence[MeasuredCase]) -> SnapshotRow:
    records = [record for case in own for record in case.keyed().values()]
    ratio = row.speedup.tpot if row.speedup else None
    acceptance = row.metrics.acceptance if row.k else None
    figures = {
        "speedup": ratio.value if ratio else None,
        "tpot_ms": row.metrics.tpot_ms,
        "ttft_ms": row.metrics.ttft_ms,
        "latency_ms": row.metrics.latency_ms,
        "tokens_per_s": row.metrics.tokens_per_s,
        "goodput_per_s": row.goodput.per_s if row.goodput else None,
        "acceptance_length": acceptance.length if acceptance else None,
    }
    found: dict[str, Series | None] = {
        "speedup": None if row.is_baseline else series(_ratios(own, baseline)),
        **{name: series(_measured(own, measure)) for name, measure in PER_REQUEST.items()},
        "tokens_per_s": series(_of_cases(own, _tokens_per_s)),
        "goodput_per_s": series(_of_cases(own, _goodput_per_s)),
    }
    if row.k and not found["acceptance_length"]:
        found["acceptance_length"] = series(_of_cases(own, _counted_acceptance))
    interval = ratio.this_set or ratio.like_these if ratio else None
    first_turns = {r.prompt_id: r.prompt_tokens for r in records if r.ok and not r.turn}
    return SnapshotRow(
        arm=row.arm,
        method=row.method,
        k=row.k,
        prompt_set=row.prompt_set,
        max_tokens=row.max_tokens,
        concurrency=row.concurrency,
        rate=row.rate,
        is_baseline=row.is_baseline,
        requests=row.metrics.requests,
        missing=sum(
            max(
                0,
                case.expected_requests - len({(r.prompt_id, r.turn) for r in case.records if r.ok}),
            )
            for case in own
        ),
        prompt_tokens=_total(list(first_turns.values())),
        figures={name: value for name, value in figures.items() if value is not None},
        speedup_interval=(interval.low, interval.high) if interval else None,
        flags=tuple(f"{flag.check}: {flag.finding}" for flag in row.flags),
        problem=row.problem.splitlines()[0] if row.problem else None,
        series={name: one for name, one in found.items() if one},
    )


def _total(counts: Sequence[int | None]) -> int | None:
    return None if None in counts or not counts else sum(count or 0 for count in counts)


# --- cells ---------------------------------------------------------------------------------------


def _measured(
    cases: Sequence[MeasuredCase], measure: Callable[[Request], float | None]
) -> dict[Cell, float]:
    """The log of *measure* of each good request."""
    found = {}
    for case in cases:
        for key, record in case.keyed().items():
            if record.ok and (value := measure(record)):
                found[_cell(case, key)] = math.log(value)
    return found


def _ratios(own: Sequence[MeasuredCase], baseline: Sequence[MeasuredCase]) -> dict[Cell, float]:
    """Logs of speed-ups, each from the two requests that were sent beside each other."""
    base, arm = _measured(baseline, tpot_ms), _measured(own, tpot_ms)
    hosts = [hosts_of(side[0].engines) if side else {} for side in (baseline, own)]
    if len({*hosts[0].values(), *hosts[1].values()}) < 2:
        hosts = [{}, {}]
    there, here = _answered_by(baseline, hosts[0]), _answered_by(own, hosts[1])
    return {
        cell: base[cell] - value
        for cell, value in arm.items()
        if cell in base and there.get(cell, here.get(cell)) == here.get(cell, there.get(cell))
    }


def _answered_by(cases: Sequence[MeasuredCase], hosts: Hosts) -> dict[Cell, str]:
    """The host that answered, where that is known."""
    return {
        _cell(case, key): hosts[record.start]
        for case in (cases if hosts else ())
        for key, record in case.keyed().items()
        if record.start in hosts
    }


def _cell(case: MeasuredCase, key: Key) -> Cell:
    return Cell((case.group, case.repeat), key.prompt_id, key.turn, key.cycle)


def _of_cases(
    cases: Sequence[MeasuredCase], figure: Callable[[MeasuredCase], float | None]
) -> dict[Cell, float]:
    found = ((case, figure(case)) for case in cases)
    return {
        Cell((case.group, case.repeat), WHOLE_CASE): math.log(value)
        for case, value in found
        if value
    }


def _tokens_per_s(case: MeasuredCase) -> float | None:
    return summarise(case.keyed().values()).tokens_per_s


def _counted_acceptance(case: MeasuredCase) -> float | None:
    acceptance = summarise(case.keyed().values(), case.spans).acceptance
    return acceptance.length if acceptance else None


def _goodput_per_s(case: MeasuredCase) -> float | None:
    if not case.limits:
        return None
    open_loop = case.rate is not None
    return goodput(case.keyed().values(), case.limits, open_loop=open_loop).per_s
