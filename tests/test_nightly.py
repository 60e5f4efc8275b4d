"""The nightly GPU job: every `run:` step of its workflow is carried out here, in order, on a tape.

What GitHub does around the steps (files for outputs, paths and the summary; conditions; artifacts and
the cache) is done by `Runner`. `python3 -m venv` and `gh` are stand-ins that write down what they were
asked; everything else is the real thing.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import yaml

from specbench import baseline
from specbench.records import RequestRecord, SpecRequest
from specbench.store import RunStore

ROOT = Path(__file__).parents[1]
WORKFLOW = ROOT / ".github" / "workflows" / "nightly-gpu.yml"
BIN = Path(sys.executable).parent
ARMS = {"vanilla": 0, "eagle3-k1": 1, "eagle3-k3": 3, "eagle3-k5": 5}
PROMPTS = {"humaneval": range(1, 7), "mt_bench": range(101, 107)}
TOKENS = 40

NEW_VENV = """#!/usr/bin/env bash
# python3 -m venv DIR: an environment that has specbench in it already.
[ "$1 $2" = "-m venv" ] || exec {python} "$@"
mkdir -p "$3/bin"
printf '#!/usr/bin/env bash\\nif [ "$2" = pip ]; then echo "$@" >> {log}; else exec {python} "$@"; fi\\n' \\
  > "$3/bin/python"
