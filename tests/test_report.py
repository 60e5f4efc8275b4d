"""The same rows in every format: nothing made up, nothing hidden, nothing cut off."""

import csv
import io
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from table_rows import NOTHING, plain_row

from specbench.analysis.hygiene import Flag
from specbench.analysis.metrics import PERCENTILES, Acceptance, CaseMetrics
from specbench.analysis.rows import Row
from specbench.analysis.speedup import Interval, Ratio, Speedup
from specbench.cli import report as report_command
from specbench.errors import UserError
from specbench.render.columns import columns, speedup_text
from specbench.render.report import FORMATS, Findings, as_csv, as_json, as_markdown, as_table, notes

RUN: dict[str, Any] = {
    "id": "20260101-000000-demo",
    "config": {
        "model": "m",
        "schedule": "interleaved",
        "sampling": {"temperature": 0.0, "ignore_eos": False},
    },
    "machine": {"gpus": [], "cpu": "Some CPU", "cores": 2},
    "vllm": "0.32.0",
    "prompt_sets": {"humaneval": {"prompts": 6}},
}
MEASURED = CaseMetrics(6, 0, 6, 288, 2345.6, 321.4, 43.21, 22.25, None, None)


def accepted(*positions: int, drafts: int = 100) -> Acceptance:
    tokens = drafts * len(positions)
    return Acceptance("requests", drafts, tokens, sum(positions), 0, positions)


def faster(value: float, low: float | None = None, high: float | None = None) -> Speedup:
    interval = Interval(low, high) if low and high else None
    ratio = Ratio(value, interval, None, 6, 1, None)
    return Speedup(ratio, ratio, None, total_time=value, pairs=6, unpaired=0)


def row(k: int = 0, *, metrics: CaseMetrics = MEASURED, **more: Any) -> Row:  # noqa: ANN401
    facts = {"prompt_set": "humaneval", "max_tokens": 48, "metrics": metrics}
    return plain_row(k, **(facts | more))


def speculating(*positions: int) -> CaseMetrics:
    return replace(MEASURED, acceptance=accepted(*positions))


VANILLA = row()
EAGLE = row(3, metrics=speculating(60, 30, 10), speedup=faster(1.5, 1.25, 1.75))
FAILED = row(5, metrics=NOTHING, problem="The engine exited with 1.\nsecret log tail")
FLAGGED = replace(EAGLE, flags=(Flag("missing", "4 of 80 requests measured"),))


def keys(*rows: Row) -> list[str]:
    return [column.key for column in columns(rows)]


def table(*rows: Row, width: int = 200, run: dict[str, Any] = RUN) -> list[str]:
    return as_table(run, Findings(rows), width=width, colour=False).splitlines()


def heads(lines: Sequence[str]) -> list[str]:
    return lines[0].split()


def cells(markdown: str) -> list[list[str]]:
    lines = [line for line in markdown.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def csv_rows(*rows: Row) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(as_csv(RUN, Findings(rows)), newline="")))


def json_rows(*rows: Row) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    document = json.loads(as_json(RUN, Findings(rows)), parse_constant=refuse)
    found: list[dict[str, Any]] = document["rows"]
    return found


# --- columns -------------------------------------------------------------------------------------


def test_columns_that_hold_nothing_are_left_out() -> None:
    assert keys(VANILLA) == [
        *("method", "k", "prompt_set", "requests", "output_tokens", "latency_ms", "ttft_ms"),
        *("tpot_ms", "tokens_per_s", "speedup"),
    ]
    assert keys(VANILLA, EAGLE)[-7:] == [
        *("acceptance_length", "acceptance_rate", "p_1", "p_2", "p_3", "total_time", "speedup")
    ]


def test_the_figures_asked_for_stay_even_when_they_are_missing() -> None:
    assert set(keys(FAILED)) >= {"requests", "latency_ms", "tokens_per_s", "speedup"}


