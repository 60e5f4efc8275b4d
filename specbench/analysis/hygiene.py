"""Is a number valid? Each check looks at facts and says what it found in plain words.

A check is a function from `CaseFacts` to a finding or None; adding one is a function and a name
in CHECKS. A flagged number is shown with its flag and is no headline.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from specbench.analysis.metrics import (
    CaseMetrics,
    acceptance_of_counters,
    acceptance_of_requests,
    counted,
)
from specbench.records import CounterSpan, RequestRecord

AGREEMENT = 0.01  # two counts of the same drafts may differ by this share
LOOK_UP_METHODS = {"ngram", "ngram_gpu", "suffix"}  # a step without a match has no draft
LENGTH_GAP = 0.02  # arms whose outputs differ in length by more are not the same work


@dataclass(frozen=True)
class CaseFacts:
    """What the checks look at: one case, its requests and counters, and what was planned."""

    method: str
    k: int
    expected_requests: int
    records: Sequence[RequestRecord]
    spans: Sequence[CounterSpan]
    metrics: CaseMetrics


@dataclass(frozen=True)
class Flag:
    """One finding: the check's name and what it found."""

    check: str
    finding: str


def flags(facts: CaseFacts) -> list[Flag]:
    """Everything the checks found."""
    found = ((name, check(facts)) for name, check in CHECKS.items())
    return [Flag(name, finding) for name, finding in found if finding]


def missing_requests(facts: CaseFacts) -> str | None:
    """Requests failed, or prompts were not measured."""
    if facts.metrics.requests == facts.expected_requests and not facts.metrics.failed:
        return None
    failed = f", {facts.metrics.failed} failed" if facts.metrics.failed else ""
    return f"{facts.metrics.requests} of {facts.expected_requests} requests measured{failed}"


def drafts_never_moved(facts: CaseFacts) -> str | None:
    """An arm is called speculative but drafted nothing."""
    acceptance = facts.metrics.acceptance
    if facts.k == 0 or acceptance is None or acceptance.drafts:
        return None
    return "speculation was on but nothing was drafted"


def acceptance_unknown(facts: CaseFacts) -> str | None:
    """A speculative arm whose acceptance could not be read."""
    if facts.k == 0 or facts.metrics.acceptance is not None or not facts.metrics.requests:
        return None
    reasons = {span.problem for span in facts.spans if span.problem}
    return "acceptance is not known: " + ("; ".join(sorted(reasons)) or "no speculative counters")


def drafted_without_k(facts: CaseFacts) -> str | None:
    """A vanilla arm that drafted."""
    acceptance = facts.metrics.acceptance
    if facts.k or acceptance is None or not acceptance.drafts:
        return None
    return f"called vanilla, but {acceptance.drafts} drafts were made"


def impossible_length(facts: CaseFacts) -> str | None:
    """An acceptance length of exactly 1, or over k + 1."""
    acceptance = facts.metrics.acceptance
    if facts.k == 0 or acceptance is None or acceptance.length_per_draft is None:
        return None
    length = acceptance.length_per_draft
    if acceptance.accepted == 0 and acceptance.drafts > 20:
        return f"acceptance length is 1.00 over {acceptance.drafts} drafts: the draft does nothing"
    if length > facts.k + 1 + 1e-9:
        return f"acceptance length {length:.2f} is over k + 1 = {facts.k + 1}"
    return None


def positions_disagree(facts: CaseFacts) -> str | None:
    """Per-position counts that do not add up, or that grow with the position."""
    for acceptance in (facts.metrics.acceptance, facts.metrics.counted):
        if acceptance is None or acceptance.per_position is None:
            continue
        counts = acceptance.per_position
        if sum(counts) != acceptance.accepted:
            return f"per-position counts add up to {sum(counts)}, accepted is {acceptance.accepted}"
        if any(later > earlier for earlier, later in itertools.pairwise(counts)):
            return f"a later position was accepted more often than an earlier one: {counts}"
    return None


