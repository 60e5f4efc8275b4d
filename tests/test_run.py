"""The story of a run on tapes: how often prompts are sent, and which k are measured."""

import hashlib
import itertools
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specbench import config as configs
from specbench.arms import starting_order
from specbench.prepare import Earlier, Prepared, document, prepare, stored
from specbench.prompts.sets import PromptSet, prompt_set_sha256
from specbench.records import Prompt, RequestRecord
from specbench.run import execute, units_of
from specbench.store import RunStore
from specbench.sweep import Arm, Case, Stage

PROMPTS = tuple(Prompt(id=f"p{i}", turns=(f"question {i}",)) for i in range(12))
SET = PromptSet("he", PROMPTS, prompt_set_sha256(PROMPTS), "made up", Path("he.jsonl"))
VANILLA_MS, VERIFY_MS, DRAFT_MS = 10.0, 11.0, 1.5
TOKENS = 64


class Heard:
    """A `Progress` that keeps what it is told."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def waiting(self, text: str) -> None:
        pass

    def advance(self, case: Case, record: RequestRecord) -> None:
        pass


def answer(prompt: str, k: int, rng: np.random.Generator, noise: float) -> RequestRecord:
    """One greedy request: a chain of drafts, each accepted with this prompt's own probability."""
    number = int(hashlib.sha256(prompt.encode()).hexdigest()[:4], 16)
    likely, chain = 0.4 + 0.4 * number / 65536, np.random.default_rng([number, k])
    left, steps, accepted = TOKENS - 1, 0, []
    while left > 0:
        run = 0
        while run < k and chain.random() < likely:
            run += 1
        accepted.append(run)
        steps, left = steps + 1, left - run - 1
    step_ms = VANILLA_MS if k == 0 else VERIFY_MS + k * DRAFT_MS
    decode_ns = round(steps * step_ms * 1e6 * float(np.exp(rng.normal(0, noise))))
    spec: dict[str, Any] | None = None
    if k:
        histogram = [accepted.count(n) for n in range(k + 1)]
        spec = {
            "drafts": steps,
            "draft_tokens": steps * k,
            "accepted": sum(accepted),
            "accepted_histogram": histogram,
        }
    return RequestRecord.model_validate(
        {
            "prompt_id": prompt,
            "sent_ns": 0,
            "end_ns": 10_000_000 + decode_ns,
            "chunk_ns": (10_000_000, 10_000_000 + decode_ns),
            "output_tokens": TOKENS,
            "token_source": "usage",
            "prompt_sha256": hashlib.sha256(prompt.encode()).hexdigest(),
            "spec": spec,
        }
    )


@pytest.fixture
def tape(tmp_path: Path) -> Path:
    """A run folder with twenty answers of each arm to each prompt, with 2% of noise."""
    rng = np.random.default_rng(0)
    arms = {"vanilla": 0, **{f"eagle-k{k}": k for k in range(1, 6)}}
    cases = [{"id": arm, "arm": arm} for arm in arms]
    store = RunStore.create(tmp_path, "tape", {"cases": cases})
    for arm, k in arms.items():
        lines = [
            answer(prompt.id, k, rng, 0.02).model_dump_json() + "\n"
            for _ in range(20)
            for prompt in PROMPTS
        ]
        folder = store.path / "cases" / arm
        folder.mkdir(parents=True)
        (folder / "requests.jsonl").write_text("".join(lines), encoding="utf-8")
    return store.path


def begin(tape: Path, *sets: str, prompts: PromptSet = SET) -> tuple[Prepared, RunStore]:
    path = tape.parent / "c.yaml"
    text = (
        "model: m\nprompts: he\nspeculation: {method: eagle, model: d, k: 3}\n"
        f"load: {{client: replay, tape: {tape}}}\n"
    )
    path.write_text(text, encoding="utf-8")
    earlier = Earlier({"he": prompts})
    prepared = prepare(
        configs.load(path, sets), config_path=path, prompt_folders=(), earlier=earlier
    )
    about = document(prepared, config_path=path, command=["test"])
    return prepared, RunStore.create(tape.parent, "run", about)


def cycles(store: RunStore, case_id: str) -> Counter[int]:
    return Counter(record.cycle for record in store.requests(case_id))


