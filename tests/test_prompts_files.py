"""Files that are not JSONL: what is recognised, which column is meant, where a mistake is."""

import gzip
import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from specbench.errors import PromptError
from specbench.prompts import arrays
from specbench.prompts.arrays import array_rows
from specbench.prompts.choice import Choice
from specbench.prompts.convert import SetReport, convert
from specbench.prompts.formats import read_prompts
from specbench.prompts.sources import resolve
from specbench.records import Prompt


def file_of(tmp_path: Path, name: str, content: str | bytes) -> Path:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def prompts_of(path: Path, layout: str | None = None) -> list[Prompt]:
    return [one.prompt for one in read_prompts(path, layout=layout)]


def converted(path: Path, column: str | None = None, layout: str | None = None) -> SetReport:
    source = resolve(path, column=column, layout=layout)
    return convert(source, Choice(turns="all"), out_dir=path.parent / "out")


def prompts_in(report: SetReport) -> list[tuple[str, str]]:
    return [(p.id, p.turns[0]) for p in prompts_of_set(report)]


def prompts_of_set(report: SetReport) -> Iterator[Prompt]:
    from specbench.prompts.sets import read_set

    return read_set(report.path)


# Text.


def test_a_text_file_has_one_prompt_a_line(tmp_path: Path) -> None:
    path = file_of(tmp_path, "p.txt", '\ufeffOne \n\n  two\u2028more\r\n{"text": 1}')
    report = converted(path)
    assert report.layout == "text"
    assert prompts_in(report) == [("1", "One "), ("3", "  two\u2028more"), ("4", '{"text": 1}')]


def test_a_layout_that_is_named_counts_more_than_the_files_name(tmp_path: Path) -> None:
    path = file_of(tmp_path, "p.txt", '{"text": "a"}')
    assert prompts_of(path, "genai-perf")[0].turns == ("a",)
    assert prompts_of(file_of(tmp_path, "p.md", "a"), "text")[0].turns == ("a",)
    assert prompts_of(file_of(tmp_path, "p.dat", "prompt\na"), "csv")[0].turns == ("a",)


# JSON arrays.


def test_a_json_file_is_an_array_or_lines(tmp_path: Path) -> None:
    records = [{"text": f"prompt {n}"} for n in range(3)]
    expected = [(str(n), f"prompt {n - 1}") for n in (1, 2, 3)]
    for name, content in {
        "array.json": json.dumps(records),
        "pretty.json": "\ufeff\n" + json.dumps(records, indent=2),
        "lines.json": "".join(json.dumps(r) + "\n" for r in records),
    }.items():
        assert prompts_in(converted(file_of(tmp_path, name, content))) == expected
    packed = file_of(tmp_path, "a.json.gz", gzip.compress(json.dumps(records).encode()))
    assert prompts_in(converted(packed)) == expected


@pytest.mark.parametrize("chunk", [1, 2, 7, 64])
def test_an_array_is_read_the_same_in_pieces_of_any_size(
    chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrays, "CHUNK", chunk)
    records = [{"text": 'é"\\\u2028' * n, "n": -1.5e3, "t": [True, None]} for n in range(1, 9)]
    path = file_of(tmp_path, "a.json", json.dumps(records, ensure_ascii=False))
    assert [record for _, record in array_rows(path)] == records


BAD_ARRAYS: dict[str, tuple[str | bytes, int | None, str]] = {
    "empty": ("[ ]", None, "the array is empty"),
    "torn in an item": ('[{"text":"a"},{"text":"b', 2, "the file ends inside the object"),
    "torn between items": ('[{"text":"a"}', None, "no `,` or `]` after item 1 (a torn file?)"),
    "a comma at the end": ('[{"text":"a"},]', 2, "not an object: it begins with `]`"),
    "no comma": ('[{"text":"a"} {"text":"b"}]', None, "no `,` or `]` after item 1"),
    "not JSON": ("[{'text':1}" + " " * 99 + "]", 1, "not JSON: Expecting property name"),
    "an item of text": ('[{"text":"a"}, "b"]', 2, 'not an object: it begins with `"`'),
    "a key twice": ('[{"text":"a","text":"b"}]', 1, "the key `text` is there twice"),
    "a long number": ('[{"n":' + "1" * 5000 + "}]", 1, "too long a number"),
    "more after it": ('[{"text":"a"}] 1', None, "more after the array"),
    "not UTF-8": (b'[{"text":"caf\xe9"}]', None, "not UTF-8 (byte 0xe9)"),
    "an unusable item": ('[{"text":"a"},{"text":5}]', 2, "`text` is a number"),
}


