"""What is written for another tool reads back the same; what a layout cannot hold is said."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from specbench.cli import app
from specbench.errors import PromptError, UserError
from specbench.prompts import files as record_files
from specbench.prompts.choice import Choice
from specbench.prompts.convert import (
    EMPTY_ANSWERS,
    TARGETS,
    WIDER,
    ConversionReport,
    convert,
    export,
)
from specbench.prompts.files import SUFFIXES
from specbench.prompts.formats import Located, read_prompts
from specbench.prompts.layout import Found
from specbench.prompts.layouts import LAYOUTS
from specbench.prompts.sets import find_source
from specbench.prompts.sources import resolve

AWKWARD = ["\u2028", "\u0085", "\0", "\ufeff", "\r\n", "\r", "\n", " ", '"', "\\", ",", "é", "\x1c"]
LONG = "\U0010fffe"  # stands for more than csv's usual limit of 128 KiB
pieces = st.sampled_from([*AWKWARD, "a", LONG]) | st.text(
    st.characters(exclude_categories=["Cs"]), max_size=20
)
text = (
    st.lists(pieces, min_size=1, max_size=6)
    .map(lambda some: "".join(some).replace(LONG, "x" * 140_000, 1))
    .filter(str.strip)
)
ids = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=9) | st.integers(
    0, 99
).map(str)


def questions(folder: Path, *records: tuple[str, list[str], str | None]) -> Path:
    """A file of EAGLE questions, which holds all that a set can."""
    path = folder / "question.jsonl"
    lines = [{"question_id": i, "turns": turns, "category": c} for i, turns, c in records]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def target(folder: Path, layout: str) -> Path:
    return folder / f"{layout}{SUFFIXES[LAYOUTS[layout].containers[0]]}"


def exported(
    source: Path, layout: str, choice: Choice | None = None, tokens: int | None = None
) -> ConversionReport:
    path = target(source.parent, layout)
    return export(resolve(source), path, layout, choice or Choice(turns="all"), tokens=tokens)


def holds(layout: str, turns: list[str]) -> bool:
    if layout == "text":
        return not set("\n\r\0") & set(turns[0]) and turns[0][0] != "\ufeff"
    return True


@pytest.mark.parametrize("layout", TARGETS)
@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_round_trip_keeps_every_prompt_turn_and_id(
    layout: str, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    known = LAYOUTS[WIDER.get(layout, layout)]
    turns = st.lists(text, min_size=1, max_size=3 if known.turns else 1)
    drawn = data.draw(
        st.lists(
            st.tuples(ids, turns.filter(lambda t: holds(layout, t)), st.none() | text),
            min_size=1,
            max_size=4,
            unique_by=lambda one: one[0],
        )
    )
    report = exported(questions(tmp_path_factory.mktemp("trip"), *drawn), layout)
    expected = [
        Found(0, id if known.ids else str(n), tuple(turns), c if known.categories else None)
        for n, (id, turns, c) in enumerate(drawn, 1)
    ]
    located = list(read_prompts(report.path))
    back = [Found(0, p.id, p.turns, p.category) for _, _, p in located]
    assert back == expected
    assert {one.layout for one in located} == {layout}
    assert report.written == len(drawn)


PARTS = {
    "eagle": [{"question_id": 7, "category": "c", "turns": ["Q\n"]}],
    "mt-bench-prompts": [{"prompt_id": 7, "category": "c", "prompt": ["Q\n"]}],
    "humaneval": [{"task_id": "7", "prompt": "Q\n"}],
    "genai-perf": [{"text": "Q\n"}],
    "genai-perf-sessions": [{"session_id": "7", "text": "Q\n"}],
    "aiperf": [{"type": "single_turn", "session_id": "7", "text": "Q\n", "output_length": 9}],
    "aiperf-multi-turn": [
        {"type": "multi_turn", "session_id": "7", "turns": [{"text": "Q\n", "output_length": 9}]}
    ],
    "mooncake-trace": [
        {"type": "mooncake_trace", "session_id": "7", "text_input": "Q\n", "output_length": 9}
    ],
    "vllm-bench": [{"prompt": "Q\n", "output_tokens": 9}],
}


@pytest.mark.parametrize("layout", PARTS)
def test_each_layout_is_written_as_its_tool_reads_it(layout: str, tmp_path: Path) -> None:
    tokens = 9 if LAYOUTS[layout].lengths else None
    report = exported(questions(tmp_path, ("7", ["Q\n"], "c")), layout, tokens=tokens)
    lines = report.path.read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == PARTS[layout]


def test_sharegpt_is_an_array_or_lines_by_its_name(tmp_path: Path) -> None:
    source = resolve(questions(tmp_path, ("a", ["Q1", "Q2"], None)))
    expected = {
        "id": "a",
        "conversations": [
            {"from": "human", "value": "Q1"},
            {"from": "gpt", "value": ""},
            {"from": "human", "value": "Q2"},
            {"from": "gpt", "value": ""},
        ],
    }
    array, lines = tmp_path / "a.json", tmp_path / "a.jsonl"
    report = export(source, array, "sharegpt", Choice(turns="all"))
    export(source, lines, "sharegpt", Choice(turns="all"))
    assert json.loads(array.read_bytes()) == [expected]
    assert json.loads(lines.read_bytes()) == expected
    assert EMPTY_ANSWERS in report.warnings


def test_tables_have_columns_that_people_expect(tmp_path: Path) -> None:
    import pandas

    one = questions(tmp_path, ("a", ['say "hi",\nplease'], None), ("b", ["Q"], "c"))
    assert exported(one, "csv").path.read_bytes() == (
        b'"id","category","prompt"\r\n"a","","say ""hi"",\nplease"\r\n"b","c","Q"\r\n'
    )
    table = pandas.read_parquet(exported(one, "parquet").path)
    assert table.to_dict("list")["prompt"] == ['say "hi",\nplease', "Q"]


def test_a_table_of_conversations_has_lists_of_turns(tmp_path: Path) -> None:
    report = exported(questions(tmp_path, ("a", ["Q"], None), ("b", ["Q1", "Q2"], None)), "parquet")
    assert report.written_as == "parquet-turns"
    assert [p.turns for _, _, p in read_prompts(report.path)] == [("Q",), ("Q1", "Q2")]


# What a layout cannot hold.


@pytest.mark.parametrize(
    "layout", [name for name in TARGETS if not LAYOUTS[name].turns and name != "parquet"]
)
def test_turns_are_refused_where_there_is_room_for_one(layout: str, tmp_path: Path) -> None:
    source = questions(tmp_path, ("a", ["Q"], None), ("b", ["Q1", "Q2"], None))
    with pytest.raises(
        PromptError, match=rf"`b` cannot be written as {layout}: it has 2 turns.*--turns first"
    ):
        exported(source, layout)
    assert [p.name for p in tmp_path.iterdir()] == ["question.jsonl"]
    assert exported(source, layout, Choice(turns="first")).written == 2


@pytest.mark.parametrize("character", ["\n", "\r", "\0"])
def test_a_line_of_text_cannot_hold_everything(character: str, tmp_path: Path) -> None:
    source = questions(tmp_path, ("a", [f"Q{character}R"], None))
    with pytest.raises(
        PromptError, match=r"`a` cannot be written as text: it has .*vllm-bench hold any"
    ):
        exported(source, "text")
    assert [p.name for p in tmp_path.iterdir()] == ["question.jsonl"]


def test_ids_and_categories_without_a_place_are_said(tmp_path: Path) -> None:
    source = questions(tmp_path, ("1", ["Q"], "c"), ("x", ["R"], None))
    assert exported(source, "vllm-bench").warnings == (
        "vllm-bench has no place for ids: 1 not kept",
        "vllm-bench has no place for categories: 1 not kept",
    )
    assert exported(source, "csv").warnings == ()


def test_white_space_that_genai_perf_strips_is_said_of_its_files_alone(tmp_path: Path) -> None:
    source = questions(tmp_path, ("1", [" Q"], None))
    (warning,) = exported(source, "genai-perf").warnings
    assert warning.startswith("GenAI-Perf strips white space")
    assert exported(source, "humaneval").warnings == ()


def test_a_misleading_name_and_a_file_that_is_there_are_refused(tmp_path: Path) -> None:
    source = resolve(questions(tmp_path, ("1", ["Q"], None)))
    with pytest.raises(PromptError, match=r"vllm-bench is written to a file that ends in .jsonl"):
        export(source, tmp_path / "x.json", "vllm-bench", Choice())
    with pytest.raises(PromptError, match="eagle has no place for output lengths"):
        export(source, tmp_path / "x.jsonl", "eagle", Choice(), tokens=9)
    with pytest.raises(PromptError, match="is there already"):
        export(source, tmp_path / "question.jsonl", "eagle", Choice())
    with pytest.raises(PromptError, match=r"no layout `alpaca` to write; there are genai-perf,"):
        export(source, tmp_path / "x.json", "alpaca", Choice())


def test_what_does_not_read_back_gets_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_files, "LINE_BREAKS", {"a": "b"})
    with pytest.raises(PromptError, match="does not read back"):
        exported(questions(tmp_path, ("1", ["aé"], None)), "eagle")
    assert [p.name for p in tmp_path.iterdir()] == ["question.jsonl"]


# From a set.


def test_a_set_is_written_with_the_ids_of_its_sidecar(tmp_path: Path) -> None:
    made = convert(resolve(questions(tmp_path, ("q/1", ["Q"], "c"))), out_dir=tmp_path / "sets")
    for ref in ("question", str(made.path)):
        source = find_source(ref, search=[tmp_path / "sets"], converted=True)
        report = export(source, tmp_path / f"{ref[-4:]}.csv", "csv", Choice())
        assert [one.prompt.id for one in read_prompts(report.path)] == ["q/1"]
    again = convert(source, out_dir=tmp_path / "sets", name="again")
    assert again.sidecar == made.sidecar.model_copy(update={"name": "again"})


def test_a_sets_style_is_said_to_be_lost(tmp_path: Path) -> None:
    path = questions(tmp_path, ("1", ["Q"], None))
    convert(resolve(path), out_dir=tmp_path, name="raw", style="completion")
    source = find_source("raw", search=[tmp_path], converted=True)
    (warning,) = export(source, tmp_path / "x.jsonl", "vllm-bench", Choice()).warnings
    assert "raw completions" in warning


# The command line.


def shell(*args: str) -> Result:
    return CliRunner().invoke(app, ["convert", *args], env={"COLUMNS": "400"})


def test_the_help_names_every_layout() -> None:
    shown = "".join(shell("--help").output.split())  # names are broken at their hyphens
    assert [name for name in TARGETS if name not in shown] == []


def test_a_set_goes_from_one_layout_to_another_and_back(tmp_path: Path) -> None:
    source = questions(tmp_path, ("a", ["Q1", "Q2"], None))
    out = ["--datasets", str(tmp_path / "sets")]
    done = shell(str(source), "--turns", "all", "--name", "mine", *out)
    assert done.exit_code == 0, done.output
    done = shell("mine", "--to", "mooncake-trace", "-o", str(tmp_path / "m.jsonl"), *out)
    assert "wrote 1, skipped 0 (genai-perf-sessions from question.jsonl, written as" in done.output
    done = shell(str(tmp_path / "m.jsonl"), "--turns", "all", *out)
    assert "(mooncake-trace from m.jsonl)" in done.output
    assert (tmp_path / "sets" / "m.jsonl").read_bytes() == (
        tmp_path / "sets" / "mine.jsonl"
    ).read_bytes()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--to", "csv"], "name it with -o"),
        (["--to", "csv", "-o", "x.csv", "--style", "chat"], "are a set's"),
        (["-o", "x.csv"], "name it with --to"),
        (["--output-tokens", "9"], "name it with --to"),
        (["--to", "alpaca", "-o", "x.csv"], "no layout `alpaca` to write"),
    ],
)
def test_flags_that_do_not_fit_are_refused(args: list[str], said: str, tmp_path: Path) -> None:
    done = shell(str(questions(tmp_path, ("a", ["Q"], None))), *args)
    assert isinstance(done.exception, UserError)
    assert said in str(done.exception)


def test_many_skips_are_counted_and_not_all_listed(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    path.write_text('{"text": "a"}\n' + '{"text": ""}\n' * 30, encoding="utf-8")
    done = shell(str(path), "--allow-skips", "--datasets", str(tmp_path / "sets"))
    assert "read 31, wrote 1, skipped 30" in done.output
    assert "line 21: `text` is empty\n  and 10 more\n" in done.output


def test_located_prompts_name_their_layout(tmp_path: Path) -> None:
    report = exported(questions(tmp_path, ("1", ["Q"], None)), "eagle")
    (one,) = read_prompts(report.path)
    assert isinstance(one, Located)
    assert one.layout == "eagle"
