"""Where the kill campaign runs: a folder with prompts, configs and engines of one kind.

replayed: a tape, in place of engines. fake: tests/fake_vllm.py in place of vLLM, which notes
every answer that it sent to its end. real: vLLM on the CPU with the demo's trio.
"""

import json
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from specbench.records import RequestRecord, SpecRequest
from specbench.store import RunStore

ROOT = Path(__file__).parents[1]
FAKE_VLLM = ROOT / "tests" / "fake_vllm.py"
PROMPTS = 5

FAKE = """
model: some/model
speculation:
  - {method: eagle, model: some/head, k: 3}
  - {method: ngram, k: 3, prompt_lookup_max: 4}
prompts: [single, talk]
max_tokens: 24
schedule: SCHEDULE
load: {warmup: 1, stall_s: 5}
engine:
  python: PYTHON
  prefork: PREFORK
  startup_timeout_s: 30
  env: {ENV}
  args: {kv_cache_memory_bytes: 1048576}
"""
REAL_ARMS = {  # one beside vanilla: five engines in a run would make it ten minutes for a few kills
    "eagle": "{method: eagle, model: demo:eagle, k: 2}",
    "draft": "{method: draft_model, model: demo:draft, k: 2}",
    "ngram": "{method: ngram, k: 2, prompt_lookup_min: 2, prompt_lookup_max: 4}",
}
REAL = """
model: demo:target
speculation: ARM
prompts: [single, talk]
max_tokens: 12
schedule: interleaved
sampling: {temperature: 0}
load: {warmup: 1, warmup_tokens: 4}
engine:
  args: {dtype: float32, max_model_len: 1024, enforce_eager: true, kv_cache_memory_bytes: 67108864}
"""


@dataclass
class Place:
    """A folder to run in, and the configs of which each new run takes one at random.

    `variants` are from a config's name to that of the one whose undisturbed run it is compared with.
    """

    kind: str
    folder: Path
    variants: dict[str, str]
    env: dict[str, str]
    limit_s: float  # a run that is left alone takes less
    witness: Path | None = None

    def environment(self, rng: random.Random) -> dict[str, str]:
        """The environment of one run: sometimes with the client's calibration and the sampler."""
        env = dict(self.env)
        for name in ("SPECBENCH_CALIBRATION", "SPECBENCH_TELEMETRY"):
            env[name] = "on" if rng.random() < 0.3 else "off"
        return env


def make(kind: str, folder: Path) -> Place:
    """A new place of *kind* in *folder*, which is there and empty."""
    (folder / "datasets").mkdir()
    (folder / "tmp").mkdir()
    _write_prompts(folder / "datasets", 3 if kind == "real" else PROMPTS)
    env = {**os.environ, "TMPDIR": str(folder / "tmp"), "PYTHONPATH": str(ROOT)}
    env |= {"SPECBENCH_DEBUG": "", "COLUMNS": "100", "PYTHONFAULTHANDLER": "1"}
    if kind == "real":
        for name, arm in REAL_ARMS.items():
            (folder / f"{name}.yaml").write_text(REAL.replace("ARM", arm), encoding="utf-8")
        return Place(kind, folder, {name: name for name in REAL_ARMS}, env, 900)
    if kind == "replayed":
        _write_tape(folder / "results")
        return Place(kind, folder, dict(_replays(folder)), env, 60)
    witness = folder / "witness.jsonl"
    return Place(kind, folder, dict(_fakes(folder, witness)), env, 240, witness)


