"""What a comparison tells: conditions that the interval supports, and every format whole and harmless."""

import json
import shutil
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from typer.testing import CliRunner

from specbench.analysis.compare import Change, Comparison, RowChange
from specbench.analysis.conditions import Condition, judge, parse
from specbench.analysis.snapshot import MEASURES, PromptsUsed, Snapshot, SnapshotRow
from specbench.cli import app
from specbench.errors import UserError
from specbench.records import Prompt, RequestRecord
from specbench.render import ci
from specbench.render.compare import Result, as_json, as_markdown, as_table
from specbench.store import RunStore


def row(arm: str = "eagle-k3", **more: Any) -> SnapshotRow:  # noqa: ANN401
    facts: dict[str, Any] = {
        "arm": arm,
        "method": "eagle",
        "k": 3,
        "prompt_set": "humaneval",
        "max_tokens": 256,
        "concurrency": 1,
        "requests": 6,
        "figures": {},
        "series": {},
    }
    return SnapshotRow.model_validate(facts | more)


def run(name: str = "monday") -> Snapshot:
    return Snapshot(
        run=name,
        model="m",
        prompt_sets={"humaneval": PromptsUsed(sha256="a" * 64, prompts=6)},
        sampling={},
        schedule="blocks",
        client="direct",
        hardware={"cpu": "Some CPU", "cores": 2, "gpus": []},
        versions={"vllm": "0.32.0"},
        setups=(),
        rows=(),
    )


def changed(
    low: float | None, high: float | None, measure: str = "speedup", starts: int = 2
) -> Change:
    middle = -0.05 if low is None or high is None else (low + high) / 2
    return Change(measure, 1.5, 1.5 * (1 + middle), middle, low, high, 6, (starts, starts))


def result(
    *rows: RowChange, conditions: Sequence[str] = (), versions: Sequence[str] = ()
) -> Result:
    comparison = Comparison(run(), run("tuesday"), rows, tuple(versions), ())
    return Result(comparison, judge(comparison, [parse(text) for text in conditions]))


def said(change: Change, condition: str) -> tuple[bool, str]:
    (one,) = result(RowChange(row(), row(), (change,)), conditions=[condition]).judgements
    return one.failed, one.text


# --- conditions ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "condition", "failed", "text"),
    [
        (-0.061, -0.04, "speedup < -3%", True, "failed: interval −6.1% to −4.0% is below −3%"),
        (
            -0.05,
            0.01,
            "speedup < -3%",
            False,
            "not failed: the interval −5.0% to +1.0% does not exclude −3%",
        ),
        (
            -0.01,
            0.02,
            "speedup < -3%",
            False,
            "not failed: interval −1.0% to +2.0% is not below −3%",
        ),
        (0.04, 0.06, "speedup > +3.5%", True, "failed: interval +4.0% to +6.0% is above +3.5%"),
        (None, None, "speedup<-3 %", False, "not failed: −5.0% without an interval shows nothing"),
        (-0.08, -0.03, "speedup <= −3%", False, "not failed: the interval"),
    ],
)
def test_a_condition_fails_only_where_the_whole_interval_is_beyond_it(
    low: float | None, high: float | None, condition: str, failed: bool, text: str
) -> None:
    found = said(changed(low, high), condition)
    assert found[0] == failed
    assert found[1].startswith(text)


def test_an_interval_of_one_start_a_side_says_so() -> None:
    assert (
        "(of one start a side) is below" in said(changed(-0.1, -0.05, starts=1), "speedup<-3%")[1]
    )


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("speedip < -3%", "there is no speedip; did you mean speedup?"),
        ("tpot < 3%", "there is no tpot; did you mean tpot_ms?"),
        ("zzz < 3%", "known: speedup, tpot_ms"),
        ("speedup < -3", 'the change is in percent; write "speedup < -3%".'),
        ("speedup", "not a condition"),
        ("speedup = 3%", "not a condition"),
        ("speedup < 1 < 2%", "not a condition"),
        ("mising", "not a condition"),
        ("", "not a condition"),
        ("< 3%", "there is no measure"),
    ],
)
def test_a_bad_condition_is_refused_with_what_to_write(text: str, why: str) -> None:
    with pytest.raises(UserError, match=r"--fail-if") as error:
        parse(text)
    assert why in str(error.value)


@given(st.sampled_from(sorted(MEASURES)), st.sampled_from("<>"), st.integers(-99, 99))
def test_what_is_written_is_what_is_asked(measure: str, sign: str, percent: int) -> None:
    found = parse(f" {measure}{sign} {percent} % ")
    assert found == Condition(found.text, measure, sign == "<", percent / 100)
    assert parse(found.text) == found


