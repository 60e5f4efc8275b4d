"""The layouts of benchmarks and their data sets: questions, functions, prompts, rows of tables."""

from specbench.prompts.fields import Record, category_of, id_of, text_of
from specbench.prompts.layout import Found, Layout, Piece, Unfit, Write, never
from specbench.prompts.perf_layouts import at_most, is_aiperf_conversation, turns_of


def _eagle(record: Record) -> Piece:
    turns = turns_of(record.get("turns"), "turns")
    return Piece(id_of(record, "question_id", optional=True), turns, category_of(record))


def _mt_bench_prompts(record: Record) -> Piece:
    turns = turns_of(record.get("prompt"), "prompt")
    return Piece(id_of(record, "prompt_id"), turns, category_of(record))


def _write_question(id_key: str, turns_key: str) -> Write:
    def write(found: Found, _: int | None) -> list[Record]:
        category: Record = {} if found.category is None else {"category": found.category}
        return [{id_key: _number(found.id)} | category | {turns_key: list(found.turns)}]

    return write


def _number(id: str) -> str | int:
    """The number that an id is, where that is all it is: EAGLE's scripts sort by it."""
    if id.isascii() and id.isdigit() and len(id) < 16 and str(int(id)) == id:
        return int(id)
    return id


def _is_prompt(record: Record, id: str | None) -> bool:
    return "prompt" in record and id == next(
        (k for k in ("task_id", "prompt_id") if k in record), None
    )


def _humaneval(record: Record) -> Piece:
    return Piece(id_of(record, "task_id"), (text_of(record.get("prompt"), "`prompt`"),))


def _vllm_bench(record: Record) -> Piece:
    return Piece(None, (text_of(record.get("prompt"), "`prompt`"),))


def _line(record: Record) -> Piece:
    return Piece(None, (text_of(record.get("text"), "the line"),))


def _write_line(found: Found, _: int | None) -> list[Record]:
    text = found.turns[0]
    for character, name in {"\n": "a line break", "\r": "a carriage return", "\0": "NUL"}.items():
        if character in text:
            raise Unfit(f"has {name}, and text has one prompt a line")
    if text.startswith("\ufeff"):
        raise Unfit("begins with U+FEFF, which is no text where a file begins")
    return [{"text": text}]


def _row(record: Record) -> Piece:
    """A row of a table, whose column of prompts is called `prompt` or `turns` by then."""
    id, category = id_of(record, "id", optional=True), category_of(record)
    if "turns" in record:
        return Piece(id, turns_of(record["turns"], "turns"), category)
    return Piece(id, (text_of(record.get("prompt"), "the prompt"),), category)


def _write_row(found: Found, _: int | None) -> list[Record]:
    return [{"id": found.id, "category": found.category, "prompt": found.turns[0]}]


def _write_row_of_turns(found: Found, _: int | None) -> list[Record]:
    return [{"id": found.id, "category": found.category, "turns": list(found.turns)}]


BENCH_LAYOUTS: dict[str, Layout] = {
    "eagle": Layout(
        lambda r: "turns" in r and not is_aiperf_conversation(r),
        _eagle,
        _write_question("question_id", "turns"),
        turns=True,
        ids=True,
        categories=True,
    ),
    "mt-bench-prompts": Layout(
        lambda r: _is_prompt(r, "prompt_id"),
        _mt_bench_prompts,
        _write_question("prompt_id", "prompt"),
        turns=True,
        ids=True,
        categories=True,
    ),
    "humaneval": Layout(
        lambda r: _is_prompt(r, "task_id"),
        _humaneval,
        lambda found, _: [{"task_id": found.id, "prompt": found.turns[0]}],
        ids=True,
    ),
    "vllm-bench": Layout(
        lambda r: _is_prompt(r, None),
        _vllm_bench,
        lambda found, n: [{"prompt": found.turns[0]} | at_most("output_tokens", n)],
        lengths=True,
    ),
    # what follows is known by its file and not by its records
    "text": Layout(never, _line, _write_line, ("text",)),
    "column": Layout(never, _row, _write_row, ids=True, categories=True),
    "csv": Layout(never, _row, _write_row, ("csv",), ids=True, categories=True),
    "parquet": Layout(never, _row, _write_row, ("parquet",), ids=True, categories=True),
    "parquet-turns": Layout(
        never, _row, _write_row_of_turns, ("parquet",), turns=True, ids=True, categories=True
    ),
}
