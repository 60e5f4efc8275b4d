"""The page says what the table says, holds all it needs, and takes no text for markup."""

import html
import io
import itertools
import json
import re
from collections.abc import Callable, Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from specbench import config as configs
from specbench.analysis.curves import curves
from specbench.analysis.rows import rows as make_rows
from specbench.analysis.speedup import Interval, Ratio
from specbench.cli import app
from specbench.cli import report as report_command
from specbench.errors import UserError
from specbench.records import Prompt, RequestRecord, SpecRequest
from specbench.render.html import document, page, prompts, provenance, published, steps
from specbench.render.html.figures import span
from specbench.render.read import measured_cases
from specbench.render.report import Findings
from specbench.store import RunStore

Made = Callable[..., RunStore]
WORDS = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"
PROMPTS = [
    Prompt(id=f"p/{i}", turns=(f"Say {i}", "And more"), category="ab"[i % 2]) for i in range(8)
]


def same(_arm: str, prompt: Prompt, _turn: int) -> str:
    """Every arm gives the same answer."""
    return f"{WORDS} {prompt.id} " * 4


def differs(arm: str, prompt: Prompt, turn: int) -> str:
    return same(arm, prompt, turn) + ("" if arm == "vanilla" else "otherwise")


def findings(store: RunStore) -> Findings:
    cases = list(measured_cases(store))
    return Findings(
        make_rows(cases, baseline="vanilla", greedy=True), curves(cases, baseline="vanilla")
    )


def made_page(store: RunStore) -> str:
    return page(store, list(measured_cases(store)), findings(store))


class Reader(HTMLParser):
    """What a browser would load, run and show."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.scripts: dict[str, str] = {}
        self.shown: list[str] = []
        self._in = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        about = dict(attrs)
        linked = tag not in ("a", "link") and "href" in about
        if linked or "src" in about or "srcset" in about:
            self.loads.append(f"{tag} {about}")
        if tag == "link" and not (about["href"] or "").startswith("data:"):
            self.loads.append(f"{tag} {about}")
        if tag == "script":
            self._in = about.get("id") or "code"
        elif tag == "style":
            self._in = "style"

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "style"):
            self._in = ""

    def handle_data(self, data: str) -> None:
        if self._in:
            self.scripts[self._in] = self.scripts.get(self._in, "") + data
        else:
            self.shown.append(data)

    def json(self, name: str) -> Any:  # noqa: ANN401
        return json.loads(self.scripts[name])

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.shown).split())


# --- the whole page ------------------------------------------------------------------------------


def test_the_page_loads_nothing(made_run: Made) -> None:
    text = made_page(made_run(PROMPTS, say=same))
    assert Reader(text).loads == []
    css = text.partition("<style>")[2].partition("</style>")[0]
    assert "url(" not in css
    assert "@import" not in css
    assert "default-src 'none'" in html.unescape(text[:1500])


def test_the_answer_stands_at_the_top_in_the_words_of_the_table(made_run: Made) -> None:
    store = made_run(PROMPTS, say=same)
    (headline,) = findings(store).headlines
    assert "x as fast" in headline
    text = Reader(made_page(store)).text
    assert headline in text
    assert text.index(headline) < text.index("How many times as fast")


def test_every_figure_is_one_that_plotly_knows(made_run: Made) -> None:
    """plotly's own validators refuse a misspelt key or a value that cannot be."""
    import plotly.graph_objects as go

    store = made_run(
        PROMPTS, say=same, arms={"eagle": (1, 2, 3), "ngram": (3,)}, concurrency=(1, 4)
    )
    figures = Reader(made_page(store)).json("figures")
    assert {name.rpartition("-")[0] for name in figures} == {
        *("speedup", "acceptance", "positions", "steps", "category", "turn"),
        *("position", "prompt", "latency", "ttft", "tpot", "concurrency"),
    }
    for figure in figures.values():
        go.Figure(data=figure["data"], layout=figure["layout"])