@given(st.text(max_size=20))
def test_no_text_crashes_the_reader_of_conditions(text: str) -> None:
    try:
        parse(text)
    except UserError as error:
        assert "--fail-if" in str(error)  # noqa: PT017


def test_missing_fails_on_rows_that_new_lost_or_that_cannot_be_compared() -> None:
    rows = (
        RowChange(row(), row()),
        RowChange(row("a"), None),
        RowChange(row("b"), row("b", missing=2, problem="The engine died.")),
        RowChange(row("c"), row("c"), refused=("other hardware: …",)),
        RowChange(None, row("d")),
    )
    found = result(*rows, conditions=["missing"]).judgements
    assert [one.text for one in found] == [
        "not failed: measured in NEW as in BASE",
        "failed: NEW does not have this row",
        "failed: 2 requests are missing in NEW (The engine died.)",
        "failed: not comparable: other hardware: …",
    ]


def test_a_condition_that_looks_at_nothing_does_not_pass() -> None:
    with pytest.raises(UserError, match=r"no row has goodput_per_s in both"):
        result(RowChange(row(), row(), (changed(0, 0),)), conditions=["goodput_per_s < -3%"])
    with pytest.raises(UserError, match=r"other prompts: …"):
        result(RowChange(row(), row(), refused=("other prompts: …",)), conditions=["speedup<-3%"])


# --- formats -------------------------------------------------------------------------------------

FOUND = (
    RowChange(
        row(),
        row(),
        (changed(-0.061, -0.04), changed(0.01, 0.03, "tpot_ms"), changed(0, 0, "ttft_ms")),
    ),
    RowChange(row("ngram-k3"), row("ngram-k3"), refused=("other prompts: 3 against 12",)),
    RowChange(row("eagle-k5"), None),
)
HOSTILE = "<script>|@all\n::error::x\x1b[31m\x00`[a](b)` #1 100% \ufffe \ud800"


def hostile(text: str) -> Result:
    lost = row(problem=text, missing=1, flags=(f"missing: {text}",))
    return result(
        RowChange(row(), lost, (changed(-0.1, -0.05),)),
        RowChange(row("b"), row("b"), refused=(text,)),
        conditions=["speedup < -3%", "missing"],
        versions=[f"vllm {text} in BASE, 1 in NEW"],
    )


def test_the_table_fits_80_columns_and_shows_both_runs() -> None:
    found = result(*FOUND, conditions=["speedup < -3%"], versions=["vllm 1 in BASE, 2 in NEW"])
    lines = as_table(found, width=80).splitlines()
    assert max(map(cell_len, lines)) <= 80
    text = "\n".join(lines)
    packed = " ".join(text.split())
    assert "speed-up 1.50x 1.42x −5.1% −6.1% to −4.0% worse" in packed
    assert "TPOT ms 1.50 1.53 +2.0% +1.0% to +3.0% worse" in packed
    assert "TTFT" not in text
    assert "ngram-k3 on humaneval (256 tokens, concurrency 1): not comparable" in text
    assert "not comparable (1 row): other prompts: 3 against 12" in text
    assert "eagle-k5 on humaneval (256 tokens, concurrency 1): only in BASE" in text
    assert "FAILED: speedup < -3%. 1 row compared: 1 worse." in text
    assert "versions: vllm 1 in BASE, 2 in NEW" in text


def test_a_measure_that_a_condition_is_about_is_shown() -> None:
    found = result(*FOUND, conditions=["ttft_ms > 5%"])
    assert "TTFT ms" in as_table(found)


def test_json_has_all_measures_and_says_what_failed() -> None:
    document = json.loads(as_json(result(*FOUND, conditions=["speedup < -3%"])))
    assert document["schema"] == 1
    assert document["failed"] is True
    assert list(document["rows"][0]["changes"]) == ["speedup", "tpot_ms", "ttft_ms"]
    assert document["rows"][0]["changes"]["speedup"]["verdict"] == "worse"
    assert document["rows"][1]["refused"] == ["other prompts: 3 against 12"]
    assert document["conditions"][0]["said"].startswith("failed: interval")


