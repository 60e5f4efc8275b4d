"""Other tools' results as runs, and runs as their files.

tests/data/imports holds small files of our own making in the tools' shapes; genai_perf_0.0.16 and
aiperf_0.13.0 were recorded from the real ones.
"""

import copy
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from specbench import cli
from specbench.analysis.rows import Row
from specbench.analysis.rows import rows as make_rows
from specbench.config import load
from specbench.errors import ExchangeError, StoreError, UserError
from specbench.interchange import importing
from specbench.interchange.exporting import KINDS, export
from specbench.interchange.found import Told
from specbench.interchange.importing import import_file
from specbench.interchange.reading import read_source
from specbench.prepare import stored
from specbench.records import Prompt
from specbench.render import report
from specbench.render.read import measured_cases
from specbench.store import RunStore

DATA = Path(__file__).parent / "data"
OWN = DATA / "imports"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recorded exports under the names that the tools give them."""
    folder = tmp_path_factory.mktemp("recorded")
    genai, aiperf = DATA / "genai_perf_0.0.16", DATA / "aiperf_0.13.0"
    shutil.copy(genai / "turn1_export.json", folder / "profile_export.json")
    shutil.copy(genai / "turn1_summary.json", folder / "profile_export_genai_perf.json")
    shutil.copy(genai / "turn2_export.json", folder / "turn2.json")
    shutil.copy(aiperf / "raw.jsonl", folder / "profile_export_raw.jsonl")
    shutil.copy(aiperf / "summary.json", folder / "profile_export_aiperf.json")
    return folder


def imported(path: Path, results: Path, **told: Any) -> RunStore:  # noqa: ANN401
    """The run that *path* becomes; *told* are import_file's arguments and Told's."""
    said = {name: told.pop(name) for name in ("k", "method", "model") if name in told}
    return RunStore.open(import_file(path, results=results, told=Told(**said), **told).path)


def rows_of(store: RunStore) -> list[Row]:
    baseline = "vanilla" if "vanilla" in store.document["arms"] else None
    return make_rows(list(measured_cases(store)), baseline=baseline)


def length(row: Row) -> float | None:
    assert row.metrics.acceptance is not None
    return row.metrics.acceptance.length


# --- what is read -----------------------------------------------------------------------------


def test_an_eagle_file_gives_tokens_per_verification(tmp_path: Path) -> None:
    """120 new tokens in (19+1) + (9+1) + (14+1) + (5+1) = 51 verifications."""
    (row,) = rows_of(imported(OWN / "eagle.jsonl", tmp_path, k=5, method="eagle"))
    assert (row.method, row.k, row.metrics.requests) == ("eagle", 5, 4)
    assert length(row) == pytest.approx(120 / 51)
    assert row.metrics.latency_ms == pytest.approx(1e3 * (0.5 + 0.25 + 0.4 + 0.15) / 4)
    assert row.metrics.tokens_per_s == pytest.approx(120 / 1.3)
    assert row.metrics.percentiles["latency_p50_ms"] == pytest.approx(1e3 * (0.25 + 0.4) / 2)
    # The file does not hold these.
    assert set(row.metrics.percentiles) == {"latency_p50_ms"}  # 4 requests have no p90
    assert row.metrics.ttft_ms is None
    assert row.metrics.tpot_ms is None
    assert row.max_tokens is None
    assert row.metrics.acceptance is not None
    assert row.metrics.acceptance.rate is None
    assert [flag.check for flag in row.flags] == ["imported"]
    assert "not measured by specbench: from EAGLE, eagle.jsonl" in row.flags[0].finding


def test_eagles_temperature_is_taken_out_of_the_model_id(tmp_path: Path) -> None:
    store = imported(OWN / "eagle.jsonl", tmp_path, k=5)
    assert store.document["config"]["model"] == "tiny-ea"
    assert store.document["config"]["sampling"]["temperature"] == 0


def test_a_baseline_beside_it_is_paired_by_question(tmp_path: Path) -> None:
    store = imported(OWN / "eagle.jsonl", tmp_path, k=5, baseline=OWN / "eagle_baseline.jsonl")
    base, arm = rows_of(store)
    assert (base.method, base.k, arm.k) == ("vanilla", 0, 5)
    assert arm.speedup is not None
    assert arm.speedup.total_time == pytest.approx((1.0 + 0.5 + 0.6 + 0.33) / 1.3)
    assert arm.speedup.tpot is None
    assert arm.speedup.ttft is None  # nobody knows it


def test_one_token_a_step_is_vanilla_unless_k_is_said(tmp_path: Path) -> None:
    (row,) = rows_of(imported(OWN / "eagle_baseline.jsonl", tmp_path / "a"))
    assert (row.method, row.k) == ("vanilla", 0)
    assert "taken for vanilla" in row.flags[0].finding
    (row,) = rows_of(imported(OWN / "eagle_baseline.jsonl", tmp_path / "b", k=5, method="eagle"))
    assert row.k == 5
    assert length(row) == 1.0


def test_a_spec_bench_file_gives_each_steps_tokens(tmp_path: Path) -> None:
    """Steps of 3 1 4 2 and 2 2 tokens; the turn that says ERROR has another's numbers."""
    store = imported(OWN / "spec_bench.jsonl", tmp_path, k=3)
    (row,) = rows_of(store)
    assert length(row) == pytest.approx(14 / 6)
    assert (row.metrics.requests, row.metrics.failed) == (2, 1)
    records = list(store.requests(store.document["cases"][0]["id"]))
    assert records[0].spec is not None
    assert records[0].spec.per_step_accepted == (2, 0, 3, 1)
    assert records[0].spec.draft_tokens is None
    assert records[0].category == "writing"
    assert "turn before" in str(records[2].error)


