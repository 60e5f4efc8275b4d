"""A run folder to the cases that the analysis takes."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from pydantic import ValidationError

from specbench import run_document
from specbench.analysis.calibration import Calibration
from specbench.analysis.cases import MeasuredCase
from specbench.analysis.outlines import Outlines, Pool
from specbench.analysis.telemetry import timeline
from specbench.errors import StoreError
from specbench.store import RunStore

UNFINISHED: dict[str, Any] = {"status": "unfinished", "problem": None, "failure": None}


def measured_cases(store: RunStore) -> Iterator[MeasuredCase]:
    """Every case of the run, measured or not, in the order of its arms.

    Requests, prompts and counters may be larger than memory: they stay in their files.
    """
    run_document.check(store.path / "run.json", store.document)
    arms = {arm: place for place, arm in enumerate(store.document["arms"])}
    prompts = {name: store.prompt_lines(name) for name in store.document["prompt_sets"]}
    turns = {name: sum(len(one.turns) for one in sent) for name, sent in prompts.items()}
    engines = store.engines()
    planned = store.document["cases"]
    sets = list(store.document["prompt_sets"])
    limits = store.document["config"].get("goodput") or {}
    known = store.document.get("calibration")
    try:
        calibration = Calibration.model_validate(known) if known else None
    except ValidationError:
        raise StoreError(f"{store.path / 'run.json'}: `calibration`: none that is known.") from None
    sampled = timeline(store.telemetry())
    pool = Pool()
    ordered = sorted(planned, key=lambda c: (sets.index(c["prompt_set"]), arms[c["arm"]]))
    for case in ordered:
        status = store.case_status(case["id"]) or UNFINISHED
        arm = case["arm"]
        about = store.document["prompt_sets"][case["prompt_set"]]
        yield MeasuredCase(
            arm=arm,
            method=store.document["methods"][arm]["method"],
            k=store.document["methods"][arm]["k"],
            prompt_set=case["prompt_set"],
            max_tokens=case["max_tokens"],
            concurrency=case["concurrency"],
            repeat=case["repeat"],
            expected_requests=turns[case["prompt_set"]],
            records=outlines(store, case["id"], pool),
            spans=store.counter_lines(case["id"]),
            status=status["status"],
            problem=status["problem"],
            failure=status["failure"],
            label=store.document["methods"][arm].get("label", arm.rpartition("-k")[0]),
            group=case.get("group", 0),
            rate=case.get("rate"),
            set_size=about.get("available"),
            engines=[facts for facts in engines if facts.arm == arm],
            prompts=prompts[case["prompt_set"]],
            sampling=store.document["config"]["sampling"],
            limits={k: v for k, v in limits.items() if v is not None},
            tools=store.tools(case["id"]),
            calibration=calibration,
            imported=store.imported(case["id"]),
            timeline=sampled,
        )


def outlines(store: RunStore, case_id: str, pool: Pool) -> Outlines:
    """The requests of a case without their long lists, in the order they ended."""
    found = Outlines(pool, partial(store.request_at, case_id))
    for offset, record in store.request_lines(case_id):
        found.add(record, offset)
    return found