def test_without_precision_every_prompt_is_sent_once(tape: Path) -> None:
    prepared, store = begin(tape)
    assert execute(prepared, store, Heard()) == "ok"
    assert cycles(store, "eagle-k3.he.t256.c1.r0") == {0: 12}


def test_prompts_are_sent_again_until_the_ratio_is_known(tape: Path) -> None:
    """2% of noise on either side of 12 pairs is ±1.9% after one pass: ±0.9% takes about five."""
    prepared, store = begin(tape, "precision=0.009")
    heard = Heard()
    assert execute(prepared, store, heard) == "ok"
    passes = cycles(store, "eagle-k3.he.t256.c1.r0")
    assert 3 <= len(passes) <= 8
    assert passes == cycles(store, "vanilla.he.t256.c1.r0")
    assert all(count == 12 for cycle, count in passes.items() if cycle < len(passes) - 1)
    (said,) = [line for line in heard.said if line.startswith("eagle-k3.he")]
    assert re.search(r"±0\.[5-9]% on this prompt set", said)


def test_an_arm_that_is_known_is_left_out_of_further_passes(tape: Path) -> None:
    """Vanilla against itself has no acceptance to vary: but here each k has the same noise."""
    prepared, store = begin(tape, "precision={within: 0.009, max_cycles: 9}", "speculation.k=[1,5]")
    execute(prepared, store, Heard())
    counts = {k: sum(cycles(store, f"eagle-k{k}.he.t256.c1.r0").values()) for k in (1, 5)}
    baseline = sum(cycles(store, "vanilla.he.t256.c1.r0").values())
    assert baseline == max(counts.values())


def test_the_limit_of_passes_is_said(tape: Path) -> None:
    prepared, store = begin(tape, "precision={within: 0.001, max_cycles: 2}")
    heard = Heard()
    assert execute(prepared, store, heard) == "ok"
    assert len(cycles(store, "eagle-k3.he.t256.c1.r0")) == 2
    assert any("after 2 passes: the limit" in line for line in heard.said)


def test_prompts_that_are_too_few_are_not_sent_for_ever(tape: Path) -> None:
    """Prompts like these: what 12 of them say is bounded by their own spread."""
    prepared, store = begin(tape, "precision={within: 0.01, of: like_these, max_cycles: 50}")
    heard = Heard()
    execute(prepared, store, heard)
    assert len(cycles(store, "eagle-k3.he.t256.c1.r0")) <= 2
    assert any("prompts, however often these 12 are sent" in line for line in heard.said)


def test_a_part_of_the_set_bounds_what_can_be_known_of_it(tape: Path) -> None:
    part = replace(SET, available=164)
    prepared, store = begin(tape, "precision={within: 0.01, max_cycles: 50}", prompts=part)
    heard = Heard()
    execute(prepared, store, heard)
    assert len(cycles(store, "eagle-k3.he.t256.c1.r0")) <= 2
    assert any("on this prompt set: for ±1.0% it takes about" in line for line in heard.said)


def test_precision_without_a_baseline_is_not_called_measured(tape: Path) -> None:
    """The baseline's tape breaks off in the first pass: three failures in a row stop it."""
    path = tape / "cases" / "vanilla" / "requests.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    failed = [
        RequestRecord.model_validate_json(line).model_copy(update={"error": "HTTP 500"})
        for line in lines
    ]
    broken = "".join(record.model_dump_json() + "\n" for record in failed)
    path.write_text(broken, encoding="utf-8")
    prepared, store = begin(tape, "precision=0.02")
    assert execute(prepared, store, Heard()) == "partial"
    done = store.case_status("eagle-k3.he.t256.c1.r0")
    assert done is not None
    assert done["status"] == "partial"
    assert "no precision without the baseline" in done["problem"]
    assert done["failure"] == "no_baseline"


def test_auto_chooses_nothing_while_something_is_missing_and_chooses_on_resume(tape: Path) -> None:
    path = tape / "cases" / "eagle-k5" / "requests.jsonl"
    whole = path.read_text(encoding="utf-8")
    cut = [
        RequestRecord.model_validate_json(line).model_copy(update={"error": "HTTP 500"})
        for line in whole.splitlines()
    ]
    path.write_text("".join(r.model_dump_json() + "\n" for r in cut), encoding="utf-8")
    prepared, store = begin(tape, "speculation.k=auto")
    heard = Heard()
    assert execute(prepared, store, heard) == "partial"
    assert "no k is chosen yet: 1 cases are not measured in full" in heard.said
    assert "chosen_k" not in store.document
    path.write_text(whole, encoding="utf-8")
    config, earlier = stored(store)
    again = prepare(config, config_path="run.json", prompt_folders=(), earlier=earlier)
    assert execute(again, store, Heard()) == "ok"
    assert store.document["chosen_k"]["eagle"] in ([2], [3])


