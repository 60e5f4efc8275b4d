"""Every layout is read, and every way a file can be wrong is named with its physical line."""

import gzip
import json
from pathlib import Path

import pytest

from specbench.errors import PromptError
from specbench.prompts.fields import Malformed
from specbench.prompts.formats import Skipped, read_prompts
from specbench.prompts.layout import never
from specbench.prompts.layouts import LAYOUTS, detect
from specbench.prompts.rows import jsonl_rows
from specbench.records import Prompt


def file_of(tmp_path: Path, content: str | bytes, name: str = "set.jsonl") -> Path:
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def prompts_of(path: Path, layout: str | None = None) -> list[Prompt]:
    return [located.prompt for located in read_prompts(path, layout=layout)]


def prompt(id: str, *turns: str, category: str | None = None) -> Prompt:
    return Prompt(id=id, turns=turns, category=category)


def layout_of(case: str) -> str:
    return case.partition(" ")[0]


READS = {
    "eagle": (
        '{"question_id":81,"category":"writing","turns":["Q1","Q2"],"reference":["",""]}',
        prompt("81", "Q1", "Q2", category="writing"),
    ),
    "humaneval": (
        '{"task_id":"HumanEval/0","prompt":"def f():\\n","test":"","entry_point":"f"}',
        prompt("HumanEval/0", "def f():\n"),
    ),
    "mt-bench-prompts": (
        '{"prompt":["Q1","Q2"],"prompt_id":81,"category":"writing","reference":[]}',
        prompt("81", "Q1", "Q2", category="writing"),
    ),
    "genai-perf": ('{"text":"Q"}', prompt("1", "Q")),
    "genai-perf text_input": ('{"text_input":"Q"}', prompt("1", "Q")),
    "genai-perf-sessions": (
        '{"session_id":"a","text":"Q1","delay":0}\n{"session_id":"a","text":"Q2"}',
        prompt("a", "Q1", "Q2"),
    ),
    "aiperf": ('{"text":"Q","output_length":256}', prompt("1", "Q")),
    "aiperf-multi-turn": (
        '{"session_id":"a","turns":[{"text":"Q1"},{"text":"Q2","role":"user"}]}',
        prompt("a", "Q1", "Q2"),
    ),
    "aiperf texts": ('{"texts":["Q"]}', prompt("1", "Q")),
    "aiperf typed": ('{"type":"single_turn","session_id":"a","text":"Q"}', prompt("a", "Q")),
    "aiperf-multi-turn typed": (
        '{"type":"multi_turn","session_id":"a","turns":[{"texts":["Q1"]},{"text":"Q2","delay":5}]}',
        prompt("a", "Q1", "Q2"),
    ),
    "mooncake-trace": ('{"timestamp":0,"text_input":"Q","output_length":4}', prompt("1", "Q")),
    "mooncake-trace session": (
        """{"type":"mooncake_trace","session_id":"a","text_input":"Q1"}
        {"type":"mooncake_trace","session_id":"a","text_input":"Q2","delay":2}""",
        prompt("a", "Q1", "Q2"),
    ),
    "sharegpt": (
        '{"id":"x","conversations":[{"from":"human","value":"Q1"},'
        + '{"from":"gpt","value":"A"},{"from":"human","value":"Q2"}]}',
        prompt("x", "Q1", "Q2"),
    ),
    "sharegpt messages": (
        '{"messages":[{"role":"system","content":"S"},{"role":"user","content":"Q1"},'
        + '{"role":"assistant","content":"A"}]}',
        prompt("1", "Q1"),
    ),
    "sharegpt parts": (
        '{"messages":[{"role":"user","content":[{"type":"text","text":"Q"}]}]}',
        prompt("1", "Q"),
    ),
    "vllm-bench": ('{"prompt":"Q","output_tokens":10}', prompt("1", "Q")),
    "vllm-bench alone": ('{"prompt":"Q"}', prompt("1", "Q")),
}


@pytest.mark.parametrize("case", READS)
def test_each_layout_is_recognised_and_read(case: str, tmp_path: Path) -> None:
    content, expected = READS[case]
    assert detect(json.loads(content.splitlines()[0])) == layout_of(case)
    assert prompts_of(file_of(tmp_path, content)) == [expected]
    assert prompts_of(file_of(tmp_path, content), layout=layout_of(case)) == [expected]


def test_every_layout_has_a_file_in_these_tests() -> None:
    known_by_records = {name for name, layout in LAYOUTS.items() if layout.claims is not never}
    assert {layout_of(case) for case in READS} == known_by_records


