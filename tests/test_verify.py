"""`specbench verify` on tapes (run folders that hold what two arms said) and on a stand-in engine."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import console
import numpy as np
import pytest
from console import Done

from specbench.config import Config
from specbench.errors import UserError
from specbench.records import RequestRecord, SpecRequest
from specbench.store import RunStore
from specbench.verify import PROMPTS, prepare

FAKE = Path(__file__).with_name("fake_vllm.py")
Build = Callable[..., RequestRecord]
CONFIG = """
model: some/model
speculation: {method: eagle, model: some/head, k: 3}
prompts: two
max_tokens: 24
load: {client: replay, tape: tape}
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with two prompts and a config that replays the tape beside it."""
    (tmp_path / "datasets").mkdir()
    lines = "".join(json.dumps({"text": f"prompt {i}"}) + "\n" for i in range(2))
    (tmp_path / "datasets" / "two.jsonl").write_text(lines, encoding="utf-8")
    (tmp_path / "c.yaml").write_text(CONFIG, encoding="utf-8")
    return tmp_path


def verify(place: Path, *args: str) -> Done:
    """Run `specbench verify` in this process."""
    return console.specbench("verify", "--config", "c.yaml", *args, cwd=place)


def tape(place: Path, **arms: Iterable[RequestRecord]) -> None:
    """Write what each arm said as the run folder ./tape; eagle stands for eagle-k3."""
    names = {"vanilla": "vanilla", "eagle": "eagle-k3"}
    cases = [{"id": names[arm], "arm": names[arm]} for arm in arms]
    store = RunStore.create(place, "tape", {"cases": cases})
    for arm, records in arms.items():
        folder = store.path / "cases" / names[arm]
        folder.mkdir(parents=True)
        lines = (record.model_dump_json(exclude_none=True) + "\n" for record in records)
        (folder / "requests.jsonl").write_text("".join(lines), encoding="utf-8")


# --- temperature 0 -------------------------------------------------------------------------------


def answers(record: Build, *said: tuple[str, tuple[int, ...]]) -> list[RequestRecord]:
    """The answers to prompts 1, 2, …: text and token ids."""
    return [record(str(i), text=text, token_ids=ids) for i, (text, ids) in enumerate(said, 1)]


ONE, OTHER, ANOTHER = ("the sea", (1, 2, 3)), ("a b c", (7, 8)), ("the sky is high", (1, 2, 9, 4))
FLOAT32 = ("--set", "engine.args.dtype=float32")


def test_identical_outputs_are_said_to_be(place: Path, record: Build) -> None:
    tape(place, vanilla=answers(record, ONE, OTHER), eagle=answers(record, ONE, OTHER))
    done = verify(place, *FLOAT32)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "eagle-k3: 2 of 2 outputs identical\n"
    (kept,) = (place / "results" / "verify").iterdir()
    assert kept.name in done.stderr
    status = RunStore.open(kept).status()
    assert status is not None
    assert status["status"] == "ok"


def test_in_float32_a_difference_fails_and_is_shown(place: Path, record: Build) -> None:
    tape(place, vanilla=answers(record, ONE, OTHER), eagle=answers(record, ANOTHER, OTHER))
    done = verify(place, *FLOAT32)
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "eagle-k3: 1 of 2 outputs identical; they part: 1 at token 3-4",
        "  two/1, token 3: after 'the s' vanilla says 'ea', eagle-k3 'ky is high'",
    ]


@pytest.mark.parametrize("dtype", ["bfloat16", "auto"])
def test_in_16_bits_a_difference_is_reported_only(place: Path, record: Build, dtype: str) -> None:
    tape(place, vanilla=answers(record, ONE, OTHER), eagle=answers(record, ANOTHER, OTHER))
    done = verify(place, "--set", f"engine.args.dtype={dtype}")
    assert done.returncode == 0
    assert "1 of 2 outputs identical" in done.stdout
    assert "Reported, not failed" in done.stdout


@pytest.mark.parametrize(("tolerance", "code"), [("0.5", 0), ("0.4", 1), ("0", 1)])
def test_a_tolerance_decides_whatever_the_precision(
    place: Path, record: Build, tolerance: str, code: int
) -> None:
    tape(place, vanilla=answers(record, ONE, OTHER), eagle=answers(record, ANOTHER, OTHER))
    for dtype in ("float32", "bfloat16"):
        sets = ("--set", f"engine.args.dtype={dtype}", "--results", dtype)
        done = verify(place, *sets, "--tolerance", tolerance)
        assert done.returncode == code
        assert "Reported" not in done.stdout


def test_json_says_all_of_it(place: Path, record: Build) -> None:
    tape(place, vanilla=answers(record, ONE, OTHER), eagle=answers(record, ANOTHER, OTHER))
    done = verify(place, "--json")
    found = json.loads(done.stdout)
    (arm,) = found["arms"]
    assert (found["schema"], found["temperature"]) == (1, 0)
    assert (arm["arm"], arm["state"], arm["identical"], arm["compared"]) == (
        "eagle-k3",
        "reported",
        1,
        2,
    )
    (difference,) = arm["differences"]
    assert difference["position"] == 2
    assert difference["key"]["prompt_id"] == "two/1"
    assert (difference["baseline_ids"], difference["arm_ids"]) == ([3], [9, 4])


def test_the_same_text_in_other_tokens_is_shown_as_ids(place: Path, record: Build) -> None:
    other = ("the sea", (1, 5))
    tape(place, vanilla=answers(record, ONE, OTHER), eagle=answers(record, other, OTHER))
    assert "the same text in other tokens: [2, 3] and [5]" in verify(place).stdout


def test_without_token_ids_nothing_is_verified(place: Path, record: Build) -> None:
    said = [record(str(i)) for i in (1, 2)]
    tape(place, vanilla=said, eagle=said)
    done = verify(place)
    assert done.returncode == 3
    assert "no token ids" in done.stdout
    assert "specbench: Not verified: eagle-k3." in done.stderr


def test_an_arm_that_drafted_nothing_is_not_verified(place: Path, record: Build) -> None:
    said = answers(record, ONE, OTHER)
    idle = [
        r.model_copy(update={"spec": SpecRequest(drafts=0, draft_tokens=0, accepted=0)})
        for r in said
    ]
    tape(place, vanilla=said, eagle=idle)
    done = verify(place)
    assert done.returncode == 3
    assert "nothing was drafted, so nothing is verified" in done.stdout


def test_too_few_answers_are_not_verified(place: Path, record: Build) -> None:
    said = answers(record, ONE, OTHER)
    failed = [said[0], said[1].model_copy(update={"error": "the stream was cut"})]
    tape(place, vanilla=said, eagle=failed)
    done = verify(place)
    assert done.returncode == 3
    assert "1 of 2 requests answered by eagle-k3" in done.stdout


# --- temperature over 0 --------------------------------------------------------------------------

WARM = ("--set", "sampling.temperature=1")


def sampled(record: Build, seed: int, samples: int, astray: float = 0) -> list[RequestRecord]:
    """Samples of the two prompts; a share of the tokens after the first goes *astray*."""
    rng = np.random.default_rng(seed)
    found = []
    for sample in range(samples):
        for prompt in (1, 2):
            ids = rng.geometric(0.4, 8) + 100 * prompt
            wrong = rng.random(8) < astray
            wrong[0] = False
            said = tuple(int(i) for i in np.where(wrong, 999, ids))
            found.append(record(f"two/{prompt}~{sample}", token_ids=said))
    return found


def test_a_right_sampler_is_not_flagged(place: Path, record: Build) -> None:
    tape(place, vanilla=sampled(record, 1, 200), eagle=sampled(record, 3, 200))
    done = verify(place, *WARM)
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("eagle-k3 at temperature 1: no difference found (p = 0.")
    assert "corrected; 200 samples x 2 prompts; a shift of 5% would be found with" in first
    assert second.startswith("400 samples: detects a shift of ")
    assert "with 80% power" in second


def test_a_wrong_sampler_that_shifts_5_percent_is_caught(place: Path, record: Build) -> None:
    tape(place, vanilla=sampled(record, 1, 200), eagle=sampled(record, 2, 200, astray=0.05))
    done = verify(place, *WARM, "--json")
    assert done.returncode == 1, done.stdout + done.stderr
    (arm,) = json.loads(done.stdout)["arms"]
    assert arm["state"] == "differs"
    assert arm["p_corrected"] <= arm["alpha"] == 0.01
    assert (arm["prompts"], arm["samples"]) == (2, 400)
    assert arm["power"]["of_5_percent"] > 0.8
    assert arm["power"]["smallest_shift_80"] < 0.05
    assert arm["largest_shift"]["position"] > 0


def test_what_differs_most_is_said_in_words(place: Path, record: Build) -> None:
    tape(place, vanilla=sampled(record, 1, 40), eagle=sampled(record, 2, 40, astray=0.5))
    done = verify(place, *WARM, "--samples", "40")
    assert done.returncode == 1
    _, detail, *rest = done.stdout.splitlines()
    assert detail.startswith("  most at two/")
    assert "token id 999 is 0% of vanilla's samples and" in detail
    assert "More --samples would find a shift of 5% more surely." in rest


def test_samples_are_copies_of_a_few_first_turns(place: Path) -> None:
    lines = [{"session_id": "t", "text": "one", "delay": 0}, {"session_id": "t", "text": "two"}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (place / "datasets" / "talk.jsonl").write_text(text, encoding="utf-8")
    many = "".join(json.dumps({"text": f"prompt {i}"}) + "\n" for i in range(9))
    (place / "datasets" / "many.jsonl").write_text(many, encoding="utf-8")
    data = {
        "model": "m",
        "speculation": [{"method": "ngram", "k": [2, 9]}],
        "prompts": ["many", "talk"],
        "sampling": {"temperature": 0.7},
        "load": {"client": "replay", "tape": "tape"},
        "repeats": 3,
        "max_tokens": [16, 256],
    }
    prepared = prepare(
        Config.model_validate(data),
        config_path=Path("c.yaml"),
        prompt_folders=(place / "datasets",),
        say=print,
        samples=30,
    )
    prompts = prepared.prompt_sets["samples"].prompts
    assert len(prompts) == PROMPTS * 30
    assert [p.id for p in prompts[:5]] == [
        "many/1~0",
        "talk/t~0",
        "many/2~0",
        "many/3~0",
        "many/1~1",
    ]
    assert all(len(p.turns) == 1 for p in prompts)
    assert {(c.max_tokens, c.concurrency, c.repeat) for c in prepared.plan.cases} == {(11, 16, 0)}


# --- what is refused, what is stopped ------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--set", "baseline=false"), "there is nothing to compare"),
        (("--set", "speculation=[]"), "there is nothing to compare"),
        (("--samples", "100"), "--samples is for a temperature over 0"),
        ((*WARM, "--tolerance", "0.1"), "--tolerance is for temperature 0"),
    ],
)
def test_what_cannot_be_answered_is_the_users_to_mend(
    place: Path, args: tuple[str, ...], said: str
) -> None:
    done = verify(place, *args)
    assert done.returncode == 2
    assert said in done.stderr
    assert not (place / "results").exists()


def test_a_server_that_is_up_is_one_arm_and_compares_with_nothing(place: Path) -> None:
    data = {"model": "m", "prompts": "two", "engine": {"url": "http://127.0.0.1:9"}}
    with pytest.raises(UserError, match="there is nothing to compare"):
        prepare(
            Config.model_validate({**data, "speculation": {"method": "ngram", "k": 2}}),
            config_path=Path("c.yaml"),
            prompt_folders=(place / "datasets",),
            say=print,
        )


def leftovers(folder: Path) -> list[str]:
    """Processes inside *folder* that still live."""
    found = []
    for proc in Path("/proc").glob("[0-9]*"):
        try:
            state = (proc / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
            inside = Path(os.readlink(proc / "cwd")).is_relative_to(folder)
        except OSError:
            continue
        if inside and state != "Z":
            found.append((proc / "cmdline").read_bytes().replace(b"\0", b" ").decode())
    return found


@pytest.mark.engine
def test_an_interrupt_stops_the_engines(place: Path, fake_python: Path) -> None:
    command = [sys.executable, "-m", "specbench", "verify", "--config", "c.yaml", *WARM]
    command += ["--set", "load={stall_s: 60}", "--set", f"engine.python={fake_python}"]
    command += ["--set", "engine.env.FAKE_MODE=stalls"]
    with (place / "err").open("wb") as err:
        process = subprocess.Popen(command, cwd=place, stderr=err, stdout=err)
    deadline = time.monotonic() + 30
    while not list(place.glob("results/verify/*/engines/*/engine.json")):
        assert time.monotonic() < deadline, (place / "err").read_text(encoding="utf-8")
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130
    assert "interrupted; the engines are stopped" in (place / "err").read_text(encoding="utf-8")
    while leftovers(place) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert leftovers(place) == []
