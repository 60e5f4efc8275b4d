"""Checks of what was sent and what came back."""

from collections.abc import Mapping
from typing import Any

from specbench.analysis.hygiene import CaseFacts
from specbench.analysis.metrics import counted
from specbench.records import Prompt

# Control tokens of the common chat templates: no user writes them.
MARKERS = (
    "<|im_start|>",
    "<|im_end|>",
    "[INST]",
    "[/INST]",
    "<<SYS>>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|user|>",
    "<|assistant|>",
    "<|START_OF_TURN_TOKEN|>",
    "<|start|>user<|message|>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "### Assistant:",
)
# Headings of templates without control tokens: text may hold them, but would not end in one.
LAST_HEADINGS = ("### Response:", " ASSISTANT:", "\n\nAssistant:")
FEW = 0.05  # a data set about chat templates names a marker here and there


def missing_requests(facts: CaseFacts) -> str | None:
    """Requests failed, or prompts were not measured. Cycles after the first come on top."""
    failed = facts.metrics.failed
    measured = sum(record.cycle == 0 for record in facts.good)
    if measured == facts.expected_requests and not failed:
        return None
    also = f", {failed} failed" if failed else ""
    return f"{measured} of {facts.expected_requests} requests measured{also}"


def sampling_not_as_written(facts: CaseFacts) -> str | None:
    """A request said something else of sampling than the config does.

    Seeds may be the prompts' own; a request that does not say what was sent is not judged.
    """
    if not facts.sampling:
        return None
    written = {**facts.sampling, "max_tokens": facts.max_tokens}
    said = [(r.prompt_id, r.sampling) for r in facts.records if r.sampling is not None]
    wrong = [(prompt, d) for prompt, sent in said if (d := _deviation(sent, written))]
    if not wrong:
        return None
    prompt, deviation = wrong[0]
    return f"{len(wrong)} of {len(said)} requests ({prompt} first): {deviation}"


def _deviation(sent: Mapping[str, Any], written: Mapping[str, Any]) -> str | None:
    """The first value of *sent* that is not as *written*, in words."""
    for name, value in written.items():
        is_own_seed = name == "seed" and isinstance(sent.get(name), int)
        if value is None or is_own_seed or _plain(sent.get(name)) == _plain(value):
            continue
        was = f"{sent[name]} was sent" if sent.get(name) is not None else "nothing was sent"
        return f"{name} is {value}, {was}"
    return None


def _plain(value: Any) -> Any:  # noqa: ANN401
    return list(value) or None if isinstance(value, list | tuple) else value


def cut_short(facts: CaseFacts) -> str | None:
    """Answers ended "by length" at another length than max_tokens: the server has its own limit.

    Triton's vLLM backend cuts at 16 tokens what comes without sampling_parameters.
    """
    at = [
        record.output_tokens or 0
        for record in facts.good
        if record.finish_reason == "length" and record.token_source != "chunks"
    ]
    short = [tokens for tokens in at if tokens < (facts.max_tokens or 0)]
    if not short:
        return None
    return (
        f"{len(short)} answers were cut at {min(short)} tokens, not at max_tokens = "
        f"{facts.max_tokens}: the server did not heed it, or its context was full"
    )


def more_than_one_bos(facts: CaseFacts) -> str | None:
    """Every rendered prompt starts with the same token twice (a template applied twice)."""
    of_prompts = {r.prompt_id: r.prompt_head[:2] for r in facts.records if r.prompt_head}
    heads = list(of_prompts.values())
    if len(heads) < 2 or len(set(heads)) > 1 or len(set(heads[0])) > 1 or len(heads[0]) < 2:
        return None
    return f"all {len(heads)} prompts start with token {heads[0][0]} twice: two BOS tokens?"


def template_markers(facts: CaseFacts) -> str | None:
    """Chat messages that hold a chat template already: the server puts another around them."""
    chats = [prompt for prompt in facts.prompts if prompt.style == "chat"]
    marked = [marker for prompt in chats if (marker := _marker(prompt))]
    if len(marked) <= FEW * len(chats):
        return None
    return f"{len(marked)} of {len(chats)} chat messages hold a template already: {marked[0]}"


def _marker(prompt: Prompt) -> str | None:
    for turn in prompt.turns:
        if found := next((marker for marker in MARKERS if marker in turn), None):
            return found
        if turn.rstrip().endswith(LAST_HEADINGS):
            return turn.split()[-1]
    return None


def prefix_cache_hit(facts: CaseFacts) -> str | None:
    """Prompts were answered from the prefix cache, by the engine's counters or the answers."""
    good = facts.good
    spent, _ = counted(facts.spans, good)
    hits = (spent.prefix_cache_hits if spent else None) or sum(r.cached_tokens or 0 for r in good)
    return f"{hits} prompt tokens came from the prefix cache" if hits else None


def preempted(facts: CaseFacts) -> str | None:
    """The engine put requests back to make room in its KV cache, and computed them again later.

    Also by a span with a request that failed: the others in it waited all the same.
    """
    keys = {record.key for record in facts.good}
    inside = [s for s in facts.spans if s.spent and (not s.keys or not keys.isdisjoint(s.keys))]
    count = sum(span.spent.preemptions or 0 for span in inside if span.spent)
    if not count:
        return None
    return (
        f"requests were preempted {count} time{'s' if count > 1 else ''}: the KV cache was too small "
        "for the requests in flight, so times are those of waiting and computing again. Lower "
        "concurrency (or rate) or max_model_len, or give each engine all the memory "
        "(schedule: blocks)"
    )


def counted_by_chunks(facts: CaseFacts) -> str | None:
    """The server gave no usage, so chunks were counted as tokens."""
    guessed = [r.prompt_id for r in facts.good if r.token_source == "chunks"]
    if not guessed:
        return None
    return f"{len(guessed)} answers have no token count from the server: chunks were counted"