printf '#!/usr/bin/env bash\\nexec {python} -m specbench "$@"\\n' > "$3/bin/specbench"
chmod +x "$3/bin/python" "$3/bin/specbench"
"""

GH = """#!/usr/bin/env bash
printf '%s\\n' "$*" >> {log}
[ "$1 $2" = "issue list" ] && cat {issues}
while [ $# -gt 0 ]; do [ "$1" = --body-file ] && cp "$2" {body}; shift; done
exit 0
"""


# --- what GitHub does ----------------------------------------------------------------------------


@dataclass
class Runner:
    """One runner machine: jobs of the workflow, step by step, as GitHub's runner does them."""

    home: Path
    contexts: dict[str, Any] = field(default_factory=dict)
    log: str = ""
    ran: list[str] = field(default_factory=list)

    @property
    def work(self) -> Path:
        """The checkout."""
        return self.home / "repo"

    def job(
        self, name: str, env: Mapping[str, str] | None = None, without: Collection[str] = ()
    ) -> dict[str, str]:
        """Carry out a job but for some steps; the outcome of each by its name."""
        job = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))["jobs"][name]
        self.contexts["steps"] = {}
        here = {
            "PATH": f"{self.home / 'bin'}:{os.environ['PATH']}",
            "HOME": str(self.home),
            "RUNNER_TEMP": str(self.home / "temp"),
            "COLUMNS": "80",
            "SPECBENCH_CACHE": os.environ.get(
                "SPECBENCH_CACHE", str(Path.home() / ".cache/specbench")
            ),
        }
        for what in ("GITHUB_OUTPUT", "GITHUB_PATH", "GITHUB_STEP_SUMMARY"):
            path = self.home / what
            path.write_text("", encoding="utf-8")
            here[what] = str(path)
        for key, value in job["env"].items():
            here[key] = self.expand(value)
        here |= env or {}
        outcomes: dict[str, str] = {}
        for number, step in enumerate(job["steps"]):
            title = _title(step, number)
            outcome = "skipped"
            if title not in without and self.condition(
                step.get("if"), failed="failure" in outcomes.values()
            ):
                self.ran.append(title)
                outcome = self.step(step, here)
            outcomes[title] = outcome
            outputs = dict(
                line.split("=", 1)
                for line in (self.home / "GITHUB_OUTPUT").read_text(encoding="utf-8").splitlines()
            )
            (self.home / "GITHUB_OUTPUT").write_text("", encoding="utf-8")
            if "id" in step:
                self.contexts["steps"][step["id"]] = {"outcome": outcome, "outputs": outputs}
            for line in (self.home / "GITHUB_PATH").read_text(encoding="utf-8").splitlines():
                here["PATH"] = f"{line}:{here['PATH']}"
        outputs = {key: self.expand(value) for key, value in job.get("outputs", {}).items()}
        result = "failure" if "failure" in outcomes.values() else "success"
        self.contexts.setdefault("needs", {})[name] = {"result": result, "outputs": outputs}
        return outcomes

    def step(self, step: Mapping[str, Any], env: Mapping[str, str]) -> str:
        """One step; "success" or "failure"."""
        if "uses" in step:
            self.action(step["uses"], step.get("with", {}))
            return "success"
        own = {key: self.expand(value) for key, value in step.get("env", {}).items()}
        assert "${{" not in step["run"], "a value in a script is code: it belongs into env"
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
            cwd=self.work,
            env={**env, **own},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        self.log += done.stdout
        return "failure" if done.returncode else "success"

    def action(self, uses: str, given: Mapping[str, Any]) -> None:
        """What the actions of this workflow do with files."""
        kind = uses.partition("@")[0]
        source, kept = self.work / str(given.get("path", "")), self.home / "kept"
        if kind == "actions/cache/save":
            shutil.copy(source, self.home / "cached")
        elif kind == "actions/cache/restore" and (self.home / "cached").exists():
            source.parent.mkdir(exist_ok=True)
            shutil.copy(self.home / "cached", source)
        elif kind == "actions/upload-artifact":
            shutil.copytree(source, kept / self.expand(given["name"]), dirs_exist_ok=True)
        elif kind == "actions/download-artifact":
            shutil.copytree(kept / self.expand(given["name"]), source, dirs_exist_ok=True)

    def condition(self, text: str | None, *, failed: bool) -> bool:
        """Whether a step or job is carried out; without a status check it takes success."""
        inner = (text or "").removeprefix("${{").removesuffix("}}").strip()
        asks = re.search(r"\b(success|failure|always|cancelled)\(\)", inner)
        status = {"success": not failed, "failure": failed, "always": True, "cancelled": False}
        said = bool(self.value(inner, status)) if inner else True
        return said if asks else said and not failed

    def expand(self, text: str) -> str:
        """*text* with its expressions worked out."""
        found = re.sub(
            r"\$\{\{(.*?)\}\}", lambda one: str(self.value(one[1].strip()) or ""), str(text)
        )
        assert "${{" not in found
        return found

    def value(self, expression: str, status: Mapping[str, bool] | None = None) -> Any:  # noqa: ANN401
        """An expression of this workflow: contexts, strings, ==, !=, !, && and ||."""
        text = expression.replace("&&", " and ").replace("||", " or ")
        text = re.sub(r"!(?!=)", " not ", text)

        def look_up(one: re.Match[str]) -> str:
            here: Any = self.contexts
            for part in one[0].split("."):
                here = (here or {}).get(part) if isinstance(here, dict) else None
            return repr(here)

        text = re.sub(r"\b(?:steps|needs|github|inputs|secrets|vars)(?:\.\w+)+", look_up, text)
        calls = {name: lambda said=said: said for name, said in (status or {}).items()}
        return eval(text, {"__builtins__": {}}, calls)  # of a file of this repository


# --- a tape for the GPU --------------------------------------------------------------------------


def tape(folder: Path, name: str, *, slower: float = 1.0, seed: int = 0) -> Path:
    """A run to replay: all arms, two starts, 1% of noise; the arms that speculate *slower*."""
    rng = np.random.default_rng(seed)
    cases = [
        {"id": f"{arm}.r{repeat}", "arm": arm, "repeat": repeat, "group": 0}
        for arm in ARMS
        for repeat in range(2)
    ]
    store = RunStore.create(folder, name, {"cases": cases})
    for case in cases:
        k = ARMS[str(case["arm"])]
        start = rng.normal(0, 0.002)
        for number in (number for some in PROMPTS.values() for number in some):
            pace_ms = 10 / (1 + 0.2 * k) * (slower if k else 1.0)
            pace_ms *= float(np.exp(rng.normal(start, 0.01)))
            store.append_request(str(case["id"]), _answer(number, k, pace_ms))
    return store.path


