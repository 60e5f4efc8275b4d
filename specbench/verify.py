"""Does speculation leave alone what is said? Under the config's own sampling.

    temperature 0: every prompt to every arm once; outputs compared token by token
    temperature > 0: a few prompts, many samples of their first tokens; the arms' counts compared

Facts are kept as those of a run are, in results/verify/. Both questions are answered against
vanilla, the arm that does not speculate.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

from specbench import prepare as preparing
from specbench import run as story
from specbench.analysis import distribution, parity
from specbench.analysis.distribution import ALPHA, Comparison, Power
from specbench.analysis.metrics import last_attempts, summarise
from specbench.analysis.outlines import Outline, Pool
from specbench.analysis.speedup import Key
from specbench.arms import Progress
from specbench.config import Config
from specbench.errors import UserError
from specbench.prepare import Prepared
from specbench.prompts.sets import PromptSet, prompt_set_sha256
from specbench.records import Prompt
from specbench.render.read import outlines
from specbench.store import RunStore
from specbench.sweep import VANILLA, Case

SCHEMA = 1  # of the JSON that `specbench verify --json` prints
FOLDER = "verify"  # in results/; `specbench report` shows the latest run beside it

# 200 samples of 4 prompts find a shift of 5% of the mass with 95% power where tokens are hard to
# tell apart (SmolLM2-135M at temperature 1; tests/test_distribution.py holds that tape's like).
SAMPLES, PROMPTS, TOKENS = 200, 4, 8
CONCURRENCY = 16
ENOUGH = 0.9  # of the requests; with fewer answered nothing is said
SHIFT = 0.05
SHOWN = 5  # differing outputs that are printed; --json has all

NO_IDS = "the server returned no token ids to compare"

State = Literal["same", "differs", "reported", "unknown"]


@dataclass(frozen=True)
class Finding:
    """What was found of one arm: "reported" is a difference that is no failure.

    "unknown" is an arm that could not be verified; `facts` is what --json says of it.
    """

    arm: str
    state: State
    said: str
    details: tuple[str, ...] = ()
    facts: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Verdict:
    """What was found of every arm, and what that rests on."""

    run: Path
    temperature: float
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()

    @property
    def differs(self) -> bool:
        """Whether an arm says something else than vanilla, beyond what is tolerated."""
        return any(finding.state == "differs" for finding in self.findings)

    @property
    def unknown(self) -> list[Finding]:
        """The arms that could not be verified."""
        return [finding for finding in self.findings if finding.state == "unknown"]

    def lines(self) -> Iterator[str]:
        """For people."""
        under = f" at temperature {self.temperature:g}" if self.temperature else ""
        for finding in self.findings:
            yield f"{finding.arm}{under}: {finding.said}"
            yield from (f"  {detail}" for detail in finding.details)
        yield from self.notes

    def document(self) -> dict[str, Any]:
        """For programs."""
        arms = [
            {"arm": f.arm, "state": f.state, "said": f.said, **(f.facts or {})}
            for f in self.findings
        ]
        return {
            "schema": SCHEMA,
            "run": str(self.run),
            "temperature": self.temperature,
            "arms": arms,
            "notes": list(self.notes),
        }


def prepare(
    config: Config,
    *,
    config_path: Path,
    prompt_folders: Sequence[Path],
    say: Callable[[str], None],
    samples: int | None = None,
    tolerance: float | None = None,
) -> Prepared:
    """What will be sent to answer the question that *config* asks; nothing is started.

    Raises:
        UserError: there are no two arms to compare, or a flag is for the other question.
    """
    greedy = config.sampling.temperature == 0
    if greedy and samples is not None:
        raise UserError("--samples is for a temperature over 0; this config's is 0.")
    if not greedy and tolerance is not None:
        raise UserError("--tolerance is for temperature 0: at any other, chance makes differences.")
    prepared = preparing.prepare(
        _once(config), config_path=config_path, prompt_folders=prompt_folders, say=say
    )
    arms = [arm.id for arm in prepared.plan.arms]
    if VANILLA not in arms or len(arms) < 2:
        raise UserError(
            f"{config_path} has {' and '.join(arms)} only: there is nothing to compare.",
            hint="It takes vanilla (`baseline: true`) and an arm that speculates, both started here.",
        )
    if greedy:
        return prepared
    chosen = _copies(prepared.prompt_sets, samples or SAMPLES)
    longest = max(max(TOKENS, arm.k + 2) for arm in prepared.plan.arms)
    sampled = _once(config).model_copy(
        update={"max_tokens": (longest,), "concurrency": (max(CONCURRENCY, *config.concurrency),)}
    )
    return preparing.prepare(
        sampled,
        config_path=config_path,
        prompt_folders=(),
        say=say,
        earlier=preparing.Earlier({chosen.name: chosen}),
    )


def verify(
    prepared: Prepared,
    store: RunStore,
    progress: Progress,
    *,
    tolerance: float | None = None,
) -> Verdict:
    """Start the engines, send what was prepared, compare. Engines are stopped before it returns."""
    if prepared.config.sampling.temperature == 0:
        story.execute(prepared, store, progress)
        return _greedy_verdict(prepared, store, tolerance)
    seeded = replace(prepared, seed_of=partial(_seed_of, prepared.config))
    story.execute(seeded, store, progress)
    return _sampling_verdict(prepared, store, progress)


def _once(config: Config) -> Config:
    """*config* without what only a measurement of speed needs."""
    return config.model_copy(
        update={
            "repeats": 1,
            "max_tokens": (max(config.max_tokens),),
            "concurrency": (max(config.concurrency),),
            "precision": None,
            "speculation": tuple(
                one.model_copy(update={"choose_k": False}) for one in config.speculation
            ),
            "load": config.load.model_copy(update={"warmup": 0}),
        }
    )


# --- temperature 0 -------------------------------------------------------------------------------


def _greedy_verdict(prepared: Prepared, store: RunStore, tolerance: float | None) -> Verdict:
    exact = prepared.config.engine.args.get("dtype") in ("float32", "float")
    limit = tolerance if tolerance is not None else (0.0 if exact else None)
    arms = [arm.id for arm in prepared.plan.arms if arm.id != VANILLA]
    findings = tuple(_greedy_finding(prepared, store, arm, limit) for arm in arms)
    notes = []
    if any(finding.state == "reported" for finding in findings):
        notes.append(
            "Reported, not failed: without engine.args.dtype: float32 the engines compute in 16 "
            "bits, where near-ties fall either way. --tolerance makes it a failure."
        )
    return Verdict(store.path, 0, findings, tuple(notes))


def _beside(prepared: Prepared, arm: str, one: str) -> list[Case]:
    """The cases of *one* that were measured together with *arm*, which has its own baseline."""
    groups = {case.group for case in prepared.plan.cases if case.arm == arm}
    return [case for case in prepared.plan.cases if case.arm == one and case.group in groups]


def _greedy_finding(prepared: Prepared, store: RunStore, arm: str, limit: float | None) -> Finding:
    outputs = [
        {
            Key(f"{case.prompt_set}/{record.prompt_id}", record.turn, case.repeat): record
            for case in _beside(prepared, arm, one)
            for record in _answered(store, case.id)
        }
        for one in (VANILLA, arm)
    ]
    if (problem := _unanswered(prepared, store, arm)) is not None:
        return Finding(arm, "unknown", problem)
    found = parity.compare(*outputs)
    if found is None:
        return Finding(arm, "unknown", NO_IDS)
    state: State = "same"
    if found.differences:
        state = "reported" if limit is None else "differs" if found.differing > limit else "same"
    details = [difference.told(VANILLA, arm) for difference in found.differences]
    if len(details) > SHOWN:
        details[SHOWN:] = [f"… and {len(details) - SHOWN} more (--json has all)"]
    facts = {
        "identical": found.identical,
        "compared": found.compared,
        "tolerance": limit,
        "differences": [{**asdict(d), "key": d.key._asdict()} for d in found.differences],
    }
    return Finding(arm, state, found.told(), tuple(details), facts)


# --- temperature over 0 --------------------------------------------------------------------------


def _copies(prompt_sets: Mapping[str, PromptSet], samples: int) -> PromptSet:
    """The first turns of a few prompts, of each set in turn, each as often as it is sampled."""
    in_turn = [
        prompt.model_copy(update={"id": f"{name}/{prompt.id}", "turns": prompt.turns[:1]})
        for row in zip_longest(*(prompts.prompts for prompts in prompt_sets.values()))
        for name, prompt in zip(prompt_sets, row, strict=True)
        if prompt is not None
    ]
    copies = tuple(
        prompt.model_copy(update={"id": f"{prompt.id}~{sample}"})
        for sample in range(samples)
        for prompt in in_turn[:PROMPTS]
    )
    source = ", ".join(prompts.source for prompts in prompt_sets.values())
    return PromptSet("samples", copies, prompt_set_sha256(copies), source, Path())


def _seed_of(config: Config, arm: str, start: int, prompt: Prompt) -> int:
    """A seed that differs from prompt to prompt, from arm to arm and from start to start."""
    name = f"{config.seed} {config.sampling.seed} {arm} {start} {prompt.id}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6])


def _sampling_verdict(prepared: Prepared, store: RunStore, progress: Progress) -> Verdict:
    arms = [arm.id for arm in prepared.plan.arms if arm.id != VANILLA]
    samples = {arm: _samples(store, _beside(prepared, arm, arm)) for arm in arms}
    baselines = {arm: _samples(store, _beside(prepared, arm, VANILLA)) for arm in arms}
    compared: dict[str, Comparison] = {}
    unknown: dict[str, str] = {}
    for arm, drawn in samples.items():
        progress.waiting(f"comparing {arm}")
        problem = _unanswered(prepared, store, arm)
        found = None if problem else distribution.compare(baselines[arm], drawn)
        if found is None:
            unknown[arm] = problem or NO_IDS
        else:
            compared[arm] = found
    findings = {arm: Finding(arm, "unknown", problem) for arm, problem in unknown.items()}
    notes: Iterable[str] = ()
    if compared:
        progress.waiting("simulating how small a difference these samples show")
        # Where not all engines fit, each arm has a baseline of its own, all of the same size.
        baseline = baselines[next(iter(compared))]
        power = distribution.power(baseline, alpha=ALPHA / len(compared))
        corrected = distribution.holm({arm: found.p_value for arm, found in compared.items()})
        for arm, found in compared.items():
            findings[arm] = _sampling_finding(arm, found, corrected[arm], power)
        notes = _what_it_rests_on(compared, power)
    in_order = tuple(findings[arm] for arm in samples)
    return Verdict(store.path, prepared.config.sampling.temperature, in_order, tuple(notes))


def _samples(store: RunStore, cases: Iterable[Case]) -> distribution.Samples:
    records = (one.whole() for case in cases for one in _answered(store, case.id))
    return distribution.samples_of(records, lambda record: record.prompt_id.rpartition("~")[0])


def _sampling_finding(arm: str, found: Comparison, p_value: float, power: Power) -> Finding:
    differs = p_value <= ALPHA
    size = f"{found.samples // found.prompts} samples x {found.prompts} prompts"
    said = (
        ("sampling differs" if differs else "no difference found")
        + f" (p = {p_value:.2g} corrected; {size}; a shift of {SHIFT:.0%} would be found with "
        f"{power.of(SHIFT):.0%} power)"
    )
    most = found.largest
    token = "the end" if most.token is None else f"token id {most.token}"
    detail = (
        f"most at {most.prompt}, output token {most.position + 1}: {token} is "
        f"{most.baseline_share:.0%} of {VANILLA}'s samples and {most.arm_share:.0%} of {arm}'s"
    )
    facts = {
        "p_value": found.p_value,
        "p_corrected": p_value,
        "alpha": ALPHA,
        "prompts": found.prompts,
        "samples": found.samples,
        "largest_shift": asdict(most),
        "power": {
            "of_5_percent": power.of(SHIFT),
            "smallest_shift_80": power.smallest(0.8),
            "smallest_shift_95": power.smallest(0.95),
        },
    }
    return Finding(arm, "differs" if differs else "same", said, (detail,) if differs else (), facts)


def _what_it_rests_on(compared: Mapping[str, Comparison], power: Power) -> Iterator[str]:
    samples = min(found.samples for found in compared.values())
    found = [f"{s:.1%} with {p:.0%} power" for p in (0.8, 0.95) if (s := power.smallest(p))]
    detects = f"detects a shift of {', of '.join(found)}" if found else "detects no small shift"
    yield (
        f"{samples} samples: {detects} "
        f"(of the mass of each token, at a level of {ALPHA:g}, corrected for {len(compared)} arm(s))."
    )
    if power.of(SHIFT) < 0.8:
        yield f"More --samples would find a shift of {SHIFT:.0%} more surely."


# --- what came back ------------------------------------------------------------------------------


def _answered(store: RunStore, case_id: str) -> list[Outline]:
    return [one for one in last_attempts(outlines(store, case_id, Pool())) if one.ok]


def _unanswered(prepared: Prepared, store: RunStore, arm: str) -> str | None:
    """Why nothing can be said of *arm*, or None."""
    drafted: list[int | None] = []
    for case in (*_beside(prepared, arm, VANILLA), *_beside(prepared, arm, arm)):
        asked = sum(len(p.turns) for p in prepared.prompt_sets[case.prompt_set].prompts)
        answered = _answered(store, case.id)
        if len(answered) < ENOUGH * asked:
            status = store.case_status(case.id) or {}
            why = str(status.get("problem") or "not measured").splitlines()[0]
            return f"{len(answered)} of {asked} requests answered by {case.arm}: {why}"
        if case.arm == arm:
            acceptance = summarise(answered, store.counters(case.id)).acceptance
            drafted.append(acceptance.drafts if acceptance else None)
    if drafted and all(drafts == 0 for drafts in drafted):
        return "nothing was drafted, so nothing is verified"
    return None