def test_steps_that_are_counted_from_0_are_put_right(tmp_path: Path) -> None:
    line = json.loads((OWN / "spec_bench.jsonl").read_text(encoding="utf-8").splitlines()[0])
    line["choices"][0]["decoding_steps"] = [3, 1]
    path = tmp_path / "zero.jsonl"
    path.write_text(json.dumps(line), encoding="utf-8")
    (row,) = rows_of(imported(path, tmp_path / "results", k=3))
    assert length(row) == pytest.approx(14 / 6)


def test_a_question_that_stands_twice_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "rerun.jsonl"
    text = (OWN / "eagle.jsonl").read_text(encoding="utf-8")
    path.write_text(text + text.splitlines()[0] + "\n", encoding="utf-8")
    (row,) = rows_of(imported(path, tmp_path / "results", k=5))
    assert row.metrics.requests == 4
    assert "1 questions stand there again" in row.flags[0].finding


def test_sglang_lines_become_arms_whose_k_is_steps(tmp_path: Path) -> None:
    """num_draft_tokens counts the root: it is k + 1 of a chain, and of a tree no k at all."""
    store = imported(OWN / "sglang.jsonl", tmp_path)
    by_arm = {row.arm: row for row in rows_of(store)}
    assert set(by_arm) == {"vanilla", "eagle-k3", "eagle-topk2-n6-k3"}
    chain = by_arm["eagle-k3"]
    assert (chain.k, length(chain)) == (3, 2.6)
    assert chain.metrics.tpot_ms == pytest.approx(7.1 / 2.6)
    assert chain.metrics.latency_ms is None
    assert "a tree of 5 drafted tokens" in by_arm["eagle-topk2-n6-k3"].flags[0].finding


def test_vllm_benchs_means_are_shown_as_it_gives_them(tmp_path: Path) -> None:
    (row,) = rows_of(imported(OWN / "vllm_bench.json", tmp_path))
    metrics = row.metrics
    assert (row.k, length(row), metrics.tpot_ms, metrics.ttft_ms) == (3, 2.29, 5.4, 21.5)
    assert (metrics.requests, metrics.failed, metrics.output_tokens) == (80, 0, 16216)
    assert metrics.latency_ms is None
    assert metrics.acceptance is not None
    assert metrics.acceptance.rate == pytest.approx(0.43)
    assert metrics.acceptance.positions == (0.66, 0.39, 0.24)
    assert "acceptance is per draft" in row.flags[0].finding


def test_vllm_benchs_counts_tell_steps_without_a_draft(tmp_path: Path) -> None:
    """vLLM issue 24344: 4.59 tokens a draft are 2.96 a step (one request of the same counts)."""
    result = json.loads((OWN / "vllm_bench.json").read_text(encoding="utf-8"))
    result |= {"completed": 1, "total_output_tokens": 5376, "spec_decode_num_drafts": 993}
    result |= {"spec_decode_draft_tokens": 4000, "spec_decode_accepted_tokens": 3562}
    path = tmp_path / "ngram.json"
    path.write_text(json.dumps(result), encoding="utf-8")
    (row,) = rows_of(imported(path, tmp_path / "results", method="ngram"))
    assert row.metrics.acceptance is not None
    assert row.metrics.acceptance.length_per_draft == pytest.approx(4.59, abs=0.01)
    assert length(row) == pytest.approx(2.96, abs=0.01)


