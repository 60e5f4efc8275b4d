"""GenAI-Perf and AIPerf as load generators, on exports recorded from the real ones.

tests/data/genai_perf_0.0.16 and aiperf_0.13.0 hold one conversation of two turns and one single
prompt, measured on the demo's EAGLE arm (k = 2, 8 tokens). tests/engine/test_tools.py runs the
real tools.
"""

import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from specbench.config import Load, Sampling
from specbench.errors import LoadError
from specbench.load import tools
from specbench.load.aiperf import AIPerfClient
from specbench.load.clocks import Clocks, ClockWatch
from specbench.load.genai_perf import GenAIPerfClient
from specbench.load.tool_client import Job, Target, ToolClient
from specbench.load.tools import TOOLS, Installed
from specbench.records import Prompt, RequestRecord, ToolReport

DATA = Path(__file__).parent / "data"
TALK = Prompt(
    id="talk",
    turns=("What is the capital of France?", "And what is it known for? \n"),
    category="x",
)
DAYS = Prompt(id="days", turns=(" Name the days of the week.\n",))
KEY = "sEcReT-kEy"
TARGET = Target("http://127.0.0.1:1", "specbench", "/models/target", KEY)

# What stands in for a tool: it copies the recorded export to where the real one writes it.
STAND_IN = """#!{python}
import json, os, pathlib, shutil, sys
here = pathlib.Path({data!r})
argv = sys.argv[1:]
{body}
"""
GENAI_PERF = """
folder = pathlib.Path(argv[argv.index("--artifact-dir") + 1])
turn = int(folder.name.rpartition(".")[2]) + 1
out = folder / "specbench-openai-chat-concurrency1"
out.mkdir()
shutil.copy(here / f"turn{turn}_export.json", out / "profile_export.json")
shutil.copy(here / f"turn{turn}_summary.json", out / "profile_export_genai_perf.json")
print("called with", *argv)
"""
AIPERF = """
folder = pathlib.Path(argv[argv.index("--config") + 1]).parent / "out"
folder.mkdir()
shutil.copy(here / "raw.jsonl", folder / "profile_export_raw.jsonl")
shutil.copy(here / "summary.json", folder / "profile_export_aiperf.json")
print("the key is", os.environ["SPECBENCH_SERVER_KEY"])
"""


def stand_in(folder: Path, name: str, body: str) -> Installed:
    data = DATA / {"genai-perf": "genai_perf_0.0.16", "aiperf": "aiperf_0.13.0"}[name]
    program = folder / name
    program.write_text(STAND_IN.format(python=sys.executable, data=str(data), body=body))
    program.chmod(0o755)
    return Installed(TOOLS[name], program, TOOLS[name].version)


Send = Callable[..., tuple[list[ToolReport], list[RequestRecord]]]
KINDS: dict[str, tuple[type[ToolClient], str]] = {
    "genai-perf": (GenAIPerfClient, GENAI_PERF),
    "aiperf": (AIPerfClient, AIPERF),
}


def client(folder: Path, name: str, body: str | None = None, **load: Any) -> ToolClient:  # noqa: ANN401
    kind, usual = KINDS[name]
    tool = stand_in(folder, name, usual if body is None else body)
    return kind(
        tool,
        TARGET,
        sampling=Sampling(),
        load=Load.model_validate({"client": name, **load}),
        start=3,
    )


def send(
    one: ToolClient,
    folder: Path,
    prompts: list[Prompt],
    **how: Any,  # noqa: ANN401
) -> tuple[list[ToolReport], list[RequestRecord]]:
    records: list[RequestRecord] = []
    usual = {"max_tokens": 8, "concurrency": 1}
    reports = one.send(prompts, on_record=records.append, folder=folder / "case", **usual | how)
    return list(reports), records


@pytest.mark.parametrize("name", KINDS)
def test_an_export_becomes_the_records_that_our_own_client_would_give(
    tmp_path: Path, name: str
) -> None:
    reports, records = send(client(tmp_path, name), tmp_path, [TALK, DAYS])
    by_key = {(r.prompt_id, r.turn): r for r in records}
    assert set(by_key) == {("talk", 0), ("talk", 1), ("days", 0)}
    assert all(r.ok for r in records), [r.error for r in records]
    for record in records:
        assert record.start == 3
        assert record.sent_ns < record.chunk_ns[0] <= record.chunk_ns[-1] <= record.end_ns
        assert record.output_tokens == len(record.token_ids or ()) == sum(record.chunk_tokens or ())
        assert record.sampling is not None
        assert record.sampling["temperature"] == 0
        assert record.sampling["max_tokens"] == 8
        assert record.finish_reason in ("length", "stop")
    assert by_key["talk", 0].category == "x"
    assert by_key["talk", 0].text
    assert [key for report in reports for key in report.keys] == [r.key for r in records]