def sources_disagree(facts: CaseFacts) -> str | None:
    """The engine's counters and its per-request metrics count the same drafts differently."""
    spent, inside = counted(facts.spans, [record for record in facts.records if record.ok])
    one, other = acceptance_of_requests(inside), acceptance_of_counters(spent, inside)
    if one is None or other is None:
        return None
    for name in ("drafts", "draft_tokens", "accepted"):
        a, b = getattr(one, name), getattr(other, name)
        if abs(a - b) > AGREEMENT * max(a, b):
            return f"{name}: {a} by per-request metrics, {b} by the engine's counters"
    return None


def tokens_do_not_add_up(facts: CaseFacts) -> str | None:
    """requests + drafts + accepted + undrafted - trimmed = output, with trimmed at most k each."""
    good = [record for record in facts.records if record.ok]
    acceptance = acceptance_of_requests(good) or facts.metrics.counted
    if acceptance is None or facts.k == 0:
        return None
    output = sum(record.output_tokens or 0 for record in good)
    made = len(good) + acceptance.drafts + acceptance.accepted
    if made - output > facts.k * len(good):
        return f"the steps made {made} tokens, only {output} were sent"
    return None


def steps_without_draft(facts: CaseFacts) -> str | None:
    """A method that always drafts stopped drafting (a context too long for the draft, say)."""
    acceptance = facts.metrics.acceptance
    if facts.k == 0 or acceptance is None or facts.method in LOOK_UP_METHODS:
        return None
    if acceptance.coverage is None or acceptance.coverage > 1 - AGREEMENT or not acceptance.drafts:
        return None
    return f"only {acceptance.coverage:.0%} of the steps had a draft"


def more_than_one_bos(facts: CaseFacts) -> str | None:
    """Every rendered prompt starts with the same token twice (a template applied twice)."""
    heads = [record.prompt_head[:2] for record in facts.records if record.prompt_head]
    if len(heads) < 2 or len(set(heads)) > 1 or len(set(heads[0])) > 1 or len(heads[0]) < 2:
        return None
    return f"all {len(heads)} prompts start with token {heads[0][0]} twice: two BOS tokens?"


def prefix_cache_hit(facts: CaseFacts) -> str | None:
    """Prompts were answered from the prefix cache."""
    spent, _ = counted(facts.spans, [record for record in facts.records if record.ok])
    if spent is None or not spent.prefix_cache_hits:
        return None
    return f"{spent.prefix_cache_hits} prompt tokens came from the prefix cache"


def counted_by_chunks(facts: CaseFacts) -> str | None:
    """The server gave no usage, so chunks were counted as tokens."""
    guessed = [r.prompt_id for r in facts.records if r.ok and r.token_source == "chunks"]
    if not guessed:
        return None
    return f"{len(guessed)} answers have no token count from the server: chunks were counted"


CHECKS: dict[str, Callable[[CaseFacts], str | None]] = {
    "missing": missing_requests,
    "no-drafts": drafts_never_moved,
    "no-acceptance": acceptance_unknown,
    "drafted-vanilla": drafted_without_k,
    "impossible-length": impossible_length,
    "positions": positions_disagree,
    "sources": sources_disagree,
    "tokens": tokens_do_not_add_up,
    "coverage": steps_without_draft,
    "bos": more_than_one_bos,
    "prefix-cache": prefix_cache_hit,
    "chunk-count": counted_by_chunks,
}


def unequal_lengths(baseline: CaseMetrics, arm: CaseMetrics) -> Flag | None:
    """Two arms that did not do the same work: total output lengths differ."""
    if not baseline.output_tokens or not arm.output_tokens:
        return None
    gap = arm.output_tokens / baseline.output_tokens - 1
    if abs(gap) <= LENGTH_GAP:
        return None
    differ = f"{abs(gap):.1%} {'longer' if gap > 0 else 'shorter'}"
    return Flag("lengths", f"outputs are {differ} than the baseline's: compare TPOT only")
