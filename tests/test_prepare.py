"""What the machine has room for decides which engines are up together."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from specbench import config, prepare
from specbench.engines.installation import Installation, absent_installation
from specbench.engines.memory import Room
from specbench.errors import ConfigError
from specbench.prompts.sets import PromptSet, prompt_set_sha256
from specbench.records import Prompt

PROMPTS = tuple(Prompt(id=f"p{i}", turns=("q",)) for i in range(3))
SET = PromptSet("he", PROMPTS, prompt_set_sha256(PROMPTS), "made up", Path("he.jsonl"), 164)


@pytest.fixture
def prepared_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., prepare.Prepared]:
    path = tmp_path / "c.yaml"

    def build(
        room: Room,
        *sets: str,
        least: Room | None = None,
        found: Installation | None = None,
        engine: Mapping[str, str] | None = None,
    ) -> prepare.Prepared:
        """*least* is the room for engines with KV cache for one request."""

        def fitting(*_: object, requests: int | None = None, **__: object) -> Room:
            return room if requests is None or least is None else least

        monkeypatch.setattr(prepare, "engines_that_fit", fitting)
        monkeypatch.setattr(prepare, "find_installation", lambda _: found)
        text = "model: m\nprompts: he\nspeculation: {method: ngram, k: [1, 2, 3]}\n"
        text += f"engine: {json.dumps(dict(engine or {}))}\n"
        path.write_text(text, encoding="utf-8")
        earlier = prepare.Earlier({"he": SET})
        parsed = config.load(path, sets)
        return prepare.prepare(
            parsed, config_path=path, prompt_folders=(), earlier=earlier, dry=True
        )

    return build


@pytest.mark.parametrize(
    ("room", "schedule", "together", "starts"),
    [
        (Room(9, "much"), "interleaved", 4, 4),
        (Room(2, "a pair"), "interleaved", 2, 6),
        (Room(1, "one"), "blocks", 1, 4),
        (Room(None, "unknown"), "blocks", 1, 4),
    ],
)
def test_auto_interleaves_where_a_pair_fits(
    prepared_with: Callable[..., prepare.Prepared],
    room: Room,
    schedule: str,
    together: int,
    starts: int,
) -> None:
    made = prepared_with(room)
    assert (made.plan.schedule, made.plan.together, made.plan.starts) == (
        schedule,
        together,
        starts,
    )
    assert made.room == room.reason


@pytest.mark.parametrize("key", ["schedule=interleaved", "precision=0.02"])
def test_pairs_that_do_not_fit_are_refused_with_the_reason(
    prepared_with: Callable[..., prepare.Prepared], key: str
) -> None:
    with pytest.raises(ConfigError, match="they do not fit: 1 engine of 70 GiB"):
        prepared_with(Room(1, "1 engine of 70 GiB fits into 80 GiB"), key)


SHORT = Room(1, "one engine of 49 GiB fits into 72 GiB, with 32 GiB of KV cache for 32 requests")
NOTE = f"memory may be short: {SHORT.reason}"


@pytest.mark.parametrize(
    ("key", "together", "notes"),
    [
        ("schedule=auto", 1, ()),
        ("schedule=interleaved", 2, (NOTE,)),
        ("precision=0.02", 2, (NOTE,)),
    ],
)
def test_who_asks_for_pairs_gets_them_with_less_kv_cache_and_is_told(
    prepared_with: Callable[..., prepare.Prepared], key: str, together: int, notes: tuple[str, ...]
) -> None:
    made = prepared_with(SHORT, key, least=Room(3, "3 engines of 18 GiB fit into 72 GiB"))
    assert (made.plan.together, made.notes) == (together, notes)


def test_one_engine_that_is_short_of_kv_cache_is_told_too(
    prepared_with: Callable[..., prepare.Prepared],
) -> None:
    made = prepared_with(Room(0, "no engine of 81 GiB fits into 72 GiB"))
    assert made.notes == ("memory may be short: no engine of 81 GiB fits into 72 GiB",)


def test_who_asks_for_pairs_gets_them_where_nobody_knows(
    prepared_with: Callable[..., prepare.Prepared],
) -> None:
    made = prepared_with(Room(None, "unknown"), "schedule=interleaved")
    assert (made.plan.schedule, made.plan.together) == ("interleaved", 2)


def test_all_workers_of_a_cpu_run_have_the_kv_cache_that_was_worked_out_for_it(
    prepared_with: Callable[..., prepare.Prepared], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that `k: auto` adds, when more or less memory is free than before."""
    asked = []

    def worked_out(*_: object, engines_together: int, **__: object) -> int:
        asked.append(engines_together)
        return 7 << 30

    monkeypatch.setattr(prepare, "cpu_kv_cache_bytes", worked_out)
    cpu = replace(absent_installation(), is_cpu=True)
    auto = "speculation={method: draft_model, model: d, k: auto}"
    made = prepared_with(Room(2, "a pair"), auto, found=cpu)
    more = prepare.with_chosen_k(made, {"draft_model": [3]})
    assert asked == [2]
    assert {one.model_json["kv_cache_memory_bytes"] for one in more.launches.values()} == {7 << 30}
    assert "draft_model-k3" in more.launches