def test_an_axis_is_a_column_only_when_it_varies() -> None:
    assert "max_tokens" not in keys(VANILLA, EAGLE)
    assert "max_tokens" in keys(VANILLA, replace(VANILLA, max_tokens=512))
    assert "concurrency" in keys(VANILLA, replace(VANILLA, concurrency=4))


def test_the_arm_is_a_column_only_when_it_says_more_than_method_and_k() -> None:
    assert "arm" not in keys(VANILLA, EAGLE)
    assert "arm" in keys(VANILLA, replace(EAGLE, arm="my-head-k3"))


def test_failures_are_a_column_only_when_there_are_some() -> None:
    assert "failed" not in keys(VANILLA)
    assert "failed" in keys(VANILLA, replace(VANILLA, metrics=replace(MEASURED, failed=1)))


def test_acceptance_of_vanilla_is_missing_not_1() -> None:
    drafted_nothing = replace(MEASURED, acceptance=Acceptance("counters", 0, 0, 0, 40, None))
    (found,) = json_rows(row(metrics=drafted_nothing))
    assert (found["acceptance_length"], found["acceptance_rate"]) == (None, None)
    assert "acceptance_length" not in keys(row(metrics=drafted_nothing))


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (VANILLA, "1 (baseline)"),
        (FAILED, "–"),
        (EAGLE, "1.50x [1.25, 1.75]"),
        (row(3, speedup=faster(1.5)), "1.50x"),
        (row(3, speedup=faster(1.02, 0.97, 1.07)), "1.02x [0.97, 1.07] no difference shown"),
        (FLAGGED, "1.50x [1.25, 1.75]?"),
        (row(3, speedup=Speedup(None, None, None, None, 0, 6)), "–"),
    ],
)
def test_a_speedup_comes_with_its_interval_and_its_doubts(shown: Row, text: str) -> None:
    assert speedup_text(shown) == text


# --- markdown ------------------------------------------------------------------------------------


def test_markdown_is_a_table_worked_out_by_hand() -> None:
    """60 + 30 + 10 accepted of 300 in 100 drafts: length 2.00, rate 0.33."""
    found = cells(as_markdown(RUN, Findings([VANILLA, EAGLE])))
    assert found[0] == [
        *("method", "k", "prompts", "reqs", "tokens", "latency ms", "TTFT ms", "TPOT ms"),
        *("tok/s", "τ", "rate", "p1", "p2", "p3", "total", "speed-up"),
    ]
    assert found[2] == [
        *("vanilla", "0", "humaneval", "6", "288", "2,346", "321", "43.21", "22.2"),
        *("–", "–", "–", "–", "–", "–", "1 (baseline)"),
    ]
    assert found[3][-7:] == ["2.00", "0.33", "0.60", "0.30", "0.10", "1.50", "1.50x [1.25, 1.75]"]


def test_markdown_keeps_its_cells_whatever_stands_in_a_name() -> None:
    odd = replace(VANILLA, prompt_set="a|b\n<script>")
    (_, _, found) = cells(as_markdown(RUN, Findings([odd])).replace("\\|", "PIPE"))
    assert found[2] == "aPIPEb�&lt;script>"


@pytest.mark.parametrize("form", ["markdown", "table"])
def test_the_footer_says_what_the_numbers_are(form: str) -> None:
    text = as_markdown(RUN, Findings([EAGLE])) if form == "markdown" else "\n".join(table(EAGLE))
    said = " ".join(text.split())
    assert "m on Some CPU, 2 cores; vLLM 0.32.0; temperature 0; schedule interleaved" in said
    assert "run 20260101-000000-demo" in said
    assert "acceptance length: tokens per target step, bonus token included" in said
    assert "(latency - TTFT) / (tokens - those of the first chunk)" in said
    assert "each is of its row alone, the headline's are of all set-ups together" in said


def test_the_footer_says_of_which_prompts_the_second_interval_is() -> None:
    """With a limit a part was measured: the interval is for the whole set, the others included."""
    part = Ratio(1.5, Interval(1.2, 1.8), Interval(1.4, 1.6), 6, 1, "steps")
    one = replace(EAGLE, speedup=Speedup(part, part, None, 1.5, 6, 0))
    said = " ".join(as_markdown(RUN, Findings([one])).split())
    assert "on this set: for the whole prompt set (noise, restarts and those of its prompts" in said
    assert "these very prompts" not in said