@pytest.mark.parametrize("case", BAD_ARRAYS)
def test_what_is_wrong_in_an_array_is_named_with_its_item(case: str, tmp_path: Path) -> None:
    content, item, message = BAD_ARRAYS[case]
    with pytest.raises(PromptError) as caught:
        prompts_of(file_of(tmp_path, "a.json", content))
    assert message in str(caught.value)
    assert caught.value.line == item
    assert item is None or f"item {item}" in str(caught.value)


def test_answers_and_system_messages_that_are_not_kept_are_counted(tmp_path: Path) -> None:
    talk = [
        {"from": "system", "value": "S"},
        {"from": "human", "value": "Q1"},
        {"from": "gpt", "value": "A1"},
        {"from": "human", "value": "Q2"},
        {"from": "gpt", "value": "A2"},
    ]
    records = [{"id": "a", "conversations": talk}, {"id": "b", "conversations": talk[1:3]}]
    report = converted(file_of(tmp_path, "s.json", json.dumps(records)))
    assert report.warnings[-2:] == (
        "answers of the assistant not kept: 3, as each engine gives its own",
        "system messages not kept: 1, as a prompt set has no place for them",
    )
    assert [(p.id, p.turns) for p in prompts_of_set(report)] == [
        ("a", ("Q1", "Q2")),
        ("b", ("Q1",)),
    ]
    assert report.layout == "sharegpt"


# Tables.

CSV = {
    "a usual name": ("id,n,prompt\nx,1,a\ny,2,b\n", None, [("x", "a"), ("y", "b")]),
    "the only text": ("n,body\n1,a\n2,b\n", None, [("2", "a"), ("3", "b")]),
    "a column that is named": ("who,body\nme,a\nyou,b\n", "body", [("2", "a"), ("3", "b")]),
    "line breaks in a field": ('text\n"a\nb\r\nc"\nd\n', None, [("2", "a\nb\r\nc"), ("5", "d")]),
    "blank lines": ("text\n\na\n\nb\n", None, [("3", "a"), ("5", "b")]),
    "a column of ids that is the prompt": ("id\na\nb\n", "id", [("2", "a"), ("3", "b")]),
    "another layout's columns": ("task_id,prompt\nT/0,a\n", None, [("T/0", "a")]),
}


@pytest.mark.parametrize("case", CSV)
def test_the_prompts_of_a_csv_file_are_found(case: str, tmp_path: Path) -> None:
    content, column, expected = CSV[case]
    report = converted(file_of(tmp_path, "t.csv", content), column)
    assert prompts_in(report) == expected


def test_the_column_is_named_in_the_report(tmp_path: Path) -> None:
    report = converted(file_of(tmp_path, "t.csv", "n,body\n1,a\n"))
    assert report.layout == "csv, column body"


BAD_CSV: dict[str, tuple[str | bytes, int | None, str]] = {
    "two columns of text": ("who,body\nme,a\n", None, "could be in who or body; there are who, b"),
    "two usual names": ("prompt,question\na,b\n", None, "could be in prompt or question"),
    "no text": ("a,b\n1,2\n", None, "no column of text; there are a, b. Name the one"),
    "semicolons": ("id;prompt\n1;a\n", 1, "separate the columns with commas"),
    "too few fields": ("id,prompt\n1,a\n2\n", 3, "1 fields, where the header has 2"),
    "a quote that is not closed": ('prompt\na\n"b', 3, "not CSV: unexpected end of data"),
    "a column twice": ("a,a\n1,2\n", 1, "the column `a` is there twice"),
    "an empty prompt": ('id,prompt\n1,a\n2,""\n', 3, "the prompt is empty"),
    "an id twice": ("id,prompt\n1,a\n1,b\n", 3, "the id `1` is taken by line 2"),
    "Latin-1": (b"prompt\ncaf\xe9\n", 2, "not UTF-8 (byte 0xe9"),
    "nothing": ("", None, "the file is empty"),
}