FOUND = replace(absent_installation(), is_there=True)


@pytest.mark.parametrize(
    ("engine", "found", "said"),
    [
        ({}, FOUND, "{}: engines get settings for a GPU"),
        ({}, replace(FOUND, is_cpu=True), "{}: engines get settings for a CPU"),
        (
            {"python": "/opt/p"},
            FOUND,
            "{} of /opt/p: engines get settings for a GPU",
        ),
        (
            {},
            absent_installation(),
            "no vLLM in this environment: settings are those for {}",
        ),
        (
            {"kind": "triton", "server": "tritonserver"},
            replace(FOUND, is_cpu=True),
            "Triton runs a vLLM of its own; its models get settings for a CPU, like {} here",
        ),
        ({"url": "http://h:1"}, None, "no engine is started: http://h:1 is up"),
    ],
)
def test_which_vllm_was_found_is_said_with_what_engines_get(
    prepared_with: Callable[..., prepare.Prepared],
    engine: dict[str, str],
    found: Installation | None,
    said: str,
) -> None:
    made = prepared_with(Room(1, "one"), "speculation.k=1", engine=engine, found=found)
    assert made.vllm == said.format(f"{found}")


def test_a_vllm_is_named_with_its_version_and_build() -> None:
    assert str(FOUND) == f"vLLM {FOUND.version} (CUDA build)"
    assert str(replace(FOUND, is_cpu=True)) == f"vLLM {FOUND.version} (CPU build)"


def test_blocks_stay_blocks(prepared_with: Callable[..., prepare.Prepared]) -> None:
    assert prepared_with(Room(9, "much"), "schedule=blocks").plan.together == 1


def test_the_size_of_the_whole_set_is_kept(
    prepared_with: Callable[..., prepare.Prepared],
) -> None:
    made = prepared_with(Room(9, "much"))
    about = prepare.document(made, config_path="c.yaml", command=[])
    assert about["prompt_sets"]["he"]["available"] == 164


def test_every_engine_gets_the_same_share_whatever_its_group(
    prepared_with: Callable[..., prepare.Prepared],
) -> None:
    launches = prepared_with(Room(2, "a pair")).launches
    plain = {
        tuple(word for word in launch.argv if "speculative" not in word and "{" not in word)
        for name, launch in launches.items()
        if name != "vanilla"
    }
    assert len(plain) == 1


def test_auto_says_where_it_takes_blocks_only_because_nobody_knows_what_fits(
    prepared_with: Callable[..., prepare.Prepared],
) -> None:
    """The first run of a model, whose second is interleaved: they are not to be compared unawares."""
    unknown = Room(None, "the size of m is not known before it is downloaded")
    (note,) = prepared_with(unknown).notes
    assert note.startswith("engines are up one at a time, because the size of m is not known")
    assert prepared_with(unknown, "schedule=blocks").notes == ()
    assert prepared_with(unknown, "schedule=interleaved").notes == ()
    assert prepared_with(Room(1, "1 engine fits")).notes == ()