def _fakes(folder: Path, witness: Path) -> Iterator[tuple[str, str]]:
    python = {"true": _interpreter(folder, "0.32.0+cpu"), "false": _interpreter(folder, "0.32.0")}
    for schedule in ("interleaved", "blocks"):
        for prefork in ("true", "false"):
            for manner, env in (("meek", ""), ("stubborn", ", FAKE_STUBBORN: '1'")):
                text = FAKE.replace("SCHEDULE", schedule).replace("PREFORK", prefork)
                text = text.replace("PYTHON", str(python[prefork]))
                text = text.replace("ENV", f"FAKE_WITNESS: {witness}{env}")
                name = f"{schedule}-{prefork}-{manner}"
                (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
                yield name, f"{schedule}-false-meek"


def _replays(folder: Path) -> Iterator[tuple[str, str]]:
    for schedule in ("interleaved", "blocks"):
        text = FAKE.partition("engine:")[0].replace("SCHEDULE", schedule)
        load = "load: {client: replay, tape: results/tape, tape_speed: 1.0}"
        text = text.replace("load: {warmup: 1, stall_s: 5}", load)
        (folder / f"{schedule}.yaml").write_text(text, encoding="utf-8")
        yield schedule, schedule


def _write_tape(results: Path) -> None:
    """What a run of the configs' three arms would have measured: 21 requests of 12 to 36 ms."""
    rng = random.Random(0)
    turns = [("single", str(n + 1), 0) for n in range(PROMPTS)] + [
        ("talk", "t", 0),
        ("talk", "t", 1),
    ]
    cases = [
        {"id": f"{arm}.{name}", "arm": arm, "prompt_set": name}
        for arm in ("vanilla", "eagle-k3", "ngram-k3")
        for name in ("single", "talk")
    ]
    tape = RunStore.create(results, "tape", {"cases": cases})
    for case in cases:
        for name, prompt, turn in turns:
            if name == case["prompt_set"]:
                tape.append_request(case["id"], _spoken(rng, prompt, turn, case["arm"]))


def _spoken(rng: random.Random, prompt: str, turn: int, arm: str) -> RequestRecord:
    accepted = () if arm == "vanilla" else tuple(rng.randint(0, 3) for _ in range(8))
    counts = (1, *(1 + n for n in accepted)) if accepted else (1,) * 24
    step_ns = rng.randint(1_000_000, 1_500_000)
    spec = SpecRequest(
        drafts=len(accepted),
        draft_tokens=3 * len(accepted),
        accepted=sum(accepted),
        per_step_accepted=accepted,
        per_step_drafted=(3,) * len(accepted),
    )
    return RequestRecord(
        prompt_id=prompt,
        turn=turn,
        sent_ns=0,
        end_ns=step_ns * (len(counts) + 1),
        chunk_ns=tuple(step_ns * (n + 1) for n in range(len(counts))),
        chunk_tokens=counts,
        prompt_tokens=20,
        output_tokens=sum(counts),
        token_source="usage",
        finish_reason="length",
        token_ids=tuple(range(sum(counts))),
        text="said",
        prompt_sha256=f"{prompt}{turn}",
        sampling={"temperature": 0.0, "max_tokens": 24},
        spec=spec if accepted else None,
    )


def _write_prompts(folder: Path, count: int) -> None:
    lines = [
        {"text": f"Write down the number {n} in words, and then the next."} for n in range(count)
    ]
    talk = [{"session_id": "t", "text": text, "delay": 0} for text in ("Who are you?", "And then?")]
    for name, items in (("single", lines), ("talk", talk)):
        text = "".join(json.dumps(item) + "\n" for item in items)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


def _interpreter(folder: Path, version: str) -> Path:
    """An interpreter whose vLLM is the stand-in, also for the process that imports vLLM once."""
    site = folder / f"site-{version}"
    package = site / "vllm"
    for name in ("engine", "config", "entrypoints/cli"):
        (package / name).mkdir(parents=True)
    for name in ("", "entrypoints", "entrypoints/cli"):
        (package / name / "__init__.py").touch()
    files = {
        "_version.py": f"__version__ = '{version}'\n",
        "engine/arg_utils.py": "class EngineArgs:\n    model: str\n    dtype: str\n"
        "    enable_prefix_caching: bool\n    kv_cache_memory_bytes: int\n",
        "config/speculative.py": "SpeculativeMethod = Literal['eagle', 'ngram']\n"
        "class SpeculativeConfig:\n    method: str\n    prompt_lookup_max: int\n",
        "entrypoints/cli/main.py": "import runpy\n\n\ndef main():\n"
        f"    runpy.run_path({str(FAKE_VLLM)!r}, run_name='__main__')\n",
    }
    for name, text in files.items():
        (package / name).write_text(text, encoding="utf-8")
    python = folder / f"python-{version}"
    python.write_text(
        "#!/bin/sh\n"
        f'[ "$1" = -I ] && {{ shift; PYTHONPATH={site} exec {sys.executable} -S "$@"; }}\n'
        f'case "$1" in *prefork.py) PYTHONPATH={site} exec {sys.executable} "$@";; esac\n'
        f'exec {sys.executable} {FAKE_VLLM} "$@"\n',
        encoding="utf-8",
    )
    python.chmod(0o755)
    return python