def test_both_tools_were_recorded_with_the_same_answers(tmp_path: Path) -> None:
    """Greedy sampling in float32: the same prompts (byte for byte) give the same tokens."""
    said = {}
    for name in KINDS:
        folder = tmp_path / name
        folder.mkdir()
        _, records = send(client(folder, name), folder, [TALK, DAYS])
        said[name] = {(r.prompt_id, r.turn): (r.token_ids, r.prompt_sha256) for r in records}
    assert said["genai-perf"] == said["aiperf"]


def test_genai_perf_counts_by_token_ids_and_aiperf_by_the_usage(tmp_path: Path) -> None:
    for name, source, has_metrics in (
        ("genai-perf", "token_ids", False),
        ("aiperf", "usage", True),
    ):
        folder = tmp_path / name
        folder.mkdir()
        _, records = send(client(folder, name), folder, [TALK, DAYS])
        assert {r.token_source for r in records} == {source}
        assert {r.spec is not None for r in records} == {has_metrics}


@pytest.mark.parametrize("name", KINDS)
def test_a_tools_own_figures_are_kept(tmp_path: Path, name: str) -> None:
    reports, records = send(client(tmp_path, name), tmp_path, [TALK, DAYS])
    assert sum(report.figures["requests"] for report in reports) == len(records)
    assert all(report.figures["tpot_ms"] > 1 for report in reports)
    assert {report.version for report in reports} == {TOOLS[name].version}


def test_genai_perf_is_told_everything(tmp_path: Path) -> None:
    one = client(tmp_path, "genai-perf")
    job = Job([DAYS], 8, 4, None, tmp_path, turn=0, said={"days": []})
    argv, env = one.command(job)
    line = json.loads((tmp_path / "prompts.jsonl").read_text(encoding="utf-8"))
    assert line["messages"] == [{"role": "user", "content": " Name the days of the week.\n"}]
    flags = dict(itertools.pairwise(argv))
    assert flags["--endpoint-type"] == "chat"
    assert "--streaming" in argv
    assert flags["--request-count"] == "1"  # as many as there are prompts, not its default of 10
    assert flags["--concurrency"] == "1"  # no more than there are requests
    assert flags["--tokenizer"] == "/models/target"
    body = json.loads(flags["--extra-inputs"])
    assert body["max_tokens"] == 8
    assert {"temperature", "top_p", "top_k", "seed", "ignore_eos", "stop"} <= body.keys()
    assert "stream_options" not in body  # 0.0.16 dies of the usage chunk
    assert argv.index("--request-count") > argv.index("--")  # perf_analyzer's, not GenAI-Perf's
    assert str(tmp_path) in env["PATH"]


def test_a_second_turn_carries_the_engines_own_answer(tmp_path: Path) -> None:
    send(client(tmp_path, "genai-perf"), tmp_path, [TALK, DAYS])
    lines = (tmp_path / "case" / "genai-perf.1" / "prompts.jsonl").read_text(encoding="utf-8")
    (line,) = map(json.loads, lines.splitlines())  # DAYS has no second turn
    roles = [message["role"] for message in line["messages"]]
    assert roles == ["user", "assistant", "user"]
    assert line["messages"][1]["content"]
    assert line["messages"][2]["content"] == "And what is it known for? \n"


def test_poisson_arrivals(tmp_path: Path) -> None:
    argv, _ = client(tmp_path, "genai-perf").command(Job([DAYS], 8, 1, 2.0, tmp_path, turn=0))
    flags = dict(itertools.pairwise(argv))
    assert flags["--request-rate"] == "2"
    assert flags["--request-distribution"] == "poisson"
    assert "--concurrency" not in argv
    client(tmp_path, "aiperf").command(Job([DAYS], 8, 1, 0.5, tmp_path))
    written = yaml.safe_load((tmp_path / "aiperf.yaml").read_text(encoding="utf-8"))
    assert written["benchmark"]["profiling"] == {"type": "poisson", "rate": 0.5, "sessions": 1}