def test_the_speedup_figure_shows_the_values_and_intervals_of_the_rows(made_run: Made) -> None:
    store = made_run(PROMPTS, say=same)
    drawn, predicted = Reader(made_page(store)).json("figures")["speedup-0"]["data"]
    rows = [row for row in findings(store).rows if not row.is_baseline]
    for place, row in enumerate(rows):
        assert row.speedup is not None
        ratio = row.speedup.tpot
        assert ratio is not None
        assert ratio.like_these is not None
        assert drawn["x"][place] == pytest.approx(row.k)
        assert drawn["y"][place] == pytest.approx(ratio.value)
        low = ratio.value - drawn["error_y"]["arrayminus"][place]
        assert low == pytest.approx(ratio.like_these.low)
    assert predicted["x"] == [1, 2, 3]


def ratio(value: float, low: float, high: float) -> Ratio:
    return Ratio(value, Interval(low, high), None, 6, 1, None)


def test_an_axis_holds_its_intervals_but_lets_no_wide_one_hide_the_values() -> None:
    narrow = span([ratio(1.4, 1.3, 1.5), ratio(1.2, 1.1, 1.3), None])
    assert narrow.low < 1
    assert 1.5 < narrow.high < 1.6
    assert narrow.note == ""
    wide = span([ratio(1.4, 0.7, 40)])
    assert 1.8 < wide.high < 2.1
    assert "beyond the plot" in wide.note
    assert span([]).low < 1 < span([]).high


def test_a_run_of_which_nothing_was_measured_still_has_a_page(made_run: Made) -> None:
    reader = Reader(made_page(made_run([], say=same)))
    assert "What this run cannot show" in reader.text
    assert "No arm was measured beside a baseline" in reader.text
    assert "Outputs side by side" in reader.text


def test_a_run_of_a_baseline_alone_compares_it_with_nothing(made_run: Made) -> None:
    reader = Reader(made_page(made_run(PROMPTS, say=same, arms={})))
    (index,) = reader.json("indexes")
    assert index["arms"] == ["vanilla"]
    assert index["prompts"][0][3:] == [[None], [None]]
    assert reader.json("texts-0-0")[0]["T"] == [same("", PROMPTS[0], 0)]
    assert "latency-0" in reader.json("figures")
    assert "speedup-0" not in reader.json("figures")


def test_an_unfinished_run_and_a_flag_are_in_plain_sight(made_run: Made) -> None:
    store = made_run(PROMPTS, say=same)
    (store.path / "done.json").unlink()
    lines = (store.path / "cases/eagle-k1.c1/requests.jsonl").read_text(encoding="utf-8")
    short = "".join(lines.splitlines(keepends=True)[:-3])
    (store.path / "cases/eagle-k1.c1/requests.jsonl").write_text(short, encoding="utf-8")
    text = Reader(made_page(store)).text
    answer = text.partition("Speed-up against k How many")[0]
    assert "This run is unfinished" in answer
    assert "13 of 16 requests measured" in answer
    assert "eagle-k1 on he" in answer


def test_a_finding_about_many_rows_names_a_few(made_run: Made) -> None:
    store = made_run(PROMPTS, say=same, arms={"eagle": (1, 2, 3, 4)}, max_tokens=99)
    text = Reader(made_page(store)).text
    assert "max_tokens is 99, 24 was sent (vanilla on he" in text
    assert " and 2 more)" in text


def test_flagged_rows_are_not_taken_for_one_concurrency(made_run: Made) -> None:
    store = made_run(PROMPTS, say=same, concurrency=(1, 4), max_tokens=99)
    text = Reader(made_page(store)).text
    assert "No method has an unflagged speed-up at more than one concurrency" in text


def test_the_table_holds_every_row_with_what_it_sorts_by(made_run: Made) -> None:
    store = made_run(PROMPTS, say=same, concurrency=(1, 4))
    text = made_page(store)
    body = text.partition('<table id="rows"')[2].partition("</table>")[0]
    assert body.count("<tr") == 1 + 6
    (first, *_) = findings(store).rows
    assert f'data-v="{first.metrics.latency_ms}"' in body


# --- hostile text --------------------------------------------------------------------------------

HOSTILE = '</script><script>alert(1)</script><img src=x onerror="alert(1)"> & \u2028 \u202e'