def test_vllm_benchs_detailed_file_becomes_requests(tmp_path: Path) -> None:
    store = imported(OWN / "vllm_bench_detailed.json", tmp_path)
    (row,) = rows_of(store)
    first, _, failed = store.requests(store.document["cases"][0]["id"])
    assert [(at - first.sent_ns) / 1e6 for at in first.chunk_ns] == [50, 90, 130, 170]
    assert (first.output_tokens, first.text) == (7, "Rivers run down.")
    assert failed.error == "Bad Gateway"
    assert row.metrics.tpot_ms == pytest.approx(20)
    assert store.case_status(store.document["cases"][0]["id"]) == {
        "status": "partial",
        "problem": "1 of 3 requests failed",
        "failure": None,
        "at": store.case_status(store.document["cases"][0]["id"])["at"],  # type: ignore[index]
    }


def test_a_result_without_speculative_counters_is_vanilla(tmp_path: Path) -> None:
    (row,) = rows_of(imported(OWN / "vllm_bench_vanilla.json", tmp_path))
    assert (row.method, row.k, row.metrics.tpot_ms) == ("vanilla", 0, 8.1)


def test_aiperf_records_become_requests(tmp_path: Path) -> None:
    """(3 + 2) steps accepted (4 + 3) tokens; the warm-up is not of it."""
    store = imported(OWN / "aiperf_records.jsonl", tmp_path)
    (row,) = rows_of(store)
    assert (row.k, row.metrics.requests, row.metrics.failed) == (2, 2, 1)
    assert length(row) == pytest.approx((5 + 7) / 5)
    assert row.metrics.ttft_ms == pytest.approx(55)
    records = list(store.requests(store.document["cases"][0]["id"]))
    assert [(r.prompt_id, r.turn) for r in records] == [("c0", 0), ("c0", 1), ("c1", 0)]
    assert records[2].error == "HTTPError: Bad Gateway"


def test_raw_aiperf_records_are_what_our_own_client_keeps(tmp_path: Path, recorded: Path) -> None:
    store = imported(recorded / "profile_export_raw.jsonl", tmp_path)
    (row,) = rows_of(store)
    assert (row.k, row.max_tokens, row.metrics.requests) == (2, 8, 3)
    assert length(row) == pytest.approx(1.4)
    figures = {one.figure: one for one in row.beside}
    assert figures["ttft_ms"].agrees  # its own summary, beside
    assert figures["acceptance_length"].theirs == pytest.approx(1.4)
    prompts = store.prompts(store.document["cases"][0]["prompt_set"])
    assert prompts[0].turns == ("What is the capital of France?", "And what is it known for? \n")


def test_a_genai_perf_export_needs_k_and_calls_prompts_by_their_text(
    tmp_path: Path, recorded: Path
) -> None:
    with pytest.raises(ExchangeError, match="--k N"):
        imported(recorded / "profile_export.json", tmp_path)
    one = imported(recorded / "profile_export.json", tmp_path / "a", k=2)
    (row,) = rows_of(one)
    assert {figure.figure for figure in row.beside} >= {"latency_ms", "ttft_ms", "tpot_ms"}
    later = imported(recorded / "turn2.json", tmp_path / "b", k=2)
    (record,) = later.requests(later.document["cases"][0]["id"])
    assert record.turn == 1
    assert record.prompt_id in {r.prompt_id for r in one.requests(one.document["cases"][0]["id"])}


def test_a_request_around_which_the_clock_was_set_back_fails_and_the_others_are_read(
    tmp_path: Path, recorded: Path
) -> None:
    """perf_analyzer stamps with the time of day."""
    export = json.loads((recorded / "profile_export.json").read_text(encoding="utf-8"))
    first = export["experiments"][0]["requests"][0]
    first["response_timestamps"] = [at - 3_600 * 10**9 for at in first["response_timestamps"]]
    path = tmp_path / "stepped.json"
    path.write_text(json.dumps(export), encoding="utf-8")
    store = imported(path, tmp_path / "results", k=2)
    records = list(store.requests(store.document["cases"][0]["id"]))
    assert sorted(record.ok for record in records) == [False, True]
    (failed,) = [record for record in records if not record.ok]
    assert failed.error == "the wall clock was set back during this request"
    (row,) = rows_of(store)
    assert row.metrics.failed == 1
    assert row.metrics.latency_ms is not None
    assert 0 < row.metrics.latency_ms < 60_000


