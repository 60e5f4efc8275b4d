"""What is converted reads back the same, and nothing is dropped or half-written in silence."""

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench.errors import PromptError
from specbench.prompts import files as record_files
from specbench.prompts.choice import Choice
from specbench.prompts.convert import SetReport
from specbench.prompts.convert import convert as convert_source
from specbench.prompts.layout import Found
from specbench.prompts.sets import (
    check,
    load_prompt_set,
    prompt_set_sha256,
    prompt_sha256,
    read_set,
    write_set,
)
from specbench.prompts.sidecar import Facts, sidecar_path
from specbench.prompts.sources import TurnsPolicy, resolve
from specbench.records import Prompt, Style

ROOT = Path(__file__).parents[1]


def convert(
    source: Path,
    *,
    out_dir: Path,
    name: str | None = None,
    style: Style | None = None,
    turns: TurnsPolicy | None = None,
    limit: int | None = None,
    seed: int | None = None,
    allow_skips: bool = False,
) -> SetReport:
    choice = Choice(turns, limit, seed, allow_skips)
    return convert_source(resolve(source), choice, out_dir=out_dir, name=name, style=style)


def jsonl(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return path


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    return jsonl(
        tmp_path / "question.jsonl",
        {"question_id": 81, "category": "writing", "turns": ["Q1", "Rewrite that."]},
        {"question_id": 82, "category": "math", "turns": ["Q3", "And then?"]},
    )


def numbers(path: Path, count: int) -> Path:
    return jsonl(path, *({"text": f"prompt {n}"} for n in range(1, count + 1)))


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


# The round trip.

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
conversations = st.lists(
    st.tuples(
        st.lists(text.filter(str.strip), min_size=1, max_size=3),
        st.none() | text.filter(str.strip),
    ),
    min_size=1,
    max_size=6,
)


def made(drawn: list[tuple[list[str], str | None]], ids: list[str], style: str) -> list[Prompt]:
    return [
        Prompt.model_validate({"id": id, "turns": turns, "category": category, "style": style})
        for id, (turns, category) in zip(ids, drawn, strict=False)
    ]


@settings(deadline=None, max_examples=50)
@given(
    drawn=conversations,
    ids=st.lists(text.filter(bool), min_size=6, max_size=6, unique=True),
    style=st.sampled_from(["chat", "completion"]),
    sessions=st.booleans(),
)
def test_any_prompts_read_back_the_same(
    tmp_path_factory: pytest.TempPathFactory,
    drawn: list[tuple[list[str], str | None]],
    ids: list[str],
    style: Style,
    sessions: bool,
) -> None:
    prompts = made(drawn, ids, style)
    if not sessions:
        prompts = [p.model_copy(update={"turns": p.turns[:1]}) for p in prompts]
    folder = tmp_path_factory.mktemp("round", numbered=True)
    found = [Found(0, p.id, p.turns, p.category) for p in prompts]
    facts = Facts(source="drawn")
    sidecar, _ = write_set(folder, "set", found, sessions=sessions, facts=facts, style=style)
    assert list(read_set(folder / "set.jsonl")) == prompts
    assert (sidecar.prompts, sidecar.turns) == (len(prompts), sum(len(p.turns) for p in prompts))
    content = (folder / "set.jsonl").read_bytes()
    # any other tool finds one object a line, however it splits lines
    assert len(content.decode().splitlines()) == content.count(b"\n") == sidecar.turns


@settings(deadline=None, max_examples=50)
@given(drawn=conversations, ids=st.lists(st.integers(), min_size=6, max_size=6, unique=True))
def test_questions_convert_without_loss(
    tmp_path_factory: pytest.TempPathFactory,
    drawn: list[tuple[list[str], str | None]],
    ids: list[int],
) -> None:
    folder = tmp_path_factory.mktemp("questions", numbered=True)
    records = [
        {"question_id": id, "turns": turns, "category": category}
        for id, (turns, category) in zip(ids, drawn, strict=False)
    ]
    report = convert(jsonl(folder / "q.jsonl", *records), out_dir=folder / "out", turns="all")
    assert list(read_set(report.path)) == made(drawn, [str(id) for id in ids], "chat")


def test_single_prompts_become_genai_perf_lines_and_nothing_else(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "he.jsonl", {"task_id": "HumanEval/0", "prompt": "déf\u2028"})
    report = convert(source, out_dir=tmp_path / "out", style="completion")
    assert report.path == tmp_path / "out" / "he.jsonl"
    assert report.path.read_bytes() == '{"text":"déf\\u2028"}\n'.encode()
    assert report.layout == "humaneval"
    meta = json.loads(sidecar_path(report.path).read_bytes())
    assert meta.pop("sha256")
    assert meta == {
        "format": 1,
        "name": "he",
        "source": "he.jsonl",
        "licence": None,
        "prompts": 1,
        "turns": 1,
        "layout": "genai-perf",
        "style": "completion",
        "turns_policy": "all",
        "seed": None,
        "limit": None,
        "index": [{"id": "HumanEval/0", "category": None}],
    }


def test_conversations_become_genai_perf_sessions(tmp_path: Path, questions: Path) -> None:
    report = convert(questions, out_dir=tmp_path / "out", turns="all")
    assert [json.loads(line) for line in report.path.read_text().splitlines()] == [
        {"session_id": "81", "text": "Q1", "delay": 0},
        {"session_id": "81", "text": "Rewrite that."},
        {"session_id": "82", "text": "Q3", "delay": 0},
        {"session_id": "82", "text": "And then?"},
    ]
    assert report.sidecar.layout == "genai-perf-sessions"
    assert any("the engine's own answers" in warning for warning in report.warnings)


def test_first_turns_keep_the_ids_of_their_conversations(tmp_path: Path, questions: Path) -> None:
    report = convert(questions, out_dir=tmp_path / "out", turns="first")
    assert [(p.id, p.turns, p.category) for p in read_set(report.path)] == [
        ("81", ("Q1",), "writing"),
        ("82", ("Q3",), "math"),
    ]
    assert report.sidecar.turns_policy == "first"


def test_a_users_conversations_need_a_choice(tmp_path: Path, questions: Path) -> None:
    with pytest.raises(
        PromptError, match=r"--turns first .*--turns all.*they would lose"
    ) as caught:
        convert(questions, out_dir=tmp_path / "out")
    assert caught.value.line == 1
    assert files(tmp_path / "out") == []


def test_a_completion_has_no_second_turn(tmp_path: Path, questions: Path) -> None:
    with pytest.raises(PromptError, match="no second turn"):
        convert(questions, out_dir=tmp_path / "out", turns="all", style="completion")
    report = convert(questions, out_dir=tmp_path / "out", turns="first", style="completion")
    assert report.written == 2


# Losses.


def test_a_malformed_record_stops_the_conversion(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "s.jsonl", {"text": "a"}, {"text": 5}, {"text": ""}, {"text": "b"})
    with pytest.raises(
        PromptError, match=r"`text` is a number.*1 more.*line 3.*--allow-skips"
    ) as c:
        convert(source, out_dir=tmp_path / "out")
    assert c.value.line == 2
    assert files(tmp_path / "out") == []


def test_allowed_skips_are_counted_with_their_reasons(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "s.jsonl", {"text": "a"}, {"text": 5}, {"text": ""}, {"text": "b"})
    report = convert(source, out_dir=tmp_path / "out", allow_skips=True)
    assert (report.read, report.written, len(report.skipped)) == (4, 2, 2)
    assert report.skipped[1] == (3, "`text` is empty")
    assert [p.id for p in read_set(report.path)] == ["1", "4"]


def test_a_file_with_no_usable_record_is_never_written(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "s.jsonl", {"text": ""}, {"text": 5})
    with pytest.raises(PromptError, match="no record can be used"):
        convert(source, out_dir=tmp_path / "out", allow_skips=True)
    assert files(tmp_path / "out") == []


def test_a_failure_leaves_the_earlier_conversion_as_it_was(tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = convert(numbers(tmp_path / "s.jsonl", 3), out_dir=out)
    before = report.path.read_bytes(), sidecar_path(report.path).read_bytes()
    (tmp_path / "s.jsonl").write_text('{"text":"a"}\n{"text":\n')
    with pytest.raises(PromptError):
        convert(tmp_path / "s.jsonl", out_dir=out)
    assert (report.path.read_bytes(), sidecar_path(report.path).read_bytes()) == before
    assert files(out) == ["s.jsonl", "s.meta.json"]


def test_what_does_not_read_back_gets_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_files, "LINE_BREAKS", {"a": "b"})
    with pytest.raises(PromptError, match="does not read back"):
        convert(jsonl(tmp_path / "s.jsonl", {"text": "aaé"}), out_dir=tmp_path / "out")
    assert files(tmp_path / "out") == []


def test_the_source_is_never_replaced(tmp_path: Path) -> None:
    source = numbers(tmp_path / "mine.jsonl", 2)
    before = source.read_bytes()
    with pytest.raises(PromptError, match="the source itself"):
        convert(source, out_dir=tmp_path)
    assert source.read_bytes() == before


def test_a_hand_made_file_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    numbers(tmp_path / "out" / "mine.jsonl", 2)
    with pytest.raises(PromptError, match="not made by convert"):
        convert(numbers(tmp_path / "mine.jsonl", 3), out_dir=tmp_path / "out")


def test_converting_again_replaces_the_conversion(tmp_path: Path) -> None:
    for count in (3, 2):
        report = convert(numbers(tmp_path / "s.jsonl", count), out_dir=tmp_path / "out")
        assert check(report.path) == count


@pytest.mark.parametrize("name", ["../up", "a/b", ".hidden", "a b", "-x"])
def test_a_name_cannot_leave_the_folder(tmp_path: Path, name: str) -> None:
    source = numbers(tmp_path / "s.jsonl", 1)
    with pytest.raises(PromptError, match="not a name"):
        convert(source, out_dir=tmp_path / "out", name=name)


# Choosing some.


def test_a_limit_takes_the_first(tmp_path: Path) -> None:
    report = convert(numbers(tmp_path / "s.jsonl", 10), out_dir=tmp_path / "out", limit=3)
    assert [p.id for p in read_set(report.path)] == ["1", "2", "3"]
    assert report.sidecar.limit == 3


def test_a_seed_draws_a_sample_that_can_be_drawn_again(tmp_path: Path) -> None:
    source = numbers(tmp_path / "s.jsonl", 50)
    ids = []
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        report = convert(source, out_dir=tmp_path / "out", name=name, limit=10, seed=seed)
        ids.append([int(p.id) for p in read_set(report.path)])
    assert ids[0] == ids[1] == sorted(ids[0])
    assert len(ids[0]) == 10
    assert ids[0] != ids[2]
    assert ids[0] != list(range(1, 11))


def test_a_limit_above_the_count_is_said(tmp_path: Path) -> None:
    for seed in (None, 1):
        report = convert(
            numbers(tmp_path / "s.jsonl", 2), out_dir=tmp_path / "out", limit=5, seed=seed
        )
        assert report.written == 2
        assert report.warnings == ("--limit is 5, but there are only 2 prompts",)


def test_a_limit_below_one_and_a_seed_alone_are_refused(tmp_path: Path) -> None:
    source = numbers(tmp_path / "s.jsonl", 2)
    with pytest.raises(PromptError, match="--limit is 0"):
        convert(source, out_dir=tmp_path, limit=0)
    with pytest.raises(PromptError, match="--seed draws a sample"):
        convert(source, out_dir=tmp_path, seed=1)


def test_white_space_that_genai_perf_would_strip_is_said(tmp_path: Path) -> None:
    source = jsonl(tmp_path / "s.jsonl", {"text": "a"}, {"text": "b\n"}, {"text": " c"})
    report = convert(source, out_dir=tmp_path / "out")
    assert report.warnings == (
        "GenAI-Perf strips white space around prompts: it changes 2 of 3 here, `2` first",
    )


# The sidecar.


def test_a_file_changed_after_conversion_is_refused(tmp_path: Path) -> None:
    report = convert(numbers(tmp_path / "s.jsonl", 2), out_dir=tmp_path / "out")
    with report.path.open("a", encoding="utf-8") as file:
        file.write('{"text":"one more"}\n')
    with pytest.raises(PromptError, match=r"changed after conversion.*or delete the sidecar"):
        check(report.path)
    sidecar_path(report.path).unlink()
    assert check(report.path) == 3


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [("format", 2, "`format`"), ("extra", 1, "`extra`"), ("prompts", "x", "`prompts`")],
)
def test_a_sidecar_of_another_format_is_refused(
    tmp_path: Path, key: str, value: object, message: str
) -> None:
    report = convert(numbers(tmp_path / "s.jsonl", 2), out_dir=tmp_path / "out")
    beside = sidecar_path(report.path)
    beside.write_text(json.dumps({**json.loads(beside.read_bytes()), key: value}))
    with pytest.raises(PromptError, match=f"not a sidecar of format 1: {message}"):
        check(report.path)