def test_the_footer_names_the_gpu_when_there_is_one() -> None:
    machine = {"gpus": [{"name": "H200"}, {"name": "H200"}], "cpu": "Some CPU", "cores": 2}
    assert "m on H200, H200; vLLM" in as_markdown({**RUN, "machine": machine}, Findings([VANILLA]))


# --- every format --------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [*FORMATS, "table"])
def test_flags_and_failures_are_in_every_format(form: str) -> None:
    rows = [VANILLA, FLAGGED, FAILED]
    text = "\n".join(table(*rows)) if form == "table" else FORMATS[form](RUN, Findings(rows))
    assert "4 of 80 requests measured" in text
    assert "The engine exited with 1." in text


@pytest.mark.parametrize("form", [*FORMATS, "table"])
def test_a_row_without_figures_shows_none(form: str) -> None:
    """Case G1: no zero, no NaN, no None."""
    failed = replace(FAILED, problem=None)
    text = "\n".join(table(failed)) if form == "table" else FORMATS[form](RUN, Findings([failed]))
    assert not re.search(r"\bnan\b|\bNone\b|\b0\.0+\b(?!,)", text.split("temperature")[0])


def test_notes_hold_one_line_of_a_failure_and_the_log_comes_once_below() -> None:
    other = replace(FAILED, prompt_set="other")
    lines = table(FAILED, other)
    said = [i for i, line in enumerate(lines) if "The engine exited with 1." in line]
    (log,) = [i for i, line in enumerate(lines) if "secret log tail" in line]
    assert len(said) == 2
    assert log > max(said)
    assert "the end of the log" in lines[log - 1]
    assert "secret log tail" not in as_markdown(RUN, Findings([FAILED]))


@pytest.mark.parametrize("form", [*FORMATS, "table"])
def test_the_name_of_a_failure_is_in_every_format(form: str) -> None:
    rows = [VANILLA, replace(FAILED, status="failed", failure="out_of_memory")]
    text = "\n".join(table(*rows)) if form == "table" else FORMATS[form](RUN, Findings(rows))
    assert ("out_of_memory" if form in ("csv", "json") else "failed: out of memory") in text


def test_there_is_no_column_of_statuses_where_all_are_well_or_under_way() -> None:
    assert "status" not in table(VANILLA, replace(EAGLE, status="unfinished"))[0]


def test_a_report_without_rows_is_still_a_report() -> None:
    assert json_rows() == []
    assert csv_rows() == []
    assert cells(as_markdown(RUN, Findings([])))[0][:2] == ["method", "k"]
    assert heads(table())[:2] == ["method", "k"]


# --- csv and json --------------------------------------------------------------------------------


def test_csv_has_an_empty_cell_where_there_is_nothing() -> None:
    vanilla, eagle, failed = csv_rows(VANILLA, EAGLE, FAILED)
    assert (vanilla["acceptance_length"], vanilla["p_1"], vanilla["speedup"]) == ("", "", "1.0")
    assert (eagle["acceptance_length"], eagle["p_1"], eagle["speedup"]) == ("2.0", "0.6", "1.5")
    assert (failed["latency_ms"], failed["speedup"], failed["requests"]) == ("", "", "0")


def test_csv_joins_flags_in_words() -> None:
    two = replace(FLAGGED, flags=(*FLAGGED.flags, Flag("bos", "two BOS tokens")))
    assert csv_rows(two)[0]["flags"] == "4 of 80 requests measured; two BOS tokens"


def test_csv_survives_commas_quotes_and_line_ends() -> None:
    odd = replace(VANILLA, part='a,"b"\nc')
    assert csv_rows(odd)[0]["part"] == 'a,"b"\nc'