def test_a_prompt_that_is_sent_again_is_another_pass(tmp_path: Path, recorded: Path) -> None:
    export = json.loads((recorded / "profile_export.json").read_text(encoding="utf-8"))
    requests = export["experiments"][0]["requests"]
    export["experiments"][0]["requests"] = [*requests, *copy.deepcopy(requests)]
    path = tmp_path / "twice.json"
    path.write_text(json.dumps(export), encoding="utf-8")
    store = imported(path, tmp_path / "results", k=2)
    records = list(store.requests(store.document["cases"][0]["id"]))
    assert sorted(record.cycle for record in records) == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("name", "kind"),
    [("profile_export_aiperf.json", "AIPerf"), ("profile_export_genai_perf.json", "GenAI-Perf")],
)
def test_a_summary_alone_is_figures_without_requests(
    tmp_path: Path, recorded: Path, name: str, kind: str
) -> None:
    path = tmp_path / name
    shutil.copy(recorded / name, path)
    store = imported(path, tmp_path / "results", k=2, method="eagle")
    (row,) = rows_of(store)
    assert row.imported is not None
    assert row.imported.tool == kind
    assert row.metrics.ttft_ms is not None
    assert row.metrics.ttft_ms > 1


def test_a_folder_of_artifacts_is_read_by_the_file_with_the_most_in_it(
    tmp_path: Path, recorded: Path
) -> None:
    store = imported(recorded, tmp_path)
    assert store.document["imported"]["files"] == ["profile_export_raw.jsonl"]


# --- the run folder ---------------------------------------------------------------------------

SAMPLES: dict[str, dict[str, Any]] = {
    "eagle.jsonl": {"k": 5},
    "eagle_baseline.jsonl": {},
    "spec_bench.jsonl": {"k": 3},
    "sglang.jsonl": {},
    "vllm_bench.json": {},
    "vllm_bench_detailed.json": {},
    "vllm_bench_vanilla.json": {},
    "aiperf_records.jsonl": {},
}


@pytest.mark.parametrize("name", SAMPLES)
def test_every_report_of_an_imported_run_is_made(tmp_path: Path, name: str) -> None:
    from specbench.render.html import page

    store = imported(OWN / name, tmp_path, **SAMPLES[name])
    found = report.Findings(rows_of(store))
    table = report.as_table(store.document, found, width=120, colour=False)
    assert name in table
    assert "imported" in table
    for form in report.FORMATS.values():
        assert form(store.document, found)
    assert "not by specbench" in page(store, measured_cases(store), found)


@pytest.mark.parametrize("name", SAMPLES)
def test_every_sample_belongs_to_one_tool_only(name: str) -> None:
    source = read_source(OWN / name)
    claimed = [kind for kind, one in importing.KINDS.items() if one.claims(source.first)]
    assert len(claimed) == 1


def test_an_imported_run_cannot_be_gone_on_with(tmp_path: Path) -> None:
    store = imported(OWN / "eagle.jsonl", tmp_path, k=5)
    with pytest.raises(StoreError, match="was imported"):
        stored(store)


