"""What `specbench doctor` finds, and that it never shows a secret nor fails on a bare machine."""

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specbench import doctor
from specbench.cli import app
from specbench.load import arrivals, perf_analyzer


def found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, doctor.Finding]:
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path))
    findings = doctor.examine(tmp_path, without_noise=True)
    return {finding.about: finding for finding in findings}


def test_a_bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_installation", lambda _: None)
    monkeypatch.setattr(perf_analyzer, "glibc", lambda: (2, 36))
    findings = found(monkeypatch, tmp_path)
    assert findings["engine"].status == "problem"
    assert "specbench[cpu]" in (findings["engine"].advice or "")
    assert findings["load.client=aiperf"].status == "note"
    assert "2.38" in findings["perf_analyzer"].said
    assert "--fix-perf-analyzer" in (findings["perf_analyzer"].advice or "")
    assert findings["prompt sets"].advice == "specbench convert humaneval"


def test_what_is_there_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.jsonl").write_text('{"text": "x"}\n', encoding="utf-8")
    bin = perf_analyzer_in(tmp_path, "echo Perf Analyzer Version 0.0.0")
    findings = found(monkeypatch, tmp_path)
    assert "mine" in findings["prompt sets"].said
    assert findings["perf_analyzer"].said == f"2.60.0 in {bin}"
    perf_analyzer_in(tmp_path, "echo segfault; exit 139")
    assert found(monkeypatch, tmp_path)["perf_analyzer"].status == "problem"


def perf_analyzer_in(cache: Path, body: str) -> Path:
    bin = cache / "tools" / "perf-analyzer-2.60.0" / "bin"
    bin.mkdir(parents=True, exist_ok=True)
    program = bin / "perf_analyzer"
    program.write_text(f"#!/bin/sh\n{body}\n", encoding="utf-8")
    program.chmod(0o755)
    return bin


def test_a_token_is_never_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_canary")
    findings = found(monkeypatch, tmp_path)
    assert findings["hub token"].status == "ok"
    assert "canary" not in json.dumps([doctor.as_record(one) for one in findings.values()])


def test_who_uses_the_cpu_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Busy:
        pid, info = 42, {"name": "trainer"}

        def cpu_percent(self) -> float:
            return 150.0

    monkeypatch.setattr("psutil.process_iter", lambda _: [Busy()])
    monkeypatch.setattr("time.sleep", lambda _: None)
    (finding,) = doctor.others(tmp_path)
    assert finding.said == "trainer (pid 42) uses 1.5 cores"


def test_the_command_exits_2_on_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path))
    monkeypatch.setattr(doctor, "CHECKS", (doctor.ports, doctor.disk))
    done = CliRunner().invoke(app, ["doctor", "--quick", "--datasets", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert "127.0.0.1 can be listened on" in done.output
    monkeypatch.setattr(doctor, "MIN_FREE_GIB", 1e9)
    done = CliRunner().invoke(app, ["doctor", "--json", "--quick", "--datasets", str(tmp_path)])
    assert done.exit_code == 2
    (_, *disks) = json.loads(done.stdout)
    assert {one["status"] for one in disks} == {"problem"}
    assert os.fspath(tmp_path) in json.dumps(disks)


@pytest.mark.parametrize(("stamped", "status"), [(True, "ok"), (False, "note")])
def test_who_stamps_arrivals_is_said(
    stamped: bool, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals, "are_stamped", lambda: stamped)
    (found,) = (one for one in doctor.clock(tmp_path) if one.about == "arrivals")
    assert found.status == status
    assert ("calibrate" in (found.advice or "")) is not stamped