@pytest.mark.parametrize(("prompt", "rate"), [(TALK, 2.0), (DAYS, 0.5)])
def test_what_genai_perf_cannot_do_at_a_rate_is_refused(
    tmp_path: Path, prompt: Prompt, rate: float
) -> None:
    with pytest.raises(LoadError, match=r"GenAI-Perf .*(at a concurrency only|only 1 and more)"):
        client(tmp_path, "genai-perf").command(Job([prompt], 8, 1, rate, tmp_path, turn=0))


def test_no_key_is_left_in_a_file_a_record_or_an_error(tmp_path: Path) -> None:
    for name in KINDS:
        folder = tmp_path / name
        folder.mkdir()
        reports, _ = send(client(folder, name), folder, [TALK, DAYS])
        assert KEY not in "".join(report.model_dump_json() for report in reports)
    broken = f"print('Error: it went to {KEY[:4]}'); print('  {KEY[4:]}'); sys.exit(4)"
    folder = tmp_path / "broken"
    folder.mkdir()
    with pytest.raises(LoadError) as caught:
        send(client(folder, "genai-perf", broken), folder, [DAYS])
    assert KEY[4:] not in str(caught.value)
    written = [p.read_bytes() for p in (tmp_path).rglob("*.*") if p.is_file()]
    assert not [text for text in written if KEY.encode() in b"".join(text.split())]


def test_aiperf_gets_the_key_by_its_environment_alone(tmp_path: Path) -> None:
    argv, env = client(tmp_path, "aiperf").command(Job([DAYS], 8, 1, None, tmp_path))
    assert KEY not in " ".join(argv)
    assert KEY in env.values()
    assert KEY not in (tmp_path / "aiperf.yaml").read_text(encoding="utf-8")


FAILURES = {
    "status 3: boom: error 17": "print('fine'); print('boom: error 17'); print('bye'); sys.exit(3)",
    "left no profile_export.json": "sys.exit(0)",
}


@pytest.mark.parametrize("said", FAILURES)
def test_a_tool_that_fails_says_why(tmp_path: Path, said: str) -> None:
    with pytest.raises(LoadError, match=said):
        send(client(tmp_path, "genai-perf", FAILURES[said]), tmp_path, [DAYS])


def test_a_tool_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specbench.load.tool_client.SLOW_START_S", 0.3)
    monkeypatch.setattr(ToolClient, "_limit_s", lambda *_: 3.0)
    body = (
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); import time; time.sleep(60)"
    )
    with pytest.raises(LoadError, match="was not done after"):
        send(client(tmp_path, "genai-perf", body), tmp_path, [DAYS])
    assert not Path("/proc", (tmp_path / "pid").read_text()).exists()


def test_an_export_with_a_request_of_its_own_is_refused(tmp_path: Path) -> None:
    """Its default of 10 requests would start again with the first prompt."""
    other = Prompt(id="other", turns=("Something else.",))
    with pytest.raises(LoadError, match="twice, or one of its own"):
        send(client(tmp_path, "genai-perf"), tmp_path, [other])


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("genai-perf", lambda text: text.replace('"response_timestamps"', '"other"')),
        ("genai-perf", lambda text: text[: len(text) // 2]),
        ("aiperf", lambda text: text.replace('"conversation_id":"0"', '"conversation_id":"nine"')),
        ("aiperf", lambda text: text[: len(text) // 2]),
    ],
)
def test_an_export_of_another_shape_is_an_error_with_its_place(
    tmp_path: Path, name: str, change: Callable[[str], str]
) -> None:
    recorded = {"genai-perf": "turn1_export.json", "aiperf": "raw.jsonl"}[name]
    source = DATA / {"genai-perf": "genai_perf_0.0.16", "aiperf": "aiperf_0.13.0"}[name]
    copy = tmp_path / "data"
    shutil.copytree(source, copy)
    (copy / recorded).write_text(change((copy / recorded).read_text(encoding="utf-8")))
    body = f"here = pathlib.Path({str(copy)!r})\n{KINDS[name][1]}"
    with pytest.raises(LoadError, match=str(tmp_path)):
        send(client(tmp_path, name, body), tmp_path, [TALK, DAYS])


# --- environments --------------------------------------------------------------------------------


def test_a_lock_pins_everything() -> None:
    for tool in TOOLS.values():
        lines = tool.lock.read_text(encoding="utf-8").splitlines()
        assert f"{tool.name}=={tool.version}" in lines
        assert all("==" in line for line in lines)
        assert "perf-analyzer" not in tool.lock.read_text(encoding="utf-8")


def test_an_environment_is_used_when_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path))
    tool = TOOLS["aiperf"]
    assert tools.find(tool) is None
    folder = tools.environment(tool)
    folder.mkdir(parents=True)
    assert tools.find(tool) is None  # half made: no mark
    made = {"lock_sha256": "of an older lock"}
    (folder / "made.json").write_text(json.dumps(made), encoding="utf-8")
    assert tools.find(tool) is None

    def make(tool: tools.Tool, folder: Path) -> None:
        made = {"lock_sha256": tools._fingerprint(tool)}
        (folder / "made.json").write_text(json.dumps(made), encoding="utf-8")

    monkeypatch.setattr(tools, "_make", make)
    said: list[str] = []
    found = tools.require(tool, say=said.append)
    assert found.command == folder / "bin" / "aiperf"
    assert len(said) == 1
    assert tools.require(tool, say=said.append) == found
    assert len(said) == 1