def test_nothing_of_a_refused_file_is_left(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text((OWN / "eagle.jsonl").read_text(encoding="utf-8") + "{", encoding="utf-8")
    with pytest.raises(ExchangeError, match=r"bad.jsonl, line 3: not JSON"):
        imported(path, tmp_path / "results", k=5)
    assert not (tmp_path / "results").exists()


def test_a_name_cannot_lead_out_of_results(tmp_path: Path) -> None:
    store = imported(OWN / "eagle.jsonl", tmp_path / "results", k=5, name="../../etc/x")
    assert store.path.parent == tmp_path / "results"
    assert store.path.name.endswith("-etc-x")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("\n \n", "is empty"),
        ("[]", "none of the files"),
        ("3", "none of the files"),
        ('{"a": 1}', "none of the files"),
        ('{"completed": 1, "output_throughput": NaN}', "NaN is no number"),
        ('{"completed": -1, "output_throughput": 3}', "`completed`"),
        ('{"completed": true, "output_throughput": 3}', "`completed`"),
        ('{"completed": 1, "output_throughput": 1e999}', "`output_throughput`"),
        ('{"question_id": 1, "choices": [{"turns": ["a"]}]}', "`choices.0.new_tokens`"),
        (
            (
                '{"question_id": 1, "choices": [{"turns": ["a"], "new_tokens": [1, 2], '
                '"wall_time": [1], "idxs": [0]}]}'
            ),
            "several lengths",
        ),
        ('{"question_id": 1, "choices": []}', "holds no answer"),
        ('{"batch_size": 0, "steps": 1, "acc_length": 2}', "`batch_size`"),
        ('{"experiments": [{"requests": [{}]}]}', "not as GenAI-Perf writes it"),
        ('{"metadata": {}, "responses": []}', "`request_start_ns`"),
        ("[" * 100_000, "nested too deep"),
        ('{"completed": 1' + "0" * 5000 + "}", "not JSON"),
    ],
)
def test_a_bad_file_is_refused_with_its_line_and_key(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ExchangeError) as error:
        imported(path, tmp_path / "results", k=1)
    assert said in str(error.value)
    assert "x.json" in str(error.value)


def test_what_a_file_says_cannot_write_to_the_terminal(tmp_path: Path) -> None:
    value = json.loads((OWN / "aiperf_records.jsonl").read_text(encoding="utf-8").splitlines()[1])
    value["spec_decode_acceptance"]["acceptance_histogram"]["\x1b[31m"] = 1
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(value), encoding="utf-8")
    with pytest.raises(ExchangeError) as error:
        imported(path, tmp_path / "results")
    assert str(error.value).isprintable()


@pytest.mark.parametrize("encoded", [b"\xff\xfe{\x00}\x00", b'{"a": "\xe9"}'])
def test_a_file_that_is_not_utf_8_is_refused(tmp_path: Path, encoded: bytes) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(encoded)
    with pytest.raises(ExchangeError, match="line 1: not UTF-8"):
        imported(path, tmp_path / "results")


def test_a_byte_order_mark_and_crlf_are_read(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    raw = (OWN / "eagle.jsonl").read_bytes().replace(b"\n", b"\r\n")
    path.write_bytes(b"\xef\xbb\xbf" + raw)
    (row,) = rows_of(imported(path, tmp_path / "results", k=5))
    assert row.metrics.requests == 4


def test_k_that_contradicts_the_file_is_refused(tmp_path: Path) -> None:
    for name in ("vllm_bench.json", "aiperf_records.jsonl", "sglang.jsonl"):
        with pytest.raises(ExchangeError, match="not 7"):
            imported(OWN / name, tmp_path, k=7)


def test_a_file_of_another_tool_than_named_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExchangeError, match="is not of GenAI-Perf"):
        imported(OWN / "eagle.jsonl", tmp_path, k=5, kind="genai-perf")
    with pytest.raises(ExchangeError, match="--from takes"):
        imported(OWN / "eagle.jsonl", tmp_path, k=5, kind="excel")


# --- any file at all --------------------------------------------------------------------------


def survives(raw: bytes, k: int | None) -> None:
    """A file of these bytes is a run whose table is made, or a UserError."""
    with tempfile.TemporaryDirectory() as made:
        path, results = Path(made, "any.jsonl"), Path(made, "results")
        path.write_bytes(raw)
        try:
            store = imported(path, results, k=k)
        except UserError:
            assert not results.exists() or not list(results.iterdir())
            return
        found = report.Findings(rows_of(store))
        assert report.as_table(store.document, found, width=100, colour=False)
        assert report.as_json(store.document, found)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    raw=st.binary(max_size=200)
    | st.text(max_size=100).map(lambda text: text.encode("utf-8", "surrogatepass"))
)
@example(raw=b"\x00")
@example(raw=b'{"completed": 0, "output_throughput": 0}')
def test_any_bytes_are_a_run_or_a_user_error(raw: bytes) -> None:
    survives(raw, 1)


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 5),
    st.sampled_from([-(10**30), 10**9, 10**18, 10**30, 1e-300, 1e308, -0.5]),
    st.sampled_from(["", "\ud800", "\x1b[31m", "a" * 300, "../..", "\u2028", "ERROR", "1"]),
    st.lists(st.integers(-1, 3), max_size=3),
    st.dictionaries(st.sampled_from(["a", "value", "avg"]), st.integers(-1, 3), max_size=2),
)


