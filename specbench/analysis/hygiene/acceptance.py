"""Checks of what was drafted and accepted: can these counts be, and do they agree?"""

import itertools
from collections.abc import Sequence

from specbench.analysis.hygiene import AGREEMENT, CaseFacts
from specbench.analysis.metrics import (
    Acceptance,
    acceptance_of_counters,
    acceptance_of_requests,
    counted,
    sizes_of,
)
from specbench.analysis.outlines import Request

LOOK_UP_METHODS = {"ngram", "ngram_gpu", "suffix"}  # a step without a match has no draft
ENOUGH_DRAFTS = 20  # after more of these something must have been accepted
ENOUGH_LOOKED_UP = 100  # a text without repetition has its look-ups refused
MANY_DRAFTS, USELESS_RATE = 200, 0.05  # vLLM 0.32 on a CPU at temperature 1: 3% accepted
MERGED = 0.1  # a busy server may send this share of its tokens in chunks of several steps


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


def chunks_merged(facts: CaseFacts) -> str | None:
    """Acceptance is read off chunks, and some of them hold more tokens than a step can make."""
    acceptance = facts.metrics.acceptance
    if facts.k == 0 or acceptance is None or acceptance.source != "chunks":
        return None
    later = sizes_of(facts.good)
    merged = sum(chunks for tokens, chunks in later.items() if tokens > facts.k + 1)
    if not merged:
        return None
    return (
        f"{merged} of {later.total()} chunks hold more than k + 1 = {facts.k + 1} tokens: several "
        "steps in one, so acceptance from chunks is too high"
    )


def drafted_without_k(facts: CaseFacts) -> str | None:
    """A vanilla arm that drafted."""
    acceptance = facts.metrics.acceptance
    if facts.k or acceptance is None or not acceptance.drafts:
        return None
    return f"called vanilla, but {acceptance.drafts} drafts were made"


def impossible_length(facts: CaseFacts) -> str | None:
    """An acceptance length of 1 or hardly more, or over k + 1, or drafts longer than k."""
    acceptance = facts.metrics.acceptance
    if facts.k == 0 or acceptance is None or acceptance.length_per_draft is None:
        return None
    length, drafts = acceptance.length_per_draft, acceptance.drafts
    looked_up = facts.method in LOOK_UP_METHODS
    if acceptance.accepted == 0 and drafts > (ENOUGH_LOOKED_UP if looked_up else ENOUGH_DRAFTS):
        return f"acceptance length is 1.00 over {drafts} drafts: the draft does nothing"
    rate = acceptance.rate
    if rate is not None and rate < USELESS_RATE and drafts >= MANY_DRAFTS and not looked_up:
        share = f"{acceptance.accepted} of {acceptance.draft_tokens} drafted tokens were accepted"
        return f"{share}: a draft that is no better than chance, or a broken sampler"
    if length > facts.k + 1 + 1e-9:
        return f"acceptance length {length:.2f} is over k + 1 = {facts.k + 1}"
    if acceptance.draft_tokens > facts.k * drafts:
        mean = acceptance.draft_tokens / drafts
        return f"{mean:.2f} tokens a draft are over k = {facts.k}: the engine ran another k"
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
        if counts and counts[0] > acceptance.drafts:
            return f"position 1 was accepted {counts[0]} times in {acceptance.drafts} drafts"
    return None


def sources_disagree(facts: CaseFacts) -> str | None:
    """The engine's counters and its per-request metrics count the same drafts differently."""
    spent, inside = counted(facts.spans, facts.good)
    one, other = acceptance_of_requests(inside), acceptance_of_counters(spent, inside)
    if one is None or other is None:
        return None
    for name in ("drafts", "draft_tokens", "accepted"):
        a, b = getattr(one, name), getattr(other, name)
        if abs(a - b) > AGREEMENT * max(a, b):
            return f"{name}: {a} by per-request metrics, {b} by the engine's counters"
    return None


def tokens_do_not_add_up(facts: CaseFacts) -> str | None:
    """requests + drafts + accepted + undrafted - trimmed = output, off in either direction.

    Steps without a draft are counted nowhere and could hide both: accepted tokens counted twice
    pass for fewer of them, lost ones for more. But a chunk is a step (or several), so that there
    were at least as many steps as chunks, which bounds the steps without a draft from below.
    """
    acceptance, inside = _counted_with_requests(facts)
    if acceptance is None or facts.k == 0 or not acceptance.drafts:
        return None
    output = sum(record.output_tokens or 0 for record in inside)
    steps = max(acceptance.drafts, _chunks_after_first(inside) or 0)
    made = len(inside) + steps + acceptance.accepted
    if made - output > _most_trimmed(facts, inside):
        return f"the steps made {made} tokens, only {output} were sent"
    return _lost(facts)


def _lost(facts: CaseFacts) -> str | None:
    """Fewer tokens made than sent, although the chunks show no more steps than that."""
    acceptance, inside = _counted_with_requests(facts)
    chunks = _chunks_after_first(inside)
    if acceptance is None or chunks is None or facts.concurrency > 1:
        return None
    largest = max(max(record.first_tokens or 0 for record in inside), *sizes_of(inside))
    if largest > facts.k + 1:
        return None  # that chunk holds several steps, and then others may
    looked_up = facts.method in LOOK_UP_METHODS
    if not looked_up and chunks > acceptance.drafts * (1 + AGREEMENT):
        return None  # steps without a draft there are: see steps_without_draft
    output = sum(record.output_tokens or 0 for record in inside)
    made = len(inside) + max(acceptance.drafts, chunks) + acceptance.accepted
    if output - made <= (MERGED if looked_up else AGREEMENT) * output:
        return None
    return f"the steps made {made} tokens, but {output} were sent: counts were lost"


def _counted_with_requests(facts: CaseFacts) -> tuple[Acceptance | None, list[Request]]:
    """Acceptance and exactly the requests that it is of."""
    good = facts.good
    if (of_requests := acceptance_of_requests(good)) is not None:
        return of_requests, good
    spent, inside = counted(facts.spans, good)
    return acceptance_of_counters(spent, inside), inside


def _chunks_after_first(records: Sequence[Request]) -> int | None:
    """Chunks with tokens after each request's first; None where chunks were not counted so."""
    if not records or any(record.later_sizes is None for record in records):
        return None
    found = 0
    for record in records:
        chunks = sum(count for tokens, count in record.later_sizes or () if tokens)
        found += max(0, chunks + bool(record.first_tokens) - 1)
    return found


def _most_trimmed(facts: CaseFacts, records: Sequence[Request]) -> int:
    """How many tokens can have been made past the ends: what the last step accepted, at most k.

    An engine learns of a stop string from its front end, up to two steps late.
    """
    late = 2 * (facts.k + 1) if facts.sampling.get("stop") else 0
    last = [record.spec.last_accepted if record.spec else None for record in records]
    return sum((facts.k if accepted is None else accepted) + late for accepted in last)


def steps_without_draft(facts: CaseFacts) -> str | None:
    """A method that always drafts stopped drafting (a context too long for the draft, say)."""
    acceptance = facts.metrics.acceptance
    if facts.k == 0 or acceptance is None or facts.method in LOOK_UP_METHODS:
        return None
    if acceptance.coverage is None or acceptance.coverage > 1 - AGREEMENT or not acceptance.drafts:
        return None
    if _lost(facts):
        return None
    return f"only {acceptance.coverage:.0%} of the steps had a draft"
