"""Every check by the name that its flag carries. Adding one is a function and a line here."""

from collections.abc import Callable

from specbench.analysis.distribution import sampler_suspect
from specbench.analysis.hygiene import CaseFacts, Flag, PairFacts, acceptance, pairs, requests
from specbench.analysis.hygiene.machine import other_clock, somebody_else, throttled
from specbench.analysis.hygiene.setup import synthetic_acceptance
from specbench.analysis.hygiene.timing import client_behind, cold_start, late_sender, stalled_reader


def flags(facts: CaseFacts) -> list[Flag]:
    """Everything that the checks of one arm found."""
    found = ((name, check(facts)) for name, check in CHECKS.items())
    return [Flag(name, finding) for name, finding in found if finding]


def pair_flags(facts: PairFacts) -> list[Flag]:
    """Everything that the checks of a ratio's two arms found."""
    found = ((name, check(facts)) for name, check in PAIR_CHECKS.items())
    return [Flag(name, finding) for name, finding in found if finding]


def baseline_is_flagged(pair: PairFacts) -> str | None:
    """A ratio is no better than its baseline."""
    names = [flag.check for flag in flags(pair.baseline)]
    return f"the baseline itself is flagged: {', '.join(names)}" if names else None


def broken_sampler(pair: PairFacts) -> str | None:
    """Above temperature 0 the arm draws other tokens than the baseline does."""
    if not pair.arm.sampling.get("temperature") or pair.arm.k == 0:
        return None
    first = ([r for r in side.good if not r.cycle] for side in (pair.baseline, pair.arm))
    return sampler_suspect(*first)  # further passes are not the same for both


CHECKS: dict[str, Callable[[CaseFacts], str | None]] = {
    "missing": requests.missing_requests,
    "no-drafts": acceptance.drafts_never_moved,
    "no-acceptance": acceptance.acceptance_unknown,
    "merged-chunks": acceptance.chunks_merged,
    "drafted-vanilla": acceptance.drafted_without_k,
    "impossible-length": acceptance.impossible_length,
    "positions": acceptance.positions_disagree,
    "sources": acceptance.sources_disagree,
    "tokens": acceptance.tokens_do_not_add_up,
    "coverage": acceptance.steps_without_draft,
    "synthetic": synthetic_acceptance,
    "sampling": requests.sampling_not_as_written,
    "cut-short": requests.cut_short,
    "bos": requests.more_than_one_bos,
    "template": requests.template_markers,
    "prefix-cache": requests.prefix_cache_hit,
    "preempted": requests.preempted,
    "chunk-count": requests.counted_by_chunks,
    "cold-start": cold_start,
    "stalled": stalled_reader,
    "client": client_behind,
    "late": late_sender,
    "throttled": throttled,
    "other-load": somebody_else,
}

PAIR_CHECKS: dict[str, Callable[[PairFacts], str | None]] = {
    "baseline": baseline_is_flagged,
    "prompts": pairs.other_prompts,
    "sampling-differs": pairs.other_sampling,
    "hosts": pairs.other_hosts,
    "setup": pairs.other_setup,
    "lengths": pairs.unequal_lengths,
    "sampler": broken_sampler,
    "noise": pairs.noise_exceeds_claim,
    "clocks": other_clock,
}