def test_no_text_ends_an_element_or_begins_one(made_run: Made) -> None:
    evil = [Prompt(id=HOSTILE + str(i), turns=(HOSTILE,), category=HOSTILE) for i in range(3)]
    text = made_page(made_run(evil, say=lambda *_: HOSTILE))
    assert "<img" not in text.rpartition('id="plotly">')[0]
    assert "alert(1)</script>" not in text
    assert Reader(text).json("texts-0-0")[0]["q"] == [HOSTILE]


def test_names_that_plotly_would_take_for_markup_are_escaped(made_run: Made) -> None:
    named = [
        Prompt(id=str(i), turns=("q",), category=f'<a href="javascript:{i % 2}">x</a>')
        for i in range(4)
    ]
    bars = Reader(made_page(made_run(named, say=same))).json("figures")["category-0"]
    assert bars["layout"]["yaxis"]["ticktext"][0] == '&lt;a href="javascript:0"&gt;x&lt;/a&gt;'
    assert not any("<" in text for bar in bars["data"] for text in bar["hovertext"])


@settings(max_examples=50)
@given(st.recursive(st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_json_in_the_page_comes_out_as_it_went_in_and_holds_no_markup(value: Any) -> None:  # noqa: ANN401
    text = document._json([value])
    assert not set("<>&\u2028\u2029") & set(text)
    text.encode()
    assert json.loads(text) == [value]


# --- outputs side by side ------------------------------------------------------------------------


def texts_of(store: RunStore) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    reader = Reader(made_page(store))
    (index,) = reader.json("indexes")
    return index, reader.json("texts-0-0")


def test_equal_outputs_are_kept_once_and_said_to_be_the_same(made_run: Made) -> None:
    index, entries = texts_of(made_run(PROMPTS, say=same))
    assert [prompt[4] for prompt in index["prompts"]] == [[[1, 1, None]] * 2] * 16
    assert all(len(entry["T"]) == 1 for entry in entries)
    assert entries[1]["q"] == ["Say 0", "And more"]


def test_the_first_difference_is_counted_in_tokens(made_run: Made) -> None:
    index, entries = texts_of(made_run(PROMPTS, say=differs))
    tokens = len(re.findall(r"\s?\S+|\s", same("", PROMPTS[0], 0)))
    assert index["prompts"][0][4][0] == [1, 0, tokens - 1]
    answer = entries[0]["A"]["0"]
    base = entries[0]["B"][answer["b"]]
    assert entries[0]["T"][answer["t"]] == differs("eagle-k1", PROMPTS[0], 0)
    assert entries[0]["T"][base["t"]] == same("vanilla", PROMPTS[0], 0)


def test_every_step_has_its_piece_of_text_and_its_drafts(made_run: Made) -> None:
    store = made_run(PROMPTS, say=same)
    index, entries = texts_of(store)
    assert index["pieces"] is True
    answer = entries[0]["A"]["1"]
    record = next(iter(store.requests("eagle-k3.c1")))
    assert record.spec is not None
    assert answer["l"] == list(record.chunk_chars or ())
    assert answer["a"] == [0, *(record.spec.per_step_accepted or ())]
    assert answer["d"] == 3
    assert "s" not in answer


def stepped(
    record: Callable[..., RequestRecord], chunks: list[int], accepted: list[int], k: int = 3
) -> steps.Told | None:
    """An answer read in *chunks* of tokens, of steps that accepted so many of *k* drafts."""
    spec = SpecRequest(
        drafts=len(accepted),
        draft_tokens=k * len(accepted),
        accepted=sum(accepted),
        per_step_accepted=tuple(accepted),
        per_step_drafted=(k,) * len(accepted),
    )
    return steps.told(
        record(chunks=range(len(chunks)), chunk_tokens=tuple(chunks), tokens=sum(chunks), spec=spec)
    )


def test_each_chunk_is_a_step(record: Callable[..., RequestRecord]) -> None:
    found = stepped(record, [1, 3, 1, 4], [2, 0, 3])
    assert found == steps.Told([0, 2, 0, 3], [0, 3, 3, 3], [0, 1, 1, 1])


def test_steps_that_arrived_together_are_told_together(
    record: Callable[..., RequestRecord],
) -> None:
    found = stepped(record, [4, 1, 6], [2, 0, 2, 2])
    assert found == steps.Told([2, 0, 4], [3, 3, 6], [1, 1, 2])


def test_the_last_step_may_have_made_more_than_was_asked_for(
    record: Callable[..., RequestRecord],
) -> None:
    found = stepped(record, [1, 2, 1], [1, 3])
    assert found == steps.Told([0, 1, 3], [0, 3, 3], [0, 1, 1])


def test_steps_without_a_draft_are_known_when_no_draft_was_in_vain(
    record: Callable[..., RequestRecord],
) -> None:
    """n-gram on vLLM 0.32 lists drafting steps only."""
    found = stepped(record, [1, 1, 4, 1, 2], [3, 1])
    assert found == steps.Told([0, 0, 3, 0, 1], [0, 0, 3, 0, 3], [0, 1, 1, 1, 1])


def test_what_nobody_knows_is_not_made_up(record: Callable[..., RequestRecord]) -> None:
    found = stepped(record, [1, 1, 4, 1, 1], [3, 0])
    assert found == steps.Told([0, 0, 3, 0, 0], [0, None, 3, None, None], [0, 1, 1, 1, 1])
    assert stepped(record, [1, 5, 4], [3, 3]) is None
    assert stepped(record, [3, 1, 1], [3, 0]) is None


@given(st.lists(st.integers(0, 3), max_size=12), st.data())
def test_whatever_was_read_together_all_steps_are_told(
    accepted: list[int], data: st.DataObject
) -> None:
    """Chunks made by cutting a list of steps anywhere hold these steps again."""
    cuts = sorted(data.draw(st.sets(st.integers(0, len(accepted)))) | {0, len(accepted)})
    parts = [accepted[a:b] for a, b in itertools.pairwise([0, *cuts])]
    counts = [sum(a + 1 for a in part) for part in parts]
    counts = [1 + counts[0], *(count for count in counts[1:] if count)]
    found = steps._all_listed(counts, [(a, 3) for a in accepted])
    assert found is not None
    assert sum(found.accepted) == sum(accepted)
    assert sum(found.steps) == len(accepted)


def test_a_run_from_before_pieces_were_kept_says_so(made_run: Made) -> None:
    store = made_run(PROMPTS, say=same)
    for path in store.path.glob("cases/*/requests.jsonl"):
        old = re.sub(r'"chunk_chars":\[[^]]*\],', "", path.read_text(encoding="utf-8"))
        path.write_text(old, encoding="utf-8")
    index, entries = texts_of(store)
    assert index["pieces"] is False
    assert "l" not in entries[0]["A"]["0"]


@given(st.lists(st.text(max_size=4), min_size=1, max_size=8))
def test_lengths_of_pieces_are_those_of_the_scripts_strings(pieces: list[str]) -> None:
    record = RequestRecord(
        prompt_id="p",
        sent_ns=0,
        end_ns=1,
        prompt_sha256="",
        text="".join(pieces),
        chunk_chars=tuple(map(len, pieces)),
        chunk_ns=tuple(range(len(pieces))),
    )
    units = record.text.encode("utf-16-le", "surrogatepass")
    at = 0
    for piece, length in zip(pieces, prompts._pieces(record) or (), strict=True):
        assert units[2 * at : 2 * (at + length)] == piece.encode("utf-16-le", "surrogatepass")
        at += length


def test_pieces_that_do_not_make_up_the_text_are_not_used() -> None:
    record = RequestRecord(
        prompt_id="p",
        sent_ns=0,
        end_ns=1,
        prompt_sha256="",
        text="abc",
        chunk_chars=(1, 1),
        chunk_ns=(0, 1),
    )
    assert prompts._pieces(record) is None


def test_above_its_size_the_page_says_what_it_leaves_out(
    made_run: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An entry here has 3 answers; what differs goes in first."""
    monkeypatch.setattr(prompts.Budget, "__init__", _small)
    only_last = PROMPTS[-1].id
    store = made_run(
        PROMPTS, say=lambda arm, p, turn: (differs if p.id == only_last else same)(arm, p, turn)
    )
    reader = Reader(made_page(store))
    kept = [prompt[0] for prompt in reader.json("indexes")[0]["prompts"]]
    assert kept == ["p/0", only_last, only_last]
    assert f"The texts of {13 * 3} requests are left out" in reader.text
    assert reader.json("figures")["latency-0"]["data"][0]["y"][1] == pytest.approx(1 / 16, abs=1e-4)


def _small(self: prompts.Budget) -> None:
    self.requests, self.characters, self.left_out = 9, 10**6, 0


# --- published curves ----------------------------------------------------------------------------


def pair(target: str, method: str, draft: str) -> dict[str, Any]:
    return {"model": target, "speculation": [{"method": method, "model": draft, "k": [1]}]}


LLAMA3 = pair("meta-llama/Meta-Llama-3-8B-Instruct", "eagle", "yuhuili/EAGLE-LLaMA3-Instruct-8B")


@pytest.mark.parametrize(("tokens", "used"), [(256, 256), (512, 512), (64, 512)])
def test_a_known_pair_has_the_curve_of_its_output_length(tokens: int, used: int) -> None:
    found = published.beside(LLAMA3, tokens)
    assert len(found) == 2
    assert {curve.max_tokens for curve in found} == {used}


def test_another_draft_or_method_has_no_published_curve() -> None:
    assert published.beside(pair(LLAMA3["model"], "eagle", "mine"), 256) == []
    draft = "yuhuili/EAGLE-LLaMA3-Instruct-8B"
    assert published.beside(pair(LLAMA3["model"], "eagle3", draft), 256) == []
    assert published.beside({"model": LLAMA3["model"]}, 256) == []


@pytest.mark.parametrize("curve", published.everything(), ids=lambda curve: curve.name)
def test_every_published_number_has_a_source_and_can_be(curve: published.Published) -> None:
    assert curve.url.startswith("https://")
    assert curve.source
    assert all(1 <= length <= k + 1 for k, length in curve.acceptance_length.items())


def test_published_curves_stand_in_the_acceptance_figure_with_their_source(made_run: Made) -> None:
    reader = Reader(made_page(made_run(PROMPTS, say=same, config={**_config(), **LLAMA3})))
    names = [trace["name"] for trace in reader.json("figures")["acceptance-0"]["data"]]
    assert sum(name.startswith("published: ") for name in names) == 2
    assert "vLLM pull request 16035" in reader.text


def _config() -> dict[str, Any]:
    return {
        "prompts": [{"set": "he"}],
        "max_tokens": [24],
        "schedule": "interleaved",
        "sampling": {"temperature": 0.0, "ignore_eos": False},
    }


# --- provenance ----------------------------------------------------------------------------------


def test_secrets_stay_out_of_the_page(made_run: Made) -> None:
    text = made_page(made_run(PROMPTS, say=same))
    assert "hush" not in text
    assert "--api-key &#39;(not shown)&#39;" in text
    assert "OMP_NUM_THREADS=1" in text


def test_the_config_in_the_page_is_one_that_runs(made_run: Made, tmp_path: Path) -> None:
    path = Path(__file__).parents[1] / "configs" / "demo.yaml"
    config = configs.load(path).model_dump(mode="json")
    store = made_run(PROMPTS, say=same, config=config)
    again = tmp_path / "again.yaml"
    again.write_text(provenance.provenance(store).config, encoding="utf-8")
    assert configs.load(again).model_dump(mode="json") == config


def test_the_command_is_there_to_copy(made_run: Made) -> None:
    store = made_run(PROMPTS, say=same, command=["specbench", "run", "--set", "a b=1"])
    assert provenance.provenance(store).again == ["specbench run --set 'a b=1'"]


# --- the command ---------------------------------------------------------------------------------


def test_report_writes_the_page(made_run: Made, tmp_path: Path) -> None:
    store = made_run(PROMPTS, say=same)
    out = tmp_path / "report.html"
    command = ["report", str(store.path), "--format", "html", "-o", str(out)]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")


def test_a_page_shows_every_split_so_by_is_refused(made_run: Made) -> None:
    store = made_run(PROMPTS, say=same)
    command = ["report", str(store.path), "--format", "html", "--by", "category"]
    done = CliRunner().invoke(app, command)
    assert isinstance(done.exception, UserError)
    assert "leave it out" in str(done.exception)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_page_is_not_poured_into_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", Terminal())
    with pytest.raises(UserError, match=r"-o report\.html"):
        report_command._check_html(None, None)
    report_command._check_html(None, Path("report.html"))