def test_junit_has_a_failure_a_condition_and_skips_what_is_not_compared() -> None:
    suite = ET.fromstring(ci.as_junit(result(*FOUND, conditions=["speedup < -3%"])))[0]
    assert suite.attrib == {
        "name": "specbench compare",
        "tests": "3",
        "failures": "1",
        "errors": "0",
        "skipped": "2",
    }
    failure = suite.find("testcase/failure")
    assert failure is not None
    assert failure.get("message") == "failed: interval −6.1% to −4.0% is below −3%"
    assert "speed-up 1.50x 1.42x" in (failure.text or "")
    plain = ET.fromstring(ci.as_junit(result(*FOUND)))[0]
    assert (plain.get("tests"), plain.get("failures")) == ("3", "0")


@given(st.text(max_size=40))
def test_junit_can_be_read_whatever_an_engine_said(text: str) -> None:
    suite = ET.fromstring(ci.as_junit(hostile(text)).encode("utf-8", "surrogatepass"))[0]
    assert suite.get("skipped") == "1"


@given(st.text(max_size=40))
def test_what_an_engine_said_gives_no_command_to_the_runner(text: str) -> None:
    for line in ci.annotations(hostile(text)).splitlines():
        assert line.split(" title=")[0] in ("::error", "::warning", "::notice")


def test_annotations_are_escaped_as_the_runner_reads_them() -> None:
    text = ci.annotations(hostile("a\nb, 50%: c"))
    assert "::error title=missing::eagle-k3 on humaneval" in text
    assert "(a\N{REPLACEMENT CHARACTER}b, 50%25: c)" in text
    assert "title=speedup < -3%25::" in text


def test_more_annotations_than_github_shows_are_counted() -> None:
    rows = [RowChange(row(f"a-k{i}"), row(f"a-k{i}"), (changed(-0.1, -0.05),)) for i in range(15)]
    text = ci.annotations(result(*rows, conditions=["speedup < -3%"]))
    assert text.count("::error") == 10
    assert "and 6 more: see the job's summary" in text


def test_markdown_lets_no_html_no_cell_and_no_mention_in() -> None:
    text = as_markdown(hostile(HOSTILE))
    assert "<script>" not in text
    assert "@all" not in text
    assert "\x1b" not in text
    assert "\x00" not in text
    assert "[a](b)" not in text.replace("\\[a](b)", "")
    assert "|@" not in text.replace("@\N{WORD JOINER}", "@").replace("\\|", "")
    table = [line for line in text.splitlines() if line.startswith("| ")]
    assert {line.replace("\\|", "").count("|") for line in table} == {8}


# --- the command ---------------------------------------------------------------------------------

PROMPTS = [Prompt(id=f"he/{i}", turns=(f"question {i}",)) for i in range(6)]


@dataclass
class Runs:
    """Two run folders: one, and the same with its arms slower."""

    base: Path
    slow: Path


@pytest.fixture
def runs(made_run: Callable[..., RunStore], tmp_path: Path) -> Runs:
    store = made_run(PROMPTS, say=lambda *_: "some words to say here " * 6, max_tokens=25)
    slow = tmp_path / "slow"
    shutil.copytree(store.path, slow)
    for path in slow.glob("cases/eagle*/requests.jsonl"):
        records = [
            RequestRecord.model_validate_json(line)
            for line in path.read_text(encoding="utf-8").splitlines()
        ]
        path.write_text(
            "".join(f"{_slower(r).model_dump_json()}\n" for r in records), encoding="utf-8"
        )
    return Runs(store.path, slow)


def _slower(record: RequestRecord) -> RequestRecord:
    first = record.chunk_ns[0]
    chunks = tuple(round(first + 1.1 * (at - first)) for at in record.chunk_ns)
    return record.model_copy(update={"chunk_ns": chunks, "end_ns": chunks[-1]})


def compare(*args: object, env: dict[str, str] | None = None) -> tuple[int, str]:
    outer = {"GITHUB_STEP_SUMMARY": "", "COLUMNS": "80"}
    done = CliRunner().invoke(app, ["compare", *map(str, args)], env=outer | (env or {}))
    if isinstance(done.exception, UserError):
        return done.exception.exit_code, str(done.exception)
    return done.exit_code, done.output


def test_a_slow_down_exits_1_and_none_exits_0(runs: Runs) -> None:
    condition = ("--fail-if", "speedup < -3%")
    assert compare(runs.base, runs.base, *condition)[0] == 0
    code, text = compare(runs.base, runs.slow, *condition)
    assert code == 1
    assert "eagle-k1 on he (25 tokens, concurrency 1): failed: interval −9." in " ".join(
        text.split()
    )
    assert compare(runs.base, runs.slow)[0] == 0  # nothing was asked
    assert compare(runs.slow, runs.base, *condition)[0] == 0


