"""Keeping runs: list, show, delete, and a run as one .zip that a stranger may have made."""

import json
import os
import shutil
import stat
import struct
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from specbench import archive, cli, runs
from specbench.errors import StoreError, UserError
from specbench.records import Prompt
from specbench.store import RunStore

PROMPTS = [Prompt(id="a", turns=("Name rivers.",)), Prompt(id="b", turns=("Why rise?",))]


@pytest.fixture
def run(made_run: Callable[..., RunStore]) -> RunStore:
    return made_run(PROMPTS, say=lambda *_: "some words are said here")


@pytest.fixture
def zipped(run: RunStore, tmp_path: Path) -> Path:
    path = tmp_path / "made.zip"
    archive.export_zip(run.path, path)
    return path


def run_cli(*args: str, stdin: str = "") -> int:
    import io

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["specbench", *args])
        patch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as end:
            cli.main()
    return int(end.value.code or 0)


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


# --- list and show ----------------------------------------------------------------------------


def test_a_list_says_what_each_run_is(run: RunStore, tmp_path: Path) -> None:
    (one,) = runs.list_runs(tmp_path)
    assert (one.id, one.config, one.status) == ("made", "made", "ok")
    assert one.arms == ("vanilla", "eagle-k1", "eagle-k3")
    assert one.requests == 6
    assert one.bytes == sum(map(len, files(run.path).values()))
    head, row = runs.as_lines([one])
    assert head.split() == ["id", "began", "(UTC)", "config", "status", "arms", "requests", "size"]
    assert row.split()[0] == "made"


def test_runs_are_listed_by_when_they_began(run: RunStore, tmp_path: Path) -> None:
    for id in ("20260102-000000-later", "20260101-120000-sooner"):
        shutil.copytree(run.path, tmp_path / id)
    found = [one.id for one in runs.list_runs(tmp_path)]
    assert found.index("20260101-120000-sooner") < found.index("20260102-000000-later")
    assert runs.list_runs(tmp_path)[0].when == "2026-01-01T12:00:00+00:00"


def test_a_run_in_progress_is_running_and_an_abandoned_one_unfinished(
    run: RunStore, tmp_path: Path
) -> None:
    (run.path / "done.json").unlink()
    with run:
        assert runs.list_runs(tmp_path)[0].status == "running"
    assert runs.list_runs(tmp_path)[0].status == "unfinished"


def test_a_run_that_cannot_be_read_is_listed_with_its_reason(tmp_path: Path) -> None:
    for id, text in (("torn", '{"format": 1'), ("old", '{"format": 0}'), ("odd", "[]")):
        (tmp_path / id).mkdir()
        (tmp_path / id / "run.json").write_text(text, encoding="utf-8")
    found = {one.id: one for one in runs.list_runs(tmp_path)}
    assert {one.status for one in found.values()} == {"unreadable"}
    assert "format 0" in str(found["old"].problem)
    assert any(line.startswith("torn: ") for line in runs.as_lines(list(found.values())))


def test_names_in_a_list_cannot_write_to_the_terminal(run: RunStore, tmp_path: Path) -> None:
    run.amend({"config_path": "x\x1b[31m.yaml"})
    assert "\x1b" not in "\n".join(runs.as_lines(runs.list_runs(tmp_path)))
    assert "\x1b" not in "\n".join(runs.details_lines(runs.details(run.path)))


def test_show_names_every_case_and_what_went_wrong(run: RunStore) -> None:
    run.finish_case("vanilla.c1", "failed", "the engine died\nwith more lines")
    about = runs.details(run.path)
    assert [case["status"] for case in about["cases"]] == ["failed", "ok", "ok"]
    lines = "\n".join(runs.details_lines(about))
    assert "vanilla.c1: failed, 2 requests: the engine died" in lines
    assert "more lines" not in lines
    json.dumps(about)


@pytest.mark.parametrize(
    "name", ["..", ".", "../made", "made/../made", "", "a\nb", "a/b", "/etc", ".hidden", "nothing"]
)
def test_an_id_that_is_no_runs_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(StoreError):
        runs.folder_of(tmp_path / "results", name)


# --- delete -----------------------------------------------------------------------------------


def test_a_deleted_run_is_gone(run: RunStore, tmp_path: Path) -> None:
    runs.delete(tmp_path, run.path)
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_being_written_to_is_not_deleted(run: RunStore, tmp_path: Path) -> None:
    before = files(run.path)
    with run, pytest.raises(StoreError, match="Another specbench"):
        runs.delete(tmp_path, RunStore.open(run.path).path)
    assert files(run.path) == before