def places(value: Any) -> Iterator[tuple[Any, Any]]:  # noqa: ANN401
    """Every (container, key) inside *value*."""
    pairs = (
        list(value.items())
        if isinstance(value, dict)
        else list(enumerate(value))
        if isinstance(value, list)
        else []
    )
    for key, inner in pairs:
        yield value, key
        yield from places(inner)


def documents() -> list[list[Any]]:
    paths = [OWN / name for name in SAMPLES]
    paths += [DATA / "genai_perf_0.0.16" / "turn1_export.json"]
    paths += [DATA / "aiperf_0.13.0" / "raw.jsonl"]
    return [[value for _, value in read_source(path).documents] for path in paths]


DOCUMENTS = documents()


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_file_with_an_odd_value_is_a_run_or_a_user_error(data: st.DataObject) -> None:
    values = copy.deepcopy(data.draw(st.sampled_from(DOCUMENTS)))
    for _ in range(data.draw(st.integers(1, 3))):
        everywhere = list(places(values))
        container, key = everywhere[data.draw(st.integers(0, len(everywhere) - 1))]
        if data.draw(st.booleans()) or not isinstance(container, dict):
            container[key] = data.draw(ODD)
        else:
            del container[key]
    raw = "\n".join(json.dumps(value) for value in values).encode()
    survives(raw, data.draw(st.sampled_from([None, 0, 1, 3])))


# --- the way back -----------------------------------------------------------------------------


def exported(store: RunStore, to: str, path: Path, **which: Any) -> Path:  # noqa: ANN401
    (written, *_) = export(store, to, path, **which).paths
    return written


def test_an_eagle_file_comes_back_as_it_was(tmp_path: Path) -> None:
    store = imported(OWN / "eagle.jsonl", tmp_path / "a", k=5)
    path = exported(store, "eagle", tmp_path / "out.jsonl")
    before, after = (
        [json.loads(line) for line in one.read_text(encoding="utf-8").splitlines()]
        for one in (OWN / "eagle.jsonl", path)
    )
    for was, now in zip(before, after, strict=True):
        assert now["choices"] == was["choices"]
        assert now["question_id"] == was["question_id"]


