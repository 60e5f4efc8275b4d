"""A vLLM's /metrics page becomes counters, or a sentence that says what was looked for."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench.engines.counters import CountersUnreadable, kv_cache_tokens, parse
from specbench.records import EngineCounters

PAGE = (Path(__file__).parent / "data" / "vllm_0.32_metrics_eagle_k3.txt").read_text("utf-8")
MEASURED = EngineCounters(
    drafts=23,
    draft_tokens=69,
    accepted=12,
    accepted_per_pos=(8, 3, 1),
    prompt_tokens=46,
    generation_tokens=36,
    requests=2,
    process_start_s=1796003368,
    prefix_cache_hits=0,
    prefix_cache_queries=0,
    preemptions=0,
)


def counter(name: str, value: float, **labels: object) -> str:
    inside = ",".join(f'{key}="{label}"' for key, label in {"engine": 0, **labels}.items())
    return f"# TYPE {name} counter\n{name}{{{inside}}} {value}\n"


def test_a_recorded_page_is_read() -> None:
    assert parse(PAGE) == MEASURED


def test_a_recorded_page_agrees_with_itself() -> None:
    found = parse(PAGE)
    assert found.accepted_per_pos is not None
    assert sum(found.accepted_per_pos) == found.accepted
    assert found.drafts is not None
    assert found.draft_tokens == 3 * found.drafts


def test_names_without_total_are_read() -> None:
    assert parse(PAGE.replace("_total", "")) == MEASURED


def test_two_engines_are_summed() -> None:
    other = PAGE.replace('engine="0"', 'engine="1"')
    assert parse(PAGE + other) == MEASURED + MEASURED


@pytest.mark.parametrize("name", ["vllm:num_preemptions_total", "vllm:num_preemptions"])
def test_preemptions_are_counted_and_those_of_a_request_are_another_thing(name: str) -> None:
    page = counter("vllm:generation_tokens_total", 1) + counter(name, 7)
    page += counter("vllm:request_num_preemptions_sum", 5) + counter(
        "vllm:num_preemptions_created", 9
    )
    assert parse(page).preemptions == 7
    assert parse(counter("vllm:generation_tokens_total", 1)).preemptions is None


def test_every_way_to_finish_counts_as_a_request() -> None:
    page = counter("vllm:generation_tokens_total", 1)
    page += counter("vllm:request_success_total", 3, finished_reason="stop")
    page += 'vllm:request_success_total{engine="0",finished_reason="length"} 4\n'
    assert parse(page).requests == 7


def test_the_room_in_the_kv_cache_is_read_from_the_recorded_page() -> None:
    assert kv_cache_tokens(PAGE) == 11264
    assert kv_cache_tokens("") is None
    assert kv_cache_tokens("<html>") is None
    assert kv_cache_tokens('vllm:cache_config_info{kv_cache_size_tokens="None"} 1\n') is None


def test_an_engine_without_speculation_has_no_draft_counters() -> None:
    found = parse(counter("vllm:generation_tokens_total", 36))
    assert found == EngineCounters(generation_tokens=36)


def test_drafts_without_positions_have_none() -> None:
    page = counter("vllm:generation_tokens_total", 36) + counter(
        "vllm:spec_decode_num_drafts_total", 5
    )
    assert parse(page) == EngineCounters(generation_tokens=36, drafts=5)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param("", id="empty"),
        pytest.param("\n\n", id="blank"),
        pytest.param(
            "".join(line + "\n" for line in PAGE.splitlines() if line.startswith("#")),
            id="only-help-and-type",
        ),
        pytest.param(counter("nv_inference_count", 3), id="triton"),
    ],
)
def test_a_page_without_vllm_counters_says_what_was_looked_for(page: str) -> None:
    with pytest.raises(CountersUnreadable, match=r"no vllm:generation_tokens .*names there: none"):
        parse(page)


def test_a_page_of_other_vllm_names_lists_them() -> None:
    page = counter("vllm:num_requests_running", 0) + counter("vllm:prompt_tokens_total", 3)
    with pytest.raises(CountersUnreadable, match="vllm:num_requests_running, vllm:prompt_tokens"):
        parse(page)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param("<html><body>502 Bad Gateway</body></html>", id="html"),
        pytest.param("<!DOCTYPE html>\n<html>\n<p>not found</p>\n</html>\n", id="html-lines"),
        pytest.param('{"detail":"Not Found"}', id="json"),
        pytest.param(counter("vllm:generation_tokens_total", 1)[:-4], id="cut"),
        pytest.param('vllm:generation_tokens_total{engine="0"} NaN\n', id="nan"),
        pytest.param('vllm:generation_tokens_total{engine="0"} +Inf\n', id="inf"),
        pytest.param(
            'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="-1"} 3\n', id="negative"
        ),
        pytest.param(
            'vllm:spec_decode_num_accepted_tokens_per_pos_total{position="99999999"} 3\n', id="far"
        ),
        pytest.param("vllm:spec_decode_num_accepted_tokens_per_pos_total 3\n", id="no-position"),
    ],
)
def test_a_page_that_is_no_metrics_page_is_refused(page: str) -> None:
    with pytest.raises(CountersUnreadable, match="/metrics"):
        parse(page)


@settings(max_examples=25, deadline=None)
@given(cut=st.integers(0, len(PAGE)), junk=st.text(max_size=12))
def test_a_damaged_page_is_read_or_refused_but_never_a_crash(cut: int, junk: str) -> None:
    try:
        found = parse(PAGE[:cut] + junk + PAGE[cut + 1 :])
    except CountersUnreadable:
        return
    assert isinstance(found, EngineCounters)
