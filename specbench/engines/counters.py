"""What a vLLM counts, read from its /metrics page."""

from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress

from specbench.records import MOST, EngineCounters

# Our name -> vLLM's, without the `_total` that some versions leave out.
NAMES = {
    "drafts": "vllm:spec_decode_num_drafts",
    "draft_tokens": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
    "prompt_tokens": "vllm:prompt_tokens",
    "generation_tokens": "vllm:generation_tokens",
    "requests": "vllm:request_success",
    "prefix_cache_hits": "vllm:prefix_cache_hits",
    "prefix_cache_queries": "vllm:prefix_cache_queries",
    "preemptions": "vllm:num_preemptions",
    "process_start_s": "process_start_time_seconds",
}
CACHE_CONFIG, CACHE_TOKENS = "vllm:cache_config_info", "kv_cache_size_tokens"
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"


class CountersUnreadable(Exception):
    """A /metrics page without what is needed; the message says what was looked for."""


def parse(page: str) -> EngineCounters:
    """The counters on *page*, summed over the engines of a data-parallel server.

    Raises:
        CountersUnreadable: the page is no metrics page of a vLLM.
    """
    from prometheus_client.parser import text_string_to_metric_families

    totals: dict[str, float] = defaultdict(float)
    per_position: dict[int, float] = defaultdict(float)
    try:
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                name = sample.name.removesuffix("_total")
                if name == PER_POSITION:
                    per_position[_position(sample.labels)] += sample.value
                else:
                    totals[name] += sample.value
        found = {ours: int(totals[name]) for ours, name in NAMES.items() if name in totals}
        positions = tuple(int(per_position[i]) for i in range(max(per_position, default=-1) + 1))
        if any(abs(value) >= MOST for value in (*found.values(), *positions)):
            raise ValueError("a count that can't be")
    except (ValueError, KeyError, IndexError, OverflowError) as error:
        raise CountersUnreadable(f"/metrics is not in Prometheus's format ({error})") from None
    if "generation_tokens" not in found:
        names = ", ".join(sorted({name for name in totals if name.startswith("vllm:")})[:5])
        raise CountersUnreadable(
            f"/metrics has no vllm:generation_tokens (vLLM names there: {names or 'none'}); "
            "is the server a vLLM with its statistics on?"
        )
    return EngineCounters(**found, accepted_per_pos=positions or None)


def kv_cache_tokens(page: str) -> int | None:
    """How many tokens the KV cache has room for, over all engines; None where *page* is silent."""
    from prometheus_client.parser import text_string_to_metric_families

    found: list[int] = []
    with suppress(ValueError, KeyError, IndexError, OverflowError):
        for family in text_string_to_metric_families(page):
            if family.name == CACHE_CONFIG:
                found += [int(sample.labels[CACHE_TOKENS]) for sample in family.samples]
    return sum(found) or None


def _position(labels: Mapping[str, str]) -> int:
    position = int(labels["position"])
    if not 0 <= position < 1024:
        raise ValueError(f"position {position} is out of range")
    return position