def _answer(number: int, k: int, pace_ms: float) -> RequestRecord:
    times = tuple(round(20e6 + i * pace_ms * 1e6) for i in range(TOKENS))
    steps = TOKENS // 2
    spec = SpecRequest(drafts=steps, draft_tokens=k * steps, accepted=TOKENS - 1 - steps)
    return RequestRecord(
        prompt_id=str(number),
        sent_ns=0,
        end_ns=times[-1],
        chunk_ns=times,
        prompt_tokens=10,
        output_tokens=TOKENS,
        token_source="usage",
        prompt_sha256=f"{number:064x}",
        spec=spec if k else None,
    )


@pytest.fixture
def runner(tmp_path: Path) -> Runner:
    """A machine with the checkout, stand-ins for `python3 -m venv` and `gh`, and prompt files."""
    for name in ("bin", "temp", "repo", "sources"):
        (tmp_path / name).mkdir()
    for name in ("tools", "configs"):
        (tmp_path / "repo" / name).symlink_to(ROOT / name)
    (tmp_path / "issues").write_text("", encoding="utf-8")
    stand_ins = {
        "python3": NEW_VENV.format(python=sys.executable, log=tmp_path / "pip.log"),
        "gh": GH.format(
            log=tmp_path / "gh.log", issues=tmp_path / "issues", body=tmp_path / "body"
        ),
    }
    for name, text in stand_ins.items():
        path = tmp_path / "bin" / name
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755)
    for name, numbers in PROMPTS.items():
        lines = [
            json.dumps({"question_id": n, "category": "c", "turns": [f"question {n}"]}) + "\n"
            for n in numbers
        ]
        (tmp_path / "sources" / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return Runner(tmp_path)


def night(runner: Runner, number: int, recorded: Path, *without: str) -> dict[str, str]:
    """One night: the measuring job, on *recorded* in place of a GPU; *without* some steps."""
    runner.contexts["github"] = {
        "run_id": number,
        "run_attempt": 1,
        "repository": "me/models",
        "server_url": "https://github.com",
        "event_name": "schedule",
        "token": "not-a-token",
    }
    runner.contexts["inputs"] = {
        "arguments": f"--set load.client=replay --set load.tape={recorded}",
    }
    runner.log = ""
    sources = " ".join(str(runner.home / "sources" / f"{name}.jsonl") for name in PROMPTS)
    return runner.job("measure", {"PROMPT_SOURCES": sources}, without)


# --- the nights ----------------------------------------------------------------------------------


@pytest.mark.engine
def test_nights_go_from_the_first_to_a_regression_and_back(runner: Runner, tmp_path: Path) -> None:
    """All of it in one test: a night takes seconds, and each builds on the one before."""
    first = night(runner, 1, tape(tmp_path, "monday", seed=1))
    assert set(first.values()) == {"success"}, runner.log
    assert runner.ran == steps_of("measure")
    assert "There is no baselines/nightly.json yet" in runner.log
    assert "There is no nightly/last-good.json yet: it is kept after each good night" in runner.log
    assert "no nvidia-smi here" in runner.log
    assert "pip install --quiet .[cuda]" in (tmp_path / "pip.log").read_text(encoding="utf-8")
    kept = tmp_path / "kept" / "nightly-gpu-1"
    assert {p.name for p in kept.iterdir()} == {
        "last-good.json",
        "report.html",
        "report.md",
        "run.tgz",
    }
    assert (tmp_path / "cached").exists()
    page = (tmp_path / "GITHUB_STEP_SUMMARY").read_text(encoding="utf-8")
    assert "| eagle3 | 3 | humaneval |" in page
    asked = runner.condition(_job("issue")["if"], failed=False)
    assert asked
    runner.job("issue")
    assert gh(tmp_path) == ["issue list"]  # a good night and no open issue: nothing to do

    # The night becomes the pinned baseline as its page says; the next is 10% slower where it speculates.
    shutil.copy(kept / "run.tgz", runner.work)
    advice = re.findall(r"^    (?:tar|specbench) .*$", page, re.MULTILINE)
    assert len(advice) == 2
    path = f"{tmp_path / 'temp' / 'venv' / 'bin'}:{os.environ['PATH']}"
    for line in advice:
        subprocess.run(line, shell=True, cwd=runner.work, env={"PATH": path}, check=True)
    pinned = (runner.work / "baselines" / "nightly.json").read_bytes()
    assert pinned == (kept / "last-good.json").read_bytes()
    shutil.rmtree(runner.work / "nightly")
    slow = night(runner, 2, tape(tmp_path, "tuesday", slower=1.1, seed=2), "Doctor", "Prompts")
    failed = {name for name, outcome in slow.items() if outcome == "failure"}
    assert failed == {"Compare with the pinned baseline", "Compare with the last good night"}
    assert slow["This was a good night"] == slow["Keep it for the next"] == "skipped"
    assert slow["Upload"] == slow["Clean up"] == "success"
    assert re.search(
        r"::error title=speedup < -3%25::eagle3-k3 on humaneval .*failed: interval −\d", runner.log
    )
    xml = (tmp_path / "kept" / "nightly-gpu-1" / "compare-pinned.xml").read_text(encoding="utf-8")
    assert 'type="regression"' in xml
    page = (tmp_path / "GITHUB_STEP_SUMMARY").read_text(encoding="utf-8")
    assert page.count("**FAILED: speedup &lt; -3%") == 2
    assert runner.contexts["needs"]["measure"]["outputs"] == {"regression": "true"}

    # One issue is opened, updated by a further bad night, and closed by a good one.
    assert runner.condition(_job("issue")["if"], failed=False)
    runner.job("issue")
    assert gh(tmp_path) == ["issue list", "label create", "issue create"]
    body = (tmp_path / "body").read_text(encoding="utf-8")
    assert "https://github.com/me/models/actions/runs/2" in body
    assert "eagle3-k3 on humaneval" in body
    assert "failed: interval" in body
    (tmp_path / "issues").write_text("7\n", encoding="utf-8")
    runner.job("issue")
    assert gh(tmp_path) == ["issue list", "issue comment 7"]
    runner.contexts["needs"]["measure"] = {"result": "success", "outputs": {"regression": ""}}
    runner.job("issue")
    assert gh(tmp_path) == ["issue list", "issue close 7"]
    assert set(runner.ran) == {*steps_of("measure"), *steps_of("issue")}


@pytest.mark.engine
def test_a_night_of_real_engines(runner: Runner, tmp_path: Path) -> None:
    """The CPU trio in place of the GPU: vanilla and EAGLE, each started twice, then set against itself."""
    asked = (
        '--set speculation={"method":"eagle","model":"demo:eagle","k":1} '
        '--set prompts=[{"set":"humaneval","limit":2}] --set max_tokens=8 --set repeats=2'
    )
    runner.contexts["inputs"] = {"arguments": asked}
    runner.contexts["github"] = {"run_id": 1, "run_attempt": 1, "repository": "me/models"}
    env = {
        "SPECBENCH_CONFIG": "demo",
        "PROMPT_SOURCES": str(runner.home / "sources" / "humaneval.jsonl"),
        "EXTRA": "cpu",
    }
    outcomes = runner.job("measure", env, without=("Doctor",))
    assert set(outcomes.values()) == {"success", "skipped"}, runner.log
    kept = tmp_path / "kept" / "nightly-gpu-1"
    night = baseline.load(kept / "last-good.json")
    assert [row.arm for row in night.rows] == ["vanilla", "eagle-k1"]
    assert [len(row.series["tpot_ms"].starts) for row in night.rows] == [2, 2]
    assert night.rows[1].figures["acceptance_length"] > 1
    assert night.setups[0].arms == ("vanilla", "eagle-k1")
    path = tmp_path / "results.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "specbench", "compare", str(kept / "last-good.json")),
            *("nightly-1-1", "--results", str(tmp_path / "specbench-nightly")),
            *("--format", "json", "-o", str(path), "--fail-if", "speedup < -3%"),
        ],
        check=False,
    )
    assert done.returncode == 0
    found = json.loads(path.read_text(encoding="utf-8"))
    assert [row["verdict"] for row in found["rows"]] == ["no difference shown"] * 2