@pytest.mark.parametrize("ids", [["82"], ["82", "81"], ["81", "82", "83"]])
def test_an_index_that_does_not_fit_the_file_is_refused(
    tmp_path: Path, questions: Path, ids: list[str]
) -> None:
    report = convert(questions, out_dir=tmp_path / "out", turns="all")
    beside = sidecar_path(report.path)
    meta = json.loads(beside.read_bytes())
    beside.write_text(json.dumps({**meta, "index": [{"id": id} for id in ids]}))
    with pytest.raises(PromptError, match="index"):
        check(report.path)


# Finding a set, and its hash.


def test_a_set_is_found_by_name_or_path(tmp_path: Path, questions: Path) -> None:
    report = convert(questions, out_dir=tmp_path / "out", name="mine", turns="first")
    by_name = load_prompt_set("mine", search=[tmp_path / "none", tmp_path / "out"])
    by_path = load_prompt_set(str(report.path), search=[])
    assert by_name == by_path
    assert (by_name.name, by_name.source, len(by_name.prompts)) == ("mine", "question.jsonl", 2)
    assert by_name.sha256 == prompt_set_sha256(by_name.prompts)


def test_a_file_of_a_known_layout_needs_no_conversion(questions: Path) -> None:
    found = load_prompt_set(str(questions), search=[])
    assert found.name == "question"
    assert [len(p.turns) for p in found.prompts] == [2, 2]