def test_auto_measures_two_k_predicts_and_confirms_the_best(tape: Path) -> None:
    prepared, store = begin(tape, "speculation.k=auto")
    heard = Heard()
    assert execute(prepared, store, heard) == "ok"
    arms = store.document["arms"]
    assert arms[:3] == ["vanilla", "eagle-k1", "eagle-k5"]
    assert arms[3] in ("eagle-k2", "eagle-k3")  # 1.5 ms a draft against 11 ms a verification
    case_id = f"{arms[3]}.he.t256.c1.r0.g1"
    assert cycles(store, case_id) == {0: 12}
    assert cycles(store, "vanilla.he.t256.c1.r0.g1") == {0: 12}
    assert any("predicted k=1" in line for line in heard.said)


def test_a_resumed_run_keeps_the_k_that_was_chosen(tape: Path) -> None:
    prepared, store = begin(tape, "speculation.k=auto")
    execute(prepared, store, Heard())
    config, earlier = stored(store)
    again = prepare(config, config_path="run.json", prompt_folders=(), earlier=earlier)
    assert [case.id for case in again.plan.cases] == [c["id"] for c in store.document["cases"]]
    before = {case.id: cycles(store, case.id) for case in again.plan.cases}
    assert execute(again, RunStore.open(store.path), Heard()) == "ok"
    assert {case.id: cycles(store, case.id) for case in again.plan.cases} == before


def test_a_resumed_run_goes_on_with_the_pass_that_was_cut(tape: Path) -> None:
    prepared, store = begin(tape, "precision={within: 0.001, max_cycles: 3}")
    execute(prepared, store, Heard())
    case_id = "eagle-k3.he.t256.c1.r0"
    path = store.path / "cases" / case_id / "requests.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:30]))
    (path.parent / "done.json").unlink()
    execute(prepared, store, Heard())
    assert cycles(store, case_id) == {0: 12, 1: 12, 2: 12}
    assert path.read_bytes().startswith(b"".join(lines[:30]))


@pytest.mark.parametrize("group", range(3))
def test_over_two_repeats_each_of_two_arms_starts_before_the_other_once(group: int) -> None:
    arms = tuple(Arm(name, name, 0) for name in ("vanilla", "a", "b", "c"))

    def stage(repeat: int) -> Stage:
        return Stage(arms, ((Case("x", "x", "he", 8, 1, repeat, group),),))

    orders = [[arm.id for arm in starting_order(stage(repeat), seed=5)] for repeat in range(10)]
    for one, other in itertools.combinations([arm.id for arm in arms], 2):
        before = [order.index(one) < order.index(other) for order in orders]
        assert all(
            is_before != again for is_before, again in zip(before[::2], before[1::2], strict=True)
        )
    assert len({tuple(order) for order in orders[::2]}) > 1  # drawn anew for each two repeats


@pytest.mark.parametrize(
    ("prompts", "concurrency", "rate", "sizes"),
    [
        (5, 1, None, [1] * 5),
        (80, 4, None, [16] * 5),
        (80, 8, None, [40, 40]),
        (20, 2, None, [10, 10]),
        (23, 2, None, [11, 12]),
        (7, 2, None, [7]),  # too few for two parts
        (80, 4, 2.0, [80]),  # arrivals are drawn for all of them
    ],
)
def test_arms_take_turns_part_by_part(
    prompts: int, concurrency: int, rate: float | None, sizes: list[int]
) -> None:
    """With several in flight, not one whole set after the other: the machine may drift between."""
    case = Case("x", "x", "he", 8, concurrency, 0, rate=rate)
    some = [Prompt(id=str(i), turns=("x",)) for i in range(prompts)]
    parts = units_of(some, case)
    assert [prompt for part in parts for prompt in part] == some
    assert [len(part) for part in parts] == sizes