def gh(home: Path) -> list[str]:
    """The commands that `gh` was given since the last look, and which issue they are about."""
    lines = (home / "gh.log").read_text(encoding="utf-8").splitlines()
    (home / "gh.log").unlink()
    return [" ".join(re.match(r"(\w+ \w+(?: \d+)?)", line)[1].split()) for line in lines]  # type: ignore[index]


@pytest.mark.engine
def test_a_night_whose_engines_fail_is_no_regression_and_opens_no_issue(
    runner: Runner, tmp_path: Path
) -> None:
    """The tape lacks everything: the run exits 3, the report still shows what there is."""
    empty = RunStore.create(tmp_path, "empty", {"cases": []}).path
    (runner.work / "datasets").mkdir()  # what the step Prompts would make
    for name in PROMPTS:
        source = runner.home / "sources" / f"{name}.jsonl"
        shutil.copy(source, runner.work / "datasets")
    outcomes = night(runner, 1, empty, "Doctor", "Prompts")
    assert outcomes["Run"] == "failure"
    assert "were not measured in full" in runner.log
    assert outcomes["This was a good night"] == "skipped"
    assert outcomes["Upload"] == outcomes["Clean up"] == "success"
    assert not runner.condition(_job("issue")["if"], failed=False)


def steps_of(job: str) -> list[str]:
    """The titles of a job's steps, in order."""
    return [_title(step, number) for number, step in enumerate(_job(job)["steps"])]


