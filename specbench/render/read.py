"""A run folder to the cases that the analysis takes."""

from collections.abc import Iterator

from pydantic import ValidationError

from specbench import run_document
from specbench.analysis.calibration import Calibration
from specbench.analysis.cases import MeasuredCase
from specbench.analysis.telemetry import timeline
from specbench.errors import StoreError
from specbench.store import RunStore


def measured_cases(store: RunStore) -> Iterator[MeasuredCase]:
    """Every case of the run, measured or not, in the order of its arms."""
    run_document.check(store.path / "run.json", store.document)
    arms = {arm: place for place, arm in enumerate(store.document["arms"])}
    prompts = {name: store.prompts(name) for name in store.document["prompt_sets"]}
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
    ordered = sorted(planned, key=lambda c: (sets.index(c["prompt_set"]), arms[c["arm"]]))
    for case in ordered:
        status = store.case_status(case["id"]) or {"status": "unfinished", "problem": None}
        arm = case["arm"]
        about = store.document["prompt_sets"][case["prompt_set"]]
        sent = prompts[case["prompt_set"]]
        yield MeasuredCase(
            arm=arm,
            method=store.document["methods"][arm]["method"],
            k=store.document["methods"][arm]["k"],
            prompt_set=case["prompt_set"],
            max_tokens=case["max_tokens"],
            concurrency=case["concurrency"],
            repeat=case["repeat"],
            expected_requests=sum(len(prompt.turns) for prompt in sent),
            records=list(store.requests(case["id"])),
            spans=store.counters(case["id"]),
            status=status["status"],
            problem=status["problem"],
            label=store.document["methods"][arm].get("label", arm.rpartition("-k")[0]),
            group=case.get("group", 0),
            rate=case.get("rate"),
            set_size=about.get("available"),
            engines=[facts for facts in engines if facts.arm == arm],
            prompts=sent,
            sampling=store.document["config"]["sampling"],
            limits={k: v for k, v in limits.items() if v is not None},
            tools=store.tools(case["id"]),
            calibration=calibration,
            imported=store.imported(case["id"]),
            timeline=sampled,
        )