def test_a_program_of_the_users_own(tmp_path: Path) -> None:
    program = tmp_path / "genai-perf"
    program.write_text("#!/bin/sh\necho genai-perf 0.0.15\n", encoding="utf-8")
    program.chmod(0o755)
    assert tools.find(TOOLS["genai-perf"], program).version == "0.0.15"  # type: ignore[union-attr]
    with pytest.raises(LoadError, match="no program"):
        tools.find(TOOLS["genai-perf"], tmp_path / "absent")
    program.write_text("#!/bin/sh\necho broken >&2; exit 1\n", encoding="utf-8")
    with pytest.raises(LoadError, match="broken"):
        tools.find(TOOLS["genai-perf"], program)


def test_what_cannot_be_installed_says_what_was_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path))
    uv = tmp_path / "uv"
    uv.write_text("#!/bin/sh\necho no such index >&2; exit 2\n", encoding="utf-8")
    uv.chmod(0o755)
    monkeypatch.setattr(tools, "find_uv", lambda: uv)
    with pytest.raises(LoadError, match=r"no such index.*load\.command"):
        tools.require(TOOLS["aiperf"])
    assert tools.find(TOOLS["aiperf"]) is None
    assert os.listdir(tmp_path / "tools") == [f".{tools.environment(TOOLS['aiperf']).name}.lock"]


def test_genai_perfs_times_come_to_the_clock_of_all_records(tmp_path: Path) -> None:
    """It stamps with the time of day, which somebody may set; the recorded run is of another day."""
    _, records = send(client(tmp_path, "genai-perf"), tmp_path, [TALK, DAYS])
    apart_ns = time.perf_counter_ns() - time.time_ns()
    exports = [
        json.loads(path.read_bytes()) for path in (tmp_path / "case").rglob("profile_export.json")
    ]
    sent = sorted(one["timestamp"] + apart_ns for made in exports for one in requests_of(made))
    assert len(sent) == len(records) == 3
    for record, at in zip(sorted(records, key=lambda one: one.sent_ns), sent, strict=True):
        assert record.ok
        assert abs(record.sent_ns - at) < 10**9


def test_a_tools_own_figures_are_not_kept_where_the_clock_was_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are means over all of its requests, also of those that have no times."""
    day = itertools.count(time.time_ns(), -(10**12))  # set back at each look
    now = time.perf_counter_ns()
    monkeypatch.setattr(
        "specbench.load.tool_client.ClockWatch",
        lambda: ClockWatch(lambda: Clocks(now, now, next(day))),
    )
    reports, records = send(client(tmp_path, "genai-perf"), tmp_path, [TALK, DAYS])
    assert [report.figures for report in reports] == [{}] * len(reports)
    assert len(records) == 3


def requests_of(export: dict[str, Any]) -> list[dict[str, Any]]:
    """Every request of a profile_export.json."""
    return [request for one in export["experiments"] for request in one["requests"]]