def _title(step: Mapping[str, Any], number: int) -> str:
    return str(step.get("name", step.get("uses", str(number)))).partition("@")[0]


def _job(name: str) -> Any:  # noqa: ANN401
    return yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))["jobs"][name]


# --- the file itself -----------------------------------------------------------------------------


def test_actionlint_finds_nothing() -> None:
    program = str(BIN / "actionlint")
    done = subprocess.run(
        [program, str(WORKFLOW)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout + done.stderr == ""
    assert done.returncode == 0


def test_actions_are_pinned_by_commit_and_say_their_version() -> None:
    text = WORKFLOW.read_text(encoding="utf-8")
    uses = [line.strip() for line in text.splitlines() if "uses:" in line]
    assert len(uses) >= 5
    for line in uses:
        assert re.search(r"uses: actions/[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line), line


def test_rights_are_the_least_and_nights_do_not_meet() -> None:
    workflow = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))
    assert workflow["permissions"] == {}
    assert workflow["concurrency"] == {"group": "nightly-gpu", "cancel-in-progress": False}
    jobs = workflow["jobs"]
    assert jobs["measure"]["permissions"] == {"contents": "read"}
    assert jobs["issue"]["permissions"] == {"issues": "write"}
    assert all("timeout-minutes" in job for job in jobs.values())
    text = WORKFLOW.read_text(encoding="utf-8")
    assert text.count("secrets.") == 1  # the hub token, in the one step that needs it


def test_the_gitlab_twin_runs_the_same_commands() -> None:
    text = (ROOT / "docs" / "nightly.md").read_text(encoding="utf-8")
    twin = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)[-1])
    script = "\n".join(
        str(line) for job in twin.values() if "script" in job for line in job["script"]
    )
    for step in (*_job("measure")["steps"],):
        for line in step.get("run", "").splitlines():
            command = re.match(r"\s*(specbench \w+|tools/\w+\.sh|python tools/\w+\.py)", line)
            if command:
                assert command[1] in script, command[1]


# --- a dirty GPU ---------------------------------------------------------------------------------