def test_only_runs_of_results_are_deleted(run: RunStore, tmp_path: Path) -> None:
    elsewhere = tmp_path / "results"
    elsewhere.mkdir()
    (elsewhere / "link").symlink_to(run.path)
    for folder in (run.path, elsewhere / "link", elsewhere / ".." / "made"):
        with pytest.raises(StoreError, match="no folder of"):
            runs.delete(elsewhere, folder)
    assert (run.path / "run.json").is_file()


def test_delete_asks(run: RunStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = ["--results", str(tmp_path)]
    assert run_cli("runs", "delete", "made", *results, stdin="n\n") == 2
    assert "Nothing was deleted" in capsys.readouterr().err
    assert run_cli("runs", "delete", "made", *results, stdin="") == 2
    assert run.path.is_dir()
    assert run_cli("runs", "delete", "made", *results, stdin="y\n") == 0
    assert not run.path.exists()


def test_one_bad_name_deletes_nothing(run: RunStore, tmp_path: Path) -> None:
    assert run_cli("runs", "delete", "made", "..", "--yes", "--results", str(tmp_path)) == 2
    assert run.path.is_dir()


# --- a zip and back ---------------------------------------------------------------------------


def test_a_run_comes_out_of_its_zip_byte_for_byte(
    run: RunStore, zipped: Path, tmp_path: Path
) -> None:
    with run:  # leaves its lock behind, which is no part of the run
        pass
    folder = archive.import_zip(zipped, tmp_path / "other")
    assert folder == tmp_path / "other" / "made"
    kept = {k: v for k, v in files(run.path).items() if k != "lock"}
    assert files(folder) == kept
    assert list((tmp_path / "other").iterdir()) == [folder]


def test_an_id_that_is_taken_is_refused(run: RunStore, zipped: Path, tmp_path: Path) -> None:
    before = files(run.path)
    with pytest.raises(StoreError, match="is taken"):
        archive.import_zip(zipped, tmp_path)
    assert files(run.path) == before


def test_a_zip_is_never_overwritten_and_never_half_there(run: RunStore, tmp_path: Path) -> None:
    path = tmp_path / "x.zip"
    path.write_text("mine", encoding="utf-8")
    with pytest.raises(StoreError, match="is there already"):
        archive.export_zip(run.path, path)
    assert path.read_text(encoding="utf-8") == "mine"
    with pytest.raises(StoreError, match="can't be written"):
        archive.export_zip(run.path, tmp_path / "nowhere" / "x.zip")
    with run, pytest.raises(StoreError, match="Another specbench"):
        archive.export_zip(run.path, tmp_path / "y.zip")
    assert {one.name for one in tmp_path.iterdir()} == {"made", "x.zip"}


def test_links_are_not_exported(run: RunStore, tmp_path: Path) -> None:
    (run.path / "secret").symlink_to("/etc/passwd")
    (run.path / "folder").symlink_to("/etc")
    archive.export_zip(run.path, tmp_path / "x.zip")
    names = zipfile.ZipFile(tmp_path / "x.zip").namelist()
    assert not [name for name in names if "secret" in name or "folder" in name]


def rezipped(zipped: Path, change: Callable[[zipfile.ZipFile, dict[str, bytes]], None]) -> Path:
    """The zip with its files as *change* leaves them; *change* may also write entries itself."""
    with zipfile.ZipFile(zipped) as old:
        contents = {name: old.read(name) for name in old.namelist()}
    path = zipped.with_name("hostile.zip")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        change(new, contents)
        for name, data in contents.items():
            new.writestr(name, data)
    return path


def entry(name: str, mode: int = 0) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo("x")
    info.filename = info.orig_filename = name
    info.external_attr = mode << 16
    return info


def odd_request(**odd: int) -> bytes:
    usual = {"prompt_id": "a", "sent_ns": 0, "end_ns": 9, "chunk_ns": [3, 9], "prompt_sha256": ""}
    return json.dumps(usual | odd).encode() + b"\n"


HOSTILE: dict[str, Callable[[zipfile.ZipFile, dict[str, bytes]], object]] = {
    "climbs out": lambda new, _: new.writestr(entry("made/../../evil"), "x"),
    "climbs out at once": lambda new, _: new.writestr(entry("../evil"), "x"),
    "absolute": lambda new, _: new.writestr(entry("/tmp/evil"), "x"),
    "a drive": lambda new, _: new.writestr(entry("C:evil"), "x"),
    "backslashes": lambda new, _: new.writestr(entry("made\\..\\..\\evil"), "x"),
    "a dot": lambda new, _: new.writestr(entry("made/./evil"), "x"),
    "nothing between slashes": lambda new, _: new.writestr(entry("made//evil"), "x"),
    "a control character": lambda new, _: new.writestr(entry("made/e\x1b[31mvil"), "x"),
    "a very long name": lambda new, _: new.writestr(entry("made/" + "e" * 300), "x"),
    "very deep": lambda new, _: new.writestr(entry("made/" + "e/" * 30 + "vil"), "x"),
    "a link": lambda new, _: new.writestr(entry("made/evil", stat.S_IFLNK | 0o777), "/etc/passwd"),
    "a device": lambda new, _: new.writestr(entry("made/evil", stat.S_IFCHR | 0o666), ""),
    "a folder that is a file": lambda new, _: new.writestr(entry("made/x/", stat.S_IFREG), ""),
    "a second run": lambda new, _: new.writestr(entry("other/run.json"), "{}"),
    "a file beside the run": lambda new, _: new.writestr(entry("readme.txt"), "x"),
    "no run.json": lambda _, contents: contents.pop("made/run.json"),
    "run.json is no JSON": lambda _, contents: contents.update({"made/run.json": b"{"}),
    "another format": lambda _, contents: contents.update({"made/run.json": b'{"format": 99}'}),
    "a torn middle line": lambda _, contents: contents.update(
        {"made/cases/vanilla.c1/requests.jsonl": b"{\n{}\n"}
    ),
    "a request before it was sent": lambda _, contents: contents.update(
        {"made/cases/vanilla.c1/requests.jsonl": odd_request(sent_ns=10**18)}
    ),
    "more tokens than there are": lambda _, contents: contents.update(
        {"made/cases/vanilla.c1/requests.jsonl": odd_request(output_tokens=10**30)}
    ),
    "a status that is none": lambda _, contents: contents.update({"made/done.json": b'{"a": 1}'}),
    "a request without a chunk": lambda _, contents: contents.update(
        {
            "made/cases/vanilla.c1/requests.jsonl": (
                b'{"prompt_id": "a", "sent_ns": 0, "end_ns": 1, "prompt_sha256": ""}\n'
            )
        }
    ),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_zip_is_refused_and_leaves_nothing(
    zipped: Path, tmp_path: Path, kind: str
) -> None:
    path = rezipped(zipped, HOSTILE[kind])  # type: ignore[arg-type]  # they return what is written
    results = tmp_path / "deep" / "results"
    with pytest.raises(StoreError):
        archive.import_zip(path, results)
    assert not results.exists() or list(results.iterdir()) == []
    assert {one.name for one in tmp_path.iterdir()} <= {"made", "made.zip", "hostile.zip", "deep"}


def test_a_name_that_stands_twice_is_refused(zipped: Path, tmp_path: Path) -> None:
    def twice(new: zipfile.ZipFile, contents: dict[str, bytes]) -> None:
        new.writestr("made/run.json", contents["made/run.json"])

    with pytest.warns(UserWarning, match="Duplicate name"):
        path = rezipped(zipped, twice)
    with pytest.raises(StoreError, match="stands twice"):
        archive.import_zip(path, tmp_path / "results")


def document(contents: dict[str, bytes]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(contents["made/run.json"])
    return found


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (("cases", 0, "id"), "../../../../etc"),
        (("cases", 0, "id"), "a/b"),
        (("cases", 0, "arm"), "nobody"),
        (("cases", 0, "prompt_set"), "../x"),
        (("cases", 0, "concurrency"), "many"),
        (("cases", 0, "max_tokens"), {}),
        (("cases",), {}),
        (("arms", 0), ".."),
        (("methods",), []),
        (("prompt_sets",), {"../he": {"sha256": "", "prompts": 1}}),
        (("config", "sampling"), None),
        (("config", "model"), 5),
        (("machine", "gpus"), "none"),
        (("config", "schedule"), 5),
        (("config", "precision"), {"within": 0.1, "of": "anything"}),
        (("config", "sampling", "temperature"), None),
        (("command",), [5]),
        (("cases", 0, "id"), "a\x1b[31m"),
        (("id",), "another"),
        (("id",), "../made"),
    ],
)
def test_a_run_json_that_leads_elsewhere_or_is_none_is_refused(
    zipped: Path, tmp_path: Path, key: tuple[str | int, ...], value: object
) -> None:
    def change(_: zipfile.ZipFile, contents: dict[str, bytes]) -> None:
        whole = document(contents)
        inside: Any = whole
        for part in key[:-1]:
            inside = inside[part]
        inside[key[-1]] = value
        contents["made/run.json"] = json.dumps(whole).encode()

    path = rezipped(zipped, change)
    with pytest.raises(StoreError, match=r"hostile.zip") as error:
        archive.import_zip(path, tmp_path / "results")
    assert str(error.value).isprintable()
    assert list((tmp_path / "results").iterdir()) == []


def test_a_bomb_is_refused_before_it_goes_off(
    zipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "FREE_OF_RATIO", 1 << 20)

    def bomb(new: zipfile.ZipFile, _: dict[str, bytes]) -> None:
        new.writestr("made/cases/vanilla.c1/bomb", bytes(20 << 20))

    path = rezipped(zipped, bomb)
    assert path.stat().st_size < 40_000
    with pytest.raises(StoreError, match="are no run"):
        archive.import_zip(path, tmp_path / "results")
    assert not (tmp_path / "results").exists()


def test_a_bomb_that_lies_about_its_size_fills_nothing(
    zipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory says 10 bytes; 20 MiB would come out."""
    monkeypatch.setattr(archive, "FREE_OF_RATIO", 1 << 20)

    def bomb(new: zipfile.ZipFile, _: dict[str, bytes]) -> None:
        new.writestr("made/bomb", bytes(20 << 20))

    path = rezipped(zipped, bomb)
    raw = path.read_bytes()
    path.write_bytes(raw.replace(struct.pack("<I", 20 << 20), struct.pack("<I", 10)))
    with pytest.raises(StoreError):
        archive.import_zip(path, tmp_path / "results")
    assert list((tmp_path / "results").iterdir()) == []


def test_too_many_entries_are_refused(
    zipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "MOST_ENTRIES", 5)
    with pytest.raises(StoreError, match="more than 5"):
        archive.import_zip(zipped, tmp_path / "results")


def test_an_import_that_breaks_off_leaves_nothing(
    zipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(archive, "_copy", full)
    with pytest.raises(StoreError, match="No space left"):
        archive.import_zip(zipped, tmp_path / "results")
    assert list((tmp_path / "results").iterdir()) == []


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_a_zip_with_any_bytes_changed_is_a_run_or_a_user_error(
    zipped: Path, data: st.DataObject
) -> None:
    raw = bytearray(zipped.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(raw)))
    survives(bytes(raw[:cut] if data.draw(st.booleans()) else raw))


@settings(max_examples=50, deadline=None)
@given(raw=st.binary(max_size=200))
@example(raw=b"PK\x05\x06" + bytes(18))
def test_any_bytes_are_no_zip_of_a_run(raw: bytes) -> None:
    survives(raw)


def survives(raw: bytes) -> None:
    with tempfile.TemporaryDirectory() as made:
        path, results = Path(made, "any.zip"), Path(made, "results")
        path.write_bytes(raw)
        try:
            folder = archive.import_zip(path, results)
        except UserError:
            assert not results.exists() or list(results.iterdir()) == []
        else:
            assert list(results.iterdir()) == [folder]
        assert {one.name for one in Path(made).iterdir()} <= {"any.zip", "results"}


# --- the command line -------------------------------------------------------------------------


def test_the_life_of_a_run_by_the_command_line(
    run: RunStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results, other = ["--results", str(tmp_path)], ["--results", str(tmp_path / "other")]
    out = str(tmp_path / "x.zip")
    assert run_cli("runs", "list", "--json", *results) == 0
    (one,) = json.loads(capsys.readouterr().out)
    assert one["arms"] == ["vanilla", "eagle-k1", "eagle-k3"]
    assert run_cli("runs", "export", "made", "-o", out, *results) == 0
    assert run_cli("runs", "import", out, *other) == 0
    assert run_cli("runs", "import", out, *other) == 2
    capsys.readouterr()
    assert run_cli("runs", "show", "made", *other) == 0
    assert "arms      vanilla, eagle-k1, eagle-k3" in capsys.readouterr().out
    assert run_cli("runs", "show", str(run.path), "--json") == 0
    assert json.loads(capsys.readouterr().out)["id"] == "made"
    assert run_cli("runs", "delete", "made", "--yes", *other) == 0
    assert run_cli("runs", "list", *other) == 0
    assert "There is no run" in capsys.readouterr().err


@pytest.mark.engine
def test_the_shell_completes_runs_and_configs(run: RunStore, tmp_path: Path) -> None:
    """As bash asks: the answer of the program itself."""
    import subprocess

    def asked(line: str) -> list[str]:
        env = {**os.environ, "_SPECBENCH_COMPLETE": "complete_bash", "COMP_WORDS": line}
        env |= {"COMP_CWORD": str(len(line.split(" ")) - 1), "SPECBENCH_RESULTS": str(tmp_path)}
        code = "import sys; sys.argv = ['specbench']; from specbench.__main__ import main; main()"
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        return done.stdout.split()

    assert asked("specbench report m") == ["made"]
    assert asked("specbench runs show ma") == ["made"]
    assert {"eagle_k5", "eagle3_k5"} <= set(asked("specbench run --config eagle"))
    assert asked("specbench report *") == []