def test_csv_ends_lines_like_other_text_files() -> None:
    assert "\r" not in as_csv(RUN, Findings([VANILLA]))
    assert as_csv(RUN, Findings([VANILLA])).startswith("arm,label,method,k,prompt_set,")


def test_json_has_null_where_there_is_nothing() -> None:
    vanilla, eagle, failed = json_rows(VANILLA, EAGLE, FAILED)
    assert (vanilla["acceptance_length"], vanilla["p_3"]) == (None, None)
    assert (eagle["acceptance_length"], eagle["p_3"]) == (2.0, 0.1)
    assert (eagle["speedup"], eagle["speedup_low"], eagle["speedup_high"]) == (1.5, 1.25, 1.75)
    assert (failed["latency_ms"], failed["speedup"], failed["problem"][:10]) == (
        None,
        None,
        "The engine",
    )


def test_rows_for_scripts_all_have_the_same_keys() -> None:
    one, other = json_rows(VANILLA, EAGLE)
    assert list(one) == list(other)
    assert list(csv_rows(VANILLA, EAGLE)[0]) == list(one)


SPREAD = replace(
    MEASURED,
    requests_per_s=0.43,
    percentiles={
        "ttft_p50_ms": 310.2,
        "ttft_p90_ms": 402.9,
        "tpot_p50_ms": 43.04,
        "tpot_p90_ms": 47.5,
        "latency_p50_ms": 2301.4,
        "latency_p90_ms": 12_650.0,
    },
)


def test_percentiles_are_in_csv_and_json_always() -> None:
    for one in (json_rows(replace(VANILLA, metrics=SPREAD))[0],):
        assert (one["requests_per_s"], one["ttft_p90_ms"], one["tpot_p90_ms"]) == (
            0.43,
            402.9,
            47.5,
        )
        assert (one["latency_p50_ms"], one["latency_p99_ms"]) == (2301.4, None)
    cells_of = csv_rows(replace(VANILLA, metrics=SPREAD))[0]
    assert (cells_of["latency_p90_ms"], cells_of["latency_p99_ms"]) == ("12650.0", "")
    assert (json_rows(FAILED)[0]["ttft_p50_ms"], json_rows(FAILED)[0]["requests_per_s"]) == (
        None,
        None,
    )


def test_percentiles_are_a_second_table_where_they_are_asked_for() -> None:
    whole = dict.fromkeys(PERCENTILES, 12_345.6)
    rows = [
        replace(VANILLA, metrics=replace(SPREAD, percentiles=whole)),
        replace(EAGLE, metrics=SPREAD, method="draft_model", label="draft_model"),
        FAILED,
    ]
    assert not any("p50" in line for line in table(*rows))
    asked = Findings(rows, percentiles=True)
    lines = as_table(RUN, asked, width=100, colour=False).splitlines()
    (head,) = [at for at, line in enumerate(lines) if "TTFT p50" in line]
    assert " ".join(lines[head].split()) == (
        "method arm k prompts done/s TTFT p50 p90 p99 TPOT p50 p90 p99 lat. p50 p90 p99"
    )
    assert lines[head + 2].split()[4:] == [
        *("0.43", "310", "403", "–", "43.0", "47.5", "–", "2,301", "12,650", "–")
    ]
    assert lines[head + 3].split()[3:] == ["humaneval", *["–"] * 10]
    assert max(map(cell_len, lines)) <= 120
    text = as_markdown(RUN, asked)
    assert "| 0.43 | 310 | 403 | – | 43.0 | 47.5 | – | 2,301 | 12,650 | – |" in text
    assert "p90 takes 10 requests" in text
    assert "p90" not in as_markdown(RUN, Findings(rows))


def test_the_second_table_fits_100_columns() -> None:
    full = dict.fromkeys(PERCENTILES, 12_345.6)
    metrics = replace(SPREAD, percentiles=full | dict.fromkeys(PERCENTILES[:3], 1_234.5))
    rows = [replace(one, metrics=metrics) for one in (VANILLA, EAGLE)]
    lines = as_table(RUN, Findings(rows, percentiles=True), width=100, colour=False).splitlines()
    assert max(map(cell_len, lines)) <= 100