SMI = """#!/usr/bin/env bash
case "$*" in
  *compute-apps*) for pid in $(cat {pids}); do kill -0 $pid 2>/dev/null && echo "$pid, 2048, python"; done ;;
  *) echo "0, $(cat {used})" ;;
esac
exit 0
"""


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    """tools/gpu_clean.py on a GPU whose memory the given processes hold."""
    (tmp_path / "bin").mkdir()
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.write_text(SMI.format(pids=tmp_path / "pids", used=tmp_path / "used"), encoding="utf-8")
    smi.chmod(0o755)
    (tmp_path / "used").write_text("5", encoding="utf-8")
    monkeypatch.setenv("PATH", f"{smi.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SPECBENCH_NIGHTLY", "me/models")

    def look(*pids: int, used_mib: int = 5, more: tuple[str, ...] = ()) -> tuple[int, str]:
        (tmp_path / "pids").write_text(" ".join(map(str, pids)), encoding="utf-8")
        (tmp_path / "used").write_text(str(used_mib), encoding="utf-8")
        tool = str(ROOT / "tools" / "gpu_clean.py")
        command = [sys.executable, tool, "--results", str(tmp_path), *more]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    return look


@pytest.fixture
def sleeper() -> Any:  # noqa: ANN401  (a fixture that yields a function)
    """Starts processes that hold memory of the stand-in GPU, and ends them after the test."""
    started: list[subprocess.Popen[bytes]] = []

    def start(mark: str | None) -> subprocess.Popen[bytes]:
        env = {k: v for k, v in os.environ.items() if k != "SPECBENCH_NIGHTLY"}
        env |= {"SPECBENCH_NIGHTLY": mark} if mark else {}
        started.append(subprocess.Popen(["sleep", "300"], env=env, start_new_session=True))
        Thread(target=started[-1].wait, daemon=True).start()  # else it stays as a zombie
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_what_an_earlier_night_left_is_ended(gpu: Any, sleeper: Any) -> None:  # noqa: ANN401
    ours = sleeper("me/models")
    code, said = gpu(ours.pid)
    assert ours.wait(10) != 0
    assert code == 0, said
    assert f"left by an earlier night, ended: pid {ours.pid} (python" in said
    assert "the GPU is free" in said


@pytest.mark.parametrize("mark", [None, "someone/else"])
def test_others_are_named_and_left_alone(gpu: Any, sleeper: Any, mark: str | None) -> None:  # noqa: ANN401
    other = sleeper(mark)
    code, said = gpu(other.pid)
    assert code == 1
    assert f"pid {other.pid} (python, " in said
    assert "holds 2048 MiB" in said
    assert other.poll() is None
    assert gpu(other.pid, more=("--ours-only",)) == (0, "")
    assert other.poll() is None


def test_an_engine_that_a_run_recorded_is_ours_and_a_later_one_of_its_number_is_not(
    gpu: Any,  # noqa: ANN401
    sleeper: Any,  # noqa: ANN401
    tmp_path: Path,
) -> None:
    """vLLM's processes overwrite the place where their environment could be read."""
    engine = sleeper(None)
    path = tmp_path / "nightly-1" / "engines" / "eagle3-k3.0" / "engine.json"
    path.parent.mkdir(parents=True)
    now = datetime.now(UTC)
    about = {"pid": engine.pid, "startup_s": 30.0}
    long_ago = {**about, "started_at": (now - timedelta(hours=3)).isoformat()}
    path.write_text(json.dumps(long_ago), encoding="utf-8")
    assert gpu(engine.pid)[0] == 1
    assert engine.poll() is None
    path.write_text(json.dumps({**about, "started_at": now.isoformat()}), encoding="utf-8")
    assert gpu(engine.pid)[0] == 0
    assert engine.wait(10) != 0


def test_memory_that_no_visible_process_holds_is_not_free(gpu: Any) -> None:  # noqa: ANN401
    code, said = gpu(used_mib=30_000)
    assert code == 1
    assert "GPU 0: 30000 MiB are in use by processes that cannot be seen from here" in said
    assert gpu()[0] == 0