def test_a_spec_bench_file_comes_back_as_it_was(tmp_path: Path) -> None:
    store = imported(OWN / "spec_bench.jsonl", tmp_path / "a", k=3)
    path = exported(store, "spec-bench", tmp_path / "out.jsonl")
    (now,) = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    was = json.loads((OWN / "spec_bench.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert now["choices"] == was["choices"]  # the question that failed is left out
    assert now["category"] == "writing"


PROMPTS = [
    Prompt(id="81", turns=("Name rivers.", "Which is longest?"), category="writing"),
    Prompt(id="82", turns=("Why does bread rise?",), category="qa"),
]


@pytest.fixture
def measured(made_run: Callable[..., RunStore]) -> RunStore:
    return made_run(PROMPTS, say=lambda arm, prompt, turn: f"{prompt.id} {turn} says this and that")


@pytest.mark.parametrize("to", KINDS)
def test_what_a_run_exports_is_imported_with_the_same_figures(
    tmp_path: Path, measured: RunStore, to: str
) -> None:
    (row,) = [row for row in rows_of(measured) if row.arm == "eagle-k3"]
    path = exported(measured, to, tmp_path / "out.jsonl", arm="eagle-k3")
    again = imported(path, tmp_path / "results", **({} if to == "aiperf" else {"k": 3}))
    (back,) = rows_of(again)
    assert back.k == 3
    assert back.metrics.requests == row.metrics.requests == 3
    assert back.metrics.latency_ms == pytest.approx(row.metrics.latency_ms)
    if to != "genai-perf":  # has no acceptance
        trimmed = 0 if to == "aiperf" else 0.35  # their last step's tokens past the end count
        assert length(back) == pytest.approx(length(row), abs=trimmed or 1e-9)
    if to in ("aiperf", "genai-perf"):
        assert back.metrics.tpot_ms == pytest.approx(row.metrics.tpot_ms)
        assert back.metrics.ttft_ms == pytest.approx(row.metrics.ttft_ms)


def test_answers_of_vanilla_have_one_token_a_step(tmp_path: Path, measured: RunStore) -> None:
    path = exported(measured, "spec-bench", tmp_path / "out.jsonl", arm="vanilla")
    line = json.loads(path.read_text(encoding="utf-8").splitlines()[0])
    (choice,) = line["choices"]
    assert choice["decoding_steps"] == choice["new_tokens"]
    assert set(choice["accept_lengths"]) == {1}
    assert line["question_id"] == 81  # a number, as their scripts sort by it
    assert line["model_id"] == "m-vanilla-temperature-0.0"


def test_an_export_of_several_arms_asks_for_one(tmp_path: Path, measured: RunStore) -> None:
    with pytest.raises(ExchangeError, match="--arm or --case"):
        export(measured, "eagle", tmp_path / "x.jsonl")
    with pytest.raises(ExchangeError, match="no arm medusa"):
        export(measured, "eagle", tmp_path / "x.jsonl", arm="medusa")
    with pytest.raises(ExchangeError, match="no format"):
        export(measured, "excel", tmp_path / "x.jsonl", arm="vanilla")
    assert not (tmp_path / "x.jsonl").exists()


def test_an_export_never_overwrites(tmp_path: Path, measured: RunStore) -> None:
    (tmp_path / "x.jsonl").write_text("mine", encoding="utf-8")
    for to in KINDS:
        with pytest.raises(ExchangeError, match="is there already"):
            export(measured, to, tmp_path / "x.jsonl", arm="vanilla")
    assert (tmp_path / "x.jsonl").read_text(encoding="utf-8") == "mine"


def test_what_a_format_cannot_hold_is_said(tmp_path: Path, recorded: Path) -> None:
    plain = imported(recorded / "profile_export.json", tmp_path / "a", k=2)
    with pytest.raises(ExchangeError, match="no per-request metrics"):
        export(plain, "eagle", tmp_path / "x.jsonl")
    eagle = imported(OWN / "eagle.jsonl", tmp_path / "b", k=5)
    with pytest.raises(ExchangeError, match="--to eagle"):
        export(eagle, "spec-bench", tmp_path / "x.jsonl")
    aggregate = imported(OWN / "vllm_bench.json", tmp_path / "c")
    with pytest.raises(ExchangeError, match="holds no request"):
        export(aggregate, "aiperf", tmp_path / "x.jsonl")
    notes = export(eagle, "eagle", tmp_path / "y.jsonl").notes
    assert any("TTFT" in note for note in notes)


# --- the command line -------------------------------------------------------------------------


def run_cli(*args: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["specbench", *args])
        with pytest.raises(SystemExit) as end:
            cli.main()
    return int(end.value.code or 0)


def test_import_report_and_export_by_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = ["--results", str(tmp_path / "results")]
    one = ["import", str(OWN / "eagle.jsonl"), "--k", "5", "--method", "eagle"]
    assert run_cli(*one, "--baseline", str(OWN / "eagle_baseline.jsonl"), *results) == 0
    said = capsys.readouterr()
    folder = Path(said.out.strip())
    assert said.err.strip() == "eagle: vanilla, eagle-k5: 8 requests"
    assert run_cli("report", *results) == 0
    assert "2.35" in capsys.readouterr().out
    out = tmp_path / "answers.jsonl"
    given = ["export", folder.name, "--to", "eagle", "--arm", "eagle-k5", "-o", str(out)]
    assert run_cli(*given, *results) == 0
    assert "2 written" in capsys.readouterr().out
    assert run_cli(*given, *results) == 2
    assert "is there already" in capsys.readouterr().err


def test_import_says_what_it_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli("import", str(OWN / "eagle.jsonl"), "--results", str(tmp_path)) == 2
    said = capsys.readouterr().err
    assert "eagle.jsonl: does not say how many tokens were drafted" in said
    assert "--k N" in said


def test_the_config_of_an_imported_run_is_honest(tmp_path: Path) -> None:
    """It claims no engine and no sampling that the file does not hold."""
    store = imported(OWN / "sglang.jsonl", tmp_path)
    config = store.document["config"]
    assert config["model"] == "unknown"
    assert config["speculation"] == []
    assert config["sampling"]["temperature"] is None
    assert store.document["vllm"] is None
    path = tmp_path / "as.yaml"
    path.write_text(json.dumps({"model": "m", "prompts": "p"}), encoding="utf-8")
    assert load(path).model == "m"  # JSON is YAML: configs stay readable by hand
