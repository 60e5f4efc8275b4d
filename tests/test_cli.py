"""The command line as a shell sees it: exit codes, stdout and stderr."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import console
import pytest
from console import Done

ROOT = Path(__file__).parents[1]
HELP = ROOT / "specbench" / "help.txt"


def specbench(*args: str, cwd: Path = ROOT) -> Done:
    """Run the console script in this process, in the project's own folder unless told."""
    return console.specbench(*args, cwd=cwd)


def test_the_quick_help_is_what_typer_prints() -> None:
    code = "from specbench.cli import app; app(['--help'], prog_name='specbench')"
    env = {**os.environ, "COLUMNS": "80"}
    command = [sys.executable, "-c", code]
    printed = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
    assert HELP.read_text(encoding="utf-8") == printed.stdout
    assert specbench("--help").stdout == printed.stdout


@pytest.mark.parametrize("command", ["convert", "run", "report", "verify", "what-if"])
def test_every_command_has_help_with_examples(command: str) -> None:
    done = specbench(command, "--help")
    assert done.returncode == 0
    assert f"specbench {command}" in done.stdout.partition("Examples:")[2]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["run"], "Name a config"),
        (["run", "--config", "eagle_k6"], "Did you mean eagle_k5?"),
        (["run", "--config", "demo", "--set", "k"], "write KEY=VALUE"),
        (["run", "--config", "demo", "--set", "speculation.9.k=1"], "item 9 is not there"),
        (["run", "--config", "demo", "--set", "sampling.temprature=1"], "'temperature'"),
        (["run", "--resume", "nowhere"], "holds no run"),
        (["report"], "There is no run"),
        (["report", "nowhere"], "holds no run"),
        (["report", "--format", "pdf"], "write table or markdown or csv or json"),
        (["convert", "nothing.jsonl"], "nothing.jsonl"),
        (["convert", "humaneval", "--turns", "second"], "write first or all"),
    ],
)
def test_a_users_mistake_is_one_line_and_exit_2(args: list[str], said: str, tmp_path: Path) -> None:
    done = specbench(*args, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert said in done.stderr
    assert done.stderr.startswith("specbench: ")
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "specbench", "--debug", "report"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" in done.stderr


def test_a_converted_file_reads_back_and_is_reported(tmp_path: Path) -> None:
    question = '{"question_id": 1, "category": "c", "turns": ["one", "two"]}\n'
    (tmp_path / "q.jsonl").write_text(
        question * 1 + question.replace("1", "2", 1), encoding="utf-8"
    )
    done = specbench("convert", "q.jsonl", "--name", "mine", "--turns", "all", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "read 2, wrote 2, skipped 0" in done.stdout
    done = specbench("convert", "datasets/mine.jsonl", "--check", cwd=tmp_path)
    assert done.stdout == "datasets/mine.jsonl: 2 prompts\n"


# --- runs against a stand-in engine --------------------------------------------------------------


@pytest.fixture
def workplace(tmp_path: Path, fake_python: Path) -> Path:
    """A folder with a prompt set, and a config whose engine is the stand-in."""
    (tmp_path / "datasets").mkdir()
    lines = "".join(json.dumps({"text": f"prompt {i}"}) + "\n" for i in range(4))
    (tmp_path / "datasets" / "four.jsonl").write_text(lines, encoding="utf-8")
    (tmp_path / "c.yaml").write_text(
        "model: some/model\n"
        "speculation: {method: eagle, model: some/head, k: 3}\n"
        "prompts: four\nmax_tokens: 24\n"
        f"engine: {{python: {fake_python}, env: {{FAKE_MODE: ok}}, startup_timeout_s: 20}}\n"
        "load: {warmup: 1, stall_s: 0.5}\n",
        encoding="utf-8",
    )
    return tmp_path


def run(workplace: Path, *args: str, mode: str = "ok") -> Done:
    set_mode = ["--set", f"engine.env.FAKE_MODE={mode}"]
    return specbench("run", "--config", "c.yaml", *set_mode, *args, cwd=workplace)


def leftovers(workplace: Path) -> list[str]:
    """Processes that were started from *workplace* and still live."""
    found = []
    for proc in Path("/proc").glob("[0-9]*"):
        try:
            command = (proc / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            state = (proc / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
            inside = Path(os.readlink(proc / "cwd")).is_relative_to(workplace)
        except OSError:
            continue
        if inside and state != "Z":
            found.append(command)
    return found


def kept_lines(cases: Path) -> list[str]:
    """The requests that a run's folder holds."""
    return [line for p in cases.glob("*/requests.jsonl") for line in p.read_text().splitlines()]


def report_rows(workplace: Path) -> list[dict[str, object]]:
    done = specbench("report", "--format", "json", cwd=workplace)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert isinstance(rows, list)
    return rows


def test_a_run_ends_in_a_table(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECBENCH_CALIBRATION", "on")
    done = run(workplace)
    assert done.returncode == 0, done.stderr
    (kept,) = workplace.glob("results/*/run.json")
    (known,) = json.loads(kept.read_text(encoding="utf-8"))["calibration"]["errors"]
    assert known["concurrency"] == 1
    assert known["chunks"] > 100
    eagle = next(row for row in report_rows(workplace) if row["method"] == "eagle")
    assert eagle["requests"] == 4
    assert eagle["output_tokens"] == 96
    assert eagle["acceptance_length"] == pytest.approx(1 + 6 / 17)
    # the fake answers at once, which this client on a busy machine may well be too slow for
    assert isinstance(eagle["flags"], list)
    assert {flag["check"] for flag in eagle["flags"]} <= {"client", "baseline", "stalled"}
    assert leftovers(workplace) == []


def test_a_dry_run_prints_cases_and_command_lines_and_starts_nothing(workplace: Path) -> None:
    done = run(workplace, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "eagle-k3.four.t24.c1.r0: 4 prompts" in done.stdout
    assert '"num_speculative_tokens": 3' in done.stdout
    assert "serve some/model" in done.stdout
    assert not (workplace / "results").exists()


def test_a_dry_run_says_first_which_vllm_was_found(workplace: Path, fake_python: Path) -> None:
    found = f"vLLM 0.32.0 (CUDA build) of {fake_python}: engines get settings for a GPU"
    assert run(workplace, "--dry-run").stdout.startswith(f"{found}\n")
    assert found in run(workplace).stderr.splitlines()[:2]


def test_a_dry_run_of_triton_prints_the_server_and_what_the_models_say(workplace: Path) -> None:
    """Not a `vllm serve`: nothing would start one."""
    triton = ["--set", "engine.kind=triton", "--set", "engine.server=nice tritonserver"]
    done = run(workplace, *triton, "--run-id", "one", "--dry-run")
    assert done.returncode == 0, done.stderr
    repository = workplace / "results/one/engines/triton/model_repository"
    (server,) = [line for line in done.stdout.splitlines() if line.startswith("Triton: ")]
    assert " FAKE_MODE=ok " in server
    assert " nice tritonserver --http-address=127.0.0.1 --http-port=HTTP_PORT " in server
    assert server.endswith(f"--model-control-mode=explicit --model-repository={repository}")
    models = dict(
        re.findall(r"^  (\S+): model \S+ (\S+/1/model.json: .*)$", done.stdout, re.MULTILINE)
    )
    said = {arm: json.loads(text.partition(": ")[2]) for arm, text in models.items()}
    assert set(said) == {"vanilla", "eagle-k3"}
    assert said["vanilla"]["model"] == "some/model"
    assert said["eagle-k3"].pop("speculative_config")["num_speculative_tokens"] == 3
    assert said["eagle-k3"] == said["vanilla"]
    assert models["eagle-k3"].startswith("eagle_model/1/model.json")
    assert "vllm.entrypoints" not in done.stdout
    assert not (workplace / "results").exists()


def test_a_dry_run_of_a_triton_that_is_up_names_its_models(workplace: Path) -> None:
    up = "engine={kind: triton, url: 'http://h:1', models: {eagle-k3: mine}}"
    done = specbench("run", "-c", "c.yaml", "--set", up, "--dry-run", cwd=workplace)
    assert done.returncode == 0, done.stderr
    assert "no engine is started: http://h:1 is up" in done.stdout
    assert "  eagle-k3: model mine, as the server has it" in done.stdout
    assert "tritonserver" not in done.stdout


def test_a_model_that_is_larger_than_the_machine_is_one_note(
    workplace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 11 GiB by its header; in its file there is nothing, and the stand-in needs nothing."""
    monkeypatch.setattr("specbench.engines.memory.gpu_bytes", lambda _: 8 << 30)
    model = workplace / "model"
    model.mkdir()
    tensor = {"dtype": "BF16", "shape": [1], "data_offsets": [0, 11 << 30]}
    header = json.dumps({"t": tensor}).encode()
    (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    note = "have weights of 11.0 GiB, and a GPU here has 8.0 GiB of memory"
    for args, stream in ((["--dry-run"], "stdout"), ([], "stderr")):
        done = run(workplace, "--set", f"model={model}", *args)
        assert done.returncode == 0, done.stderr
        notes = [line for line in getattr(done, stream).splitlines() if line.startswith("note: ")]
        assert len(notes) == 1
        assert re.fullmatch(rf"note: the engines of stage 1 \(\S+\) {note}", notes[0])


def test_an_engine_that_never_gets_ready_ends_at_its_limit(workplace: Path) -> None:
    done = run(workplace, "--set", "engine.startup_timeout_s=1", mode="hangs")
    assert done.returncode == 3
    assert "was not ready after 1 s" in done.stderr
    assert leftovers(workplace) == []


def test_unreadable_counters_leave_acceptance_to_the_requests(workplace: Path) -> None:
    assert run(workplace, mode="metrics-500").returncode == 0
    eagle = report_rows(workplace)[1]
    assert eagle["acceptance_source"] == "requests"
    assert eagle["acceptance_length"] == pytest.approx(1 + 6 / 17)


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        signal.SIGKILL,
        pytest.param(signal.SIGTERM, marks=pytest.mark.engine),  # as INT; kept from the fast part
        pytest.param(signal.SIGHUP, marks=pytest.mark.engine),
    ],
)
def test_a_run_that_is_stopped_leaves_nothing_and_can_go_on(
    workplace: Path, number: signal.Signals
) -> None:
    command = [sys.executable, "-m", "specbench", "run", "--config", "c.yaml", "--run-id", "one"]
    command += ["--set", "baseline=false"]
    with (workplace / "err").open("wb") as err:
        process = subprocess.Popen(command, cwd=workplace, stderr=err, stdout=err)
    facts = workplace / "results" / "one" / "cases"
    deadline = time.monotonic() + 30
    while not list(facts.glob("*/requests.jsonl")) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(number)
    code = process.wait(30)
    said = (workplace / "err").read_text(encoding="utf-8")
    if number != signal.SIGKILL:
        assert code == 130, said
        assert "specbench run --resume results/one" in said
    while leftovers(workplace) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert leftovers(workplace) == []
    kept = kept_lines(facts)
    done = specbench("run", "--resume", "results/one", cwd=workplace)
    assert done.returncode == 0, done.stderr
    after = kept_lines(facts)
    assert set(kept) <= set(after)
    assert len(after) == 4  # one for each prompt: none was measured twice


def test_a_key_that_this_vllm_does_not_know_stops_before_anything_starts(workplace: Path) -> None:
    done = run(workplace, "--set", "speculation.prompt_lookup_min=2")
    assert done.returncode == 2
    assert "the installed vLLM 0.32.0 does not know 'prompt_lookup_min'" in done.stderr
    assert "'prompt_lookup_max'" in done.stderr


def test_a_server_that_is_already_up_is_measured_without_a_launch(workplace: Path) -> None:
    command = [sys.executable, str(ROOT / "tests" / "fake_vllm.py"), "--port", "18123"]
    server = subprocess.Popen([*command, "--served-model-name", "up"], stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None
        server.stdout.readline()
        (workplace / "u.yaml").write_text(
            "model: m\nspeculation: {method: eagle, model: h, k: 3}\nprompts: four\n"
            "max_tokens: 24\nengine: {url: 'http://127.0.0.1:18123'}\n",
            encoding="utf-8",
        )
        done = specbench("run", "--config", "u.yaml", cwd=workplace)
        assert done.returncode == 0, done.stderr
    finally:
        server.kill()
        server.communicate()
    (row,) = report_rows(workplace)
    assert (row["method"], row["requests"]) == ("eagle", 4)


def test_a_tape_replays_a_run_without_an_engine(workplace: Path) -> None:
    assert run(workplace, "--run-id", "tape").returncode == 0
    before = report_rows(workplace)
    sets = ["--set", "load.client=replay", "--set", "load.tape=results/tape"]
    done = run(workplace, *sets, "--run-id", "again")
    assert done.returncode == 0, done.stderr
    after = report_rows(workplace)
    assert [row["tpot_ms"] for row in before] == [row["tpot_ms"] for row in after]