def test_a_page_has_no_table_of_percentiles(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--percentiles is a table for the other formats"):
        report_command._check_html(None, tmp_path / "report.html", percentiles=True)


def test_json_says_which_schema_and_run_it_is_of() -> None:
    document = json.loads(as_json(RUN, Findings([VANILLA])))
    assert (document["schema"], document["run"]["id"]) == (2, RUN["id"])


def test_json_refuses_a_number_that_json_has_not() -> None:
    broken = row(metrics=replace(MEASURED, latency_ms=float("nan")))
    with pytest.raises(ValueError, match="not JSON compliant"):
        as_json(RUN, Findings([broken]))


# --- the terminal --------------------------------------------------------------------------------


def test_the_table_lines_up() -> None:
    lines = table(VANILLA, EAGLE)
    assert heads(lines)[:4] == ["method", "k", "prompts", "reqs"]
    assert lines[1].split()[:9] == [
        *("vanilla", "0", "humaneval", "6", "288", "2,346", "321", "43.21", "22.2")
    ]
    column = lines[0].index("speed-up")
    assert lines[1][column:].rstrip() == "1 (baseline)"
    assert lines[2][column:].rstrip() == "1.50x [1.25, 1.75]"


DEEP = row(
    9, metrics=speculating(90, 80, 70, 60, 50, 40, 30, 20, 10), speedup=faster(1.5, 1.2, 1.9)
)
ORDER = [
    *("p9", "p8", "p7", "p6", "p5", "p4", "p3", "tokens", "rate", "p2", "p1"),
    *("TTFT ms", "reqs", "latency ms", "TPOT ms"),
]


def test_a_narrow_terminal_loses_columns_in_the_stated_order() -> None:
    lost: list[str] = []
    for width in range(200, 40, -3):
        head = table(VANILLA, DEEP, width=width)[0]
        gone = [name for name in ORDER if not re.search(rf"(^| ){name}( |$)", head)]
        assert gone == ORDER[: len(gone)], width
        assert len(gone) >= len(lost)
        lost = gone
    assert lost == ORDER
    assert heads(table(VANILLA, DEEP, width=40)) == [
        *("method", "k", "prompts", "tok/s", "τ", "speed-up")
    ]


@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_no_line_is_wider_than_the_terminal_and_no_cell_is_cut(width: int) -> None:
    lines = table(VANILLA, DEEP, FLAGGED, FAILED, width=width)
    assert [line for line in lines if cell_len(line) > width] == []
    assert any(line.rstrip().endswith("1.50x [1.20, 1.90]") for line in lines)
    assert "…" not in "".join(lines)


def test_a_terminal_too_narrow_for_anything_still_cuts_no_cell() -> None:
    lines = table(VANILLA, EAGLE, width=20)
    assert lines[2].rstrip().endswith("1.50x [1.25, 1.75]")


def test_wide_characters_take_two_places() -> None:
    wide = [replace(shown, prompt_set="数学问题集") for shown in (VANILLA, EAGLE)]
    lines = table(*wide)
    place = {
        cell_len(line[: line.index(mark)])
        for line, mark in zip(lines[:3], ("speed-up", "1 (baseline)", "1.50x"), strict=True)
    }
    assert len(place) == 1
    needed = max(cell_len(line.rstrip()) for line in lines[:3])
    assert table(*wide, width=needed)[0].rstrip() == lines[0].rstrip()
    narrower = table(*wide, width=needed - 1)
    assert "p3" in heads(lines)
    assert "p3" not in heads(narrower)
    assert max(map(cell_len, narrower[:3])) < needed
    assert narrower[2].rstrip().endswith("1.50x [1.25, 1.75]")


def test_conditions_are_set_apart_by_an_empty_line() -> None:
    other = replace(VANILLA, prompt_set="mt_bench")
    lines = table(VANILLA, EAGLE, other)
    assert [line.split()[0] if line.strip() else "" for line in lines[1:5]] == [
        *("vanilla", "eagle", "", "vanilla")
    ]


HOSTILE = "evil\x1b[31m\x07\rname\x9b2J"


@pytest.mark.parametrize("form", ["markdown", "table"])
def test_a_name_cannot_steer_the_terminal(form: str) -> None:
    odd = replace(FLAGGED, part=HOSTILE, problem=f"died: {HOSTILE}")
    text = "\n".join(table(odd)) if form == "table" else as_markdown(RUN, Findings([odd]))
    assert {c for c in text if not c.isprintable()} <= {"\n"}
    assert "evil�[31m��name�2J" in text


def test_markup_in_a_name_is_text() -> None:
    odd = replace(VANILLA, prompt_set="[red]x[/red]", problem="[bold]died[/bold]")
    text = "\n".join(table(odd))
    assert "[red]x[/red]" in text
    assert "[bold]died[/bold]" in text


@pytest.mark.parametrize(
    ("shown", "code"),
    [
        (EAGLE, "32"),
        (row(3, speedup=faster(0.8, 0.7, 0.9)), "31"),
        (row(3, speedup=faster(1.02, 0.97, 1.07)), None),
        (FLAGGED, None),
    ],
    ids=["faster", "slower", "no-difference", "flagged"],
)
def test_only_a_difference_that_is_shown_has_a_colour(shown: Row, code: str | None) -> None:
    coloured = as_table(RUN, Findings([VANILLA, shown]), width=200, colour=True)
    found = re.findall(r"\x1b\[(3\d)m", coloured)
    assert found == ([code] if code else [])


def test_without_colour_there_is_no_escape_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b" not in "\n".join(table(VANILLA, EAGLE))


def test_rows_that_are_split_name_their_part() -> None:
    assert "part" not in keys(VANILLA)
    split = [replace(VANILLA, part="coding"), replace(EAGLE, part="coding")]
    assert "part" in heads(table(*split))
    assert csv_rows(*split)[1]["part"] == "coding"


def test_where_no_column_is_left_to_drop_the_doubt_is_shortened_and_explained() -> None:
    unsure = row(3, metrics=speculating(60, 30, 10), speedup=faster(1.02, 0.97, 1.07))
    longer = "1.02x [0.97, 1.07] no difference shown"
    wide = table(VANILLA, unsure, width=80)
    assert wide[2].rstrip().endswith(longer)
    assert not any("n.d.s." in line for line in wide)
    narrow = table(VANILLA, unsure, width=60)
    assert heads(narrow) == ["method", "k", "prompts", "tok/s", "τ", "speed-up"]
    assert narrow[2].rstrip().endswith("1.02x [0.97, 1.07] n.d.s.")
    assert "n.d.s.: no difference shown" in narrow
    assert max(map(cell_len, narrow)) <= 60


def test_a_sweep_over_everything_fits_80_columns() -> None:
    """Several lengths and concurrencies, the longest method of the demo, nothing shown."""
    unsure = row(
        3, metrics=speculating(60, 30, 10), speedup=faster(1.02, 0.97, 1.07), method="draft_model"
    )
    unsure = replace(unsure, label="draft_model", arm="draft_model-k3")
    rows = [
        replace(one, max_tokens=tokens, concurrency=at)
        for tokens in (256, 1024)
        for at in (1, 16)
        for one in (VANILLA, unsure)
    ]
    lines = table(*rows, width=80)
    assert max(map(cell_len, lines)) <= 80
    assert "max" in heads(lines)
    assert "conc" in heads(lines)


def test_turns_that_are_in_no_pair_are_said_under_the_table() -> None:
    """In bfloat16 answers part, and a second turn of either arm asks something else."""
    speedup = replace(faster(1.5, 1.25, 1.75), asked_otherwise=12)
    (note,) = notes([replace(EAGLE, speedup=speedup)])
    assert note.startswith(
        "eagle-k3 humaneval: 12 later turns in no pair: the first answers differ"
    )
    assert notes([EAGLE]) == []