@pytest.mark.parametrize(
    ("ref", "message"),
    [
        ("humaneval", "no prompt set 'humaneval' in {}/; run `specbench convert humaneval`"),
        ("minee", "no prompt set 'minee' in {}/; did you mean 'mine'?"),
        ("mt-bench", "did you mean 'mt_bench'? Then run `specbench convert mt_bench`."),
        ("zzzzzz", "`specbench convert FILE --name zzzzzz` makes one"),
        ("./none.jsonl", "./none.jsonl: no such file"),
    ],
)
def test_a_missing_set_is_answered_with_what_to_do(tmp_path: Path, ref: str, message: str) -> None:
    numbers(tmp_path / "mine.jsonl", 1)
    with pytest.raises(PromptError) as caught:
        load_prompt_set(ref, search=[tmp_path])
    assert message.format(tmp_path) in str(caught.value)


def test_the_hash_of_a_set_is_of_what_is_sent() -> None:
    one = Prompt(id="1", turns=("a", "b"), category="x")
    assert prompt_set_sha256([one]) == prompt_set_sha256(
        [one.model_copy(update={"category": None})]
    )
    others = [
        one.model_copy(update=change)
        for change in (
            {"id": "2"},
            {"turns": ("ab",)},
            {"turns": ("b", "a")},
            {"style": "completion"},
        )
    ]
    assert len({prompt_set_sha256([p]) for p in (one, *others)}) == 5
    # pinned: a change here makes every earlier run incomparable
    assert prompt_set_sha256([one]).startswith("85e0bfa0450b0f63")
    assert prompt_sha256("é").startswith("4a99557e4033c353")


def test_the_smoke_set_is_whole() -> None:
    found = load_prompt_set("smoke", search=[ROOT / "datasets"])
    assert len(found.prompts) == 6
    assert Counter(p.category for p in found.prompts) == {"code": 3, "chat": 3}
