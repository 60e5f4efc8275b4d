"""A pinned baseline says what its run says, is small, and a broken one is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specbench import baseline
from specbench.analysis.compare import compare
from specbench.analysis.snapshot import Snapshot
from specbench.errors import StoreError
from specbench.records import Prompt
from specbench.store import RunStore

PROMPTS = [Prompt(id=f"he/{i}", turns=(f"question {i}",)) for i in range(6)]


def say(_arm: str, prompt: Prompt, _turn: int) -> str:
    return f"{prompt.turns[0]} and twenty words more " * 3


@pytest.fixture
def run(made_run: Callable[..., RunStore]) -> RunStore:
    return made_run(PROMPTS, say=say)


@pytest.fixture
def kept(run: RunStore) -> Snapshot:
    for path in (run.path / "engines").glob("*/engine.json"):
        text = path.read_text(encoding="utf-8")
        text = text.replace(
            '"--api-key",', '"--hf-token", "hush", "--draft", "/home/me/head", "--api-key",'
        )
        path.write_text(text, encoding="utf-8")
    return baseline.of_run(run)


def test_a_saved_run_compares_as_the_run_itself(kept: Snapshot, tmp_path: Path) -> None:
    path = tmp_path / "baselines" / "made.json"
    baseline.save(kept, path)
    back = baseline.load(path)
    assert {**dict(back), "rows": ()} == {**dict(kept), "rows": ()}
    assert [one.key for one in back.rows] == [one.key for one in kept.rows]
    for one, other in zip(back.rows, kept.rows, strict=True):
        assert one.figures == pytest.approx(other.figures, rel=1e-3)
        assert one.series.keys() == other.series.keys()
        for name, series in one.series.items():
            assert series.by_prompt == pytest.approx(other.series[name].by_prompt, abs=6e-5)
            assert series.starts == pytest.approx(other.series[name].starts, abs=6e-6)
    for row in compare(back, kept).rows:
        assert row.refused == ()
        for change in row.changes:
            assert abs(change.change) < 1e-4
            assert change.verdict in ("no difference shown", "no interval")


def test_the_file_is_a_line_a_row_and_the_same_each_time(kept: Snapshot) -> None:
    text = baseline.as_text(kept)
    assert text == baseline.as_text(Snapshot.model_validate_json(kept.model_dump_json()))
    lines = text.splitlines()
    about_arms = [line for line in lines if line.startswith('  {"arm"')]
    assert len(about_arms) == len(kept.rows) == 3
    assert '"figures": {"speedup": ' in about_arms[1]
    of_series = sum(len(row.series) for row in kept.rows)
    assert len(lines) == 30 + of_series + len(about_arms) - 3 - 3
    assert max(map(len, lines)) < 700
    assert json.loads(text)["format"] == 1


def test_it_holds_no_prompt_no_output_and_no_path(kept: Snapshot) -> None:
    text = baseline.as_text(kept)
    assert "question" not in text
    assert "twenty words" not in text
    assert "hush" not in text  # what tests/conftest.py starts its engines with
    assert "/home/" not in text
    assert '"--draft": "head"' in text


def test_a_baseline_is_not_overwritten_by_chance(kept: Snapshot, tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    baseline.save(kept, path)
    before = path.read_bytes()
    with pytest.raises(StoreError, match=r"is there already; --replace"):
        baseline.save(kept, path)
    assert path.read_bytes() == before
    baseline.save(kept, path, replace=True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.pop("rows"), "is no pinned baseline; make one: specbench baseline save"),
        (lambda d: d.update(format=2), "has format 2, this specbench reads 1"),
        (lambda d: d["rows"][0].update(k="three"), "rows.0.k: "),
        (lambda d: d["rows"][0].update(kk=3), "rows.0.kk: "),
        (lambda d: d["series"][0]["logs"].pop(), "series and prompts do not fit together"),
        (lambda d: d["series"][0].update(row=99), "series and prompts do not fit together"),
        (lambda d: d.pop("series"), "series and prompts do not fit together"),
        (lambda d: d["prompts"].clear(), "series and prompts do not fit together"),
    ],
)
def test_a_file_that_an_edit_broke_is_refused_with_its_place(
    kept: Snapshot, tmp_path: Path, change: Callable[[Any], Any], said: str
) -> None:
    document = json.loads(baseline.as_text(kept))
    change(document)
    path = tmp_path / "b.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(StoreError) as error:
        baseline.read(path)
    assert str(error.value).startswith(f"{path}")
    assert said in str(error.value)


@pytest.mark.parametrize("text", ["", "{", "[]", '"rows"', "null"])
def test_what_is_no_baseline_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "b.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(StoreError, match=r"b\.json"):
        baseline.read(path)


def test_a_baseline_that_is_not_there_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"is not there; pin a run: specbench baseline save RUN"):
        baseline.read(tmp_path / "b.json")
    with pytest.raises(StoreError, match=r"holds no run"):
        baseline.read(tmp_path / "run")