def test_two_sessions_and_a_single_turn_one_keep_their_order(tmp_path: Path) -> None:
    lines = [("b", "1"), ("b", "2"), ("a", "3"), ("c", "4"), ("c", "5"), ("c", "6")]
    content = "\n".join(json.dumps({"session_id": i, "text": t}) for i, t in lines)
    assert prompts_of(file_of(tmp_path, content)) == [
        prompt("b", "1", "2"),
        prompt("a", "3"),
        prompt("c", "4", "5", "6"),
    ]


def test_a_trace_of_sessions_and_single_requests_keeps_its_order(tmp_path: Path) -> None:
    lines = [{"session_id": "a", "text_input": "1"}, {"session_id": "a", "text_input": "2"}]
    typed = [{"type": "mooncake_trace", **line} for line in lines]
    single = {"type": "mooncake_trace", "text_input": "3"}
    content = "\n".join(json.dumps(line) for line in [single, *typed])
    assert prompts_of(file_of(tmp_path, content)) == [prompt("1", "3"), prompt("a", "1", "2")]
    with pytest.raises(PromptError, match="line 3: no id, where records before it have one"):
        prompts_of(file_of(tmp_path, "\n".join(json.dumps(line) for line in [*typed, single])))


# What is accepted although it looks odd.

ACCEPTED = {
    "a BOM": (b'\xef\xbb\xbf{"text":"Q"}', ["Q"]),
    "CRLF": (b'{"text":"Q"}\r\n{"text":"R"}\r\n', ["Q", "R"]),
    "no last newline": (b'{"text":"Q"}', ["Q"]),
    "U+2028 in a string": (
        '{"text":"a\u2028b\u2029c\u0085d"}\n'.encode(),
        ["a\u2028b\u2029c\u0085d"],
    ),
    "an escaped pair": (b'{"text":"\\ud83d\\ude00"}', ["\U0001f600"]),
    "NUL": (b'{"text":"a\\u0000b"}', ["a\0b"]),
    "outer white space": (b'{"text":" Q \\n"}', [" Q \n"]),
    "gzip": (gzip.compress(b'{"text":"Q"}\n'), ["Q"]),
    "output lengths on some lines": (b'{"text":"Q"}\n{"text":"R","output_length":9}', ["Q", "R"]),
    "an empty list of images": (b'{"text":"Q","images":[]}', ["Q"]),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_what_is_odd_but_clear_is_read_byte_for_byte(case: str, tmp_path: Path) -> None:
    content, expected = ACCEPTED[case]
    assert [p.turns[0] for p in prompts_of(file_of(tmp_path, content))] == expected


def test_blank_lines_are_no_prompts_but_count_as_lines(tmp_path: Path) -> None:
    path = file_of(tmp_path, '\n{"text":"Q"}\n  \n\r\n{"text":"R"}\n\n')
    assert [(at.line, at.prompt.id) for at in read_prompts(path)] == [(2, "2"), (5, "5")]


def test_questions_without_an_id_are_known_by_their_line(tmp_path: Path) -> None:
    path = file_of(tmp_path, '{"turns":["Q"]}\n{"turns":["R"]}')
    assert [p.id for p in prompts_of(path)] == ["1", "2"]


# What is refused: (content, line, a piece of the message).

OK = '{"text":"fine"}\n'
QUESTION = '{"question_id":1,"turns":["Q"]}\n'
REFUSED: dict[str, tuple[str | bytes, int | None, str]] = {
    "bad JSON": (OK + "{'text': 1}", 2, "not JSON: Expecting property name"),
    "a torn line": (OK + '{"text":"abc', 2, "the line ends inside the object"),
    "a pretty-printed object": ('{\n "text": "a"\n}', 1, "the line ends inside the object"),
    "a comma after the object": ('{"text":"a"},\n{"text":"b"}', 1, "a comma after the object"),
    "objects with a comma": ('{"text":"a"}, {"text":"b"}', 1, "two objects with a comma between"),
    "objects side by side": ('{"text":"a"} {"text":"b"}', 1, "more after the object"),
    "old Mac line ends": ('{"text":"a"}\r{"text":"b"}', 1, "more after the object"),
    "a JSON array": ('\n[{"text":"a"}]', 2, "one JSON array; JSONL has one object a line"),
    "an array over lines": ('[\n{"text":"a"}\n]', 1, "one JSON array"),
    "UTF-16": ('{"text":"a"}'.encode("utf-16"), None, "UTF-16"),
    "UTF-16 without a BOM": ('{"text":"a"}'.encode("utf-16-le"), None, "UTF-16 or binary"),
    "Latin-1": (OK.encode() + b'{"text":"caf\xe9"}', 2, "not UTF-8 (byte 0xe9 at byte 13)"),
    "a surrogate in UTF-8": (b'{"text":"\xed\xa0\x80"}', 1, "not UTF-8"),
    "parquet": (b"PAR1\x15\x04", None, "a parquet file"),
    "zip": (b"PK\x03\x04....", None, "a zip archive"),
    "torn gzip": (gzip.compress(OK.encode())[:12], None, "cannot be read"),
    "an empty file": ("", None, "the file is empty"),
    "only blank lines": ("\n \n", None, "only blank lines"),
    "text on a line": (OK + '"hello"', 2, "text, not an object"),
    "a number on a line": (OK + "5", 2, "a number, not an object"),
    "null on a line": (OK + "null", 2, "null, not an object"),
    "an array on a line": (OK + '["a"]', 2, "a list, not an object"),
    "a key twice": ('{"text":"a","text":"b"}', 1, "the key `text` is there twice"),
    "a key twice inside": ('{"text":"a","x":{"k":1,"k":2}}', 1, "the key `k` is there twice"),
    "a long number": ('{"text":"a","n":' + "1" * 5000 + "}", 1, "too long a number"),
    "deep nesting": ('{"text":' + "[" * 100_000, 1, "nests too deep"),
    "an unknown key": (
        '{"foo":"a"}',
        1,
        "no `text`, `text_input`, `prompt`, `turns`, `conversations` or `messages`; it has `foo`",
    ),
    "no keys": ("{}", 1, "it has nothing"),
    "two layouts on a line": ('{"text":"a","prompt":"b"}', 1, "genai-perf or vllm-bench"),
    "mixed layouts": (OK + QUESTION, 2, "a record of layout eagle in a file of layout genai-perf"),
    "HumanEval, then EAGLE": ('{"task_id":"a","prompt":"b"}\n\n' + QUESTION, 3, "layout eagle"),
    "a session among prompts": (OK + '{"session_id":1,"text":"a"}', 2, "genai-perf-sessions"),
    "an unknown key later": (OK + '{"foo":1}', 2, "no `text` or `text_input`"),
    "text and text_input": ('{"text":"a","text_input":"b"}', 1, "both `text` and `text_input`"),
    "text and empty text_input": ('{"text":"a","text_input":""}', 1, "both `text`"),
    "an empty prompt": (OK + '{"text_input":""}', 2, "`text_input` is empty"),
    "a blank prompt": (OK + '{"text":" \\n\\u2028"}', 2, "`text` is empty"),
    "a number as text": ('{"text_input": 5}', 1, "`text_input` is a number, not text"),
    "a boolean as text": ('{"text": true}', 1, "`text` is a boolean, not text"),
    "null as text": ('{"text": null}', 1, "`text` is null, not text"),
    "a list as prompt": ('{"prompt": ["a"]}', 1, "`prompt` is a list, not text"),
    "half a pair": ('{"text":"a\\ud800b"}', 1, "half of a surrogate pair (\\ud800)"),
    "half a pair in an id": ('{"question_id":"\\udc00","turns":["a"]}', 1, "surrogate"),
    "turns as text": ('{"question_id":1,"turns":"Q"}', 1, "`turns` is text, not a list"),
    "no turns": (QUESTION + '{"question_id":2,"turns":[]}', 2, "`turns` is an empty list"),
    "an empty turn": ('{"question_id":1,"turns":["a",""]}', 1, "turn 2 is empty"),
    "a number as turn": ('{"question_id":1,"turns":["a",2]}', 1, "turn 2 is a number"),
    "a turn with an image": ('{"turns":[{"text":"a","image":"x"}]}', 1, "turn 1: has `image`"),
    "the assistant's turn": ('{"text":"a","role":"assistant"}', 1, "only a user's turns"),
    "several texts in one request": ('{"texts":["a","b"]}', 1, "`texts` has 2 texts"),
    "a trace of lengths": ('{"input_length":9,"hash_ids":[1]}', 1, "there is no text to send"),
    "a trace of messages": (
        '{"type":"mooncake_trace","messages":[{"role":"user","content":"a"}]}',
        1,
        "one request with its history; --from sharegpt",
    ),
    "messages with an output length": (
        '{"messages":[{"role":"user","content":"a"}],"output_length":9}',
        1,
        "could be mooncake-trace or sharegpt; say which with --from",
    ),
    "a type that is no text": ('{"text":"a","type":[]}\n{"turns":1}', 2, "layout eagle"),
    "the assistant first": (
        '{"conversations":[{"from":"gpt","value":"A"},{"from":"human","value":"Q"}]}',
        1,
        "it begins with the assistant",
    ),
    "no user": ('{"conversations":[{"from":"system","value":"A"}]}', 1, "no turn of a user"),
    "no messages": ('{"conversations":[]}', 1, "no turn of a user"),
    "an empty message": ('{"messages":[{"role":"user","content":""}]}', 1, "message 1 is empty"),
    "a tool's message": ('{"messages":[{"role":"tool","content":"x"}]}', 1, "is from 'tool'"),
    "a message of text": ('{"messages":["hello"]}', 1, "message 1 is text, not an object"),
    "messages of text": ('{"conversations":"hello"}', 1, "`conversations` is text, not a list"),
    "a message of two parts": (
        '{"messages":[{"role":"user","content":[{"text":"a"},{"text":"b"}]}]}',
        1,
        "message 1 is a list, not text",
    ),
    "ids that repeat": (QUESTION + "\n" + QUESTION, 3, "the id `1` is taken by line 1"),
    "81 and '81'": (QUESTION + '{"question_id":"1","turns":["a"]}', 2, "the id `1` is taken"),
    "an id that is a list": ('{"question_id":[1],"turns":["a"]}', 1, "`question_id` is a list"),
    "an empty id": ('{"question_id":"","turns":["a"]}', 1, "`question_id` is empty"),
    "true as an id": ('{"question_id":true,"turns":["a"]}', 1, "`question_id` is a boolean"),
    "an id on some records": (QUESTION + '{"turns":["a"]}', 2, "no id, where records before it"),
    "a category of 5": (
        '{"question_id":1,"category":5,"turns":["a"]}',
        1,
        "`category` is a number",
    ),
    "a session in two parts": (
        '{"session_id":1,"text":"a"}\n{"session_id":2,"text":"b"}\n{"session_id":1,"text":"c"}',
        3,
        "session `1` began on line 1",
    ),
    "a bad turn of a session": (
        '{"session_id":1,"text":"a"}\n{"session_id":1,"text":""}\n{"session_id":1,"text":"c"}',
        2,
        "`text` is empty",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_named_with_its_line(case: str, tmp_path: Path) -> None:
    content, line, message = REFUSED[case]
    path = file_of(tmp_path, content)
    with pytest.raises(PromptError) as caught:
        prompts_of(path)
    assert caught.value.line == line
    assert message in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_folder_are_prompt_errors(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(PromptError, match="cannot be read"):
            prompts_of(path)


def test_malformed_records_are_handed_over_when_asked_for(tmp_path: Path) -> None:
    path = file_of(tmp_path, '{"text":"a"}\n\n{"text":5}\n{"foo":1}\n{"text":"b"}')
    skipped: list[Skipped] = []
    assert [at.prompt.id for at in read_prompts(path, on_skip=skipped.append)] == ["1", "5"]
    assert skipped == [
        Skipped(3, "`text` is a number, not text"),
        Skipped(4, "no `text` or `text_input`"),
    ]


def test_a_session_that_lost_a_turn_is_left_out_whole(tmp_path: Path) -> None:
    lines = [("a", ""), ("a", "2"), ("b", "3"), ("b", ""), ("b", "4"), ("c", "5")]
    content = "\n".join(json.dumps({"session_id": i, "text": t}) for i, t in lines)
    skipped: list[Skipped] = []
    found = list(read_prompts(file_of(tmp_path, content), on_skip=skipped.append))
    assert [at.prompt for at in found] == [prompt("c", "5")]
    assert [skip.line for skip in skipped] == [1, 4]


def test_a_forced_layout_reads_what_could_be_two(tmp_path: Path) -> None:
    path = file_of(tmp_path, '{"text":"a","prompt":"b"}')
    assert prompts_of(path, layout="vllm-bench") == [prompt("1", "b")]
    assert prompts_of(path, layout="genai-perf") == [prompt("1", "a")]


def test_a_forced_layout_never_makes_prompts_of_turns(tmp_path: Path) -> None:
    path = file_of(tmp_path, '{"session_id":1,"text":"a"}')
    with pytest.raises(PromptError, match="one turn of a session"):
        prompts_of(path, layout="genai-perf")


def test_an_unknown_layout_is_answered_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"no layout `x`; there are genai-perf, .*vllm-bench"):
        prompts_of(file_of(tmp_path, OK), layout="x")


def test_a_file_is_read_lazily(tmp_path: Path) -> None:
    rows = jsonl_rows(file_of(tmp_path, OK + "not JSON"))
    assert next(rows) == (1, {"text": "fine"})
    with pytest.raises(PromptError):
        next(rows)


def test_detect_says_what_a_record_lacks() -> None:
    with pytest.raises(Malformed, match=r"it has `dialogue` \(--column names"):
        detect({"dialogue": []})