def test_a_pinned_baseline_stands_for_its_run(runs: Runs, tmp_path: Path) -> None:
    pinned = tmp_path / "baselines" / "made.json"
    saving = ["baseline", "save", str(runs.base), "-o", str(pinned)]
    done = CliRunner().invoke(app, saving)
    assert done.exit_code == 0, done.output
    assert f"{pinned}: 3 rows of made" in done.output
    code, text = compare(pinned, runs.slow, "--fail-if", "speedup < -3%", "--fail-if", "missing")
    assert code == 1
    assert "FAILED: speedup < -3%. 3 rows compared: 1 no interval, 2 worse." in text
    shutil.rmtree(runs.base)
    assert compare(pinned, runs.slow)[0] == 0


def test_new_is_the_latest_run_unless_named(runs: Runs) -> None:
    assert compare(runs.base, "--results", runs.base.parent)[0] == 0
    assert compare("made", "slow", "--results", runs.base.parent)[0] == 0


def test_other_prompts_are_refused_with_exit_2(runs: Runs) -> None:
    document = json.loads((runs.slow / "run.json").read_text(encoding="utf-8"))
    document["prompt_sets"]["he"]["sha256"] = "f" * 64
    (runs.slow / "run.json").write_text(json.dumps(document), encoding="utf-8")
    code, text = compare(runs.base, runs.slow)
    assert code == 2
    assert text.startswith("Nothing was compared: other prompts: he is 6 prompts (000000000000)")
    code, text = compare(runs.base, runs.slow, "--fail-if", "speedup < -3%")
    assert code == 2
    assert text.startswith("speedup < -3%: other prompts")


def test_an_arm_that_failed_is_said_and_fails_if_asked(runs: Runs) -> None:
    (runs.slow / "cases" / "eagle-k3.c1" / "requests.jsonl").write_text("", encoding="utf-8")
    code, text = compare(runs.base, runs.slow)
    assert code == 0
    assert "6 requests are missing in NEW" in " ".join(text.split())
    assert compare(runs.base, runs.slow, "--fail-if", "missing")[0] == 1


def test_github_gets_annotations_in_the_log_and_the_table_on_the_page(
    runs: Runs, tmp_path: Path
) -> None:
    page, body, xml = (tmp_path / name for name in ("summary", "body.md", "out.xml"))
    page.write_text("before\n", encoding="utf-8")
    code, text = compare(
        *(runs.base, runs.slow, "--fail-if", "speedup < -3%"),
        *("--format", "github", "-o", body, "--junit", xml),
        env={"GITHUB_STEP_SUMMARY": str(page)},
    )
    assert code == 1
    assert text.startswith("::error title=speedup < -3%25::eagle-k1 on he")
    assert "| row |" not in text
    on_page = page.read_text(encoding="utf-8")
    assert on_page.startswith("before\n## specbench compare\n\n**FAILED: speedup &lt; -3%")
    assert body.read_text(encoding="utf-8") == on_page.removeprefix("before\n")
    assert ET.parse(xml).getroot()[0].get("failures") == "2"
    without = compare(runs.base, runs.slow, "--format", "github")[1]
    assert "| row |" in without


@pytest.mark.parametrize("form", ["table", "markdown", "json", "junit"])
def test_every_format_can_go_to_a_file(runs: Runs, tmp_path: Path, form: str) -> None:
    out = tmp_path / "out"
    code, text = compare(runs.base, runs.slow, "--format", form, "-o", out)
    assert (code, text) == (0, "")
    assert "eagle-k1" in out.read_text(encoding="utf-8")
    assert "eagle-k1" in compare(runs.base, runs.slow, "--format", form, "--all")[1]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["nowhere"], "holds no run"),
        (["baselines/none.json"], "is not there; pin a run"),
        (["{base}", "{base}", "--format", "pdf"], "--format pdf: write table or markdown"),
        (["{base}", "{base}", "--allow", "prompts"], "--allow prompts: write sampling or args"),
        (["{base}", "{base}", "--fail-if", "speed < 3%"], "did you mean speedup?"),
    ],
)
def test_a_users_mistake_exits_2_and_says_what_to_write(
    runs: Runs, args: list[str], said: str
) -> None:
    code, text = compare(*(arg.replace("{base}", str(runs.base)) for arg in args))
    assert code == 2
    assert said in text


@pytest.mark.parametrize("command", [["compare"], ["baseline", "save"]])
def test_help_has_examples(command: list[str]) -> None:
    done = CliRunner().invoke(app, [*command, "--help"])
    assert f"specbench {' '.join(command)}" in done.output.partition("Examples:")[2].replace(
        "\n", " "
    )