@pytest.mark.parametrize("case", BAD_CSV)
def test_what_is_wrong_in_a_csv_file_is_named(case: str, tmp_path: Path) -> None:
    content, line, message = BAD_CSV[case]
    with pytest.raises(PromptError) as caught:
        prompts_of(file_of(tmp_path, "t.csv", content))
    assert message in str(caught.value)
    assert caught.value.line == line


def test_a_table_without_rows_has_no_prompts(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"t.csv: no prompts: there is not one record"):
        converted(file_of(tmp_path, "t.csv", "id,prompt\n"))


def test_a_column_that_is_not_there_is_answered_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match="no column `x`; there are a, b"):
        converted(file_of(tmp_path, "t.csv", "a,b\nc,d\n"), "x")
    with pytest.raises(PromptError, match="a text file has no columns"):
        converted(file_of(tmp_path, "t.txt", "a"), "x")


def test_a_parquet_file_is_read_by_column_or_layout(tmp_path: Path) -> None:
    import pandas

    def table(name: str, **columns: list[object]) -> Path:
        pandas.DataFrame(columns).to_parquet(tmp_path / name)
        return tmp_path / name

    usual = converted(
        table("usual.parquet", id=["x", "y"], instruction=["a", "b"], answer=["", ""])
    )
    assert prompts_in(usual) == [("x", "a"), ("y", "b")]
    assert usual.layout == "parquet, column instruction"
    named = converted(table("named.parquet", a=["a"], b=["b"]), "b")
    assert prompts_in(named) == [("1", "b")]
    questions = converted(table("q.parquet", question_id=[81], turns=[["Q1", "Q2"]]))
    assert [(p.id, p.turns) for p in prompts_of_set(questions)] == [("81", ("Q1", "Q2"))]
    assert questions.layout == "eagle"
    with pytest.raises(PromptError, match="could be in a or b; there are n, a, b"):
        converted(table("two.parquet", n=[1], a=["a"], b=["b"]))
    with pytest.raises(PromptError, match=r"row 2: the prompt is empty"):
        converted(table("empty.parquet", prompt=["a", ""]))
    with pytest.raises(PromptError, match="not a parquet file"):
        converted(file_of(tmp_path, "no.parquet", "PAR1 and no more"))


def test_a_column_of_jsonl_is_named_too(tmp_path: Path) -> None:
    path = file_of(tmp_path, "g.jsonl", '{"question": "Q", "answer": "A"}\n')
    with pytest.raises(PromptError, match="it has `question`, `answer` \\(--column names"):
        converted(path)
    with pytest.raises(PromptError, match=r"line 1: no column `q`; there are question, answer"):
        converted(path, "q")
    report = converted(path, "question")
    assert prompts_in(report) == [("1", "Q")]
    assert report.sidecar.source == "g.jsonl, column question"


# Memory.


def peak_bytes(path: Path) -> int:
    tracemalloc.start()
    try:
        converted(path)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", ["s.jsonl", "s.json", "s.csv", "s.txt"])
def test_memory_does_not_grow_with_the_number_of_prompts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrays, "CHUNK", 1 << 14)

    def written(count: int) -> Path:
        texts = [f"prompt {n} " + "word " * 60 for n in range(count)]
        content = {
            ".jsonl": "".join(json.dumps({"text": t}) + "\n" for t in texts),
            ".json": json.dumps([{"text": t} for t in texts]),
            ".csv": "prompt\n" + "\n".join(texts),
            ".txt": "\n".join(texts),
        }[Path(name).suffix]
        return file_of(tmp_path, name, content)

    few, many = 500, 3000
    converted(written(few))  # what is imported and cached once
    grown = peak_bytes(written(many)) - peak_bytes(written(few))
    assert grown < 30 * (many - few)  # bytes; a prompt that is held has more than 300
